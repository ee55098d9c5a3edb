"""What to watch in a trained satformer.py."""
from nanodepth.record import watch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    alphas = watch(model, idx, [b.attn.value_gate for b in model.blocks if b.attn.value_gate is not None])
    return {"value_gate": [a.mean().item() for a in alphas],
            "value_gate_zeros": [(a == 0).float().mean().item() for a in alphas]}
