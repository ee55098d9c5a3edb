"""What is known about muddformer.py, and what to watch in a trained one; also for other models with its connections."""
import torch

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
    """Hidden width that all MLPs have together beyond L d_ff: 0 but for rounding."""
    return sum(128 * max(1, round(c.d_ff * (0.5 + i / (c.n_layer - 1)) / 128)) - c.d_ff for i in range(c.n_layer))


def costs(c, T):
    parameters, flops, read = connections(c, sizes(c))
    norms = 2 * c.n_layer                                                           # of keys and values
    if c.pre_post_norm:
        norms += c.n_layer + 1 + sum(n for n, _, _ in sizes(c))
    return parameters + c.d_model * (norms + 3 * wider(c)), flops + 6 * c.d_model * wider(c), read


def aggregates(model):
    """{i: (what mixes after block i, the names of the inputs that each of its streams makes, its sources)}."""
    found = {}
    for i, m in enumerate(model.aggregate, start=1):
        if m is not None:                                                           # as in some of muddformer_ablations
            n, S = m.a.shape
            found[i] = m, getattr(m, "streams", "qkvr" if n == 4 else "r"), getattr(m, "sources", range(S))
    return found


def generators(model):
    """The maps that end in dynamic weights: none if they are static."""
    return [m.w2 for m, *_ in aggregates(model).values() if m.w2 is not None]


def weights(model, generated):
    """{i: A_i (B, T, n, S), or (n, S) if static}, from what the generators gave."""
    generated = iter(generated)
    return {i: m.a if m.w2 is None else m.a + next(generated).unflatten(-1, m.a.shape)
            for i, (m, *_) in aggregates(model).items()}


def stats(model, idx):
    A = weights(model, watch(model, idx, generators(model))).values()
    return {"on_last": [a[..., -1].mean().item() for a in A],                   # of X_i: first 1 (pre_post_norm: 0)
            "on_earlier": [a[..., :-1].abs().sum(-1).mean().item() for a in A]} if A else {}


def watched(model):
    return {"block": list(model.blocks), "generators": generators(model)}


def streams(model, record):
    """The blocks' inputs for queries, keys, values and the residual."""
    inputs = [inputs[:4] for inputs, _ in record.calls["block"]]
    return {name: list(own) for name, own in zip("qkvr", zip(*inputs))}


def depth_matrix(model, record):
    """With X_i and the blocks' inputs as sums of outputs: rows of n numbers, one per output, for all tokens or each."""
    n, like = len(record.reads), record.outputs[0]
    eye = torch.eye(n, dtype=like.dtype, device=like.device)
    X, A = [eye[0]], {name: like.new_zeros(*like.shape[:2], n, n) for name in "qkvr"}
    made, found = weights(model, record.outputs_of("generators")), aggregates(model)
    rows = dict.fromkeys("qkvr", eye[0])
    for i in range(1, len(model.blocks) + 1):
        for name in "qkvr":
            A[name][..., 2 * i - 2, :] = rows[name]
            A[name][..., 2 * i - 1, :] = rows["r"] + (0 if record.parallel else eye[2 * i - 1])
        X.append(rows["r"] + eye[2 * i - 1] + eye[2 * i])
        rows = dict.fromkeys("qkvr", X[i])
        _, streams, sources = found.get(i, (None, "", []))
        for c, names in enumerate(streams):
            mixed = sum(made[i][..., c, j, None] * X[source] for j, source in enumerate(sources))
            rows |= dict.fromkeys(names, mixed)
    for name in "qkvr":
        A[name][..., n - 1, :] = rows["r"]
    return A
