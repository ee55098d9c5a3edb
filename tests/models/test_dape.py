"""DAPE V2 (arXiv:2410.04798): its equations in float64 and initial values."""
import math
from functools import partial

import torch
from reference import add, attend, equations, float64, gpt, rope, softmax  # noqa: F401  (float64: autouse)

import models


def distance_bias(p, c, at, distance):
    """P, the position bias of all heads (H,), or None."""
    if c.position == "kerple":
        b, a = ([u if u > 0.01 else u - u.detach() + 0.01 for u in p[f"{at}.score_bias.{name}"].flatten()]
                for name in "pa")                                       # the value is clamped, the gradient is not
        return torch.stack([-b[h] * torch.log(1 + a[h] * distance) for h in range(c.n_head)])
    if c.position == "alibi":
        return torch.tensor([-distance * 2.0 ** (-8 * (h + 1) / c.n_head) for h in range(c.n_head)])
    return None


def along_keys(p, c, at, S, P):
    """D of one query from its S and P: lists over its keys of (H,) -> list of (H,). U goes on after the last key, where
    the authors' code ends with the text."""
    r = c.kernel // 2
    w1, b1, w2 = (p[f"{at}.score_bias.{name}"] for name in ("conv_in.weight", "conv_in.bias", "conv_out.weight"))
    Z = {j: S[j] if P is None else torch.cat((S[j], P[j])) for j in range(len(S))}

    def U(j):
        if j < 0:
            return torch.zeros(len(b1))
        u = b1 + sum(w1[:, :, 0, t] @ Z[j + t - r] for t in range(c.kernel) if j + t - r in Z)
        return torch.stack([x if x > 0 else x / 100 for x in u])

    return [sum(w2[:, :, 0, t] @ U(j + t - r) for t in range(c.kernel)) for j in range(len(S))]


def weights(p, c, at, q, k, past):
    """Attention of the last token of the past: [head][key]."""
    t, group = past[-1], len(q) // len(k[0])
    S = [torch.stack([torch.dot(u, k[j][h // group]) / math.sqrt(len(u)) for h, u in enumerate(q)]) for j in past]
    P = [distance_bias(p, c, at, t - j) for j in past]
    P = None if P[0] is None else P
    A = add(S, along_keys(p, c, at, S, P)) if c.kernel else S
    A = A if P is None else add(A, P)
    return [softmax([a[h] for a in A]) for h in range(c.n_head)]


def attention(p, c, at, S):
    return attend(p, c, at, S, rotate=rope if c.position == "rope" else lambda u, t, c: u,
                  weights=lambda *given: weights(p, c, f"{at}.attn", *given))


test_equations = equations(partial(gpt, attention=attention), "dape", [
    dict(), dict(position="alibi", n_head=6, d_model=36, n_kv_head=3), dict(position="rope", kernel=7, n_kv_head=4),
    dict(kernel=0, position="none"), dict(kernel=0), dict(position="none", kernel=9, n_kv_head=1),
    dict(kernel=1, width=1), dict(gate="elementwise", tie_embeddings=True, qk_norm=False, z_loss=0.0)],
    n_layer=2, position="kerple", kernel=3, width=5)


def test_initial_values():
    model = models.build("dape", vocab_size=31, n_layer=2, n_head=12, d_model=48)
    for block in model.blocks:
        bias = block.attn.score_bias
        for w, fan_in in ((bias.conv_in.weight, 24 * 3), (bias.conv_in.bias, 24 * 3), (bias.conv_out.weight, 32 * 3)):
            assert 0.8 * fan_in ** -0.5 < w.abs().max() <= fan_in ** -0.5
            assert abs(w.std() * math.sqrt(3 * fan_in) - 1) < 0.3 and abs(w.mean()) < 0.3 * fan_in ** -0.5
        assert bias.p.min() >= 0 and 1 < bias.p.max() <= 2 and bias.a.min() >= 0 and 0.5 < bias.a.max() <= 1
    assert not torch.equal(model.blocks[0].attn.score_bias.p, model.blocks[1].attn.score_bias.p)
