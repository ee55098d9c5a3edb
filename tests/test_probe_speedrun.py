"""probes/speedrun.py against what the model reads."""
import math

import pytest
from analysis import average, check_depth, double, numbers, random_model, tokens  # noqa: F401

from nanodepth import record


@pytest.mark.parametrize("options", [{}, dict(skip="backout"), dict(lambdas=False), dict(skip="none")], ids=str)
def test_depth_matrix_makes_every_input_from_the_outputs(options):
    check_depth("speedrun", **options)


@pytest.mark.parametrize("n_layer", [4, 5])
def test_depth_matrix_of_several_skips(n_layer):
    assert numbers(random_model("speedrun", n_layer=n_layer))["depth_error"] < 1e-12


def test_stats_against_loops():
    model = random_model("speedrun")
    found = record.stats("speedrun", model, tokens()[0])
    gates = [block.attn.value_gate for block in model.blocks if block.attn.value_gate is not None]
    raw = record.watch(model, tokens()[0], gates)
    wanted = [average(2 / (1 + math.exp(-z)) for z in x.flatten().tolist()) for x in raw]
    assert found["value_gate"] == pytest.approx(wanted)
