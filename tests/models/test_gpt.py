"""gpt.py against its equations in float64, and its initial values."""
import math

import pytest
import torch
from reference import GATED, equations, float64, gpt  # noqa: F401  (float64: autouse)

import models

test_equations = equations(gpt, "gpt", GATED)


@pytest.mark.quick
@pytest.mark.parametrize("zero_init", [True, False])
def test_initial_values(zero_init):
    """Norms 1; wo, w_down and head 0 unless zero_init is off; all others N(0, 0.02), cut at three sigma."""
    torch.manual_seed(0)
    model = models.build("gpt", vocab_size=97, n_layer=2, n_head=4, d_model=64, d_ff=96, max_len=8, gate="elementwise",
                         zero_init=zero_init)
    for key, p in model.named_parameters():
        module = key.split(".")[-2]
        if module.endswith("norm"):
            assert (p == 1).all(), key
        elif module in ("wo", "w_down", "head") and zero_init:
            assert (p == 0).all(), key
        else:
            assert abs(p.std() - 0.0197) < 0.001 and p.abs().max() <= 0.06, key
            assert abs(p.mean()) < 5 * 0.02 / math.sqrt(p.numel()), key


def test_norms_have_their_statistics_in_fp32():
    """Of bf16 numbers the norm in float64, rounded once: with statistics in bf16 a third would be others."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = models.module("gpt").RMSNorm(512, 1e-6).float()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (norm(x) != exact.bfloat16()).float().mean() < 0.001
