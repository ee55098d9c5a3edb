"""bench.py: what it counts is right, what it writes is whole. Its times are not tested."""
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
import models
from nanodepth.devices import flops_per_token

ROOT = Path(__file__).parent.parent
SHAPE = dict(vocab_size=50, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)
CASES = [("resformer", dict(value_mix=kind, last_k=k)) for kind in ("identity", "constant", "learnable", "plus") for k in (2, 3)] + [
    ("satformer", {}), ("satformer", dict(last_k=2)),
    ("exoformer", {}), ("exoformer", dict(mixing="dynamic", granularity="headwise")), ("exoformer", dict(granularity="scalar")),
    ("exoformer", dict(anchor="first_layer", mixing="dynamic")), ("exoformer", dict(mix_streams="vg", norm_streams="none")),
    ("exoformer", dict(gate="none", mix_streams="qkv", norm_streams="qk")),
    ("muddformer", {}), ("muddformer", dict(streams="kv", dilation=2)), ("muddformer", dict(dynamic=False, period=2)),
    ("muddformer", dict(multiway=False, window=2)), ("muddformer", dict(pre_post_norm=True)),
    ("attnres", {}), ("attnres", dict(block_size=3)), ("attnres", dict(block_size=8)),
    ("denseformer", {}), ("denseformer", dict(dilation=2, period=2)),
    ("geonorm", {}), ("geonorm", dict(update="unprojected")), ("geonorm", dict(update="pre_norm")), ("geonorm", dict(update="post_norm")),
    ("kern", {}), ("kern", dict(router="softmax", n_expert=8, top_k=4)),
    ("sas", {}), ("sas", dict(n_sim=2, d_sim=20, kernel=3)), ("sas", dict(simulation="projection")),
    ("sas", dict(simulation="projection", n_sim=2, d_sim=20, gate="headwise")),
    ("hyperconnections", {}), ("hyperconnections", dict(connection="static", n_streams=3)),
    ("hyperconnections", dict(connection="manifold")), ("hyperconnections", dict(connection="identity", n_streams=2)),
    ("gpt3", {}), ("gpt3", dict(n_kv_head=4)), ("pythia", {}), ("muddpythia", {}), ("muddpythia", dict(ffn_realloc=False)),
    ("dape", {}), ("dape", dict(position="rope", kernel=5, width=7)), ("dape", dict(position="alibi")), ("dape", dict(conv="heads")), ("dape", dict(kernel=0))]


@pytest.mark.parametrize("name, options", CASES, ids=lambda x: x if isinstance(x, str) else "-".join(f"{k}={v}" for k, v in x.items()))
def test_the_papers_formulas_give_the_counted_sizes(name, options):
    """Parameters exactly; FLOPs: the counter sees matrix products only, the formulas also the mixing of vectors."""
    equal_widths = dict(ffn_realloc=False) if name == "muddformer" else {}
    model = models.build(name, **{**SHAPE, **options}, **equal_widths)
    base = models.build("gpt", **{**SHAPE, "n_kv_head": model.config.n_kv_head}, gate=getattr(model.config, "gate", "none"))
    params, flops, read = bench.theory(model)
    assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    counted = flops_per_token(model, 64) - flops_per_token(base, 64)
    if name == "attnres":                       # its scores are matrix products, of each source with the readers to come
        assert 0 < counted < flops
    elif name == "denseformer":
        assert counted == 0 and flops == 2 * params * SHAPE["d_model"]
    elif name == "hyperconnections":            # each entry of the maps takes a product with a vector
        entries = sum(p.numel() for key, p in model.named_parameters() if key.endswith(("static", "bias")))
        assert counted == flops - 2 * entries * SHAPE["d_model"]
    elif name == "geonorm":                     # no matrix products, and nothing read but the newest state
        per_sublayer = {"geodesic": 10, "unprojected": 11}.get(options.get("update", "geodesic"), 0) * SHAPE["d_model"]
        assert counted == read == 0 and flops == 8 * per_sublayer
    elif name == "kern":                        # the k outputs' weighted sum; nothing is read but the newest state
        assert counted == flops - 2 * 4 * model.config.top_k * SHAPE["d_model"] and read == 0
    elif name == "sas":                         # the counter sees values as wide as keys, and not the aggregation
        c = model.config
        wide, mean = 2 * 64 * c.n_sim * c.n_head * (c.d_sim - c.d_head), c.n_sim * c.d_model
        assert counted == flops + 4 * (wide - mean * (1 + (c.simulation == "projection"))) and read == 0
        assert bench.theory(model, 32)[1] == flops - 4 * 2 * 32 * (c.n_sim * c.n_head * (c.d_sim + c.d_head) - 2 * c.d_model)
    elif name == "dape":                        # kernel // 2 columns more than the paper's, and the scores a second time
        columns = 64 if options.get("conv") == "heads" else 64 + options.get("kernel", 3) // 2
        assert counted == flops * columns / 64 + 4 * 2 * 64 * SHAPE["d_model"] * (options.get("kernel") != 0)
        assert bench.theory(model, 32)[1:] == (flops / 2, read / 2)
    else:
        mixing = {"resformer": 3 * read, "satformer": 2 * read, "exoformer": 3 * read}.get(name, sum(
            2 * len(a.streams) * len(a.sources) * SHAPE["d_model"] for a in getattr(model, "aggregate", {}).values()))
        assert counted == flops - mixing
    assert (read > 0) == (name not in ("geonorm", "kern", "sas", "gpt3", "pythia"))


def test_reads_of_attnres_are_what_its_readers_see():
    for size in (1, 3, 8):
        model, seen = models.build("attnres", **SHAPE, block_size=size), []
        model.depth_attention.register_forward_hook(lambda module, inputs, output: seen.append(output.size(-1)))
        model(torch.zeros(1, 4, dtype=torch.long))
        assert bench.theory(model)[2] == sum(s - 1 for s in seen) * SHAPE["d_model"]


def test_reads_of_denseformer():
    for options, others in ((dict(), 1 + 2 + 3 + 4), (dict(dilation=2), 0 + 1 + 1 + 2), (dict(dilation=2, period=2), 1 + 2), (dict(period=3), 3)):
        assert bench.theory(models.build("denseformer", **SHAPE, **options))[2] == others * SHAPE["d_model"]


@pytest.mark.parametrize("name", ["gpt3", "pythia", "muddpythia"])
@pytest.mark.parametrize("preset", [dict(qk_norm=False), dict(d_ff=96), {}])
def test_models_with_another_mlp_are_compared_with_the_usual_gpt(name, preset):
    """Each has the default d_ff of its own file, unless one is asked for; what only gpt has is as asked for."""
    shape = {key: value for key, value in SHAPE.items() if key != "d_ff"} | preset
    rows = [bench.Row(spec, SimpleNamespace(seq_len=64), shape) for spec in ("gpt", name)]
    assert rows[0].shape == rows[1].shape and rows[0].shape["d_ff"] == shape.get("d_ff", 192)
    params, flops, _ = bench.theory(rows[1].model, base=rows[0].model.config)
    assert rows[1].model.config.d_ff == shape.get("d_ff", 256) and params == rows[1].n_params - rows[0].n_params
    assert name == "muddpythia" or flops == rows[1].flops - rows[0].flops


@pytest.mark.parametrize("options", [dict(), dict(n_layer=12, window=16, gate="headwise"), dict(n_layer=8, gmu="sigmoid", d_state=5, d_conv=3),
                                     dict(n_layer=8, gmu="none", qk_norm=False, gate="elementwise")], ids=str)
def test_formulas_of_sambay(options):
    """Parameters exactly, and FLOPs at two lengths: the counter sees matrix products, and blocks of queries whose windows
    together are 2 window - 1 keys wide."""
    model = models.build("sambay", **{**SHAPE, **options})
    c, E, of = model.config, 2 * SHAPE["d_model"], model.config.mixers.count
    base = models.build("gpt", **SHAPE | dict(n_layer=c.n_layer, gate=c.gate, qk_norm=c.qk_norm))
    mixing = of("mamba") * E * (7 * c.d_state + 2 * c.d_conv + 3) + of("gmu") * E * (2 if c.gmu == "sigmoid" else 1)
    for T in (64, 32):
        params, flops, read = bench.theory(model, T)
        assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
        beyond = of("window") * 4 * SHAPE["d_model"] * (c.window - 1) if c.window < T else 0
        assert flops_per_token(model, T) - flops_per_token(base, T) == flops - mixing + beyond
        assert read == of("gmu") * E
    assert bench.theory(model) == bench.theory(model, 64)


def test_every_model_has_its_formulas():
    for name in set(models.names()) - {"gpt"}:
        assert bench.theory(models.build(name, **SHAPE)) is not None or name not in (ROOT / "README.md").read_text()


def test_ratio_pairs_rounds():
    """A machine that becomes three times as slow in the middle does not change the ratio."""
    assert bench.ratio([2.0, 6.0, 2.0, 6.0], [1.0, 3.0, 1.0, 3.0]) == (0.5, 0.0)


def test_peak_memory_counts_what_a_step_allocates():
    row = bench.Row("gpt", SimpleNamespace(seq_len=8, dtype="fp32", compile=False), SHAPE)
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


def run(*words):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(ROOT / "bench.py"), *map(str, words)], capture_output=True, text=True, timeout=300, env=env)


SMALL = "--n_layer 4 --d_model 32 --n_head 2 --vocab_size 50 --seq_len 16 --batch 2 --rounds 2 --prompt 4 --new_tokens 3 --device cpu".split()


def test_all_models_side_by_side(tmp_path):
    done = run(*SMALL, "--new_tokens", 16, "--no-compile", "--json", tmp_path / "b.json")     # decoding is a difference of two times
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "b.json").read_text())
    rows = {row["model"]: row for row in told["models"]}
    assert set(rows) >= {*models.names(), *bench.VARIANTS, "gpt:gate=elementwise"}
    for label, row in rows.items():
        assert row["against"] == ("gpt:gate=elementwise" if "exoformer" in label or "gate" in label else "gpt")
        assert row["parameters"] == rows[row["against"]]["parameters"] + row["extra_parameters"]
        assert row["peak_bytes"] > 16 * row["parameters"] * 0.5 and row["compile_s"] is None
        assert all(row[key] > 0 for key in ("forward_ms", "backward_ms", "optimizer_ms", "tokens_per_s", "decode_tokens_per_s", "floor"))
        if label == row["against"]:
            assert row["ratio"] == row["decode_ratio"] == [1.0, 0.0] and row["memory_ratio"] == row["floor"] == 1
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == len(rows) + 2 and len({len(line) for line in table}) == 1      # aligned
    assert "torch.optim.Muon" in done.stdout


def test_decoding_after_contexts(tmp_path):
    """What caches hold: gpt's grows in every layer, sambay's in one of its four."""
    done = run(*SMALL, "--no-compile", "--models", "sambay:window=4", "--decode", 20, 50, "--json", tmp_path / "b.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())["decode"]
    assert [(row["model"], row["context"]) for row in rows] == [(name, n) for n in (20, 50) for name in ("gpt", "sambay:window=4")]
    token, fixed = 4 * 2 * 32, 4 * (2 * 3 * 32 + 2 * (64 * 3 + 64 * 16))            # fp32; a window, two Mamba layers
    for row in rows:
        layers, own = (4, 0) if row["model"] == "gpt" else (1, fixed)
        assert row["fixed_bytes"] == own and row["cache_bytes"] == own + layers * token * (row["context"] + 3)
        assert row["decode_tokens_per_s"] > 0 and (row["model"] != "gpt" or row["decode_ratio"] == [1.0, 0.0])
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 6 and "| 50 |" in table[-1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_one_line_after_the_table():
    done = run(*SMALL, "--no-compile", "--models", "gpt", "--new_tokens", "0", "--json", "/dev/full")
    assert done.returncode == 2 and "| `gpt`" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("bench.py: error: --json /dev/full could not be written")


def test_compiled_and_profiled(tmp_path):
    done = run(*SMALL, "--n_layer", 1, "--models", "gpt", "--json", tmp_path / "b.json")
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "b.json").read_text())
    assert [row["model"] for row in told["models"]] == ["gpt"]
    assert all(row["graph_breaks"] == 0 and row["compile_s"] > 0 for row in told["models"])
    done = run(*SMALL, "--no-compile", "--models", "attnres:block_size=2", "--profile", tmp_path / "trace.json")
    assert done.returncode == 0 and "aten::mm" in done.stdout, done.stderr
    assert any(event.get("name") == "aten::mm" for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def test_a_graph_break_is_counted(monkeypatch):
    row = bench.Row("gpt", SimpleNamespace(seq_len=8, dtype="fp32", compile=True), {**SHAPE, "n_layer": 1})
    plain = row.model.output
    row.model.output = lambda *args: (torch._dynamo.graph_break(), plain(*args))[1]
    idx = torch.zeros(2, 8, dtype=torch.long)
    row.start(torch.device("cpu"), (idx, idx))
    assert row.breaks > 0


BAD = [["--models", "gtp"], ["--models", "gpt:width=3"], ["--models", "gpt:qk_norm=maybe"], ["--models", "attnres:block_size"],
       ["--models", "attnres:block_size=99"], ["--preset", "huge"], ["--dtype", "fp8"], ["--batch", "0"], ["--new_tokens", "1"],
       ["--prompt", "100000"], ["--decode", "0"], ["--decode", "8", "--new_tokens", "0"], ["--n_head", "5"], ["--seq_len", "0"], ["--device", "abacus"], ["--profile", "x.json"],
       ["--json", "no/such/folder/x.json"], ["--json", "/"], ["--speed", "9"]]


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_mistakes_are_one_line(words, capsys):
    with pytest.raises(SystemExit) as leave:
        bench.main(words)
    told = capsys.readouterr()
    assert leave.value.code == 2 and told.err.count("\n") == 1 and told.err.startswith("bench.py: error: ") and not told.out
