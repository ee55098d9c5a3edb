"""probes/hyperconnections.py, of three models, against their maps."""
import pytest
from analysis import average, double, passed, random_model, tokens  # noqa: F401

import models
import probes


@pytest.mark.parametrize("name, options", [("hyperconnections", {}), ("hyperconnections", dict(dynamic=False)),
                                           ("mhc", {}), ("mhc_lite", {})], ids=str)
def test_stats_at_the_start_and_against_loops(name, options):
    start = probes.stats(name, models.build(name, vocab_size=97, n_layer=2, n_head=4, d_model=32, **options).eval(),
                         tokens()[0])
    wanted = 1.0 if name == "hyperconnections" else 0.4753                      # sigmoid(1), and three of sigmoid(-1)
    assert start["focus"] == pytest.approx([wanted] * 4, abs=1e-4) and start["write"] == pytest.approx([1.0] * 4)
    keep = [0.994008] * 4 if name == "mhc_lite" else [1.0] * 4                  # (1 + 5 e^-8) / (1 + 23 e^-8)
    assert start["keep"] == pytest.approx(keep, abs=1e-6 if name == "mhc_lite" else 2e-3)       # exp(-8) is not zero
    model = random_model(name, **options)
    found, calls = probes.stats(name, model, tokens()[0]), passed(model).calls["connections"]
    modules = [m for block in model.blocks for m in (block.attn_connection, block.mlp_connection)]
    for n, (m, (inputs, _)) in enumerate(zip(modules, calls, strict=True)):
        pre, post, res = m.maps(inputs[0])
        rows = pre.abs().reshape(-1, pre.size(-1)).tolist()
        assert found["focus"][n] == pytest.approx(average(max(row) / sum(row) for row in rows), rel=1e-5)
        assert found["write"][n] == pytest.approx(average(post), rel=1e-5)
        kept = [r[i][i] for r in res.reshape(-1, 4, 4).tolist() for i in range(4)]
        assert found["keep"][n] == pytest.approx(average(kept), rel=1e-5)
    assert len(calls) == len(found["keep"]) == 6
