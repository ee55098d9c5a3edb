"""Probes of attnres_delta.py."""
import torch

from probes import attnres
from probes.attnres import stats  # noqa: F401


def depth_matrix(model, idx, record):
    """The weights of the mean, plus 1 for every output so far, from the residual sum."""
    A = attnres.depth_matrix(model, idx, record)["r"]
    return {"r": A + torch.ones_like(A).tril()}
