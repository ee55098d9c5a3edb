"""What to watch in a trained attnres.py."""
from nanodepth.record import watch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    alphas = watch(model, idx, [model.depth_attention])                            # entropy in nats; uniform: log(S)
    return {"entropy": [-a.xlogy(a).sum(-1).mean().item() for a in alphas],
            "newest": [a[..., -1].mean().item() for a in alphas]}
