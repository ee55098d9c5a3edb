"""sambay.py against its equations in float64, one token and channel after the other; its scan, window and caches."""
import math
from types import SimpleNamespace

import pytest
import torch
from reference import (
    COMMON, add, compare, heads, linear, mlp_sublayer, norm, own_groups, reference_logits, sigmoid, softmax)

import models
from nanodepth import record
from nanodepth.devices import flops_per_token
from small import near

sambay = models.module("sambay")


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# --------------------------------------------------------------------------------------- the model, one token at a time


def silu(x):
    return x / (1 + torch.exp(-x))


def mamba(p, c, at, a):
    """Mixer outputs and readouts y of all tokens, from the normalised inputs a; every channel has its own state."""
    E, N, taps = 2 * c.d_model, c.d_state, c.d_conv
    x, z = [linear(p, f"{at}.w_x", u) for u in a], [linear(p, f"{at}.w_z", u) for u in a]
    state, out, ys = [torch.zeros(N) for _ in range(E)], [], []
    for t in range(len(a)):
        conv = p[f"{at}.conv_bias"]
        for back in range(min(taps, t + 1)):
            conv = conv + p[f"{at}.conv_weight"][taps - 1 - back] * x[t - back]
        u = silu(conv)
        dt = torch.log(1 + torch.exp(linear(p, f"{at}.w_dt", linear(p, f"{at}.w_rank", u)) + p[f"{at}.dt_bias"]))
        write, read, y = linear(p, f"{at}.w_write", u), linear(p, f"{at}.w_read", u), []
        for e in range(E):
            state[e] = torch.exp(-dt[e] * torch.exp(p[f"{at}.A_log"][e])) * state[e] + dt[e] * write * u[e]
            y.append(torch.dot(read, state[e]) + p[f"{at}.skip"][e] * u[e])
        ys.append(torch.stack(y))
        out.append(linear(p, f"{at}.wo", ys[-1] * silu(z[t])))
    return out, ys


def attention(p, c, at, a, first, keys=None, values=None):
    """softmax(q k^T / sqrt(D)) v over tokens first(t) .. t, without positions; own keys and values unless given."""
    def normed(name, u):
        return norm(p, f"{at}.{name}", u, c) if c.qk_norm else u

    if keys is None:
        keys = [[normed("k_norm", u) for u in heads(linear(p, f"{at}.wk", x), c.n_kv_head)] for x in a]
        values = [heads(linear(p, f"{at}.wv", x), c.n_kv_head) for x in a]
    out, D, group = [], c.d_model // c.n_head, c.n_head // c.n_kv_head
    for t, x in enumerate(a):
        y, past = [], range(first(t), t + 1)
        for h, q in enumerate(heads(linear(p, f"{at}.wq", x), c.n_head)):
            q = normed("q_norm", q)
            weights = softmax([torch.dot(q, keys[s][h // group]) / math.sqrt(D) for s in past])
            y.append(sum(w * values[s][h // group] for w, s in zip(weights, past)))
            if c.gate != "none":
                y[-1] = y[-1] * sigmoid(heads(linear(p, f"{at}.gate", x), c.n_head)[h])
        out.append(linear(p, f"{at}.wo", torch.cat(y)))
    return out, keys, values


def gmu(p, c, at, a, memory):
    if c.gmu == "sigmoid":
        return [linear(p, f"{at}.wo", linear(p, f"{at}.w_in", u) + sigmoid(linear(p, f"{at}.w_gate", m)) * m)
                for u, m in zip(a, memory)]
    return [linear(p, f"{at}.wo", silu(linear(p, f"{at}.w_gate", u)) * m) for u, m in zip(a, memory)]


def stack(p, c, x):
    half = 2 * (c.n_layer // 4)
    for i in range(c.n_layer):
        at = f"blocks.{i}"
        a = [norm(p, f"{at}.attn_norm", u, c) for u in x]
        at += ".attn"
        if i < half and i % 2 == 1:
            mixed = attention(p, c, at, a, lambda t: max(0, t - c.window + 1))[0]
        elif i <= half:
            mixed, memory = mamba(p, c, at, a)
        elif i == half + 1:
            mixed, keys, values = attention(p, c, at, a, lambda t: 0)
        elif i % 2 == 0 and c.gmu != "none":
            mixed = gmu(p, c, at, a, memory)
        else:
            mixed = attention(p, c, at, a, lambda t: 0, keys, values)[0]
        x = add(x, mixed)
        x = add(x, mlp_sublayer(p, c, f"blocks.{i}", x))
    return x


BASE = {key: value for key, value in COMMON.items() if key != "rope_theta"}
OWN = dict(n_layer=8, n_head=4, n_kv_head=2, d_model=16, d_ff=24, window=3, d_state=3, d_conv=4, gmu="silu",
           scan_chunk=2)
CASES = [dict(), dict(gmu="sigmoid"), dict(gmu="none"), dict(qk_norm=False, tie_embeddings=True, z_loss=0.0),
         dict(n_kv_head=4, gate="elementwise"), dict(n_kv_head=1, gate="headwise"), dict(window=2), dict(window=4),
         dict(window=6), dict(window=50), dict(d_state=1), dict(d_conv=1), dict(d_conv=2), dict(d_conv=9),
         dict(scan_chunk=1), dict(scan_chunk=3), dict(scan_chunk=99), *(dict(n_layer=n) for n in (2, 3, 4, 5, 6, 7))]


def setup(T=7, **options):
    """A model with every parameter random, leaf copies of its parameters, its options, and a batch."""
    torch.manual_seed(0)
    config = {**BASE, **OWN, **options}
    model = models.build("sambay", **config)
    with torch.no_grad():
        for key, q in model.named_parameters():
            q.normal_(mean=1.0 if key.endswith("norm.weight") else 0.0, std=0.3)
    p = {key: q.detach().clone().requires_grad_() for key, q in model.named_parameters()}
    idx, targets = torch.randint(29, (2, 2, T))
    targets[0, 2] = targets[1, 0] = -1
    return model, p, SimpleNamespace(**config), idx, targets


@pytest.mark.parametrize("options", CASES, ids=str)
def test_equations(options):
    """Logits, loss and the gradient of every parameter."""
    compare(stack, *setup(**options))


@torch.no_grad()
def test_reference_depends_on_every_parameter():
    """Changing a parameter in the reference alone changes the logits."""
    for options in (dict(), dict(gmu="sigmoid")):
        model, p, c, idx, _ = setup(n_layer=6, **options)
        idx = idx[:1, :3]
        logits = model(idx)[0]
        for key in p:
            before = p[key].clone()
            p[key] += 0.01 * torch.randn_like(before)
            assert (logits - reference_logits(stack, p, c, idx)).abs().max() > 1e-8, key
            p[key].copy_(before)


def test_mixers():
    """The paper's figure: 8 pairs of Mamba and window, Mamba and full attention, 7 pairs of GMU and cross."""
    c = sambay.Config(n_layer=32)
    assert c.mixers == ["mamba", "window"] * 8 + ["mamba", "full"] + ["gmu", "cross"] * 7
    assert sambay.Config(n_layer=32, gmu="none").mixers == c.mixers[:18] + ["cross"] * 14
    model, _, _, idx, _ = setup()
    kinds = [type(block.attn).__name__ for block in model.blocks]
    assert kinds == ["Mamba", "WindowAttention"] * 2 + ["Mamba", "FullAttention", "GMU", "CrossAttention"]
    keys = {key for key, _ in model.named_parameters()}
    assert not keys & {f"blocks.7.attn.{name}.weight" for name in ("wk", "wv", "k_norm")}
    assert "blocks.5.attn.wk.weight" in keys
    assert not any("rope" in name or name in ("cos", "sin") for name, _ in model.named_buffers())


# ------------------------------------------------------------------------------------------------------------- the scan


def one_after_the_other(dt, u, write, read, A, state):
    ys = []
    for t in range(dt.size(1)):
        state = torch.exp(dt[:, t, :, None] * A) * state + (dt[:, t] * u[:, t])[..., None] * write[:, t, None]
        ys.append(torch.einsum("ben,bn->be", state, read[:, t]))
    return torch.stack(ys, 1), state


def scan_inputs(T, scale=1.0):
    torch.manual_seed(T)
    dt = torch.nn.functional.softplus(torch.randn(2, T, 5) * scale)
    return [x.requires_grad_() for x in (dt, torch.randn(2, T, 5), torch.randn(2, T, 3), torch.randn(2, T, 3),
                                         -torch.rand(5, 3) * 4, torch.randn(2, 5, 3))]


@pytest.mark.parametrize("T", [1, 2, 3, 7, 16, 37])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 36, 64])
def test_chunked_scan_equals_the_sequential_loop(T, chunk):
    """Outputs, last state, and the gradients of all inputs, from a state that is not zero."""
    inputs, weights = scan_inputs(T), torch.randn(2, T, 5)
    results = []
    for scan in (lambda *x: sambay.selective_scan(*x, chunk), one_after_the_other):
        y, state = scan(*inputs)
        results.append((y, state, *torch.autograd.grad((y * weights).sum() + state.square().sum(), inputs)))
    for got, wanted in zip(*results):
        assert got.shape == wanted.shape and (got - wanted).abs().max() < 1e-12


def test_scan_with_strong_decay_stays_finite():
    """Decays to exp(-1000s), where quotients of decays would overflow; and in fp32."""
    for dtype in (torch.float64, torch.float32):
        inputs = [x.detach().to(dtype) for x in scan_inputs(64, scale=300)]
        for got, wanted in zip(sambay.selective_scan(*inputs, 16), one_after_the_other(*(x.double() for x in inputs))):
            near(got, wanted, size=wanted.abs().max(), dtype=dtype)


def test_scan_in_pieces():
    """The next piece continues from the last state of the one before."""
    inputs = [x.detach() for x in scan_inputs(23)]
    whole, last = sambay.selective_scan(*inputs, 4)
    state, parts = inputs[-1], []
    for piece in zip(*(x.split((9, 1, 13), dim=1) for x in inputs[:4])):
        y, state = sambay.selective_scan(*piece, inputs[4], state, 4)
        parts.append(y)
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-12 and (state - last).abs().max() < 1e-12


@pytest.mark.parametrize("gmu, more", [("silu", set()), ("sigmoid", {"w_in"})])
def test_groups(gmu, more):
    """What acts on one channel is not a matrix: Mamba's convolution and A are in the group of `mix_lr`."""
    matrices, mixing = own_groups(setup(gmu=gmu)[0])
    own = {"w_x", "w_z", "w_rank", "w_dt", "w_write", "w_read", "w_gate"}
    assert {key.split(".")[-2] for key in matrices} == own | more
    assert {key.split(".")[-1] for key in mixing} == {"A_log", "skip", "dt_bias", "conv_weight", "conv_bias"}


def test_training_keeps_no_states():
    """What autograd saves in the forward pass has no tensor of T states."""
    model, _, c, idx, targets = setup(T=9, gmu="silu", d_state=7)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.shape) or x, lambda x: x):
        model(idx, targets)
    assert sizes and not any(c.d_state in shape and 2 * c.d_model in shape and len(shape) > 3 for shape in sizes)


# --------------------------------------------------------------------------------------------------- windows and caches


@pytest.mark.parametrize("T", [1, 2, 5, 6, 11, 16])
@pytest.mark.parametrize("window", [2, 3, 5, 8, 20])
@torch.no_grad()
def test_window_against_a_mask(T, window):
    """Every query sees itself and window - 1 tokens before it; blocks of queries equal one masked attention."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, T, 4, 6), torch.randn(2, T, 2, 6), torch.randn(2, T, 2, 6)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    mask = (distance >= 0) & (distance < window)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True).transpose(1, 2)
    for attend in (sambay.attend_window, sambay.attend_window_in_blocks):
        assert (attend(q, k, v, window, 0) - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("window", [2, 3, 5, 8])
@torch.no_grad()
def test_window_goes_on_after_held_tokens(window):
    """Only the last queries, with window - 1 keys before them; whatever is stored before token 0 is not read."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 21, 4, 6), torch.randn(2, 21, 2, 6), torch.randn(2, 21, 2, 6)
    wanted = sambay.attend_window(q, k, v, window, 0)
    rubbish = torch.randn(2, window - 1, 2, 6)
    for start in (0, 1, 4, 13, 20):
        held = [torch.cat((rubbish, x), dim=1)[:, start:] for x in (k, v)]
        for attend in (sambay.attend_window, sambay.attend_window_in_blocks):
            got = attend(q[:, start:], *held, window, torch.tensor(start))
            assert (got - wanted[:, start:]).abs().max() < 1e-12


@pytest.mark.parametrize("options",
                         [dict(), dict(gmu="sigmoid", d_conv=2), dict(gmu="none"), dict(window=2, n_layer=12),
                          dict(window=40), dict(n_layer=5)], ids=str)
@pytest.mark.parametrize("pieces", [(21,), (1,) * 21, (2, 1, 11, 3, 1, 1, 2), (14, 7)], ids=str)
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(options, pieces):
    model, _, _, idx, _ = setup(T=21, max_len=30, **options)
    full = model(idx)[0]
    # tokens taken by prefill(), which gives no logits
    for read in ([], [(1,)], [(8,)], [(20,)], [(3, 9)]):
        cache, at, parts = sambay.Cache(model, 2, 30), 0, []
        for n in (read[0] if read else ()):
            model.prefill(idx[:, at:at + n], cache)
            at += n
        start = at
        for n in pieces:
            n = min(n, 21 - at)
            if n:
                parts.append(model(idx[:, at:at + n], cache=cache)[0])
                at += n
        assert (torch.cat(parts, 1) - full[:, start:]).abs().max() < 1e-9 and cache.pos == 21


@torch.no_grad()
def test_only_the_full_attention_grows_with_the_context():
    model = setup()[0]
    small, large = (sambay.Cache(model, 2, n) for n in (10, 1000))
    for mixer, a, b in zip(model.config.mixers, small.layers, large.layers, strict=True):
        assert (a is None) == (b is None) == (mixer in ("gmu", "cross"))
        names = {"mamba": ("u", "state"), "window": ("k", "v"), "full": ("k", "v")}.get(mixer, ())
        assert set(names) == set(vars(b) if b else ()) - {"pos"}
        for name in names:
            assert getattr(b, name).numel() == getattr(a, name).numel() * (100 if mixer == "full" else 1) > 0
    assert large.layers[0].u.shape == (2, 3, 32) and large.layers[0].state.shape == (2, 32, 3)
    assert large.layers[1].k.shape == (2, 2, 2, 4) and large.layers[5].v.shape == (2, 2, 1000, 4)


@torch.no_grad()
def test_prefill_is_linear_in_the_prompt():
    """Runs only the windows' attention and no layer of the cross-decoder; the next logits are those of forward."""
    model, _, c, idx, _ = setup(T=40, max_len=50)
    seen = []
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda m, inputs, output, i=i: seen.append(i))
    cache = sambay.Cache(model, 2, 50)
    model.prefill(idx[:, :39], cache)
    assert seen == [0, 1, 2, 3, 4]
    assert (model(idx[:, 39:], cache=cache)[0][:, 0] - model(idx)[0][:, -1]).abs().max() < 1e-9
    seen.clear()
    model.generate(idx, 2, temperature=0)
    assert seen == [0, 1, 2, 3, 4] + 2 * list(range(8))


@torch.no_grad()
def test_a_cache_under_autocast_keeps_its_states_in_fp32():
    torch.set_default_dtype(torch.float32)
    model, _, _, idx, _ = setup(T=20, max_len=30)
    with torch.autocast("cpu", torch.bfloat16):
        full, cache = model(idx)[0], sambay.Cache(model, 2, 30)
        parts = [model(idx[:, a:b], cache=cache)[0] for a, b in ((0, 9), (9, 10), (10, 20))]
    mamba, window, keys = cache.layers[0], cache.layers[1], cache.layers[5]
    assert {t.dtype for t in (mamba.u, window.k, window.v, keys.k)} == {torch.bfloat16}
    assert mamba.state.dtype == torch.float32
    assert (torch.cat(parts, 1).float() - full.float()).abs().max() < 0.05 * full.abs().max()


def test_every_mixer_is_one_graph():
    """Several chunks and blocks of the window, in forward, backward and decoding; the rest is in test_compile.py."""
    model, _, _, idx, targets = setup(n_layer=6)
    want = model(idx, targets)[1]
    want.backward()
    grads = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    got = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")(idx, targets)[1]
    got.backward()
    assert (got - want).abs() < 1e-9
    for key, p in model.named_parameters():
        assert (p.grad - grads[key]).abs().max() < 1e-9, key
    with torch.no_grad():
        step = torch.compile(model.forward, fullgraph=True, dynamic=False, backend="aot_eager")
        cache = sambay.Cache(model, 2, 7)
        parts = [step(token, cache=cache)[0] for token in idx.split(1, dim=1)]
        assert (torch.cat(parts, 1) - model(idx)[0]).abs().max() < 1e-9


# ------------------------------------------------------------------------------------------------------- initial values


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
        # rank 8; std of U(+-a) is a / sqrt(3)
        assert layer.w_dt.weight.abs().max() <= 8 ** -0.5 and abs(layer.w_dt.weight.std() * 24 ** 0.5 - 1) < 0.1
        assert layer.conv_weight.abs().max() <= 0.5 and abs(layer.conv_weight.std() * 12 ** 0.5 - 1) < 0.1
        assert (layer.conv_bias == 0).all() and (layer.wo.weight == 0).all()
    assert model.blocks[0].attn.w_rank.weight.shape == (8, 256)
    assert (model.blocks[6].attn.wo.weight == 0).all() and 0.015 < model.blocks[6].attn.w_gate.weight.std() < 0.025


def test_states_under_autocast_are_bf16():
    """The stream, the memory, shared keys and values, and what the fp32 scan saves for backward."""
    torch.set_default_dtype(torch.float32)
    model, _, _, idx, targets = setup(T=20, max_len=20)
    handed, kept = [], []
    for block in model.blocks:
        block.register_forward_hook(lambda m, inputs, output: handed.append(output))
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x) or x, lambda x: x):
        model(idx, targets)
    x, memory, (k, v) = handed[-1]
    assert {x.dtype, memory.dtype, k.dtype, v.dtype} == {torch.bfloat16} and memory.shape == (2, 20, 32)
    assert not any(t.dtype == torch.float32 and t.ndim == 4 and 3 in t.shape for t in kept)      # N = 3: no states


@pytest.mark.parametrize("options", [
    dict(), dict(n_layer=12, window=16, gate="headwise"), dict(n_layer=8, gmu="sigmoid", d_state=5, d_conv=3),
    dict(n_layer=8, gmu="none", qk_norm=False, gate="elementwise"), dict(n_layer=5, n_kv_head=4)], ids=str)
def test_costs(options):
    """Parameters exactly, and FLOPs at two lengths: the counter sees matrix products, and blocks of queries that meet
    2 window keys."""
    torch.set_default_dtype(torch.float32)
    shape = dict(vocab_size=50, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)
    model = models.build("sambay", **{**shape, **options})
    c, E, of = model.config, 2 * 64, model.config.mixers.count
    base = models.build("gpt", **shape | dict(n_layer=c.n_layer, n_kv_head=c.n_kv_head, gate=c.gate, qk_norm=c.qk_norm))
    mixing = of("mamba") * E * (7 * c.d_state + 2 * c.d_conv + 3) + of("gmu") * E * (2 if c.gmu == "sigmoid" else 1)
    for T in (64, 32):
        params, flops, read = sambay.costs(c, T)
        assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
        beyond = of("window") * 4 * 64 * c.window if c.window < T else 0
        assert flops_per_token(model, T) - flops_per_token(base, T) == flops - mixing + beyond
        assert read == of("gmu") * E


def test_stats():
    model, p, c, idx, _ = setup()
    stats = record.stats("sambay", model, idx)
    assert [len(stats[name]) for name in ("dt", "memory_gate")] == [3, 1] and min(stats["dt"]) > 0
    half = models.build("sambay", **{**BASE, **OWN, "gmu": "sigmoid"})
    with torch.no_grad():
        half.blocks[6].attn.w_gate.weight.zero_()
    assert record.stats("sambay", half, idx)["memory_gate"] == [0.5]
    assert list(record.stats("sambay", models.build("sambay", **{**BASE, **OWN, "gmu": "none"}), idx)) == ["dt"]
