"""exoformer.py against its paper's equations in float64, arXiv:2601.08131."""
import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    BASE, compare, depends_on_every_parameter, float64, gelu, gpt, heads, linear, norm, own_groups, setup, show,
    sigmoid,
)

import models

OWN = dict(gate="elementwise", anchor="external", mixing="static", granularity="elementwise", mix_streams="qkvg", norm_streams="qkvg")
DYNAMIC, FIRST = dict(mixing="dynamic"), dict(anchor="first_layer")
CASES = BASE + [
    dict(granularity="headwise"), dict(granularity="scalar"), dict(norm_streams="qk"), dict(norm_streams=""),
    dict(mix_streams="vg", norm_streams=""), dict(gate="none", mix_streams="qkv", norm_streams="qkv"),
    DYNAMIC, dict(DYNAMIC, granularity="headwise"), dict(DYNAMIC, granularity="scalar", n_kv_head=4),
    dict(DYNAMIC, mix_streams="vg", norm_streams="g"), dict(DYNAMIC, gate="none", mix_streams="qkv", norm_streams="qkv"),
    FIRST, dict(FIRST, granularity="headwise", norm_streams=""), dict(FIRST, granularity="scalar"),
    dict(FIRST, **DYNAMIC), dict(FIRST, **DYNAMIC, granularity="headwise", norm_streams="qk")]


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


@pytest.mark.parametrize("options", CASES, ids=show)
def test_equations(options):
    compare(exoformer, *setup("exoformer", **{**OWN, **options}))


def test_reference_depends_on_every_parameter():
    depends_on_every_parameter(exoformer, *setup("exoformer", **OWN))


SMALL = dict(vocab_size=31, n_layer=3, n_head=4, n_kv_head=2, d_model=32, d_ff=64, max_len=16)


@torch.no_grad()
def test_dynamic_starts_as_static():
    static, dynamic = (models.build("exoformer", **SMALL, zero_init=False, mixing=mixing) for mixing in ("static", "dynamic"))
    dynamic.load_state_dict({k: v for k, v in static.state_dict().items() if "lambda" not in k}, strict=False)
    idx = torch.randint(31, (2, 9))
    torch.testing.assert_close(static(idx)[0], dynamic(idx)[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("mixing, value", [("static", 0.5), ("dynamic", 1.0)])
def test_initial_values(mixing, value):
    model = models.build("exoformer", **SMALL, mixing=mixing)
    for block in model.blocks:
        assert all((p == value).all() for p in (*block.attn.mix.lambda_anchor.values(), *block.attn.mix.lambda_self.values()))
    assert 0.015 < model.anchor.proj.weight.std() < 0.025
    assert all((p == 1).all() for key, p in model.anchor.named_parameters() if "norm" in key)
    if mixing == "dynamic":
        gamma = model.blocks[0].attn.mix.gamma
        assert 0.015 < gamma.mix_in.weight.std() < 0.025
        assert (gamma.mix_out.weight == 0).all() and (gamma.mix_out.bias == 0).all()


def test_groups():
    """W_anc is outside the blocks and a matrix of Muon all the same."""
    matrices, mixing = own_groups(setup("exoformer", **{**OWN, **DYNAMIC})[0])
    assert matrices == {"anchor.proj.weight", "blocks.attn.mix.gamma.mix_in.weight", "blocks.attn.mix.gamma.mix_out.weight"}
    assert mixing == {f"blocks.attn.mix.lambda_{which}.{s}" for which in ("anchor", "self") for s in "qkvg"}
