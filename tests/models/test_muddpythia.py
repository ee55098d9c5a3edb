"""muddpythia.py against loops in float64, arXiv:2502.12170."""
import math

import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    OLDER, block, compare, float64, older_initial_values, setup, show)
from test_muddformer import aggregate, everything

import models


def muddpythia(p, c, x):
    X, streams = [x], [x] * 4
    for i in range(1, c.n_layer + 1):
        X.append(block(p, c, i - 1, *streams))
        streams = aggregate(p, c, i, X, *everything(c, i))
    return streams[-1]


@pytest.mark.parametrize("options", [
    dict(), dict(n_kv_head=2, d_ff=300), dict(tie_embeddings=True, n_layer=2, norm_eps=0.1)], ids=show)
def test_equations(options):
    compare(muddpythia, *setup("muddpythia", OLDER, 0.2, rope_theta=50.0, **options))


@pytest.mark.parametrize("L, d, h", [(24, 2048, 16), (32, 2560, 32)])
def test_widths(L, d, h):
    """Of the MLPs at the two sizes of arXiv:2502.12170, table 3, within rounding."""
    with torch.device("meta"):
        model = models.build("muddpythia", n_layer=L, d_model=d, n_head=h)
    widths = [block.mlp.w_up.out_features for block in model.blocks]
    assert abs(sum(widths) / (4 * d * L) - 1) < 0.005 and (widths[0], widths[-1]) == (2 * d, 6 * d)
    assert all(abs(f - 4 * d * (0.5 * (L - i) + 1.5 * (i - 1)) / (L - 1)) <= 64 for i, f in enumerate(widths, start=1))


def test_initial_values():
    older_initial_values("muddpythia", math.sqrt(2 / 5 / 256), 2 / 4 / 16)
