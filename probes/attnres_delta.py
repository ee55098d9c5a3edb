"""What is known about attnres_delta.py besides the model."""
import torch

from probes import attnres
from probes.attnres import neutral, stats  # noqa: F401


def costs(c, T):
    """Of attnres.py without the head, and the mean is added to the residual sum (C FLOPs for each reader)."""
    n = 2 * c.n_layer
    parameters, flops, read = attnres.of_sources(c, [l + 1 for l in range(n)], n - 1)
    return parameters, flops + n * c.d_model, read


def depth_matrix(model, idx, record):
    """1 for every output so far, from the residual sum, and the weights of the mean."""
    A = attnres.depth_matrix(model, idx, record)["r"]
    return {"r": A + torch.ones_like(A).tril()}
