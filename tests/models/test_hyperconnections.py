"""Hyper-Connections (arXiv:2409.19606), mHC (2512.24880) and mHC-lite (2601.05732) against their equations in float64,
one number at a time, and what the papers state.
"""
from functools import partial
from itertools import permutations

import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    equations, float64, layer_norm, rms, setup, sigmoid, softmax, sublayer)
from torch._dynamo.testing import CompileCounter

import models
import probes
from nanodepth.devices import compile_model

NAMES = ("hyperconnections", "mhc", "mhc_lite")


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


def doubly_stochastic(Z, steps):
    """Sinkhorn: exponentials; then columns, then rows are divided by their sums, `steps` times."""
    n = len(Z)
    top = max(max(row) for row in Z)
    P = [[torch.exp(z - top) for z in row] for row in Z]
    for _ in range(steps):
        columns = [sum(P[i][s] for i in range(n)) for s in range(n)]
        P = [[P[i][s] / columns[s] for s in range(n)] for i in range(n)]
        P = [[p / sum(row) for p in row] for row in P]
    return P


def mhc_maps(p, c, at, X):
    """Sinkhorn, or in mhc_lite a convex combination of all permutations in lexicographic order; one puts P[i] in the
    place of i.
    """
    n, u = c.n_streams, rms(torch.cat(X), c)
    phi, alpha, bias = p[f"{at}.phi"], p[f"{at}.alpha"], p[f"{at}.bias"]
    z = [alpha[min(j // n, 2)] * torch.dot(u, phi[:, j]) + bias[j] for j in range(len(bias))]
    if hasattr(c, "sinkhorn_steps"):
        res = doubly_stochastic([z[2 * n + n * i:3 * n + n * i] for i in range(n)], c.sinkhorn_steps)
    else:
        weighted = list(zip(softmax(z[2 * n:]), permutations(range(n)), strict=True))
        res = [[sum(w for w, P in weighted if P[i] == s) for s in range(n)] for i in range(n)]
    return [sigmoid(u) for u in z[:n]], [2 * sigmoid(u) for u in z[n:2 * n]], res


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


test_equations = equations(partial(streams, dynamic_maps), "hyperconnections", [
    dict(), dict(dynamic=False), dict(n_streams=1), dict(n_streams=2, n_kv_head=4),
    dict(n_streams=5, gate="elementwise", n_layer=1), dict(dynamic=False, gate="headwise", tie_embeddings=True)],
    n_streams=3, dynamic=True)
test_equations_of_mhc = equations(partial(streams, mhc_maps), "mhc", [
    dict(), dict(n_streams=1), dict(sinkhorn_steps=1), dict(sinkhorn_steps=2, n_streams=2, n_kv_head=4),
    dict(n_streams=4, sinkhorn_steps=4, gate="headwise", tie_embeddings=True)],
    n_layer=2, n_streams=3, sinkhorn_steps=20)
test_equations_of_mhc_lite = equations(partial(streams, mhc_maps), "mhc_lite", [
    dict(), dict(n_streams=1), dict(n_streams=4), dict(n_streams=2, gate="headwise")], n_streams=3)


def connections(model):
    return [m for block in model.blocks for m in (block.attn_connection, block.mlp_connection)]


@pytest.mark.parametrize("name, options", [*((name, {}) for name in NAMES), (NAMES[0], dict(dynamic=False))], ids=str)
def test_initial_values(name, options):
    """Of mhc_lite's 3! permutations the first is the identity."""
    eye, model = torch.eye(3), setup(name, n_streams=3, **options)[0]
    model.init_weights()
    res = torch.tensor([0.0, *[-8.0] * 5]) if name == "mhc_lite" else (8 * eye - 8).flatten()
    for k, m in enumerate(connections(model)):
        if name == "hyperconnections":
            assert torch.equal(m.static, torch.cat((eye[k % 3, :, None], torch.ones(3, 1), eye), dim=1))
            assert options or (m.W == 0).all() and (m.scale == 0.01).all()
        else:
            assert torch.equal(m.bias, torch.cat((2 * eye[k % 3] - 1, torch.zeros(3), res)))
            assert (m.phi == 0).all() and (m.alpha == 0.01).all()


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


@pytest.mark.parametrize("size", [1, 30, 3000])
def test_sinkhorn_of_any_size_is_finite_in_fp32(size):
    """Rows that all want one column underflow as exp(z) in fp32; forward and backward against float64."""
    sinkhorn, draw = models.module("mhc").sinkhorn, torch.Generator().manual_seed(0)
    z = size * torch.randn(200, 4, 4, generator=draw)
    z[:100, :, 0] += 3 * size
    grad = torch.randn(200, 4, 4, generator=draw)
    found = []
    for x in (z.clone(), z.float()):
        H = sinkhorn(x.requires_grad_(), 20)
        H.backward(grad.to(x.dtype))
        assert H.isfinite().all() and x.grad.isfinite().all() and (H.sum(-1) - 1).abs().max() < 1e-6 * max(size, 10)
        found.append((H.detach(), x.grad))
    for wide, narrow in zip(*found):
        assert (wide - narrow).abs().max() < 1e-6 * size
    assert (sinkhorn(1000 * torch.eye(4)[[2, 0, 3, 1]], 20) == torch.eye(4)[[2, 0, 3, 1]]).all()


def test_blocks_share_a_compiled_graph(monkeypatch):
    """All but the first, whose streams are one tensor; the loss has its own. The hooks of stats() need no graph."""
    torch._dynamo.reset()
    model = models.build("mhc", vocab_size=16, n_layer=4, d_model=16, n_head=2)
    idx, graphs = torch.arange(16)[None], CompileCounter()
    want, compiled = model(idx, idx)[1], torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, options=None, **how: compiled(part, backend=graphs, **how))
    compile_model(model)
    for _ in range(2):
        torch.testing.assert_close(model(idx, idx)[1], want)
        probes.stats("mhc", model, idx)
    assert graphs.frame_count == 3
