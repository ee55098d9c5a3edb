"""The models' equations in float64 as plain loops, and the comparison of a model with them.

The loops share no code with the models: they take parameters by name and work on one token's vector at a time.
Sources: RMSNorm arXiv:1910.07467, rotary positions 2104.09864, SwiGLU 2002.05202, grouped queries 2305.13245, gated
attention 2505.06708, layer norm 1607.06450, GPT-NeoX's parallel block 2204.06745. A paper's own loops are in the tests
of its model.
"""
import math
from types import SimpleNamespace

import pytest
import torch
from settings import show

import models

# ---------------------------------------------------------------------------------------------------------------------
# The parts. p: {name: parameter}; c: the options; x: a vector, or a list of them, one per position of one sequence;
# a "stream" (q, k, v or g) is a list over positions of lists over heads of vectors.


def rms(x, c):
    return x / torch.sqrt((x * x).mean() + c.norm_eps)


def layer_norm(x, c):
    y = x - x.sum() / len(x)
    return y / torch.sqrt((y * y).sum() / len(x) + c.norm_eps)


def norm(p, name, x, c):
    """RMSNorm, or where it has a bias LayerNorm."""
    weight, bias = p[name + ".weight"], p.get(name + ".bias")
    return weight * rms(x, c) if bias is None else weight * layer_norm(x, c) + bias


def linear(p, name, x):
    return p[name + ".weight"] @ x + p.get(name + ".bias", 0)


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
    """Rotates the pairs (u[i], u[i + D/2]) by the angles pos * theta^(-2i/D)."""
    D = len(u)
    angles = [pos * c.rope_theta ** (-2 * i / D) for i in range(D // 2)]
    cos, sin = torch.tensor([math.cos(a) for a in angles]), torch.tensor([math.sin(a) for a in angles])
    u1, u2 = u[:D // 2], u[D // 2:]
    return torch.cat([u1 * cos - u2 * sin, u2 * cos + u1 * sin])


def queries(p, c, at, x):
    """The streams q and, if there is a gate, g of one layer from its normalised input x."""
    S = {"q": [heads(linear(p, f"{at}.attn.wq", u), c.n_head) for u in x]}
    if c.gate != "none":                        # headwise: the vectors have one entry
        S["g"] = [heads(linear(p, f"{at}.attn.gate", u), c.n_head) for u in x]
    return S


def project(p, c, at, x, xk=None, xv=None):
    """The streams of one layer from its normalised input, or from one for queries and gate, for keys and for values."""
    return {**queries(p, c, at, x),
            "k": [heads(linear(p, f"{at}.attn.wk", u), c.n_kv_head) for u in xk or x],
            "v": [heads(linear(p, f"{at}.attn.wv", u), c.n_kv_head) for u in xv or x]}


def dots(q, k, past):
    """softmax(q k^T / sqrt(D)) over the keys of the past, for each head of one query: [head][key]."""
    group = len(q) // len(k[0])
    return [softmax([torch.dot(u, k[j][h // group]) / math.sqrt(len(u)) for j in past]) for h, u in enumerate(q)]


def attend(p, c, at, S, of=None, rotate=rope, window=None, weights=dots):
    """softmax(q k^T / sqrt(D)) v over the past, gated, times W_O.

    of: the layer that made the keys, if it is another; window: how many keys a query sees, itself included.
    """
    def ready(s, layer):
        return [[rotate(norm(p, f"{layer}.attn.{s}_norm", u, c) if c.qk_norm else u, t, c) for u in token]
                for t, token in enumerate(S[s])]

    q, k, group, out = ready("q", at), ready("k", of or at), c.n_head // c.n_kv_head, []
    for t in range(len(q)):
        past, y = range(max(0, t + 1 - (window or t + 1)), t + 1), []
        for h, w in enumerate(weights(q[t], k, past)):
            head = sum(w[i] * S["v"][j][h // group] for i, j in enumerate(past))
            y.append(head if c.gate == "none" else head * sigmoid(S["g"][t][h]))
        out.append(linear(p, f"{at}.attn.wo", torch.cat(y)))
    return out


def mlp_sublayer(p, c, at, x):
    def mlp(u):
        gate = linear(p, f"{at}.mlp.w_gate", u)
        return linear(p, f"{at}.mlp.w_down", gate * sigmoid(gate) * linear(p, f"{at}.mlp.w_up", u))
    return [mlp(norm(p, f"{at}.mlp_norm", u, c)) for u in x]


def sublayer(p, c, l, h):
    """Output of sublayer l = 1 .. 2L with its own norm: attention if l is odd, MLP if even."""
    at = f"blocks.{(l - 1) // 2}"
    if l % 2 == 0:
        return mlp_sublayer(p, c, at, h)
    a = [norm(p, f"{at}.attn_norm", u, c) for u in h]
    return attend(p, c, at, project(p, c, at, a))


def add(x, y):
    return [a + b for a, b in zip(x, y, strict=True)]


def gpt(p, c, x, mix=lambda n, a, S: S, attention=attend, mlp=mlp_sublayer):
    """The plain stack. mix(layer, normalised inputs, streams) -> streams: for value residuals and anchors. Other
    sublayers: attention(p, c, at, streams) and mlp(p, c, at, x).
    """
    for n in range(c.n_layer):
        at = f"blocks.{n}"
        a = [norm(p, f"{at}.attn_norm", u, c) for u in x]
        x = add(x, attention(p, c, at, mix(n, a, project(p, c, at, a))))
        x = add(x, mlp(p, c, at, x))
    return x


# ---------------------------------------------------------------------------------------------------------------------
# A model against its loops: logits, loss and the gradient of every parameter.


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
GATED = [dict(), dict(tie_embeddings=True, qk_norm=False, z_loss=0.0), dict(n_kv_head=4), dict(gate="elementwise"),
         dict(gate="headwise")]


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def setup(name, common=COMMON, std=0.3, **options):
    """A model with every parameter random, leaf copies of its parameters, its options, and a batch.

    The loops read a gate and qk_norm in all models; the older ones have none.
    """
    torch.manual_seed(0)
    config = {**common, **options}
    model = models.build(name, **config)
    with torch.no_grad():
        for key, q in model.named_parameters():
            q.normal_(mean=1.0 if key.endswith("norm.weight") else 0.0, std=std)
    p = {key: q.detach().clone().requires_grad_() for key, q in model.named_parameters()}
    idx, targets = torch.randint(29, (2, 2, 7))
    targets[0, 2] = targets[1, 0] = targets[1, 6] = -1
    c = SimpleNamespace(**{"gate": "none", "qk_norm": False, **vars(model.config), **config})
    return model, p, c, idx, targets


def compare(stack, model, p, c, idx, targets, more=lambda: 0.0):
    """Logits, loss and the gradient of every parameter against those of `stack`; the rest as setup() returns it.

    more(): what the loss has in training beside cross-entropy and z-loss.
    """
    expected = reference_logits(stack, p, c, idx)
    expected_loss = reference_loss(expected, targets, c.z_loss) + more()
    expected_loss.backward()
    logits, loss = model(idx, targets)
    loss.backward()
    torch.testing.assert_close(logits, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-10)
    for key, q in model.named_parameters():
        wanted = p[key].grad                    # without positions the bias of all keys changes no softmax
        assert wanted is not None and wanted.abs().max() > 1e-8 or "wk.bias" in key, f"no gradient of {key}"
        atol = 1e-9 * max(1, wanted.abs().max())
        torch.testing.assert_close(q.grad, wanted, rtol=0, atol=atol, msg=lambda m, key=key: f"gradient of {key}: {m}")
    with torch.no_grad():                       # in evaluation cross-entropy alone
        loss = model.eval()(idx, targets)[1]
    torch.testing.assert_close(loss, reference_loss(expected.detach(), targets, 0.0), rtol=0, atol=1e-10)


def equations(stack, name, cases, common=COMMON, std=0.3, **own):
    """The test that compares a model with `stack`, in cases that are dicts of options beside its `own`."""
    @pytest.mark.parametrize("name, options", [(name, options) for options in cases], ids=show)
    def test(name, options):
        compare(stack, *setup(name, common, std, **own | options))
    return test
