"""What to watch in a trained hyperconnections.py."""
from nanodepth.record import watch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    maps = watch(model, idx, [m for b in model.blocks for m in (b.attn_connection, b.mlp_connection)])
    pre = [m[..., 0].abs() for m in maps]
    return {"focus": [(p.amax(-1) / p.sum(-1)).mean().item() for p in pre],     # 1: reads one stream; 1/n: all alike
            "write": [m[..., 1].mean().item() for m in maps],                   # H_post; 1 at the start
            "keep": [m[..., 2:].diagonal(dim1=-2, dim2=-1).mean().item() if m.size(-1) > 2 else 1.0 for m in maps]}
