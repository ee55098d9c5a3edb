"""satformer.py: its costs, and gates of the stream's dtype."""
import pytest
import torch

import models
from nanodepth.devices import flops_per_token

SHAPE = dict(vocab_size=50, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)


@pytest.mark.parametrize("options", [{}, dict(last_k=2), dict(last_k=1, value_act="softmax_sigmoid", n_kv_head=4)], ids=str)
def test_costs(options):
    """Parameters exactly; FLOPs: the counter sees the gate's product, the formula also the sums."""
    shape = {**SHAPE, "n_kv_head": options.get("n_kv_head", 2)}
    model, base = models.build("satformer", **{**SHAPE, **options}), models.build("gpt", **shape)
    params, flops, read = models.module("satformer").costs(model.config, 64)
    assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    assert flops_per_token(model, 64) - flops_per_token(base, 64) == flops - 2 * read
    assert read == options.get("last_k", 3) * shape["n_kv_head"] * 16


@pytest.mark.parametrize("value_act", ["relu", "softmax", "softmax_sigmoid"])
def test_gated_values_stay_bf16_under_autocast(value_act):
    """A softmax under autocast is fp32: it must not make the values so."""
    model, seen = models.build("satformer", **SHAPE, value_act=value_act), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, **options):
        seen.append(v.dtype)
        return attend(q, k, v, **options)
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        model(torch.zeros(2, 8, dtype=torch.long))
    assert seen == [torch.bfloat16] * 4


def test_queries_and_keys_are_the_two_products():
    attn = models.build("satformer", **SHAPE).blocks[1].attn
    x = torch.randn(2, 5, 64)
    q, k = attn.queries_and_keys(x)
    torch.testing.assert_close(q.flatten(2), attn.wq(x))
    torch.testing.assert_close(k.flatten(2), attn.wk(x))
