"""resformer.py against its paper's equations in float64, arXiv:2410.17897."""
import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    GATED, compare, depends_on_every_parameter, float64, gpt, own_groups, reading_layers, setup, show, softmax,
)

import models
from nanodepth.devices import flops_per_token
from probes.resformer import costs

OWN = dict(n_layer=4, value_mix="plus", last_k=None)
CASES = GATED + [dict(value_mix="identity"), dict(value_mix="learnable"), dict(last_k=2),
                 dict(value_mix="learnable", last_k=1)]


def resformer(p, c, x):
    """v_n <- lambda1_n v_1 + lambda2_n v_n."""
    first, layers = [], reading_layers(c)

    def lambdas(i):
        if c.value_mix == "identity":
            return 0.5, 0.5
        l1, l2 = p["value_mix.logits" if c.value_mix == "plus" else "value_mix.lambda1"], p["value_mix.lambda2"]
        if c.value_mix == "learnable":
            return l1[i], l2[i]
        return p["value_mix.scale"] * softmax([l1[j] for j in range(len(layers))])[i], l2[i]

    def mix(n, a, S):
        if n == 0:
            first.extend(S["v"])
        if n not in layers:
            return S
        l1, l2 = lambdas(layers.index(n))
        return {**S, "v": [[l1 * v1 + l2 * v for v1, v in zip(*at)] for at in zip(first, S["v"])]}

    return gpt(p, c, x, mix)


@pytest.mark.parametrize("options", CASES, ids=show)
def test_equations(options):
    compare(resformer, *setup("resformer", **{**OWN, **options}))


def test_reference_depends_on_every_parameter():
    depends_on_every_parameter(resformer, *setup("resformer", **OWN))


def test_initial_values():
    def lambdas(**options):
        return models.build("resformer", vocab_size=31, n_layer=3, n_head=4, d_model=32, max_len=8, **options).value_mix
    torch.testing.assert_close(torch.stack([torch.stack(pair) for pair in lambdas()()]), torch.tensor([[1.0, 0.5]] * 2))
    assert lambdas(value_mix="identity")() == [(0.5, 0.5)] * 2
    learnable = lambdas(value_mix="learnable")
    assert (learnable.lambda1 == 0.5).all() and (learnable.lambda2 == 0.5).all()


def test_groups():
    mixing = {"value_mix.logits", "value_mix.lambda2", "value_mix.scale"}
    assert own_groups(setup("resformer", **OWN)[0]) == (set(), mixing)


SHAPE = dict(vocab_size=50, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)


@pytest.mark.parametrize("last_k", [2, 3])
@pytest.mark.parametrize("value_mix", ["identity", "learnable", "plus"])
def test_costs(value_mix, last_k):
    """Parameters exactly; of the FLOPs the counter sees no products of vectors, and there are no others."""
    model, base = models.build("resformer", **SHAPE, value_mix=value_mix, last_k=last_k), models.build("gpt", **SHAPE)
    params, flops, read = costs(model.config, 64)
    assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    assert flops_per_token(model, 64) == flops_per_token(base, 64)
    assert (flops, read) == (last_k * 3 * 32, last_k * 32)


@pytest.mark.parametrize("value_mix", ["identity", "learnable", "plus"])
def test_mixed_values_stay_bf16_under_autocast(value_mix):
    model, seen = models.build("resformer", **SHAPE, value_mix=value_mix).float(), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: seen.extend(output))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(2, 8, dtype=torch.long))
    assert {x.dtype for x in seen} == {torch.bfloat16}
