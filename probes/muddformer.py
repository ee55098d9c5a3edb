"""What to watch in a trained muddformer.py."""
import math

import torch

from nanodepth.pictures import figure, heat
from nanodepth.record import part, watch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    if not model.aggregate:
        return {}
    weights = watch(model, idx, [aggregate.weights for aggregate in model.aggregate.values()])
    return {"on_last": [A[..., -1].mean().item() for A in weights],             # of X_i: first 1 (pre_post_norm: 0)
            "on_earlier": [A[..., :-1].abs().sum(-1).mean().item() for A in weights]}


def watched(model):
    return {"block": list(model.blocks), "weights": [aggregate.weights for aggregate in model.aggregate.values()]}


def streams(model, record):
    """The blocks' inputs for queries, keys, values and the residual."""
    inputs = [inputs[:4] for inputs, _ in record.calls["block"]]
    return {name: list(own) for name, own in zip("qkvr", zip(*inputs))}


def depth_matrix(model, record):
    """With X_i and the blocks' inputs as sums of outputs: rows of n numbers, one per output, for all tokens or each."""
    n, like = len(record.reads), record.outputs[0]
    eye = torch.eye(n, dtype=like.dtype, device=like.device)
    X, A = [eye[0]], {name: like.new_zeros(*like.shape[:2], n, n) for name in "qkvr"}
    rows, weights = dict.fromkeys("qkvr", eye[0]), iter(record.outputs_of("weights"))
    for i in range(1, len(model.blocks) + 1):
        for name in "qkvr":
            A[name][..., 2 * i - 2, :] = rows[name]
            A[name][..., 2 * i - 1, :] = rows["r"] + (0 if record.parallel else eye[2 * i - 1])
        X.append(rows["r"] + eye[2 * i - 1] + eye[2 * i])
        rows = dict.fromkeys("qkvr", X[i])
        if str(i) in model.aggregate:
            aggregate, w = model.aggregate[str(i)], next(weights)                   # w: (B, T, C, S) or (C, S)
            for c, name in enumerate(aggregate.streams):
                mixed = sum(w[..., c, j, None] * X[source] for j, source in enumerate(aggregate.sources))
                rows = dict.fromkeys("qkvr", mixed) if name == "x" else {**rows, name: mixed}
    for name in "qkvr":
        A[name][..., n - 1, :] = rows["r"]
    return A


def observe(model, record):
    """Mean norms of the X_j as the aggregates see them, and mean and mean square of their weights."""
    L, norms = len(model.blocks), getattr(model, "pre_norms", None)
    X = [record.outputs[0]]
    X += [record.reads[2 * i] + record.outputs[2 * i + 1] + record.outputs[2 * i + 2] for i in range(L)]
    if norms is not None:
        X = [norms[f"{j}_pre_norm"](x) if f"{j}_pre_norm" in norms else x for j, x in enumerate(X)]
    out = {"dynamic_norm": torch.stack([x.norm(dim=-1).mean() for x in X])}
    for i, w in zip(model.aggregate, record.outputs_of("weights")):
        w = w.double().expand(*X[0].shape[:2], -1, -1)
        out |= {f"dynamic.{i}": w.mean((0, 1)), f"dynamic_square.{i}": w.square().mean((0, 1))}
    return out


def numbers(model, means, batches, quiet_ids):
    """Appendix G: mean and deviation of the weights, times the mean norm of what they weigh, by place."""
    out, squares = {}, part(means, "dynamic_square")
    for i, w in part(means, "dynamic").items():
        aggregate = model.aggregate[i]
        norm, sd = means["dynamic_norm"][aggregate.sources], (squares[i] - w.square()).clamp(min=0).sqrt()
        out[i] = {"streams": aggregate.streams, "sources": list(aggregate.sources), "mean": (w * norm).tolist(),
                  "sd": (sd * norm).tolist()}
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
