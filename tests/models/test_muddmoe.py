"""muddmoe.py against loops in float64: arXiv:2502.12170, sections 2 and 3.2; it starts as kern.py."""
import pytest
from reference import float64, setup, show  # noqa: F401  (float64: autouse)
from test_kern import compare_routed
from test_muddformer import muddformer

OWN = dict(d_ff=48, n_layer=3, router="softmax", n_expert=5, top_k=2, balance_loss=0.7)


@pytest.mark.parametrize("options", [
    dict(), dict(router="kern"), dict(gate="elementwise", tie_embeddings=True), dict(n_layer=1, top_k=1, n_kv_head=4)],
    ids=show)
def test_equations(options):
    compare_routed(muddformer, *setup("muddmoe", **{**OWN, **options}))
