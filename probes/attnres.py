"""Probes of attnres.py; attnres_block.py, attnres_delta.py and mhar.py share most of them."""
from bisect import bisect_left

import torch

from probes import watch


def sources(model, l):
    """Which outputs reader l attends to: all so far; with blocks the last of each, which holds the block's sum."""
    return [*range(0, l, getattr(model.config, "block_size", 1)), l]


def alphas(model, idx):
    """The weights of readers 1, 2, .. on their sources, (B, T, .., S) each."""
    outputs, = watch(model, idx, [model.depth_attention], inputs=True)[-1]          # the last reader's list has all
    scores = [s for _, s in outputs]
    return [torch.stack([scores[s][..., l - 1] for s in sources(model, l)], dim=-1).softmax(-1)
            for l in range(1, len(model.depth_attention.query) + 1)]


def stats(model, idx):
    """For each reader with a query: the entropy of its weights in nats (uniform: log(S)), and the newest's weight."""
    found = alphas(model, idx)
    return {"entropy": [-a.xlogy(a).sum(-1).mean().item() for a in found],
            "newest": [a[..., -1].mean().item() for a in found]}


def depth_matrix(model, idx, record):
    """An output's weight is that of the source it is summed into."""
    n, like = len(record.reads), record.outputs[0]
    A = like.new_zeros(*like.shape[:2], n, n)
    A[..., 0, 0] = 1.0                                                              # reader 0 has one source
    for l, alpha in enumerate(alphas(model, idx), start=1):
        read = sources(model, l)
        A[..., l, :l + 1] = alpha[..., [bisect_left(read, output) for output in range(l + 1)]]
    return {"r": A}
