"""muddpythia.py against loops in float64, arXiv:2502.12170; it starts as pythia.py."""
import math

import pytest
import torch
from measure import extra
from reference import (  # noqa: F401  (float64: autouse)
    OLDER, block, compare, count, float64, gelu, older_initial_values, rms, setup, show)

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


@pytest.mark.parametrize("L, d, h, percent", [(24, 2048, 16, 0.22), (32, 2560, 32, 0.23)])
def test_what_it_adds_to_pythia(L, d, h, percent):
    """At the two sizes of arXiv:2502.12170, table 3; MLP widths, and those of w1 beyond 4 S, stay within rounding."""
    shape = dict(n_layer=L, d_model=d, n_head=h)
    with torch.device("meta"):
        model = models.build("muddpythia", **shape)
    widths = [block.mlp.w_up.out_features for block in model.blocks]
    extra = count("muddpythia", **shape) - count("pythia", **shape) - (2 * d + 1) * (sum(widths) - 4 * d * L)
    K = [4 * (i + 1) for i in range(1, L)] + [L + 1]
    assert abs(100 * sum(d * k + k * k + k for k in K) / (12 * L * d * d) - percent) < 0.01
    hidden = [m.w1.out_features for m in model.aggregate]
    assert all(k < h <= k + 64 for k, h in zip(K[:-1] + [4 * K[-1]], hidden))
    assert extra == sum(h * (d + k) + k for k, h in zip(K, hidden)) + 4 * d * L
    assert abs(sum(widths) / (4 * d * L) - 1) < 0.005 and (widths[0], widths[-1]) == (2 * d, 6 * d)
    assert all(abs(f - 4 * d * (0.5 * (L - i) + 1.5 * (i - 1)) / (L - 1)) <= 64 for i, f in enumerate(widths, start=1))


def test_costs():
    """The counter sees matrix products only, the sums over depth are 2 FLOPs for each weight and channel."""
    (_, flops, read), (_, products) = extra("muddpythia")
    assert products == flops - 2 * 64 * (8 + 12 + 16 + 5) and read == 64 * (1 + 2 + 3 + 4)


def test_initial_values():
    older_initial_values("muddpythia", math.sqrt(2 / 5 / 256), 2 / 4 / 16)
