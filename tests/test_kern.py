"""KERN (arXiv:2509.25913): its equations in float64, its balance loss, and the equality of its products."""
import math

import pytest
import torch
import torch.nn.functional as F
from reference import (  # noqa: F401  (float64: autouse)
    add, attend, float64, norm, project, reference_logits, reference_loss, setup, sigmoid, softmax)

import models
import muon
import probes
from nanodepth import record
from nanodepth.devices import flops_per_token
from nanodepth.presets import PRESETS
from small import near

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


def kern(p, c, x, routed):
    """gpt.py's blocks with a mixture as the MLP; `routed` gets per sequence and layer a list of (r, chosen)."""
    for n in range(c.n_layer):
        at = f"blocks.{n}"
        a = [norm(p, f"{at}.attn_norm", u, c) for u in x]
        x = add(x, attend(p, c, at, project(p, c, at, a, a, a)))
        routed.append([])
        x = add(x, [mixture(p, c, f"{at}.mlp", norm(p, f"{at}.mlp_norm", u, c), routed[-1]) for u in x])
    return x


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
CASES = [dict(), dict(router="softmax"), dict(router="sigmoid"), dict(router="tanh"),
         dict(top_k=1, n_expert=3), dict(top_k=3, n_expert=3), dict(router="tanh", top_k=3, n_expert=3),
         dict(n_expert=16), dict(router="softmax", top_k=3, n_expert=16),
         dict(gate="elementwise", tie_embeddings=True, balance_loss=0.0),
         dict(gate="headwise", n_kv_head=4, qk_norm=False, z_loss=0.0)]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_equations_of_kern(options):
    """Logits, loss and the gradient of every parameter; in evaluation the loss has no balance loss."""
    model, p, c, idx, targets = setup("kern", **{**OWN, **options})
    routed = []
    expected = reference_logits(lambda p, c, x: kern(p, c, x, routed), p, c, idx)
    plain = reference_loss(expected, targets, c.z_loss)
    (plain + c.balance_loss * balance(routed)).backward()
    logits, loss = model(idx, targets)
    loss.backward()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, plain + c.balance_loss * balance(routed), rtol=0, atol=1e-10)
    for key, q in model.named_parameters():
        torch.testing.assert_close(q.grad, p[key].grad, rtol=0, atol=1e-9,
                                   msg=lambda m, key=key: f"gradient of {key}: {m}")
        assert q.grad.abs().max() > 0, key
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(idx, targets)[1], reference_loss(expected, targets, 0.0), rtol=0,
                                   atol=1e-10)


LOADS = [[3, 0, 9, 4, 1, 0, 7, 16], [40, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1000], [50] * 8,
         [0, 399, 1, 0, 0, 0, 0, 0], [0, 2, 0, 0, 1, 0, 0, 0]]


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


@torch.no_grad()
def test_dropless_equals_all_experts_masked():
    """Also when every token wants the same expert."""
    for push in (0.0, 5.0):
        model, _, _, idx, _ = setup("kern", **OWN)
        layer, x = model.blocks[0].mlp.eval(), torch.randn(3, 7, 32)
        x[..., 0] += push
        layer.router.weight[2, 0] += push
        r = layer.router(x)
        mask = torch.zeros_like(r).scatter(-1, r.topk(2).indices, 1.0)
        w_gate, w_up, w_down = (getattr(layer.experts, name).weight for name in ("w_gate", "w_up", "w_down"))
        h = F.silu(torch.einsum("btc,efc->btef", x, w_gate)) * torch.einsum("btc,efc->btef", x, w_up)
        y = layer.gamma * torch.einsum("btef,ecf,bte->btc", h, w_down, r * mask)
        torch.testing.assert_close(layer(x)[0], y, rtol=0, atol=1e-11)
        assert push == 0 or mask[..., 2].mean() > 0.9


def of_gpt(state, n_expert, scale=1.0):
    """Weights of gpt.py as those of experts that share its hidden units between them."""
    out = {}
    for key, w in state.items():
        name = key.split(".")[-2]
        if name in ("w_gate", "w_up"):
            w = w.unflatten(0, (n_expert, -1))
        if name == "w_down":
            w = scale * w.unflatten(1, (n_expert, -1)).transpose(0, 1)
        out[key.replace(".mlp.w", ".mlp.experts.w")] = w
    return out


@pytest.mark.parametrize("n_expert", [1, 2, 4])
@torch.no_grad()
def test_all_experts_together_are_gpt(n_expert):
    """One expert with softmax; and E of E experts with a router at zero, with matrices scaled by the shares 1 / E."""
    base, _, _, idx, _ = setup("gpt", d_ff=64)
    model = setup("kern",
                  **{**OWN, "d_ff": 64, "n_layer": 3, "router": "softmax", "n_expert": n_expert, "top_k": n_expert})[0]
    model.load_state_dict(of_gpt(base.state_dict(), n_expert, n_expert), strict=False)
    assert n_expert == 1 or (model(idx)[0] - base(idx)[0]).abs().max() > 1e-3
    for block in model.blocks:
        block.mlp.router.weight.mul_(n_expert == 1)                     # one expert: any router
    torch.testing.assert_close(model(idx)[0], base(idx)[0], rtol=0, atol=1e-11)


def router(n_expert, kind):
    layer = kern_file.Router(kern_file.Config(d_model=128, n_head=1, n_expert=n_expert, router=kind))
    torch.nn.init.normal_(layer.weight, std=0.02)
    return layer


@torch.no_grad()
def test_properties_of_the_router():
    """The length of W has no effect, gamma < 0 changes signs, not choices; the weights are those of the docstring."""
    layer = setup("kern", **OWN)[0].blocks[0].mlp.eval()
    x = torch.randn(2, 7, 32)
    layer.gamma.fill_(1.0)
    plain = layer(x)[0]
    layer.gamma.fill_(-0.5)
    torch.testing.assert_close(layer(x)[0], -0.5 * plain, rtol=0, atol=1e-12)
    layer.gamma.fill_(1.0)
    layer.router.weight.mul_(3)
    torch.testing.assert_close(layer(x)[0], plain, rtol=1e-4, atol=0)
    for E, k, total in ((16, 2, 0.775), (64, 8, 1.62)):                 # mean of the sum of the k largest
        assert abs(router(E, "kern")(torch.randn(4000, 128)).topk(k).values.sum(-1).mean() - total) < 0.03
    assert (router(16, "softmax")(torch.randn(9, 128)).sum(-1) - 1).abs().max() < 1e-12
    assert router(16, "kern")(torch.zeros(1, 128)).isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):                         # r is fp32
        assert router(16, "kern").float()(torch.randn(9, 128).float()).dtype == torch.float32


def test_balance_loss_is_one_at_equal_load():
    layer = setup("kern", **OWN)[0].blocks[0].mlp

    def imbalance(r):
        return layer.imbalance(r, *r.topk(2)).item()
    equal = torch.eye(5).roll(1, 0) + torch.eye(5)                      # token t to experts t and t + 1
    assert imbalance(equal[None]) == pytest.approx(1.0)
    # a weight of 0 is no load
    assert imbalance(torch.tensor([[[0.3, 0, 0, 0, 0]] * 5])) == pytest.approx(5.0)
    assert imbalance(torch.tensor([[[0.3, 0.1, 0, 0, 0]] * 5])) == pytest.approx(2.5)
    assert math.isfinite(imbalance(torch.zeros(1, 5, 5)))
    two = torch.stack((equal, torch.tensor([[0.3, 0.1, 0, 0, 0]] * 5)))
    assert imbalance(two) == pytest.approx(1.75)                        # each sequence by itself


@pytest.mark.parametrize("options", [dict(), dict(n_expert=64, top_k=8), dict(router="softmax", top_k=1),
                                     dict(router="softmax", n_expert=8, top_k=4)], ids=str)
def test_flops_are_those_of_the_active_experts(options):
    """As many as gpt.py has, and the router's, where blocks have a row; else an eighth more. costs adds the sum of the
    k outputs."""
    shape = dict(vocab_size=50, n_layer=3, n_head=4, d_model=64, d_ff=128, max_len=64)
    with torch.device("meta"):
        model, base = models.build("kern", **shape, **options), models.build("gpt", **shape)
    c, extra = model.config, flops_per_token(model, 16) - flops_per_token(base, 16)
    at_64 = flops_per_token(model, 64) - flops_per_token(base, 64)
    assert extra <= at_64 <= extra + 2 * 3 * 3 * 64 * 128 / 8
    params, flops, read = probes.of("kern", "costs")(c, 64)
    assert extra == 3 * 2 * 64 * c.n_expert == flops - 3 * 2 * 64 * c.top_k and read == 0
    assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    experts = sum(p.numel() for key, p in model.named_parameters() if "experts" in key)
    active = experts * c.top_k // c.n_expert
    assert active == 3 * 3 * 64 * 128                                   # as gpt.py's MLPs


def test_size_of_muddformers_mixture():
    """Section 3.2: 2 of 16 experts of width 1,408 in the 405M shape, 1.8B parameters, as many active as when dense."""
    known = models.module("kern").Config.__dataclass_fields__
    with torch.device("meta"):
        model = models.build("kern", **{k: v for k, v in PRESETS["mudd-405m"].items() if k in known})
    assert model.blocks[0].mlp.experts.w_up.weight.shape == (16, 1408, 1024)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 1865


def test_initial_values_and_groups():
    model = models.build("kern", vocab_size=31, n_layer=2, n_head=2, d_model=64, d_ff=128)
    for block in model.blocks:
        layer = block.mlp
        assert layer.gamma == 1 and abs(layer.router.weight.std() / 0.02 - 1) < 0.1
        for name in ("w_gate", "w_up"):
            each = getattr(layer.experts, name).weight.std(dim=(1, 2))
            assert each.shape == (16,) and (each / 0.02 - 1).abs().max() < 0.1
        assert (layer.experts.w_down.weight == 0).all()
    matrices, _ = muon.split_params(model)
    experts = [p for key, p in model.named_parameters() if "experts" in key]
    assert len(experts) == 6 and {id(p) for p in experts} <= {id(p) for p in matrices}
    routing = {id(p) for block in model.blocks for p in (block.mlp.gamma, block.mlp.router.weight)}
    assert routing == {id(p) for p in muon.mixes(model)}
    plain = models.build("kern", vocab_size=31, n_layer=1, n_head=2, d_model=16, d_ff=16, router="softmax")
    assert not any("gamma" in key for key in plain.state_dict())


def test_stats():
    model, _, _, idx, _ = setup("kern", **OWN)
    found, routed = record.stats("kern", model, idx), []
    with torch.no_grad():
        reference_logits(lambda p, c, x: kern(p, c, x, routed), dict(model.named_parameters()), model.config, idx)
    for n in range(2):
        tokens = [token for one in routed[n::2] for token in one]       # of both sequences
        pairs = [m for r, chosen in tokens for m in chosen if r[m] > 0]
        assert found["load"][n] == pytest.approx(5 * max(pairs.count(m) for m in range(5)) / len(pairs))
        gamma = model.blocks[n].mlp.gamma.item()
        assert found["gamma"][n] == gamma
        weights = sum(r[m].item() for r, chosen in tokens for m in chosen)
        near(found["weight"][n], gamma * weights / 14)


def test_compiled_in_bf16_and_fp32():
    """One graph in each, and of a mixture in bf16, with grouped_mm, the code too. The rest is in test_compile.py."""
    model, _, _, idx, targets = setup("kern", **{**OWN, "n_layer": 1})
    model = model.float().train()
    layer, x = model.blocks[0].mlp, torch.randn(2, 7, 32, dtype=torch.float32)
    for module, inputs, enabled, backend in ((model, (idx, targets), True, "aot_eager"),
                                             (model, (idx, targets), False, "aot_eager"),
                                             (layer, (x,), True, "inductor")):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        results = []
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for run in (module, *[torch.compile(module, fullgraph=True, dynamic=False, backend=backend)] * 2):
                module.zero_grad()
                out, loss = run(*inputs)
                (out.square().mean() + loss if module is layer else loss).backward()
                results.append([out, loss, *(p.grad.clone() for p in module.parameters())])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        for compiled in results[1:]:
            for got, want in zip(compiled, results[0]):
                assert (got - want).norm() <= (0.05 if enabled else 1e-4) * want.norm()
