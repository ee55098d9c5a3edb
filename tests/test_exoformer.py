"""exoformer.py: its costs, the plain form of its projections, and states of the stream's dtype."""
import pytest
import torch

import models
from nanodepth.devices import flops_per_token

SHAPE = dict(vocab_size=50, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)


@pytest.mark.parametrize("options", [
    {}, dict(mixing="dynamic", granularity="headwise"), dict(granularity="scalar"), dict(anchor="first_layer", mixing="dynamic"),
    dict(mix_streams="vg", norm_streams="none"), dict(gate="none", mix_streams="qkv", norm_streams="qk")], ids=str)
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


@pytest.mark.parametrize("options", [{}, dict(granularity="scalar"), dict(mix_streams="kg", granularity="headwise")], ids=str)
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


@pytest.mark.parametrize("options", [{}, dict(mixing="dynamic"), dict(anchor="first_layer"), dict(norm_streams="none")], ids=str)
def test_anchors_and_mixed_streams_stay_bf16_under_autocast(options):
    model, seen = models.build("exoformer", **SHAPE, **options), []
    for module in (model.anchor, *(block.attn.mix for block in model.blocks if block.attn.mix is not None)):
        module.register_forward_hook(lambda module, inputs, output: seen.extend(output.values()))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(2, 8, dtype=torch.long))
    assert len(seen) >= 16 and {x.dtype for x in seen} == {torch.bfloat16}
