"""What to watch in a trained muddpythia.py."""
from nanodepth.record import watch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    weights = watch(model, idx, [aggregate.weights for aggregate in model.aggregate.values()])
    return {"on_last": [A[..., -1].mean().item() for A in weights],             # weight of X_i; 1 at the start
            "on_earlier": [A[..., :-1].abs().sum(-1).mean().item() for A in weights]}
