"""Probes of resformer.py."""
import torch


@torch.no_grad()
def neutral(model):
    """lambda1 = 0, lambda2 = 1. ValueError for options without these parameters."""
    if model.config.value_mix == "identity":
        raise ValueError("value_mix identity has no parameters to set")
    (model.value_mix.scale if model.config.value_mix == "plus" else model.value_mix.lambda1).zero_()
    model.value_mix.lambda2.fill_(1.0)


def stats(model, idx):
    return {name: [float(x) for x in pairs] for name, pairs in zip(("lambda1", "lambda2"), zip(*model.value_mix()))}


def value_matrix(model, idx):
    """The last layers have lambda1 times the first layer's values and lambda2 times their own."""
    A, mixes = torch.eye(len(model.blocks)), model.value_mix()
    for n, (lambda1, lambda2) in zip(range(len(A) - len(mixes), len(A)), mixes):
        A[n, 0], A[n, n] = lambda1, lambda2
    return {"v": A}
