"""Probes of geonorm.py."""
import torch.nn.functional as F

from probes import watch


def stats(model, idx):
    streams = [F.normalize(x, dim=-1) for x in watch(model, idx, [model.embed, *model.blocks])]
    chords = [(b - a).norm(dim=-1) for a, b in zip(streams, streams[1:])]
    angles = {"angle": [2 * (c / 2).clamp(max=1.0).asin().mean().item() for c in chords]}    # radians of a block's turn
    return angles | {f"{name}_step": [step.scale.item() * step.decay for step in (
        getattr(block, f"{name}_geodesic") for block in model.blocks)] for name in ("attn", "mlp")}


def depth_matrix(model, idx, record):
    """The next stream is y = a x + b g of stream x and output g: a scales all earlier weights, b is the new one."""
    n, like = len(record.reads), record.outputs[0]
    A = like.new_zeros(*like.shape[:2], n, n)
    A[..., 0, 0] = record.reads[0].norm(dim=-1) / like.norm(dim=-1)                 # the embedding, put onto the sphere
    for i, (x, g, y) in enumerate(zip(record.reads, record.outputs[1:], record.reads[1:])):
        along = (x * g).sum(-1) / x.square().sum(-1)
        v = g - along[..., None] * x
        b = (y * v).sum(-1) / v.square().sum(-1).clamp(min=1e-12)
        a = (y * x).sum(-1) / x.square().sum(-1) - b * along
        A[..., i + 1, :] = a[..., None] * A[..., i, :]
        A[..., i + 1, i + 1] = b
    return {"r": A}
