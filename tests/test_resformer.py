"""resformer.py: its costs, and lambdas of the stream's dtype."""
import pytest
import torch

import models
from nanodepth.devices import flops_per_token

SHAPE = dict(vocab_size=50, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)


@pytest.mark.parametrize("last_k", [2, 3])
@pytest.mark.parametrize("value_mix", ["identity", "constant", "learnable", "plus"])
def test_costs(value_mix, last_k):
    """Parameters exactly; of the FLOPs the counter sees no products of vectors, and there are no others."""
    model, base = models.build("resformer", **SHAPE, value_mix=value_mix, last_k=last_k), models.build("gpt", **SHAPE)
    params, flops, read = models.module("resformer").costs(model.config, 64)
    assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    assert flops_per_token(model, 64) == flops_per_token(base, 64)
    assert (flops, read) == (last_k * 3 * 32, last_k * 32)


@pytest.mark.parametrize("value_mix", ["identity", "learnable", "plus"])
def test_mixed_values_stay_bf16_under_autocast(value_mix):
    model, seen = models.build("resformer", **SHAPE, value_mix=value_mix), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: seen.extend(output))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(2, 8, dtype=torch.long))
    assert {x.dtype for x in seen} == {torch.bfloat16}
