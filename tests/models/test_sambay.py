"""sambay.py against its equations in float64, one token and channel after the other; its recurrence and its cache."""
import math

import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    COMMON, add, attend, equations, float64, linear, mlp_sublayer, norm, project, queries, setup)

import models

sambay = models.module("sambay")


def silu(x):
    return x / (1 + torch.exp(-x))


def mamba(p, c, at, a):
    """Mixer outputs and readouts y of all tokens, from the normalised inputs a; every channel has its own state."""
    E, N, taps = 2 * c.d_model, c.d_state, 4
    x, z = [linear(p, f"{at}.w_u", u) for u in a], [linear(p, f"{at}.w_z", u) for u in a]
    state, out, ys = [torch.zeros(N) for _ in range(E)], [], []
    for t in range(len(a)):
        conv = p[f"{at}.conv.bias"]
        for back in range(min(taps, t + 1)):
            conv = conv + p[f"{at}.conv.weight"][:, 0, taps - 1 - back] * x[t - back]
        u = silu(conv)
        dt = torch.log(1 + torch.exp(linear(p, f"{at}.w_dt", linear(p, f"{at}.w_rank", u)) + p[f"{at}.dt_bias"]))
        write, read, y = linear(p, f"{at}.w_write", u), linear(p, f"{at}.w_read", u), []
        for e in range(E):
            state[e] = torch.exp(-dt[e] * torch.exp(p[f"{at}.A_log"][e])) * state[e] + dt[e] * write * u[e]
            y.append(torch.dot(read, state[e]) + p[f"{at}.skip"][e] * u[e])
        ys.append(torch.stack(y))
        out.append(linear(p, f"{at}.wo", ys[-1] * silu(z[t])))
    return out, ys


def stack(p, c, x):
    half = 2 * (c.n_layer // 4)
    for i in range(c.n_layer):
        at = f"blocks.{i}"
        a, plain = [norm(p, f"{at}.attn_norm", u, c) for u in x], dict(rotate=lambda u, t, c: u)
        if i < half and i % 2 == 1:
            mixed = attend(p, c, at, project(p, c, at, a), window=c.window, **plain)
        elif i <= half:
            mixed, memory = mamba(p, c, f"{at}.attn", a)
        elif i == half + 1:
            full = project(p, c, at, a)
            mixed = attend(p, c, at, full, **plain)
        elif i % 2 == 0 and c.gmu:
            mixed = [linear(p, f"{at}.attn.wo", silu(linear(p, f"{at}.attn.w_gate", u)) * m)
                     for u, m in zip(a, memory)]
        else:
            mixed = attend(p, c, at, {**full, **queries(p, c, at, a)}, of=f"blocks.{half + 1}", **plain)
        x = add(x, mixed)
        x = add(x, mlp_sublayer(p, c, at, x))
    return x


OWN = {**{key: value for key, value in COMMON.items() if key != "rope_theta"}, "n_layer": 8, "d_model": 16, "window": 3,
       "d_state": 3, "gmu": True}
test_equations = equations(stack, "sambay", [
    dict(), dict(n_layer=6, gmu=False, qk_norm=False), dict(n_layer=7, window=2, n_kv_head=4, gate="elementwise"),
    dict(n_layer=2, d_state=1, tie_embeddings=True), dict(n_layer=5, window=50, n_kv_head=1, gate="headwise"),
    dict(n_layer=3, z_loss=0.0)], OWN)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 7, 8, 16, 37])
def test_recurrence_equals_the_loop(T):
    """States and gradients, in fp32 too; with decays down to exp(-300), where quotients of decays would overflow."""
    def one_after_the_other(a, b):
        s = [b[:, 0]]
        for t in range(1, T):
            s.append(a[:, t] * s[-1] + b[:, t])
        return torch.stack(s, 1)

    torch.manual_seed(T)
    exact = [torch.exp(-300 * torch.rand(2, T, 5, 3) ** 3), torch.randn(2, T, 5, 3)]
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        inputs, results = [x.to(dtype).requires_grad_() for x in exact], []
        for states in (sambay.recurrence, one_after_the_other):
            s = states(*inputs)
            grads = torch.autograd.grad((s * torch.sin(torch.arange(3.0))).sum(), inputs, materialize_grads=True)
            results.append((s, *grads))
        for got, wanted in zip(*results):
            assert got.shape == wanted.shape and (got - wanted).abs().max() <= limit * max(1, wanted.abs().max())


def test_training_keeps_no_states():
    """What autograd saves in the forward pass has no tensor of T states."""
    model, _, c, idx, targets = setup("sambay", OWN, d_state=5)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.shape) or x, lambda x: x):
        model(idx, targets)
    assert sizes and not any(c.d_state in shape and 2 * c.d_model in shape and len(shape) > 3 for shape in sizes)


def test_what_the_cache_holds():
    """Keys and values of all tokens for windows and the full attention; nothing for the layers that only read."""
    model = setup("sambay", OWN)[0]
    small, large = (sambay.Cache(model, 2, n) for n in (10, 1000))
    assert [*large.k] == [*large.v] == [1, 3, 5] and [*large.u] == [*large.state] == [0, 2, 4]
    assert all(large.k[i].shape == (2, 2, 1000, 4) for i in large.k)
    assert all(small.state[i].shape == large.state[i].shape == (2, 32, 3) for i in large.state)
    assert all(small.u[i].shape == large.u[i].shape == (2, 3, 32) for i in large.u)


@torch.no_grad()
def test_a_cache_under_autocast_keeps_its_states_in_fp32():
    torch.set_default_dtype(torch.float32)
    model, _, _, idx, _ = setup("sambay", OWN)
    with torch.autocast("cpu", torch.bfloat16):
        full, cache = model(idx)[0], sambay.Cache(model, 2, 9)
        parts = [model(idx[:, a:b], cache=cache)[0] for a, b in ((0, 3), (3, 4), (4, 7))]
    assert {t.dtype for t in (cache.u[0], cache.k[1], cache.v[5])} == {torch.bfloat16}
    assert cache.state[0].dtype == torch.float32
    assert (torch.cat(parts, 1).float() - full.float()).abs().max() < 0.05 * full.abs().max()


def test_initial_values():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = models.build("sambay", n_layer=8, d_model=128, n_head=4, vocab_size=50, d_state=5)
    for block in model.blocks[:6:2]:
        layer = block.attn
        assert torch.equal(layer.A_log, torch.tensor([1.0, 2, 3, 4, 5]).log().expand(256, 5))
        assert (layer.skip == 1).all()
        dt = torch.nn.functional.softplus(layer.dt_bias)
        assert 1e-3 * 0.999 < dt.min() < 2e-3 and 0.05 < dt.max() < 0.1 * 1.001
        assert abs(dt.log().mean() - math.log(1e-2)) < 0.3
        # rank 8, 4 taps; std of U(+-a) is a / sqrt(3)
        assert layer.w_dt.weight.abs().max() <= 8 ** -0.5 and abs(layer.w_dt.weight.std() * 24 ** 0.5 - 1) < 0.1
        assert layer.conv.weight.abs().max() <= 0.5 and abs(layer.conv.weight.std() * 12 ** 0.5 - 1) < 0.1
        assert (layer.conv.bias == 0).all() and (layer.wo.weight == 0).all()
    assert model.blocks[0].attn.w_rank.weight.shape == (8, 256)
    assert (model.blocks[6].attn.wo.weight == 0).all() and 0.015 < model.blocks[6].attn.w_gate.weight.std() < 0.025
