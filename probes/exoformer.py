"""What to watch in a trained exoformer.py."""
from nanodepth.record import watch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    mixes = [block.attn.mix for block in model.blocks if block.attn.mix is not None]
    stats = {f"{name}_{s}": [getattr(m, name)[s].mean().item() for m in mixes]
             for name in ("lambda_anchor", "lambda_self") for s in model.config.mix_streams}
    if model.config.mixing == "dynamic":
        stats["gamma"] = [g.mean().item() for g in watch(model, idx, [m.gamma for m in mixes])]
    return stats
