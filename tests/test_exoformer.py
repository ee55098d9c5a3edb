"""exoformer.py against its paper's equations in float64, arXiv:2601.08131."""
import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    BASE, compare, depends_on_every_parameter, float64, gelu, gpt, heads, linear, norm, own_groups, setup, show,
    sigmoid,
)

import models
from nanodepth.devices import flops_per_token

OWN = dict(gate="elementwise", anchor="external", mixing="static", granularity="elementwise", mix_streams="qkvg",
           norm_streams="qkvg")
DYNAMIC, FIRST = dict(mixing="dynamic"), dict(anchor="first_layer")
CASES = BASE + [
    dict(granularity="headwise"), dict(granularity="scalar"), dict(norm_streams="qk"), dict(norm_streams=""),
    dict(mix_streams="vg", norm_streams=""), dict(gate="none", mix_streams="qkv", norm_streams="qkv"),
    DYNAMIC, dict(DYNAMIC, granularity="headwise"), dict(DYNAMIC, granularity="scalar", n_kv_head=4),
    dict(DYNAMIC, mix_streams="vg", norm_streams="g"),
    dict(DYNAMIC, gate="none", mix_streams="qkv", norm_streams="qkv"), FIRST,
    dict(FIRST, granularity="headwise", norm_streams=""), dict(FIRST, granularity="scalar"), dict(FIRST, **DYNAMIC),
    dict(FIRST, **DYNAMIC, granularity="headwise", norm_streams="qk")]


def exoformer(p, c, x):
    """S_n <- g1 lambda_anchor norm_S(S_anc) + g2 lambda_self S_n, g1 = g2 = 1 if static."""
    n_heads = {s: c.n_head if s in "qg" else c.n_kv_head for s in "qkvg" if s in c.mix_streams}
    anchors = {}

    def set_anchors(S):
        for s in n_heads:
            anchors[s] = [[norm(p, f"anchor.norms.{s}_norm", u, c) if s in c.norm_streams else u for u in at]
                          for at in S[s]]

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
    static, dynamic = (models.build("exoformer", **SMALL, zero_init=False, mixing=mixing)
                       for mixing in ("static", "dynamic"))
    dynamic.load_state_dict({k: v for k, v in static.state_dict().items() if "lambda" not in k}, strict=False)
    idx = torch.randint(31, (2, 9))
    torch.testing.assert_close(static(idx)[0], dynamic(idx)[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("mixing, value", [("static", 0.5), ("dynamic", 1.0)])
def test_initial_values(mixing, value):
    model = models.build("exoformer", **SMALL, mixing=mixing)
    for block in model.blocks:
        assert all((p == value).all()
                   for p in (*block.attn.mix.lambda_anchor.values(), *block.attn.mix.lambda_self.values()))
    assert 0.015 < model.anchor.proj.weight.std() < 0.025
    assert all((p == 1).all() for key, p in model.anchor.named_parameters() if "norm" in key)
    if mixing == "dynamic":
        gamma = model.blocks[0].attn.mix.gamma
        assert 0.015 < gamma.mix_in.weight.std() < 0.025
        assert (gamma.mix_out.weight == 0).all() and (gamma.mix_out.bias == 0).all()


def test_groups():
    """W_anc is outside the blocks, and still trained by Muon."""
    matrices, mixing = own_groups(setup("exoformer", **{**OWN, **DYNAMIC})[0])
    assert matrices == {"anchor.proj.weight", "blocks.attn.mix.gamma.mix_in.weight",
                        "blocks.attn.mix.gamma.mix_out.weight"}
    assert mixing == {f"blocks.attn.mix.lambda_{which}.{s}" for which in ("anchor", "self") for s in "qkvg"}


SHAPE = dict(vocab_size=50, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)


@pytest.mark.parametrize("options", [
    {}, dict(mixing="dynamic", granularity="headwise"), dict(granularity="scalar"),
    dict(anchor="first_layer", mixing="dynamic"), dict(mix_streams="vg", norm_streams="none"),
    dict(gate="none", mix_streams="qkv", norm_streams="qk")], ids=str)
def test_costs(options):
    """Parameters exactly; FLOPs: the counter sees matrix products, the formula also the sums."""
    model = models.build("exoformer", **SHAPE, **options)
    base = models.build("gpt", **SHAPE, gate=model.config.gate)
    params, flops, read = models.module("exoformer").costs(model.config, 64)
    assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    assert flops_per_token(model, 64) - flops_per_token(base, 64) == flops - 3 * read and read > 0


def test_the_docstrings_costs():
    """C = 64, H = K = 4, D = 16, L = 4."""
    C, H, D, L = 64, 4, 16, 4
    for granularity, n in dict(elementwise=C, headwise=H, scalar=1).items():
        for mixing in ("static", "dynamic"):
            module, more = models.module("exoformer"), mixing == "dynamic"
            config = module.Config(**{**SHAPE, "n_kv_head": H}, granularity=granularity, mixing=mixing)
            assert module.costs(config, 64) == (4 * C * C + 4 * D + L * (8 * n + more * (16 * C + 136)),
                                                8 * C * C + L * (12 * C + more * (32 * C + 256)), L * 4 * C)


@pytest.mark.parametrize("options", [{}, dict(granularity="scalar"), dict(mix_streams="kg", granularity="headwise")],
                         ids=str)
def test_projections_are_lambda_self_times_the_plain_ones(options):
    attn = models.build("exoformer", **SHAPE, **options).double().blocks[1].attn
    with torch.no_grad():
        for lambdas in attn.mix.lambda_self.values():
            lambdas.normal_()
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    streams = attn.project(x)
    assert list(streams) == list("qkvg")
    for (s, got), linear in zip(streams.items(), (attn.wq, attn.wk, attn.wv, attn.gate)):
        plain = linear(x).unflatten(-1, (-1, 16))
        torch.testing.assert_close(got, plain * attn.mix.lambda_self[s] if s in attn.mix.mix_streams else plain)


@pytest.mark.parametrize("options", [{}, dict(mixing="dynamic"), dict(anchor="first_layer"), dict(norm_streams="none")],
                         ids=str)
def test_anchors_and_mixed_streams_stay_bf16_under_autocast(options):
    model, seen = models.build("exoformer", **SHAPE, **options).float(), []
    for module in (model.anchor, *(block.attn.mix for block in model.blocks if block.attn.mix is not None)):
        module.register_forward_hook(lambda module, inputs, output: seen.extend(output.values()))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(2, 8, dtype=torch.long))
    assert len(seen) >= 16 and {x.dtype for x in seen} == {torch.bfloat16}
