"""Every model against its paper's equations, written out in float64 as slowly and plainly as possible.

Logits, losses and the gradient of every parameter must agree. The reference below shares no code with the models: it
takes their parameters by name and works on one token's vector at a time. Sources: RMSNorm arXiv:1910.07467, rotary
positions 2104.09864, SwiGLU 2002.05202, grouped queries 2305.13245, gated attention 2505.06708, ResFormer 2410.17897,
ExoFormer 2601.08131, SATFormer 2605.03953, MUDDFormer 2502.12170, Attention Residuals 2603.15031. Offline, about a minute.
"""
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models  # noqa: E402

# ---------------------------------------------------------------------------------------------------------------------
# The parts. p: {name: parameter}; c: the options; x: a vector, or a list of them, one per position of one sequence;
# a "stream" (q, k, v or g) is a list over positions of lists over heads of vectors.


def rms(x, c):
    return x / torch.sqrt((x * x).mean() + c.norm_eps)


def norm(p, name, x, c):
    return p[name + ".weight"] * rms(x, c)


def linear(p, name, x):
    return p[name + ".weight"] @ x


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def softmax(scores):
    """List of numbers -> list of weights that sum to one."""
    e = [torch.exp(s) for s in scores]
    return [a / sum(e) for a in e]


def heads(x, n):
    """Vector -> list of its n equal parts."""
    size = len(x) // n
    return [x[i * size:(i + 1) * size] for i in range(n)]


def rope(u, pos, c):
    """Turns the pairs (u[i], u[i + D/2]) by the angles pos * theta^(-2i/D)."""
    D = len(u)
    angles = [pos * c.rope_theta ** (-2 * i / D) for i in range(D // 2)]
    cos, sin = torch.tensor([math.cos(a) for a in angles]), torch.tensor([math.sin(a) for a in angles])
    u1, u2 = u[:D // 2], u[D // 2:]
    return torch.cat([u1 * cos - u2 * sin, u2 * cos + u1 * sin])


def project(p, c, at, xq, xk, xv):
    """The streams of one layer from the inputs of its projections; the gate's pre-activation reads the query input."""
    S = {"q": [heads(linear(p, f"{at}.attn.wq", x), c.n_head) for x in xq],
         "k": [heads(linear(p, f"{at}.attn.wk", x), c.n_kv_head) for x in xk],
         "v": [heads(linear(p, f"{at}.attn.wv", x), c.n_kv_head) for x in xv]}
    if c.gate != "none":                        # headwise: the vectors have one entry
        S["g"] = [heads(linear(p, f"{at}.attn.gate", x), c.n_head) for x in xq]
    return S


def attend(p, c, at, S):
    """softmax(q k^T / sqrt(D)) v over the past, gated, times W_O."""
    def ready(s, t, h):
        u = norm(p, f"{at}.attn.{s}_norm", S[s][t][h], c) if c.qk_norm else S[s][t][h]
        return rope(u, t, c)

    T, D, group = len(S["q"]), c.d_model // c.n_head, c.n_head // c.n_kv_head
    k = [[ready("k", t, h) for h in range(c.n_kv_head)] for t in range(T)]
    out = []
    for t in range(T):
        y = []
        for h in range(c.n_head):
            q, kv = ready("q", t, h), h // group
            weights = softmax([torch.dot(q, k[j][kv]) / math.sqrt(D) for j in range(t + 1)])
            head = sum(weights[j] * S["v"][j][kv] for j in range(t + 1))
            y.append(head if c.gate == "none" else head * sigmoid(S["g"][t][h]))
        out.append(linear(p, f"{at}.attn.wo", torch.cat(y)))
    return out


def mlp(p, at, x):
    u = linear(p, f"{at}.mlp.w_gate", x)
    return linear(p, f"{at}.mlp.w_down", u * sigmoid(u) * linear(p, f"{at}.mlp.w_up", x))


def mlp_sublayer(p, c, at, x):
    return [mlp(p, at, norm(p, f"{at}.mlp_norm", u, c)) for u in x]


def add(x, y):
    return [a + b for a, b in zip(x, y, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# The models: embeddings of one sequence -> what the final norm and the head read.


def gpt(p, c, x, mix=lambda n, a, S: S):
    """The plain stack. mix(layer, normalised inputs, streams) -> streams is where the next three models differ."""
    for n in range(c.n_layer):
        at = f"blocks.{n}"
        a = [norm(p, f"{at}.attn_norm", u, c) for u in x]
        x = add(x, attend(p, c, at, mix(n, a, project(p, c, at, a, a, a))))
        x = add(x, mlp_sublayer(p, c, at, x))
    return x


def reading_layers(c):
    """Layers that read the first layer's values: the last k, never the first (counting from 0)."""
    return [n for n in range(1, c.n_layer) if c.last_k is None or n >= c.n_layer - c.last_k]


def resformer(p, c, x):
    """v_n <- lambda1_n v_1 + lambda2_n v_n."""
    first, layers = [], reading_layers(c)

    def lambdas(i):
        if c.value_mix in ("identity", "constant"):
            return (0.5, 0.5) if c.value_mix == "identity" else (2.0, 1.0)
        l1, l2 = p["value_mix.lambda1"], p["value_mix.lambda2"]
        if c.value_mix == "learnable":
            return l1[i], l2[i]
        return p["value_mix.lambda_scale"] * softmax([l1[j] for j in range(len(layers))])[i], l2[i]

    def mix(n, a, S):
        if n == 0:
            first.extend(S["v"])
        if n not in layers:
            return S
        l1, l2 = lambdas(layers.index(n))
        return {**S, "v": [[l1 * v1 + l2 * v for v1, v in zip(*at)] for at in zip(first, S["v"])]}

    return gpt(p, c, x, mix)


def value_gates(z, act):
    """The gates of one token, a number per KV head, from their pre-activations."""
    K = len(z)
    soft = [K * w for w in softmax(list(z))]
    return {"relu": [u * (u > 0) for u in z], "sigmoid": [sigmoid(u) for u in z], "identity": list(z), "softmax": soft,
            "tanh": [(torch.exp(u) - torch.exp(-u)) / (torch.exp(u) + torch.exp(-u)) for u in z],
            "softmax_sigmoid": [w * sigmoid(u) for w, u in zip(soft, z)]}[act]


def satformer(p, c, x):
    """v_n <- v_n + alpha_n v_1, alpha_n from the layer's normalised input, per token and KV head."""
    first = []

    def mix(n, a, S):
        if n == 0:
            first.extend(S["v"])
        if n not in reading_layers(c):
            return S
        v = []
        for t, u in enumerate(a):
            alpha = value_gates(linear(p, f"blocks.{n}.attn.value_gate", u), c.value_act)
            v.append([S["v"][t][h] + alpha[h] * first[t][h] for h in range(c.n_kv_head)])
        return {**S, "v": v}

    return gpt(p, c, x, mix)


def exoformer(p, c, x):
    """S_n <- g1 lambda_anchor norm_S(S_anc) + g2 lambda_self S_n, g1 = g2 = 1 if static."""
    n_heads = {s: c.n_head if s in "qg" else c.n_kv_head for s in "qkvg" if s in c.mix_streams}
    anchors = {}

    def set_anchors(S):
        for s in n_heads:
            anchors[s] = [[norm(p, f"anchor.norms.{s}_norm", u, c) if s in c.norm_streams else u for u in at] for at in S[s]]

    def gamma(at, a):
        z = linear(p, f"{at}.gamma.mix_out", gelu(linear(p, f"{at}.gamma.mix_in", a))) + p[f"{at}.gamma.mix_out.bias"]
        return sigmoid(z)                       # q1 q2 k1 k2 v1 v2 g1 g2

    def mix(n, a, S):
        if n == 0 and c.anchor == "first_layer":
            set_anchors(S)
            return S
        at, out = f"blocks.{n}.attn.mix", dict(S)
        for i, (s, H) in enumerate(n_heads.items()):
            out[s] = []
            for t in range(len(a)):
                g1, g2 = gamma(at, a[t])[2 * i:2 * i + 2] if c.mixing == "dynamic" else (1, 1)
                l1, l2 = p[f"{at}.lambda_anchor.{s}"], p[f"{at}.lambda_self.{s}"]
                row = [0] * H if c.granularity == "scalar" else range(H)
                out[s].append([g1 * l1[row[h]] * anchors[s][t][h] + g2 * l2[row[h]] * S[s][t][h] for h in range(H)])
        return out

    if c.anchor == "external":                  # from the raw embedding, rows of W_anc in the order q, k, v, g
        S, D = {s: [] for s in n_heads}, c.d_model // c.n_head
        for u in x:
            rest = linear(p, "anchor.proj", u)
            for s, H in n_heads.items():
                part, rest = rest[:H * D], rest[H * D:]
                S[s].append(heads(part, H))
        set_anchors(S)
    return gpt(p, c, x, mix)


def muddformer(p, c, x):
    """Blocks with four inputs; H = X^R + attn(X^Q, X^K, X^V), X_i = H + mlp(H)."""
    X = [x]
    xq = xk = xv = xr = x
    for i in range(1, c.n_layer + 1):
        at = f"blocks.{i - 1}"
        names = ("q_in_norm", "k_in_norm", "v_in_norm") if c.multiway and i > 1 else ("q_in_norm",) * 3
        inputs = [[norm(p, f"{at}.{name}", u, c) for u in part] for name, part in zip(names, (xq, xk, xv))]
        H = add(xr, attend(p, c, at, project(p, c, at, *inputs)))
        X.append(add(H, mlp_sublayer(p, c, at, H)))
        xq, xk, xv, xr = aggregate(p, c, i, X)
    return xr


def mudd_sources(c, i):
    """Indices j of the X_j that the aggregates after block i sum over."""
    if c.window is not None:                    # the last outputs, and the embedding
        return sorted({0} | {j for j in range(1, i + 1) if j > i - c.window})
    return [j for j in range(i + 1) if (i - j) % c.dilation == 0]


def aggregate(p, c, i, X):
    """X^c = sum_j A_cj X_j for c = Q, K, V, R after block i; after the last block only R."""
    at, last = f"aggregate.{i}", i == c.n_layer
    if i % c.period and not last:
        return X[i], X[i], X[i], X[i]
    streams = "r" if last else [s for s in "qkvr" if s in c.streams] if c.multiway else "x"
    sources, out = mudd_sources(c, i), {s: [] for s in streams}
    for t, u in enumerate(X[i]):
        A = p[f"{at}.weights.a"]
        assert A.shape == (len(streams), len(sources))
        if c.dynamic:
            A = A + linear(p, f"{at}.weights.w2", gelu(linear(p, f"{at}.weights.w1", rms(u, c)))).view(A.shape)
        for row, s in enumerate(streams):
            if c.pre_post_norm:
                mixed = sum(A[row, m] * norm(p, f"pre_norms.{j}_pre_norm", X[j][t], c) for m, j in enumerate(sources))
                out[s].append(u + norm(p, f"{at}.post_norms.{s}_post_norm", mixed, c))
            else:
                out[s].append(sum(A[row, m] * X[j][t] for m, j in enumerate(sources)))
    return [out["x"]] * 4 if streams == "x" else [out.get(s, X[i]) for s in "qkvr"]


def sublayer(p, c, l, h):
    """Output of sublayer l = 1 .. 2L with its own norm: attention if l is odd, MLP if even."""
    at = f"blocks.{(l - 1) // 2}"
    if l % 2 == 0:
        return mlp_sublayer(p, c, at, h)
    a = [norm(p, f"{at}.attn_norm", u, c) for u in h]
    return attend(p, c, at, project(p, c, at, a, a, a))


def score(p, c, l, u):
    """w_l . RN(u), reader l = 2 .. 2L + 1; the first reader has one source and no query."""
    return torch.dot(p["depth_attention.query"][l - 2], rms(u, c) if c.key_norm else u)


def read(p, c, l, sources):
    """h_l = sum_s softmax_s(score) v_s at every position."""
    if l == 1:
        return sources[0]
    out = []
    for t in range(len(sources[0])):
        alpha = softmax([score(p, c, l, v[t]) for v in sources])
        out.append(sum(a * v[t] for a, v in zip(alpha, sources)))
    return out


def attnres(p, c, x):
    """Block form: embedding, sums of finished blocks, running sum of the own block."""
    done, partial = [x], None
    for l in range(1, 2 * c.n_layer + 1):
        v = sublayer(p, c, l, read(p, c, l, done + ([] if partial is None else [partial])))
        partial = v if partial is None else add(partial, v)
        if l % c.block_size == 0:
            done, partial = done + [partial], None
    return read(p, c, 2 * c.n_layer + 1, done + ([] if partial is None else [partial]))


def attnres_full(p, c, x):
    """Full form: all earlier sublayer outputs."""
    v = [x]
    for l in range(1, 2 * c.n_layer + 1):
        v.append(sublayer(p, c, l, read(p, c, l, v)))
    return read(p, c, 2 * c.n_layer + 1, v)


def attnres_two_phase(p, c, x):
    """Block form as an online softmax: finished blocks once per block, then the running sum merged in."""
    L_s, T, done = 2 * c.n_layer, len(x), [x]
    for start in range(1, L_s + 2, c.block_size):
        readers = range(start, min(start + c.block_size, L_s + 2))
        phase1 = {}
        for l in readers:
            for t in range(T):
                e = [score(p, c, l, b[t]) if l > 1 else torch.zeros(()) for b in done]
                m = max(e)
                phase1[l, t] = m, sum(torch.exp(a - m) for a in e), sum(torch.exp(a - m) * b[t] for a, b in zip(e, done))
        partial = None
        for l in readers:
            h = []
            for t in range(T):
                m, z, o = phase1[l, t]
                if partial is not None:
                    e = score(p, c, l, partial[t])
                    top = max(m, e)
                    z = torch.exp(m - top) * z + torch.exp(e - top)
                    o = torch.exp(m - top) * o + torch.exp(e - top) * partial[t]
                h.append(o / z)
            if l == L_s + 1:
                return h
            v = sublayer(p, c, l, h)
            partial = v if partial is None else add(partial, v)
        done.append(partial)


# ---------------------------------------------------------------------------------------------------------------------


def reference_logits(stack, p, c, idx):
    head = p["embed.weight" if c.tie_embeddings else "head.weight"]
    out = []
    for row in idx.tolist():
        x = stack(p, c, [p["embed.weight"][i] for i in row])
        out.append(torch.stack([head @ norm(p, "final_norm", u, c) for u in x]))
    return torch.stack(out)


def reference_loss(logits, targets, z_loss):
    """Mean cross-entropy over the targets that are not -1, plus z_loss * mean over all positions of logsumexp^2."""
    nats, squares = [], []
    for u, target in zip(logits.flatten(0, 1), targets.flatten().tolist()):
        lse = torch.log(torch.exp(u).sum())
        squares.append(lse * lse)
        if target != -1:
            nats.append(lse - u[target])
    return sum(nats) / len(nats) + z_loss * sum(squares) / len(squares)


COMMON = dict(vocab_size=29, n_layer=3, n_head=4, n_kv_head=2, d_model=32, d_ff=24, max_len=9, rope_theta=50.0,
              norm_eps=1e-6, tie_embeddings=False, z_loss=0.01, qk_norm=True, gate="none")
OWN = {"gpt": {}, "resformer": dict(n_layer=4, value_mix="plus", last_k=None),
       "exoformer": dict(gate="elementwise", anchor="external", mixing="static", granularity="elementwise",
                         mix_streams="qkvg", norm_streams="qkvg"),
       "satformer": dict(n_layer=4, value_act="relu", last_k=None),
       "muddformer": dict(n_layer=5, d_ff=128, dynamic=True, multiway=True, streams="qkvr", ffn_realloc=True,
                          pre_post_norm=False, period=1, dilation=1, window=None),
       "attnres": dict(block_size=1, key_norm=True)}
STACKS = {stack.__name__: stack for stack in (gpt, resformer, exoformer, satformer, muddformer, attnres)}
BASE = [dict(), dict(tie_embeddings=True, qk_norm=False, z_loss=0.0), dict(n_kv_head=4)]        # for every model
GATED = BASE + [dict(gate="elementwise"), dict(gate="headwise")]
DYNAMIC, FIRST = dict(mixing="dynamic"), dict(anchor="first_layer")
CASES = {
    "gpt": GATED + [dict(qk_norm=False), dict(n_kv_head=1), dict(tie_embeddings=True), dict(z_loss=0.0)],
    "resformer": GATED + [dict(value_mix=m) for m in ("identity", "constant", "learnable")]
    + [dict(last_k=2), dict(value_mix="learnable", last_k=1)],
    "exoformer": BASE + [
        dict(granularity="headwise"), dict(granularity="scalar"), dict(norm_streams="qk"), dict(norm_streams=""),
        dict(mix_streams="vg", norm_streams=""), dict(gate="none", mix_streams="qkv", norm_streams="qkv"),
        DYNAMIC, dict(DYNAMIC, granularity="headwise"), dict(DYNAMIC, granularity="scalar", n_kv_head=4),
        dict(DYNAMIC, mix_streams="vg", norm_streams="g"), dict(DYNAMIC, gate="none", mix_streams="qkv", norm_streams="qkv"),
        FIRST, dict(FIRST, granularity="headwise", norm_streams=""), dict(FIRST, granularity="scalar"),
        dict(FIRST, **DYNAMIC), dict(FIRST, **DYNAMIC, granularity="headwise", norm_streams="qk")],
    "satformer": GATED + [dict(value_act=a) for a in ("sigmoid", "tanh", "identity", "softmax", "softmax_sigmoid")]
    + [dict(last_k=1), dict(value_act="softmax_sigmoid", n_kv_head=4, last_k=2)],
    "muddformer": GATED + [dict(dynamic=False), dict(multiway=False), dict(multiway=False, dynamic=False)]
    + [dict(streams=s) for s in ("kvr", "qvr", "qkr", "qkv", "qr")]
    + [dict(period=2), dict(dilation=2), dict(period=2, dilation=2), dict(window=2), dict(window=1, period=3)]
    + [dict(pre_post_norm=True, **o) for o in ({}, dict(dilation=2), dict(multiway=False, dynamic=False))]
    + [dict(ffn_realloc=False), dict(released=True), dict(released=True, multiway=False)],
    "attnres": GATED + [dict(block_size=S) for S in (2, 3, 4, 6)]
    + [dict(key_norm=False), dict(block_size=4, key_norm=False)],
}
PARAMS = [pytest.param(name, o, id="-".join([name] + [f"{k}={v}" for k, v in o.items()]))
          for name, cases in CASES.items() for o in cases]


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def setup(name, **options):
    """A model with every parameter random, leaf copies of its parameters, its options, and a batch."""
    torch.manual_seed(0)
    config = {**COMMON, **OWN.get(name, {}), **options}
    model = models.build(name, **config)
    with torch.no_grad():
        for key, q in model.named_parameters():
            q.normal_(mean=1.0 if key.endswith("norm.weight") else 0.0, std=0.3)
    p = {key: q.detach().clone().requires_grad_() for key, q in model.named_parameters()}
    idx, targets = torch.randint(29, (2, 2, 7))
    targets[0, 2] = targets[1, 0] = targets[1, 6] = -1
    return model, p, SimpleNamespace(**config), idx, targets


def compare(stack, model, p, c, idx, targets):
    """Logits, loss and the gradient of every parameter against those of `stack`; the rest as setup() returns it."""
    logits, loss = model(idx, targets)
    loss.backward()
    expected = reference_logits(stack, p, c, idx)
    expected_loss = reference_loss(expected, targets, c.z_loss)
    expected_loss.backward()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-10)
    for key, q in model.named_parameters():
        assert q.grad is not None and q.grad.abs().max() > 0, f"{key} has no gradient"
        assert q.grad.isfinite().all(), key
        torch.testing.assert_close(q.grad, p[key].grad, rtol=0, atol=1e-9, msg=lambda m, key=key: f"gradient of {key}: {m}")
    model.eval()
    with torch.no_grad():                       # no z-loss in evaluation
        torch.testing.assert_close(model(idx, targets)[1], reference_loss(expected, targets, 0.0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name, options", PARAMS)
def test_equations(name, options):
    compare(STACKS[name], *setup(name, **options))


@pytest.mark.parametrize("key_norm", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6])
def test_attention_residuals_in_other_forms(block_size, key_norm):
    model, p, c, idx, _ = setup("attnres", block_size=block_size, key_norm=key_norm)
    with torch.no_grad():
        for stack in [attnres_two_phase] + [attnres_full] * (block_size == 1):
            torch.testing.assert_close(model(idx)[0], reference_logits(stack, p, c, idx), rtol=0, atol=1e-10)


def test_muddformer_widths():
    """From 0.5 to 1.5 d_ff in equal steps, rounded to multiples of 64."""
    for d_ff, widths in {128: [64, 128, 128, 128, 192], 256: [128, 192, 256, 320, 384], 8: [64] * 5}.items():
        p = setup("muddformer", d_ff=d_ff)[1]
        assert [len(p[f"blocks.{n}.mlp.w_up.weight"]) for n in range(5)] == widths


def test_muddformer_released_widths():
    """MLPs in multiples of 128; K = 4 (i+1) rounded up beyond itself to multiples of 64, in the last place 4 K = 4 (L+1)."""
    p = setup("muddformer", released=True, d_ff=384, n_layer=17)[1]
    widths = [len(p[f"aggregate.{i}.weights.w1.weight"]) for i in range(1, 18)]
    assert widths == [64] * 14 + [128, 128, 128]                # K = 8, 12, .. 60, 64, 68, and 4 * 18
    assert [p[f"aggregate.{i}.weights.w2.weight"].shape for i in (1, 15, 17)] == [(8, 64), (64, 128), (18, 128)]
    assert [len(p[f"blocks.{n}.mlp.w_up.weight"]) for n in (0, 4, 8, 12, 16)] == [256, 256, 384, 512, 512]


@pytest.mark.parametrize("name", STACKS)
def test_reference_depends_on_every_parameter(name):
    """A parameter changed in the reference alone is seen in the logits."""
    model, p, c, idx, _ = setup(name)
    idx = idx[:1, :3]
    with torch.no_grad():
        logits = model(idx)[0]
        for key in p:
            before = p[key].clone()
            p[key] += 0.01 * torch.randn_like(before)
            assert (logits - reference_logits(STACKS[name], p, c, idx)).abs().max() > 1e-8, key
            p[key].copy_(before)
