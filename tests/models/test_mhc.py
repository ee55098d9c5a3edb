"""mHC against its equations in float64, one number at a time; doubly stochastic maps. arXiv:2512.24880."""
from functools import partial

import pytest
import torch
from reference import compare, float64, rms, setup, show, sigmoid  # noqa: F401  (float64: autouse)
from test_hyperconnections import build, connections, streams

import models
import probes
from nanodepth.devices import compile_model

OWN = dict(n_layer=2, n_streams=3, sinkhorn_steps=20)


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


def logits(p, c, at, X):
    """What H_pre, H_post and H_res of the connection `at` are made of, at one token: numbers."""
    n, u = c.n_streams, rms(torch.cat(X), c)
    phi, alpha, bias = p[f"{at}.phi"], p[f"{at}.alpha"], p[f"{at}.bias"]
    return [alpha[min(j // n, 2)] * torch.dot(u, phi[:, j]) + bias[j] for j in range(len(bias))]


def maps(p, c, at, X):
    n, z = c.n_streams, logits(p, c, at, X)
    Z = [z[2 * n + n * i:3 * n + n * i] for i in range(n)]
    return [sigmoid(u) for u in z[:n]], [2 * sigmoid(u) for u in z[n:2 * n]], doubly_stochastic(Z, c.sinkhorn_steps)


@pytest.mark.parametrize("options", [
    dict(), dict(n_streams=1), dict(sinkhorn_steps=1), dict(sinkhorn_steps=2, n_streams=2, n_kv_head=4),
    dict(n_streams=4, sinkhorn_steps=4, gate="headwise", tie_embeddings=True)], ids=show)
def test_equations_of_mhc(options):
    compare(partial(streams, maps), *setup("mhc", **{**OWN, **options}))


def test_initial_values():
    eye = torch.eye(3)
    for k, m in enumerate(connections(build("mhc"))):
        assert torch.equal(m.bias, torch.cat((2 * eye[k % 3] - 1, torch.zeros(3), (8 * eye - 8).flatten())))
        assert (m.phi == 0).all() and (m.alpha == 0.01).all()


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
    """All but the first, whose streams are one tensor. The hooks of stats() need no graph."""
    torch._dynamo.reset()
    model = models.build("mhc", vocab_size=16, n_layer=4, d_model=16, n_head=2)
    idx, graphs = torch.arange(16)[None], []

    def count(graph, inputs, options):
        graphs.append(graph)
        return graph.forward

    want, compiled = model(idx, idx)[1], torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda part, **how: compiled(part, backend=count, **how))
    compile_model(model)
    for _ in range(2):
        torch.testing.assert_close(model(idx, idx)[1], want)
        probes.stats("mhc", model, idx)
    assert len(graphs) == 2
