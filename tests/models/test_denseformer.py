"""denseformer.py against its paper's equations in float64, arXiv:2402.02622, and its counts."""
import pytest
import torch
from measure import extra
from reference import add, compare, count, float64, setup, show, sublayer  # noqa: F401  (float64: autouse)

import models
import probes


def denseformer(p, c, x):
    """X_i = block_i(Y_{i-1}); every period-th Y_i is a sum over the X_j with j = i modulo dilation."""
    X, Y = [x], x
    for i in range(1, c.n_layer + 1):
        H = add(Y, sublayer(p, c, 2 * i - 1, Y))
        X.append(add(H, sublayer(p, c, 2 * i, H)))
        Y = X[i]
        if i % c.period == 0:
            alpha, sources = p[f"average.{i}.alpha"], [j for j in range(i + 1) if j % c.dilation == i % c.dilation]
            assert len(alpha) == len(sources)
            Y = [sum(alpha[m] * X[j][t] for m, j in enumerate(sources)) for t in range(len(x))]
    return Y


CASES = [dict(), dict(tie_embeddings=True, qk_norm=False, z_loss=0.0), dict(n_kv_head=4, gate="elementwise"),
         dict(dilation=3), dict(period=2, n_layer=5), dict(dilation=2, period=3, n_layer=7)]


@pytest.mark.parametrize("options", CASES, ids=show)
def test_equations_of_denseformer(options):
    """With period=2 and 5 layers the head reads the last output itself."""
    compare(denseformer, *setup("denseformer", **{**dict(dilation=1, period=1), **options}))


def sources(**options):
    with torch.device("meta"):
        model = models.build("denseformer", **options)
    return {int(i): list(average.sources) for i, average in model.average.items()}


def test_sources():
    """The first two are examples in section 3.3 of the paper."""
    assert sources(n_layer=8, dilation=4, period=4) == {4: [0, 4], 8: [0, 4, 8]}
    assert sources(n_layer=23, dilation=4, period=5) == {
        5: [1, 5], 10: [2, 6, 10], 15: [3, 7, 11, 15], 20: [0, 4, 8, 12, 16, 20]}
    assert sources(n_layer=3) == {1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2, 3]}


def test_parameters():
    def extra_of(**options):
        return count("denseformer", **options) - count("gpt", n_layer=options["n_layer"])
    assert all(extra_of(n_layer=L) == L * (L + 3) // 2 for L in (1, 12, 48))
    assert extra_of(n_layer=48, dilation=4, period=5) == sum(i // 4 + 1 for i in (5, 10, 15, 20, 25, 30, 35, 40, 45))


def test_initial_values():
    model = models.build("denseformer", vocab_size=31, n_layer=12, n_head=2, d_model=16, dilation=4, period=5)
    for average in model.average.values():
        assert average.alpha.tolist() == [0.0] * (len(average.sources) - 1) + [1.0]


@pytest.mark.parametrize("options, others", [(dict(), 1 + 2 + 3 + 4), (dict(dilation=2, period=2), 1 + 2)], ids=show)
def test_costs(options, others):
    """No matrix product more than gpt.py."""
    (n, flops, read), (_, products) = extra("denseformer", **options)
    assert products == 0 and flops == 2 * 64 * n and read == 64 * others


def test_stats():
    model = setup("denseformer", dilation=2, n_layer=4)[0]
    with torch.no_grad():
        model.average["4"].alpha.copy_(torch.tensor([0.5, -0.25, 2.0]))
    found = probes.stats("denseformer", model, torch.zeros(1, 2, dtype=torch.long))
    assert found["on_last"][3] == 2.0 and found["on_earlier"][3] == 0.75 and found["on_earlier"][0] == 0.0
