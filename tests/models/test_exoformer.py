"""exoformer.py, nuresformer.py and exoformer_dynamic.py against their paper in float64, arXiv:2601.08131."""
import pytest
from reference import equations, float64, gelu, gpt, heads, linear, norm, sigmoid  # noqa: F401

import models

CASES = [dict(gate="elementwise", granularity="elementwise", norms="qkvg") | options for options in (
    dict(), dict(granularity="headwise", tie_embeddings=True, qk_norm=False), dict(norms="qk"),
    dict(granularity="scalar", norms="none", n_kv_head=4))]
MAPS = dict(q="wq", k="wk", v="wv", g="gate")


def mixed(p, c, x):
    """S_n <- g1 lambda_anchor norm_S(S_anc) + g2 lambda_self S_n, g1 = g2 = 1 unless the parameters p have a gamma."""
    n_heads, D = dict(q=c.n_head, k=c.n_kv_head, v=c.n_kv_head, g=c.n_head), c.d_model // c.n_head
    normed, anchors = dict(qkvg="qkvg", qk="qk", none="")[c.norms], {}

    def set_anchors(S):
        for s in "qkvg":
            anchors[s] = [[norm(p, f"anchor_norms.{s}_norm", u, c) if s in normed else u for u in at] for at in S[s]]

    def gamma(at, a):
        z = linear(p, f"{at}.gamma.mix_out", gelu(linear(p, f"{at}.gamma.mix_in", a)))
        return sigmoid(z)                       # q1 q2 k1 k2 v1 v2 g1 g2

    def mix(n, a, S):
        at, out = f"blocks.{n}.attn", {}
        if not anchors:                         # nuresformer's first layer
            set_anchors(S)
            return S
        for i, (s, H) in enumerate(n_heads.items()):
            out[s], row = [], [0] * H if c.granularity == "scalar" else range(H)
            l1, l2 = p[f"{at}.{MAPS[s]}.lambda_anchor"], p[f"{at}.{MAPS[s]}.lambda_self"]
            for t in range(len(a)):
                g1, g2 = gamma(at, a[t])[2 * i:2 * i + 2] if f"{at}.gamma.mix_in.weight" in p else (1, 1)
                out[s].append([g1 * l1[row[h]] * anchors[s][t][h] + g2 * l2[row[h]] * S[s][t][h] for h in range(H)])
        return out

    if "anchor.weight" in p:                    # from the raw embedding, rows of W_anc in the order q, k, v, g
        S = {s: [] for s in n_heads}
        for u in x:
            rest = linear(p, "anchor", u)
            for s, H in n_heads.items():
                part, rest = rest[:H * D], rest[H * D:]
                S[s].append(heads(part, H))
        set_anchors(S)
    return gpt(p, c, x, mix)


test_equations = equations(mixed, "exoformer", CASES)
test_equations_of_nuresformer = equations(mixed, "nuresformer", CASES)
test_equations_of_dynamic = equations(mixed, "exoformer_dynamic", CASES)


@pytest.mark.parametrize("name", ["exoformer", "nuresformer", "exoformer_dynamic"])
def test_initial_values(name):
    layers = 4 if name != "nuresformer" else 3          # its first layer does not mix
    p = dict(models.build(name, n_layer=4, d_model=64, n_head=4, n_kv_head=2).named_parameters())
    lambdas = [q for key, q in p.items() if "lambda" in key]
    assert len(lambdas) == 8 * layers and all((q == (1.0 if "dynamic" in name else 0.5)).all() for q in lambdas)
    assert all(0.015 < q.std() < 0.025 for key, q in p.items() if key == "anchor.weight" or "mix_in" in key)
    assert all((q == 0).all() for key, q in p.items() if "mix_out" in key)
