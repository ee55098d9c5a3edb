"""Hyper-Connections against their equations in float64, one number at a time, and what the paper states.

arXiv:2409.19606. What mhc.py and mhc_lite.py share with it is tested here for all three.
"""
from functools import partial

import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    COMMON, compare, count, float64, layer_norm, setup, show, sigmoid, sublayer)

import models

NAMES = ("hyperconnections", "mhc", "mhc_lite")
OWN = dict(n_streams=3, dynamic=True)


# One token: X is a list of n vectors; H_pre and H_post are lists of numbers, H_res[i][s] is a list of lists.


def dynamic_maps(p, c, at, X):
    """H_pre, H_post, H_res of the connection `at` at one token. Row s of its parameters belongs to stream s: first the
    entry of H_pre, second that of H_post, then H_res[0][s], H_res[1][s], ..."""
    n, a = c.n_streams, p[f"{at}.static"]
    pre, post = [a[s, 0] for s in range(n)], [a[s, 1] for s in range(n)]
    res = [[a[s, 2 + i] for s in range(n)] for i in range(n)]
    if c.dynamic:
        W, (s_alpha, s_beta) = p[f"{at}.W"], p[f"{at}.scale"]
        for s in range(n):
            x = layer_norm(X[s], c)
            z = [2 * sigmoid(2 * torch.dot(x, W[:, j])) - 1 for j in range(2 + n)]          # tanh
            pre[s] = pre[s] + s_alpha * z[0]
            post[s] = post[s] + s_beta * z[1]
            for i in range(n):
                res[i][s] = res[i][s] + s_alpha * z[2 + i]
    return pre, post, res


def streams(maps, p, c, x):
    """The sum of the n streams after 2 L sublayers whose maps are maps(p, c, name of the connection, X)."""
    n, tokens = c.n_streams, [[u] * c.n_streams for u in x]
    for k in range(2 * c.n_layer):
        at = f"blocks.{k // 2}.{('attn', 'mlp')[k % 2]}_connection"
        H = [maps(p, c, at, X) for X in tokens]
        h = [sum(pre[s] * X[s] for s in range(n)) for X, (pre, _, _) in zip(tokens, H)]
        y = sublayer(p, c, k + 1, h)
        tokens = [[sum(res[i][s] * X[s] for s in range(n)) + post[i] * out for i in range(n)]
                  for X, (_, post, res), out in zip(tokens, H, y)]
    return [sum(X) for X in tokens]


def build(name="hyperconnections", **options):
    torch.manual_seed(0)
    return models.build(name, **{**COMMON, "n_streams": 3, **options})


def connections(model):
    return [m for block in model.blocks for m in (block.attn_connection, block.mlp_connection)]


@pytest.mark.parametrize("options", [
    dict(), dict(dynamic=False), dict(n_streams=1), dict(n_streams=2, n_kv_head=4),
    dict(n_streams=5, gate="elementwise", n_layer=1), dict(dynamic=False, gate="headwise", tie_embeddings=True)],
    ids=show)
def test_equations_of_hyperconnections(options):
    compare(partial(streams, dynamic_maps), *setup("hyperconnections", **{**OWN, **options}))


def test_initial_values():
    eye = torch.eye(3)
    for dynamic in (True, False):
        for k, m in enumerate(connections(build(dynamic=dynamic))):
            assert torch.equal(m.static, torch.cat((eye[k % 3, :, None], torch.ones(3, 1), eye), dim=1))
            assert not dynamic or (m.W == 0).all() and (m.scale == 0.01).all()


def test_the_parameter_count_of_the_paper():
    """DHC x4 in OLMo-1B: a norm without parameters."""
    shape = dict(n_layer=16, d_model=2048, n_head=16, d_ff=8192, vocab_size=50304)
    assert round((count("hyperconnections", **shape) - count("gpt", **shape)) / 1000) == 394


# ------------------------------------------------------------------------------------------ also of mhc.py, mhc_lite.py


@pytest.mark.parametrize("name", NAMES)
def test_maps_are_fp32_under_autocast(name):
    """And streams are bf16. In bf16 the maps would round what tanh adds to a 1, at most 0.01, to one of five values."""
    (model, _, _, idx, _), seen = setup(name, n_streams=3), []
    for m in connections(model.float()):
        m.register_forward_pre_hook(lambda m, inputs: seen.append(
            ({H.dtype for H in m.maps(inputs[0])}, {x.dtype for x in inputs[0]})))
    with torch.autocast("cpu", torch.bfloat16):
        model(idx)
    assert seen == [({torch.float32}, {torch.bfloat16})] * 6
    mixed = models.module(name).mix(torch.full((1, 1, 3), 1.001).float(), [torch.ones(1, 1, 2).bfloat16()] * 3)
    assert mixed.dtype == torch.float32 and (mixed - 3.003).abs().max() < 1e-5
