"""Probes of muddformer.py, and of other models with its connections."""
from probes import watch


def mixtures(model):
    """The modules that mix after the blocks. In muddformer_ablations some blocks have none."""
    return [m for m in model.aggregate if m is not None]


def token_weights(model):
    """The maps that end in dynamic weights: none if the weights are static."""
    return [m.w2 for m in mixtures(model) if m.w2 is not None]


def stats(model, idx):
    made = iter(watch(model, idx, token_weights(model)))
    A = [m.a if m.w2 is None else m.a + next(made).unflatten(-1, m.a.shape) for m in mixtures(model)]
    return {"on_last": [a[..., -1].mean().item() for a in A],                   # of X_i: starts at 1 (pre_post_norm: 0)
            "on_earlier": [a[..., :-1].abs().sum(-1).mean().item() for a in A]} if A else {}


def streams(model, idx):
    """The blocks' inputs for queries, keys, values and the residual."""
    inputs = [x[:4] for x in watch(model, idx, model.blocks, inputs=True)]
    return {name: list(own) for name, own in zip("qkvr", zip(*inputs))}
