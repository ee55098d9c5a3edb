"""mHC-lite against its equations in float64. arXiv:2601.05732.

test_hyperconnections.py and test_mhc.py also test it.
"""
from functools import partial
from itertools import permutations

import pytest
import torch
from reference import compare, float64, setup, show, sigmoid, softmax  # noqa: F401  (float64: autouse)
from test_hyperconnections import build, connections, streams
from test_mhc import logits


def maps(p, c, at, X):
    """H_res: a convex combination of all permutations in lexicographic order; one puts P[i] in the place of i."""
    n, z = c.n_streams, logits(p, c, at, X)
    weighted = list(zip(softmax(z[2 * n:]), permutations(range(n)), strict=True))
    res = [[sum(w for w, P in weighted if P[i] == s) for s in range(n)] for i in range(n)]
    return [sigmoid(u) for u in z[:n]], [2 * sigmoid(u) for u in z[n:2 * n]], res


@pytest.mark.parametrize("options", [dict(), dict(n_streams=1), dict(n_streams=4), dict(n_streams=2, gate="headwise")],
                         ids=show)
def test_equations_of_mhc_lite(options):
    compare(partial(streams, maps), *setup("mhc_lite", **{"n_streams": 3, **options}))


def test_initial_values():
    eye = torch.eye(3)
    for k, m in enumerate(connections(build("mhc_lite"))):              # of 3! permutations the first is the identity
        assert torch.equal(m.bias, torch.cat((2 * eye[k % 3] - 1, torch.zeros(4), torch.full((5,), -8.0))))
        assert torch.equal(m.P[0], eye) and (m.phi == 0).all() and (m.alpha == 0.01).all()
