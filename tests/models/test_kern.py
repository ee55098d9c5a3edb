"""KERN (arXiv:2509.25913), and muddmoe.py (arXiv:2502.12170, sections 2 and 3.2), with the same mixtures: equations in
float64, the balance loss, and the equality of the experts' products.
"""
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from reference import (  # noqa: F401  (float64: autouse)
    compare, float64, gpt, norm, reference_logits, setup, show, sigmoid, softmax)
from small import near
from test_muddformer import muddformer

import models
import probes

kern_file = models.module("kern")


def routing(p, c, at, u):
    """r of one token u as a list of E numbers, and the k experts with the largest."""
    s = [torch.dot(w, u) for w in p[f"{at}.router.weight"]]
    length = torch.sqrt(sum(a * a for a in s)) + 1e-6
    r = {"softmax": softmax(s), "sigmoid": [sigmoid(a) for a in s], "tanh": [2 * sigmoid(2 * a) - 1 for a in s],
         "kern": [a / length * (a > 0) for a in s]}[c.router]
    return r, sorted(range(len(r)), key=lambda m: -float(r[m].detach()))[:c.top_k]


def mixture(p, c, at, u, tokens):
    """gamma sum_m r_m expert_m(u); what was routed where is added to `tokens`."""
    r, chosen = routing(p, c, at, u)
    tokens.append((r, chosen))
    y = torch.zeros(c.d_model)
    for m in chosen:
        gate, up = (p[f"{at}.experts.{name}.weight"][m] @ u for name in ("w_gate", "w_up"))
        assert len(gate) == c.d_ff / c.top_k
        y = y + r[m] * (p[f"{at}.experts.w_down.weight"][m] @ (gate * sigmoid(gate) * up))
    return p[f"{at}.gamma"] * y if c.router == "kern" else y


def experts(routed):
    """The MLP sublayer of a stack; `routed` gets per sequence and layer a list of (r, chosen)."""
    def sublayer(p, c, at, x):
        routed.append([])
        return [mixture(p, c, f"{at}.mlp", norm(p, f"{at}.mlp_norm", u, c), routed[-1]) for u in x]
    return sublayer


def balance(routed):
    """Mean over sequences and layers of E sum_m F_m P_m."""
    total = 0
    for tokens in routed:
        E = len(tokens[0][0])
        pairs = [m for r, chosen in tokens for m in chosen if r[m] > 0]
        positive = [[a * (a > 0) for a in r] for r, _ in tokens]
        for m in range(E):
            share = sum(p[m] / max(sum(p), 1e-8) for p in positive) / len(tokens)
            total = total + E * pairs.count(m) / len(pairs) * share
    return total / len(routed)


OWN = dict(d_ff=48, n_layer=2, router="kern", n_expert=5, top_k=2, balance_loss=0.7)


@pytest.mark.parametrize("name, options", [("kern", options) for options in (
    dict(), dict(router="softmax", top_k=3, n_expert=16), dict(router="sigmoid"), dict(router="tanh"),
    dict(top_k=3, n_expert=3), dict(gate="elementwise", tie_embeddings=True, balance_loss=0.0, top_k=1),
    dict(gate="headwise", n_kv_head=4, qk_norm=False, z_loss=0.0))] + [("muddmoe", options) for options in (
        dict(router="softmax", n_layer=3), dict(n_layer=3), dict(n_layer=1, router="softmax", top_k=1, n_kv_head=4),
        dict(n_layer=3, router="softmax", gate="elementwise", tie_embeddings=True))], ids=show)
def test_equations(name, options):
    """With the balance loss."""
    given, routed = setup(name, **OWN | options), []
    stack = partial(gpt if name == "kern" else muddformer, mlp=experts(routed))
    compare(stack, *given, lambda: given[0].config.balance_loss * balance(routed))


LOADS = [[3, 0, 9, 4, 1, 0, 7, 16], [0, 0, 0, 0, 0, 0, 0, 1000], [50] * 8, [0, 2, 0, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_products_are_a_loop_over_the_experts(dtype, load):
    """Forward and backward; no row is dropped at any load, and at most an eighth more rows are multiplied."""
    torch.manual_seed(0)
    layer, N = kern_file.MLP(8, 16, 24), sum(load)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x, layer = torch.randn(N, 16).to(dtype).requires_grad_(), layer.to(dtype)
    expert = torch.arange(8).repeat_interleave(torch.tensor(load))[torch.randperm(N)]
    seen = []
    layer.w_up.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].flatten(0, 1).size(0)))
    got, want = layer(x, expert), torch.zeros_like(x)
    assert N <= seen[0] <= N * (1 if dtype == torch.bfloat16 else 9 / 8)
    for m in range(8):
        w_gate, w_up, w_down = (getattr(layer, name).weight[m] for name in ("w_gate", "w_up", "w_down"))
        rows = expert == m
        want = want.index_put((rows,), (F.silu(x[rows] @ w_gate.T) * (x[rows] @ w_up.T)) @ w_down.T)
    grad = torch.randn(N, 16).to(dtype)
    mine, right = (torch.autograd.grad(y, (x, *layer.parameters()), grad) for y in (got, want))
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for a, b in zip((got, *mine), (want, *right)):
        assert a.dtype == b.dtype and (a - b).norm() <= limit * b.norm()


def test_router_is_finite_and_fp32():
    for E, k, total in ((64, 8, 1.62), (16, 2, 0.775)):         # mean of the sum of the k largest: docs/notes.md
        layer = kern_file.Router(kern_file.Config(d_model=128, n_head=1, n_expert=E))
        torch.nn.init.normal_(layer.weight, std=0.02)
        assert abs(layer(torch.randn(4000, 128)).topk(k).values.sum(-1).mean() - total) < 0.03
    assert layer(torch.zeros(1, 128)).isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.float()(torch.randn(9, 128).float()).dtype == torch.float32
    nothing = torch.zeros(1, 5, 5)                                      # no token is routed anywhere
    assert setup("kern", **OWN)[0].blocks[0].mlp.imbalance(nothing, *nothing.topk(2)).isfinite()


def test_initial_values():
    model = models.build("kern", vocab_size=31, n_layer=2, n_head=2, d_model=64, d_ff=128)
    for block in model.blocks:
        layer = block.mlp
        assert layer.gamma == 1 and abs(layer.router.weight.std() / 0.02 - 1) < 0.1
        for name in ("w_gate", "w_up"):
            each = getattr(layer.experts, name).weight.std(dim=(1, 2))
            assert each.shape == (16,) and (each / 0.02 - 1).abs().max() < 0.1
        assert (layer.experts.w_down.weight == 0).all()


def test_stats():
    model, _, _, idx, _ = setup("kern", **OWN)
    found, routed = probes.stats("kern", model, idx), []
    with torch.no_grad():
        reference_logits(lambda *given: gpt(*given, mlp=experts(routed)), dict(model.named_parameters()), model.config,
                         idx)
    for n in range(2):
        tokens = [token for one in routed[n::2] for token in one]       # of both sequences
        pairs = [m for r, chosen in tokens for m in chosen if r[m] > 0]
        gamma, weights = model.blocks[n].mlp.gamma.item(), sum(r[m].item() for r, chosen in tokens for m in chosen)
        assert found["load"][n] == pytest.approx(5 * max(pairs.count(m) for m in range(5)) / len(pairs))
        assert found["gamma"][n] == gamma
        near(found["weight"][n], gamma * weights / 14)


@pytest.mark.full
def test_a_mixture_compiles_in_bf16():
    """One graph, and code, of the products by grouped_mm. The rest is in test_compile.py."""
    layer, x = setup("kern", **OWN)[0].float().train().blocks[0].mlp, torch.randn(2, 7, 32, dtype=torch.float32)
    torch._dynamo.reset()
    results = []
    with torch.autocast("cpu", torch.bfloat16):
        for run in (layer, torch.compile(layer, fullgraph=True, dynamic=False)):
            layer.zero_grad()
            out, loss = run(x)
            (out.square().mean() + loss).backward()
            results.append([out, loss, *(p.grad.clone() for p in layer.parameters())])
    assert all((got - want).norm() <= 0.05 * want.norm() for want, got in zip(*results))
