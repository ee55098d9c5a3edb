"""probes/sambay.py against loops; and not every layer has attention."""
import math

import pytest
from analysis import average, double, numbers, random_model, tokens  # noqa: F401

import probes


def test_it_is_watched_without_attention_in_every_layer():
    found = numbers(random_model("sambay", n_layer=8, window=5, gate="headwise"))
    assert found["depth_error"] < 1e-9 and len(found["lens"]) == 9 and found["entropy"] is None


def test_stats_against_loops():
    model = random_model("sambay", n_layer=8, window=5)
    found, idx, mixers = probes.stats("sambay", model, tokens()[0]), tokens()[0], model.config.mixers
    mambas = [block.attn for block, kind in zip(model.blocks, mixers) if kind == "mamba"]
    gates = [block.attn.w_gate for block, kind in zip(model.blocks, mixers) if kind == "gmu"]
    for n, (layer, raw) in enumerate(zip(mambas, probes.watch(model, idx, [layer.w_dt for layer in mambas]))):
        steps = [math.log1p(math.exp(x)) for x in (raw + layer.dt_bias).flatten().tolist()]
        assert found["dt"][n] == pytest.approx(average(steps))
    for n, raw in enumerate(probes.watch(model, idx, gates)):
        sizes = [abs(x / (1 + math.exp(-x))) for x in raw.flatten().tolist()]
        assert found["memory_gate"][n] == pytest.approx(average(sizes))
    assert len(mambas) > 1 and len(gates) > 0
