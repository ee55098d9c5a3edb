"""muddmoe.py against loops in float64: arXiv:2502.12170, sections 2 and 3.2; it starts as kern.py."""
import pytest
from reference import add, attend, count, float64, norm, project, setup, show  # noqa: F401  (float64: autouse)
from test_kern import compare_routed, mixture
from test_muddpythia import aggregates

from nanodepth.presets import PRESETS


def muddmoe(p, c, x, routed):
    """H = X^R + attn(X^Q, X^K, X^V), X_i = H + moe(H); `routed` gets per sequence and layer a list of (r, chosen)."""
    X, streams = [x], [x] * 4
    for i in range(1, c.n_layer + 1):
        at = f"blocks.{i - 1}"
        names = "q_in_norm", "k_in_norm", "v_in_norm"
        inputs = [[norm(p, f"{at}.{name}", u, c) for u in part] for name, part in zip(names, streams)]
        H = add(streams[3], attend(p, c, at, project(p, c, at, *inputs)))
        routed.append([])
        X.append(add(H, [mixture(p, c, f"{at}.mlp", norm(p, f"{at}.mlp_norm", u, c), routed[-1]) for u in H]))
        streams = aggregates(p, c, i, X)
    return streams[-1]


OWN = dict(d_ff=48, n_layer=3, router="softmax", n_expert=5, top_k=2, balance_loss=0.7)


@pytest.mark.parametrize("options", [
    dict(), dict(router="kern"), dict(gate="elementwise", tie_embeddings=True), dict(n_layer=1, top_k=1, n_kv_head=4)],
    ids=show)
def test_equations(options):
    compare_routed(muddmoe, *setup("muddmoe", **{**OWN, **options}))


def test_sizes_of_the_paper():
    """1.8B parameters in the shape of the dense 405M."""
    size = {key: PRESETS["mudd-405m"][key] for key in ("n_layer", "d_model", "n_head", "d_ff", "vocab_size")}
    assert 1.8e9 < count("muddmoe", **size) < 1.9e9
