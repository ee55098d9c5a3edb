"""bench.py: its counts and its output. Times are not tested."""
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import bench
import models

SHAPE = dict(vocab_size=50, n_layer=1, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)
SMALL = ("--n_layer 4 --d_model 32 --n_head 2 --vocab_size 50 --seq_len 16 --batch 2 --rounds 2 "
         "--device cpu").split()
EAGER = [*SMALL, "--no-compile", "--models"]
FIRST, SECOND = models.names()[1:3]
GATED = next(name for name in models.names() if getattr(models.module(name).Config, "gate", "none") != "none")
SOME = models.names()[::9]


def row_of(dtype="fp32", **more):
    """A Row of gpt, and the arguments it has."""
    args = dict(batch=2, seq_len=8, dtype=dtype, compile=False, rounds=3)
    args = SimpleNamespace(**{**args, "device": torch.device("cpu"), "ids": torch.zeros(2, 2, 8).long(), **more})
    return bench.Row("gpt", args, SHAPE), args


def test_ratio_pairs_rounds():
    """A machine that becomes three times as slow in the middle does not change the ratio."""
    assert bench.ratio([2.0, 6.0, 2.0, 6.0], [1.0, 3.0, 1.0, 3.0]) == (0.5, 0.0)
    assert bench.ratio([1.0, 2.0, 3.0], [3.0, 2.0, 10.0])[0] == 3                 # and it is no ratio of medians


def test_peak_memory_counts_what_a_step_allocates():
    row, _ = row_of()
    row.start()
    row.optimizers = []

    def step():
        freed, kept = torch.zeros(10 ** 6), torch.zeros(2 * 10 ** 6)
        del freed
        torch.zeros(10 ** 5)
        return kept
    row.step = step
    assert 12_000_000 <= row.peak_bytes() - 4 * row.n_params <= 12_001_000


def test_figures_of_a_row(monkeypatch):
    """Of 16 tokens. MFU counts backward as twice forward."""
    (base, args), (row, _) = row_of(), row_of()
    monkeypatch.setattr(bench, "peak_flops", lambda device: 1e6)
    for each, times, peak in ((base, [1.0, 2.0, 1.0], 10), (row, [2.0, 4.0, 4.0], 30)):
        each.step, each.peak, each.first = partial(list, times), peak, 1.0
    row.flops = base.flops + 1000
    found = bench.training(row, base, args)
    wanted = {"ratio": (0.5, 0), "step_ratio": (0.4, 0), "forward_ms": 2000, "memory_ratio": 3, "tokens_per_s": 1.6,
              "extra_flops": pytest.approx(1000 / base.flops), "mfu": pytest.approx(3 * row.flops * 16 / 6 / 1e6)}
    assert {name: found[name] for name in wanted} == wanted


def test_models_beside_their_gpt(scripts, tmp_path):
    done = scripts.run("bench.py", *SMALL, "--no-compile", "--json", tmp_path / "b.json", "--models", *SOME)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())["models"]
    bases = {row["model"]: row for row in rows if row["model"] == row["against"]}
    assert {row["model"] for row in rows} == {*SOME, *bases} and rows[0]["model"] == "gpt"
    for row in rows:
        gate = getattr(models.module(row["model"].split(":")[0]).Config, "gate", "none")
        assert row["against"] == (row["model"] if row["model"] in bases else "gpt" if gate == "none"
                                  else f"gpt:gate={gate}")
        assert row["parameters"] == bases[row["against"]]["parameters"] + row["extra_parameters"]
        assert row["peak_bytes"] > 16 * row["parameters"] * 0.5 and row["compile_s"] is None
        for key in ("forward_ms", "backward_ms", "optimizer_ms", "tokens_per_s"):
            assert row[key] > 0, key
        if row["model"] in bases:
            assert row["ratio"] == [1.0, 0.0] and row["memory_ratio"] == 1
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == len(rows) + 2 and len({len(line) for line in table}) == 1      # aligned


def test_a_model_without_memory_is_a_row(monkeypatch, capsys):
    """It says so, or that its gpt has no memory, and the next one is measured. Other errors are not swallowed."""
    real, full = bench.Row.start, []

    def start(row):
        if row.label in full:
            raise torch.OutOfMemoryError("no room")
        real(row)
    monkeypatch.setattr(bench.Row, "start", start)

    def lines(*names):
        assert bench.main([*EAGER, *names]) == 0
        return {line.split("`")[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")}
    full[:] = [FIRST]
    found = lines(FIRST, SECOND)
    assert "out of memory" in found[FIRST] and " ±" in found["gpt"] and " ±" in found[SECOND]
    full[:] = ["gpt"]
    found = lines(FIRST, GATED)
    assert "| out of memory" in found["gpt"] and "gpt: out of memory" in found[FIRST] and " ±" in found[GATED]
    with pytest.raises(MemoryError):
        lines("gpt", FIRST)
    monkeypatch.setattr(bench.Row, "start", lambda row: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        lines("gpt")
