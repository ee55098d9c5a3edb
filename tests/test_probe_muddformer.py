"""probes/muddformer.py, which serves all models with MUDD's connections."""
import pytest
from analysis import average, double, numbers, passed, random_model, tokens  # noqa: F401

import probes


def test_normed_sources_make_no_sums_of_outputs():
    found = numbers(random_model("muddformer", pre_post_norm=True))
    assert found["depth_error"] > 1e-2 and found["depth"] == {}


@pytest.mark.parametrize("name", ["muddformer", "muddpythia", "muddmoe"])
def test_stats_against_loops(name):
    model = random_model(name)
    found = probes.stats(name, model, tokens()[0])
    for n, (m, made) in enumerate(zip(model.aggregate, passed(model).outputs_of("generators"))):
        rows = (m.a + made.unflatten(-1, m.a.shape)).flatten(0, -2).tolist()        # of each token and stream
        assert found["on_last"][n] == pytest.approx(average(row[-1] for row in rows), rel=1e-4)
        assert found["on_earlier"][n] == pytest.approx(average(sum(map(abs, row[:-1])) for row in rows), rel=1e-4)
    assert n == 2
