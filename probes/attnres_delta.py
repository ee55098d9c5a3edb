"""Probes of attnres_delta.py."""
import torch

from probes import attnres
from probes.attnres import neutral, stats  # noqa: F401


def costs(c, T):
    """Those of attnres.py without the head, plus the sum of mean and residual (C FLOPs per reader)."""
    n = 2 * c.n_layer
    parameters, flops, read = attnres.of_sources(c, [l + 1 for l in range(n)], n - 1)
    return parameters, flops + n * c.d_model, read


def depth_matrix(model, idx, record):
    """The weights of the mean, plus 1 for every output so far, from the residual sum."""
    A = attnres.depth_matrix(model, idx, record)["r"]
    return {"r": A + torch.ones_like(A).tril()}
