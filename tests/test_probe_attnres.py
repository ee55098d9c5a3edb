"""probes/attnres.py against what the model reads."""
import math

import pytest
from analysis import average, check_depth, double, numbers, passed, random_model, tokens  # noqa: F401

from nanodepth import record


@pytest.mark.parametrize("options", [{}, dict(block_size=2), dict(block_size=4), dict(additive=True)], ids=str)
def test_depth_matrix_makes_every_input_from_the_outputs(options):
    check_depth("attnres", **options)


def test_one_layer():
    found = numbers(random_model("attnres", n_layer=1))
    assert found["adjacent"] == {} and len(found["lens"]) == 2 and found["depth_error"] < 1e-9


def test_stats_against_loops():
    model = random_model("attnres")
    found, alphas = record.stats("attnres", model, tokens()[0]), passed(model).outputs_of("alpha")
    for n, alpha in enumerate(alphas):
        rows = alpha.flatten(0, 1).tolist()                                         # of each token, its sources
        entropies = [-sum(a * math.log(a) for a in row) for row in rows]
        assert found["entropy"][n] == pytest.approx(average(entropies))
        assert found["newest"][n] == pytest.approx(average(row[-1] for row in rows))
    assert len(alphas) == len(found["entropy"]) == len(found["newest"]) == 6
