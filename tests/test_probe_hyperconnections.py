"""probes/hyperconnections.py against what the model reads."""
import pytest
from analysis import average, check_depth, double, passed, random_model, tokens  # noqa: F401

import models
from nanodepth import record


@pytest.mark.parametrize("connection, n_streams", dict(static=2, dynamic=4, manifold=3, lite=3, identity=4).items())
def test_depth_matrix_makes_every_input_from_the_outputs(connection, n_streams):
    check_depth("hyperconnections", connection=connection, n_streams=n_streams)


@pytest.mark.parametrize("connection", ["static", "dynamic", "manifold", "lite", "identity"])
def test_stats_at_the_start_and_against_loops(connection):
    options = dict(connection=connection, vocab_size=97, n_layer=2, n_head=4, d_model=32)
    start = record.stats("hyperconnections", models.build("hyperconnections", **options).eval(), tokens()[0])
    wanted = {"static": 1.0, "dynamic": 1.0}.get(connection, 0.4753)            # sigmoid(1), and three of sigmoid(-1)
    assert start["focus"] == pytest.approx([wanted] * 4, abs=1e-4) and start["write"] == pytest.approx([1.0] * 4)
    keep = [1.0, 0.994008, 0.994008, 1.0] if connection == "lite" else [1.0] * 4    # (1 + 5 e^-8) / (1 + 23 e^-8)
    assert start["keep"] == pytest.approx(keep, abs=1e-6 if connection == "lite" else 2e-3)     # exp(-8) is not zero
    model = random_model("hyperconnections", connection=connection)
    found, maps = record.stats("hyperconnections", model, tokens()[0]), passed(model).outputs_of("maps")
    for n, (pre, post, res) in enumerate(maps):
        rows = pre.abs().reshape(-1, pre.size(-1)).tolist()
        assert found["focus"][n] == pytest.approx(average(max(row) / sum(row) for row in rows))
        assert found["write"][n] == pytest.approx(average(post))
        kept = [1.0] if res is None else [m[i][i] for m in res.reshape(-1, 4, 4).tolist() for i in range(4)]
        assert found["keep"][n] == pytest.approx(average(kept))
    assert len(maps) == len(found["keep"]) == 6
