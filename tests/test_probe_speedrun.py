"""probes/speedrun.py against what the model reads."""
import math

import pytest
from analysis import average, check_depth, double, random_model, tokens  # noqa: F401

import probes


@pytest.mark.parametrize("options", [dict(n_layer=4), dict(n_layer=5), dict(skip="backout"), dict(lambdas=False)],
                         ids=str)
def test_depth_matrix_of_skips(options):
    check_depth(random_model("speedrun", **options))


def test_stats_against_loops():
    model = random_model("speedrun")
    found = probes.stats("speedrun", model, tokens()[0])
    gates = [block.attn.value_gate for block in model.blocks if block.attn.value_gate is not None]
    raw = probes.watch(model, tokens()[0], gates)
    wanted = [average(2 / (1 + math.exp(-z)) for z in x.flatten().tolist()) for x in raw]
    assert found["value_gate"] == pytest.approx(wanted)
