"""mHC-lite against its equations in float64. arXiv:2601.05732.

What it shares with hyperconnections.py and mhc.py is tested in their files.
"""
from functools import partial
from itertools import permutations
from math import factorial

import pytest
import torch
from reference import compare, float64, own_groups, setup, sigmoid, softmax  # noqa: F401  (float64: autouse)
from test_hyperconnections import build, connections, idx, streams
from test_mhc import logits

import models


def maps(p, c, at, X):
    """H_res: a convex combination of all permutations in lexicographic order; one puts P[i] in the place of i."""
    n, z = c.n_streams, logits(p, c, at, X)
    weighted = list(zip(softmax(z[2 * n:]), permutations(range(n)), strict=True))
    res = [[sum(w for w, P in weighted if P[i] == s) for s in range(n)] for i in range(n)]
    return [sigmoid(u) for u in z[:n]], [2 * sigmoid(u) for u in z[n:2 * n]], res


@pytest.mark.parametrize("options", [dict(), dict(n_streams=1), dict(n_streams=4), dict(n_streams=2, gate="headwise")],
                         ids=str)
def test_equations_of_mhc_lite(options):
    compare(partial(streams, maps), *setup("mhc_lite", **{"n_streams": 3, **options}))


def test_groups():
    parts = {f"blocks.{kind}_connection.{part}" for kind in ("attn", "mlp") for part in ("bias", "phi", "alpha")}
    assert own_groups(build("mhc_lite")) == (set(), parts)


def test_initial_values():
    eye = torch.eye(3)
    for k, m in enumerate(connections(build("mhc_lite"))):              # of 3! permutations the first is the identity
        assert torch.equal(m.bias, torch.cat((2 * eye[k % 3] - 1, torch.zeros(4), torch.full((5,), -8.0))))
        assert torch.equal(m.P[0], eye) and (m.phi == 0).all() and (m.alpha == 0.01).all()


@torch.no_grad()
def test_the_map_is_doubly_stochastic():
    for n in (2, 3, 4):
        model, seen = setup("mhc_lite", n_streams=n)[0], []
        connections(model)[1].register_forward_pre_hook(lambda m, inputs: seen.append(m.maps(inputs[0])[2]))
        model(idx(2, 6))
        H = seen[0]
        assert H.shape == (2, 6, n, n) and (H > 0).all() and (H[0, 0] - H[1, 1]).abs().max() > 1e-4
        assert (H.sum(-1) - 1).abs().max() < 1e-14 and (H.sum(-2) - 1).abs().max() < 1e-14


def test_parameter_counts():
    """H_res is made from n C numbers to n!."""
    with torch.device("meta"):
        shape = dict(n_layer=16, d_model=2048, n_head=16, vocab_size=50304)
        for n in (2, 4):
            sizes = [sum(p.numel() for p in models.build(name, **shape, **options).parameters())
                     for name, options in (("mhc_lite", dict(n_streams=n)), ("gpt", {}))]
            assert sizes[0] - sizes[1] == 32 * ((n * 2048 + 1) * (2 * n + factorial(n)) + 3)
