"""Probes of muddformer.py, and of other models with its connections."""
from probes import watch


def sizes(c):
    """(n, S, hidden width of w1) of the mixtures after block 1 .. L."""
    return [(4 if S <= c.n_layer else 1, S, 64 * (4 * S // 64 + 1)) for S in range(2, c.n_layer + 2)]


def connections(c, sizes):
    """(parameters, forward FLOPs per token, numbers read per token) of mixtures of these sizes.

    w1 and w2 take two FLOPs per weight, the sums 2 C n S; they read the S - 1 earlier outputs.
    """
    maps, sums = sum(h * (c.d_model + n * S) for n, S, h in sizes), sum(n * S for n, S, _ in sizes)
    return maps + sums, 2 * (maps + c.d_model * sums), c.d_model * sum(S - 1 for _, S, _ in sizes)


def wider(c):
    """Total hidden width of the MLPs beyond L d_ff: 0 up to rounding."""
    return sum(128 * max(1, round(c.d_ff * (0.5 + i / (c.n_layer - 1)) / 128)) - c.d_ff for i in range(c.n_layer))


def costs(c, T):
    parameters, flops, read = connections(c, sizes(c))
    norms = 2 * c.n_layer                                                           # of keys and values
    if c.pre_post_norm:
        norms += c.n_layer + 1 + sum(n for n, _, _ in sizes(c))
    return parameters + c.d_model * (norms + 3 * wider(c)), flops + 6 * c.d_model * wider(c), read


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
