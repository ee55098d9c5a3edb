"""resformer.py against its paper's equations in float64, arXiv:2410.17897."""
import pytest
import torch
from reference import GATED, compare, float64, gpt, reading_layers, setup, show, softmax  # noqa: F401

import models

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
    compare(resformer, *setup("resformer", **{**dict(n_layer=4, value_mix="plus", last_k=None), **options}))


def test_initial_values():
    def lambdas(**options):
        return models.build("resformer", vocab_size=31, n_layer=3, n_head=4, d_model=32, max_len=8, **options).value_mix
    torch.testing.assert_close(torch.stack([torch.stack(pair) for pair in lambdas()()]), torch.tensor([[1.0, 0.5]] * 2))
    assert lambdas(value_mix="identity")() == [(0.5, 0.5)] * 2
    learnable = lambdas(value_mix="learnable")
    assert (learnable.lambda1 == 0.5).all() and (learnable.lambda2 == 0.5).all()
