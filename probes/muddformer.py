"""What is known about muddformer.py, and what to watch in a trained one; also for other models with its connections."""
import math

import torch

from nanodepth.pictures import figure, heat
from nanodepth.record import part
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
    """{i: (what mixes after block i, its streams, its sources)}; the stream x is for all inputs."""
    found = {}
    for i, aggregate in enumerate(model.aggregate, start=1):
        if aggregate is not None:                                                   # as in some of muddformer_ablations
            n, S = aggregate.a.shape
            streams = "".join(getattr(aggregate, "streams", "qkvr" if n == 4 else "r"))
            streams = "x" if n == 1 and streams == "qkvr" else streams
            found[i] = aggregate, streams, list(getattr(aggregate, "sources", range(S)))
    return found


def generators(model):
    """The maps that end in dynamic weights: none if they are static."""
    return [aggregate.w2 for aggregate, *_ in aggregates(model).values() if aggregate.w2 is not None]


def weights(model, generated):
    """{i: A_i (B, T, n, S), or (n, S) if static}, from what the generators gave."""
    generated = iter(generated)
    return {i: m.a if m.w2 is None else m.a + next(generated).unflatten(-1, m.a.shape)
            for i, (m, *_) in aggregates(model).items()}


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
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
        _, names, sources = found.get(i, (None, "", []))
        for c, name in enumerate(names):
            mixed = sum(made[i][..., c, j, None] * X[source] for j, source in enumerate(sources))
            rows |= dict.fromkeys("qkvr" if name == "x" else name, mixed)
    for name in "qkvr":
        A[name][..., n - 1, :] = rows["r"]
    return A


def observe(model, record):
    """Mean norms of the X_j as the aggregates see them, and mean and mean square of their weights."""
    L = len(model.blocks)
    X = [record.outputs[0]]
    X += [record.reads[2 * i] + record.outputs[2 * i + 1] + record.outputs[2 * i + 2] for i in range(L)]
    X = [norm(x) for norm, x in zip(getattr(model, "pre_norms", [lambda x: x] * len(X)), X)]
    out = {"dynamic_norm": torch.stack([x.norm(dim=-1).mean() for x in X])}
    for i, w in weights(model, record.outputs_of("generators")).items():
        w = w.double().expand(*X[0].shape[:2], -1, -1)
        out |= {f"dynamic.{i}": w.mean((0, 1)), f"dynamic_square.{i}": w.square().mean((0, 1))}
    return out


def numbers(model, means, batches, quiet_ids):
    """Appendix G: mean and deviation of the weights, times the mean norm of what they weigh, by place."""
    out, squares, found = {}, part(means, "dynamic_square"), aggregates(model)
    for i, w in part(means, "dynamic").items():
        _, names, sources = found[int(i)]
        norm, sd = means["dynamic_norm"][sources], (squares[i] - w.square()).clamp(min=0).sqrt()
        out[i] = {"streams": names, "sources": sources, "mean": (w * norm).tolist(), "sd": (sd * norm).tolist()}
    return {"dynamic": out}


def draw_dynamic(found):
    """Figures 12 and 13: the numbers above, a row of panels for the mean and one for the deviation of each run."""
    fig, axes = figure(2 * len(found), 4, (16, 6.6 * len(found)))
    for row, (run, kind) in zip(axes, [(run, kind) for run in found for kind in ("mean", "sd")]):
        places = {int(i): d for i, d in found[run]["dynamic"].items()}
        streams = [s for s in "xqkvr" if any(s in d["streams"] for d in places.values())]  # x: one for all inputs
        for ax in row[len(streams):]:
            ax.axis("off")
        for ax, s in zip(row, streams):
            L = max(places)
            matrix = [[math.nan] * (L + 1) for _ in range(L)]
            for i, d in places.items():
                if s in d["streams"]:
                    for j, x in zip(d["sources"], d[kind][d["streams"].index(s)]):
                        matrix[i - 1][j] = x
            top = max(abs(x) for cells in matrix for x in cells if not math.isnan(x)) or 1.0
            look = dict(cmap="RdBu_r", vmin=-top) if kind == "mean" else dict(cmap="viridis", vmin=0)
            image = heat(ax, matrix, f"{run}: {kind}, stream {s.upper()}", "source (0: embedding)", "after block",
                         (1, 0), vmax=top, **look)
            fig.colorbar(image, ax=ax)
    fig.suptitle("weights over earlier outputs, times the mean norm of the output", fontsize=11)
    return fig


PICTURES = {"dynamic": draw_dynamic}
