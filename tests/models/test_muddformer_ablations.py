"""muddformer_ablations.py against the paper's equations in float64, arXiv:2502.12170, table 5 and figure 9."""
from functools import partial

import pytest
import torch
from reference import compare, float64, setup, show  # noqa: F401  (float64: autouse)
from settings import fitting
from test_muddformer import muddformer

import models

OWN = dict(n_layer=5, d_ff=256, dynamic=True, multiway=True, streams="qkvr", ffn_realloc=True, period=1, dilation=1,
           window=0, last_k=None)
CASES = [dict(period=2, dilation=2), dict(window=2, multiway=False, ffn_realloc=False), dict(last_k=2, streams="vr"),
         dict(dynamic=False, streams="qkr"), dict(multiway=False, dynamic=False), dict(streams="kvr"),
         dict(streams="qvr"), dict(streams="qkv"), dict(window=1, period=3), dict(last_k=4, period=2),
         dict(multiway=False, dilation=3), dict(last_k=0, multiway=False)]


def mixed(c, i):
    """(streams, sources) of the mixtures after block i: the head's after the last one."""
    if i % c.period and i != c.n_layer or c.last_k is not None and i <= c.n_layer - c.last_k:
        return "", []
    sources = [j for j in range(i + 1) if (i - j) % c.dilation == 0]
    if c.window:                                # the last outputs, and the embedding
        sources = sorted({0} | {j for j in range(1, i + 1) if j > i - c.window})
    return "r" if i == c.n_layer else [s for s in "qkvr" if s in c.streams] if c.multiway else "x", sources


reference = partial(muddformer, mixed=mixed)


@pytest.mark.parametrize("options", CASES, ids=show)
def test_equations(options):
    compare(reference, *setup("muddformer_ablations", **{**OWN, **options}))


def test_default_is_muddformer():
    """With the same weights, under the same names, bit for bit."""
    mudd, _, _, idx, _ = setup("muddformer")
    again = models.build("muddformer_ablations", **fitting("muddformer_ablations", vars(mudd.config)))
    again.load_state_dict(mudd.state_dict())
    assert torch.equal(again(idx)[0], mudd(idx)[0])


def test_widths():
    """w1 of n S, up to the next multiple of 64; after the last block 4 S; without re-allocation MLPs have d_ff."""
    def widths(**options):
        p = setup("muddformer_ablations", **{**OWN, "n_layer": 20, "d_ff": 24, "ffn_realloc": False, **options})[1]
        assert {len(q) for key, q in p.items() if "w_up" in key} == {24}
        return [len(q) for key, q in p.items() if ".w1." in key]
    assert widths(multiway=False) == [64] * 19 + [128] and widths(streams="vr") == [64] * 19 + [128]
    assert widths(streams="qkv") == [64] * 19 + [128] and widths(streams="qkvr") == [64] * 14 + [128] * 6
    assert widths(window=8) == [64] * 20 and widths(period=7) == [64, 64, 128]
