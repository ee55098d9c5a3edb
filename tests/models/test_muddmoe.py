"""muddmoe.py against loops in float64: arXiv:2502.12170, sections 2 and 3.2; it starts as kern.py."""
import pytest
from reference import count, float64, setup, show  # noqa: F401  (float64: autouse)
from test_kern import compare_routed
from test_muddformer import muddformer

from nanodepth.presets import PRESETS


OWN = dict(d_ff=48, n_layer=3, router="softmax", n_expert=5, top_k=2, balance_loss=0.7)


@pytest.mark.parametrize("options", [
    dict(), dict(router="kern"), dict(gate="elementwise", tie_embeddings=True), dict(n_layer=1, top_k=1, n_kv_head=4)],
    ids=show)
def test_equations(options):
    compare_routed(muddformer, *setup("muddmoe", **{**OWN, **options}))


def test_sizes_of_the_paper():
    """1.8B parameters in the shape of the dense 405M."""
    size = {key: PRESETS["mudd-405m"][key] for key in ("n_layer", "d_model", "n_head", "d_ff", "vocab_size")}
    assert 1.8e9 < count("muddmoe", **size) < 1.9e9
