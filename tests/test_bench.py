"""bench.py: its counts, its output and its mistakes. Times are not tested."""
import json
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import bench
import models
import probes
from nanodepth import timing

SHAPE = dict(vocab_size=50, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)


def test_ratio_pairs_rounds():
    """A machine that becomes three times as slow in the middle does not change the ratio."""
    assert timing.ratio([2.0, 6.0, 2.0, 6.0], [1.0, 3.0, 1.0, 3.0]) == (0.5, 0.0)


def test_peak_memory_counts_what_a_step_allocates():
    row = timing.Row("gpt", SimpleNamespace(seq_len=8, dtype="fp32", compile=False), SHAPE)
    row.device, row.optimizers = torch.device("cpu"), []
    own = 4 * row.n_params

    def step():
        a = torch.zeros(10 ** 6)
        b = torch.zeros(2 * 10 ** 6)
        del a
        torch.zeros(10 ** 5)
        return b
    row.step = step
    assert own + 12_000_000 <= row.peak_bytes() <= own + 12_001_000


FIRST, SECOND = [name for name in models.names() if probes.of(name, "costs")][:2]
SOME = models.names()[::9]
SMALL = ("--n_layer 4 --d_model 32 --n_head 2 --vocab_size 50 --seq_len 16 --batch 2 --rounds 2 --prompt 4 "
         "--new_tokens 3 --device cpu").split()


def test_models_beside_their_gpt(scripts, tmp_path):
    # 16 new tokens: the time of decoding is a difference of two times
    words = (*SMALL, "--new_tokens", 16, "--no-compile", "--json", tmp_path / "b.json", "--models", *SOME)
    done = scripts.run("bench.py", *words)
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
        for key in ("forward_ms", "backward_ms", "optimizer_ms", "tokens_per_s", "decode_tokens_per_s"):
            assert row[key] > 0, key
        if row["model"] in bases:
            assert row["ratio"] == row["decode_ratio"] == [1.0, 0.0] and row["memory_ratio"] == row["floor"] == 1
        elif "floor" in row:
            assert 0 < row["floor"] <= 1
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == len(rows) + 2 and len({len(line) for line in table}) == 1      # aligned
    assert "torch.optim.Muon" in done.stdout


def test_a_model_without_memory_is_a_row(monkeypatch, capsys):
    """It says so, and the next model is measured; another error is not swallowed."""
    real = timing.Row.start

    def start(row, *args):
        if row.name == FIRST:
            raise torch.OutOfMemoryError("no room")
        real(row, *args)
    monkeypatch.setattr(timing.Row, "start", start)
    monkeypatch.setattr(timing, "limits", lambda *args: (1e9, 1e9))
    monkeypatch.setattr(timing, "optimizer_times", lambda *args: {})
    assert bench.main([*SMALL, "--no-compile", "--new_tokens", "0", "--models", FIRST, SECOND]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {name: next(line for line in lines if f"| `{name}`" in line) for name in (FIRST, SECOND)}
    assert "out of memory" in rows[FIRST] and "out of memory" not in rows[SECOND] and " ±" in rows[SECOND]
    monkeypatch.setattr(timing.Row, "start", lambda row, *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.main([*SMALL, "--no-compile", "--models", "gpt"])


def no_room(*args):
    raise torch.OutOfMemoryError("no room")


def test_no_memory_for_gpt_or_for_the_optimizers(monkeypatch, capsys):
    """Then the models have rows all the same: that they could not be compared, and their figures."""
    monkeypatch.setattr(timing, "limits", lambda *args: (1e9, 1e9))
    monkeypatch.setattr(timing, "optimizer_times", no_room)
    words = [*SMALL, "--no-compile", "--new_tokens", "0", "--models", SECOND]
    assert bench.main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert len(lines) == 2 and all(" ±" in line for line in lines)
    monkeypatch.setattr(timing.Row, "start", no_room)
    assert bench.main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == ["gpt", SECOND] and "gpt: out of memory" in lines[1]


def test_the_floor_counts_four_passes_over_what_is_read():
    args = SimpleNamespace(batch=2, seq_len=8, dtype="bf16", compile=False, new_tokens=0, bytes=False)
    base, row = (timing.Row("gpt", args, SHAPE) for _ in range(2))
    for each in (base, row):
        each.device, each.peak, each.first, each.breaks = torch.device("cpu"), 1, 1.0, 0
        each.times = [[1.0, 2.0, 0.5]] * 3
    row.label, row.costs = "idea", lambda: (5, 10, 100)
    row.flops = base.flops + 1000
    found = bench.result(row, base, args, 1e6, 1e4)
    # backward costs twice forward; four passes of 2 bytes per number, 16 tokens
    added = 3 * 1000 * 16 / 1e6 + 4 * 100 * 2 * 16 / 1e4
    assert found["floor"] == pytest.approx(3 / (3 + added)) and found["read_per_token"] == 100


def test_figures_of_a_row():
    args = SimpleNamespace(batch=2, seq_len=8, dtype="fp32", compile=False, new_tokens=3, bytes=False)
    base, row = timing.Row("gpt", args, SHAPE), timing.Row("gpt", args, SHAPE)
    base.times, base.decode_times, base.peak = [[1.0, 2.0, 1.0]] * 3, [(0.1, 0.2)] * 3, 10
    row.times, row.decode_times, row.peak = [[2.0, 4.0, 4.0]] * 3, [(0.1, 0.5)] * 3, 30
    for each in (base, row):
        each.device, each.first, each.breaks = torch.device("cpu"), 1.0, 0
    row.label, row.flops, row.costs = "idea", 1.5 * base.flops, lambda: None
    found = bench.result(row, base, args, 1e6, 1e4)
    assert (found["ratio"], found["step_ratio"], found["decode_ratio"]) == ((0.5, 0), (0.4, 0), (0.4, 0))
    assert found["memory_ratio"] == 3 and found["extra_flops"] == 0.5 and found["tokens_per_s"] == 16 / 10
    assert found["utilisation"] == pytest.approx(3 * 1.5 * base.flops * 16 / 6 / 1e6)


def test_seconds_of_decoding(monkeypatch):
    """On a clock that only the model moves: 10 s for the first token, 2 s for each of four more."""
    args, clock = SimpleNamespace(seq_len=8, dtype="fp32", compile=False, prompt=4, new_tokens=5), [0.0]
    row = timing.Row("gpt", args, SHAPE)
    row.place(torch.device("cpu"), [torch.zeros(1, 8, dtype=torch.long)] * 2)
    monkeypatch.setattr(timing, "now", lambda device: clock[0])

    def generate(model, idx, n, **options):
        clock[0] += 10 + 2 * (n - 1)

    def step(token, cache):
        clock[0] += 2
        return torch.zeros(1, 1, 50), None

    monkeypatch.setattr(type(row.model), "generate", generate)
    assert row.decode() == (10, 2) and row.decode_after(step, row.cache(64)[0], 7) == 2


def test_decoding_after_contexts(scripts, tmp_path):
    """What caches hold: keys and values of every layer and token."""
    labels = ("gpt", "gpt:n_kv_head=1")
    words = ("--no-compile", "--dtype", "fp32", "--models", *labels, "--decode", 20, 50, "--json", tmp_path / "b.json")
    done = scripts.run("bench.py", *SMALL, *words, seconds=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())["decode"]
    assert [(row["model"], row["context"]) for row in rows] == [(label, n) for label in labels for n in (20, 50)]
    for row in rows:
        width = 32 if row["model"] == "gpt" else 16                                 # of keys and values
        fp32, n_layer = 4, 4
        assert row["fixed_bytes"] == 0 and row["against"] == "gpt"
        assert row["cache_bytes"] == fp32 * n_layer * 2 * width * (row["context"] + 3)
        assert row["decode_tokens_per_s"] > 0 and (row["decode_ratio"] == [1.0, 0.0]) == (row["model"] == "gpt")
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 6 and table[-1].split("|")[2].strip() == "50"


def test_tensors_of_a_cache_are_found_wherever_it_has_them():
    layer = SimpleNamespace(k=torch.zeros(2), v={"a": torch.zeros(3)})
    held = SimpleNamespace(pos=torch.zeros(()), layers=[layer, None], n=4)
    assert sorted(len(t) for t in timing.tensors_of(held)) == [2, 3]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_one_line_after_the_table(scripts):
    words = (*SMALL, "--no-compile", "--models", "gpt", "--new_tokens", "0", "--json", "/dev/full")
    done = scripts.run("bench.py", *words)
    assert done.returncode == 2 and "| `gpt`" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("bench.py: error: --json /dev/full could not be written")


def test_compiled(scripts, tmp_path):
    words = (*SMALL, "--n_layer", 1, "--models", "gpt", "--bytes", "--json", tmp_path / "b.json")
    done = scripts.run("bench.py", *words)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "b.json").read_text())["models"]
    assert row["model"] == "gpt" and row["graph_breaks"] == 0 and row["compile_s"] > 0
    # each weight is read twice and its gradient is written
    assert row["kernel_bytes"] > 3 * 4 * row["parameters"] and row["extra_kernel_bytes"] == 0


def test_profiled(scripts, tmp_path):
    words = (*SMALL, "--no-compile", "--models", "gpt:n_kv_head=1", "--profile", tmp_path / "trace.json")
    done = scripts.run("bench.py", *words)
    assert done.returncode == 0 and "aten::mm" in done.stdout, done.stderr
    assert any(event.get("name") == "aten::mm"
               for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def test_a_prompt_may_be_longer_than_a_sequence(monkeypatch):
    args, seen = SimpleNamespace(seq_len=8, dtype="fp32", compile=False, prompt=14, new_tokens=2), []
    row = timing.Row("gpt", args, {**SHAPE, "n_layer": 1})
    monkeypatch.setattr(type(row.model), "generate", lambda self, idx, *args, **kwargs: seen.append(idx.shape))
    row.start(torch.device("cpu"), (torch.zeros(2, 8, dtype=torch.long),) * 2)
    row.decode()
    assert seen == [(1, 14)] * 2


def test_a_prompt_that_is_not_read_may_be_longer_than_the_batch():
    for words in (["--new_tokens", "0"], ["--ranks", "2"], ["--decode", "4"]):
        assert bench.parse(["--seq_len", "64", "--batch", "1", *words])[0].prompt == 128


def test_a_graph_break_is_counted(monkeypatch):
    row = timing.Row("gpt", SimpleNamespace(seq_len=8, dtype="fp32", compile=True), {**SHAPE, "n_layer": 1})
    plain = row.model.output
    row.model.output = lambda *args: (torch._dynamo.graph_break(), plain(*args))[1]
    monkeypatch.setattr(row.model, "compile", partial(row.model.compile, backend="eager"))
    idx = torch.zeros(2, 8, dtype=torch.long)
    row.start(torch.device("cpu"), (idx, idx))
    assert row.breaks > 0


BAD = [["--models", "gtp"], ["--models", "gpt:width=3"], ["--models", "gpt:qk_norm=maybe"], ["--models", "gpt:n_head"],
       ["--models", "gpt:n_kv_head=4"], ["--preset", "huge"], ["--preset", ""], ["--dtype", "fp8"], ["--batch", "0"],
       ["--new_tokens", "1"], ["--prompt", "100000"], ["--decode", "0"], ["--decode", "8", "--new_tokens", "0"],
       ["--n_head", "5"], ["--seq_len", "0"], ["--device", "abacus"], ["--profile", "x.json"],
       ["--ranks", "8", "--models", "gpt", "--n_head", "7"], ["--models", "gpt", "--batch", "1000000000"],
       ["--models", "gpt", "--vocab_size", "2000000000"],
       ["--models", "gpt:max_len=16", "--batch", "1"], ["--models", "gpt:vocab_size=100"],
       ["--json", "x.json", "--ranks", "2"], ["--json", "no/such/folder/x.json"], ["--json", "/"], ["--speed", "9"]]


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_mistakes_are_one_line(words, scripts):
    done = scripts.run("bench.py", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("bench.py: error: ") and not done.stdout
