"""muddpythia.py against loops in float64, arXiv:2502.12170; it starts as pythia.py."""
import math

import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    OLDER, block, compare, float64, gelu, older_initial_values, rms, setup, show)

import models


def aggregates(p, c, i, X):
    """X^c = sum_j A_cj X_j for c = Q, K, V, R after block i; after the last block only R."""
    C, S, at = 1 if i == c.n_layer else 4, i + 1, f"aggregate.{i - 1}"
    out = [[] for _ in range(C)]
    for t, u in enumerate(X[i]):
        made = p[f"{at}.w2.weight"] @ gelu(p[f"{at}.w1.weight"] @ rms(u, c))
        for row in range(C):
            out[row].append(sum((made[row * S + j] + p[f"{at}.a"][row, j]) * X[j][t] for j in range(S)))
    return out


def muddpythia(p, c, x):
    X, streams = [x], [x] * 4
    for i in range(1, c.n_layer + 1):
        X.append(block(p, c, i - 1, *streams))
        streams = aggregates(p, c, i, X)
    return streams[-1]


@pytest.mark.parametrize("options", [
    dict(), dict(n_kv_head=2, d_ff=300), dict(tie_embeddings=True, n_layer=2, norm_eps=0.1)], ids=show)
def test_equations(options):
    compare(muddpythia, *setup("muddpythia", OLDER, 0.2, rope_theta=50.0, **options))


@torch.no_grad()
def test_it_starts_as_pythia():
    """Bit for bit where all MLPs have its width."""
    pythia, mudd = setup("pythia", OLDER, 0.2, d_ff=128)[0], models.build("muddpythia", **OLDER)
    weights = {key: q for key, q in pythia.state_dict().items() if "attn_norm" not in key}
    for key, q in pythia.state_dict().items():
        if "attn_norm" in key:
            weights |= {key.replace("attn_norm", f"{s}_in_norm"): q for s in "qkv"}
    missing = mudd.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and all(key.startswith("aggregate.") for key in missing.missing_keys)
    idx = torch.randint(29, (2, 9))
    assert torch.equal(mudd(idx)[0], pythia(idx)[0])


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
