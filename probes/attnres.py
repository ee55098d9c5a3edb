"""What is known about attnres.py besides the model; attnres_block.py, attnres_delta.py and mhar.py share most of it."""
import torch

from probes import watch


def costs(c, T):
    """Reader l = 0 .. 2L takes the mean of l + 1 outputs. 2L readers have a query."""
    return of_sources(c, [l + 1 for l in range(2 * c.n_layer + 1)], 2 * c.n_layer)


def of_sources(c, sources, n_query):
    """sources: how many each reader has, 2 C FLOPs each; it reads all of them again but the newest, for which it makes
    the RN (3 C) and the scores for all queries (2 C each).
    """
    flops = 2 * sum(sources) + len(sources) * (3 + 2 * n_query)
    return n_query * c.d_model, flops * c.d_model, (sum(sources) - len(sources)) * c.d_model


def neutral(model):
    """Nothing to set: all queries are zero at the start."""


def sources(model, l):
    """Which outputs reader l attends to: all so far; or of each block the last, which holds the block's sum."""
    return [*range(0, l, getattr(model.config, "block_size", 1)), l]


def alphas(model, idx):
    """How much the readers 1, 2, .. take of their sources, (B, T, .., S) each."""
    _, scores = watch(model, idx, [model.depth_attention], inputs=True)[-1]         # the last reader's list has all
    return [torch.stack([scores[s][..., l - 1] for s in sources(model, l)], dim=-1).softmax(-1)
            for l in range(1, len(model.depth_attention.query) + 1)]


def stats(model, idx):
    """For each reader with a query: the entropy of its weights in nats (uniform: log(S)), and the newest source's."""
    found = alphas(model, idx)
    return {"entropy": [-a.xlogy(a).sum(-1).mean().item() for a in found],
            "newest": [a[..., -1].mean().item() for a in found]}


def depth_matrix(model, idx, record):
    """Every output has the weight of the source that it is summed into."""
    n, like = len(record.reads), record.outputs[0]
    A = like.new_zeros(*like.shape[:2], n, n)
    A[..., 0, 0] = 1.0                                                              # reader 0 has one source
    for l, alpha in enumerate(alphas(model, idx), start=1):
        last = sources(model, l)
        A[..., l, :l + 1] = alpha[..., [next(i for i, s in enumerate(last) if s >= output) for output in range(l + 1)]]
    return {"r": A}
