"""mhar.py against its paper's equations in float64, arXiv:2607.27230."""
from functools import partial

import pytest
import torch
from reference import GATED, compare, float64, heads, rms, setup, show, softmax  # noqa: F401  (float64: autouse)
from test_attnres import attnres


def read(p, c, l, v):
    """Head i has slice i of every vector, of the query and of the normalised keys too."""
    if l == 0:
        return v[0]
    w, out = heads(p["depth_attention.query"][l - 1], c.n_depth_head), []
    for t in range(len(v[0])):
        keys, values = ([heads(f(u[t]), c.n_depth_head) for u in v] for f in (lambda u: rms(u, c), lambda u: u))
        slices = []
        for i in range(c.n_depth_head):
            alpha = softmax([torch.dot(w[i], key[i]) for key in keys])
            slices.append(sum(a * value[i] for a, value in zip(alpha, values)))
        out.append(torch.cat(slices))
    return out


@pytest.mark.parametrize("options", [dict(n_depth_head=n) for n in (1, 2, 32)] + GATED, ids=show)
def test_equations(options):
    compare(partial(attnres, read=read), *setup("mhar", **{"n_depth_head": 8, **options}))
