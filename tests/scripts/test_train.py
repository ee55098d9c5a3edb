"""One training run: its log, its schedule, signals, full disks, ranks, compilation, and where it finds its files."""
import json
import math
import os
import re
import resource
import shutil
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data_prep
import models
import settings
import train
from folders import ranks_file
from nanodepth import cli, runs, scoring
from nanodepth.data import Batches, Data
from small import ROOT, SMALL, assert_same_run, finish, flags, inside, losses, near, rows, start

SHORT = {**SMALL, "max_steps": 3, "n_layer": 1, "eval_every": 3}


@pytest.mark.quick
def test_log_and_run_folder(whole, data):
    steps, checks = rows(whole), rows(whole, "val")
    assert [r["step"] for r in steps] == list(range(1, 41)) and [r["step"] for r in checks] == [0, 10, 20, 30, 40]
    assert all(r["tokens"] == 128 * r["step"] for r in steps + checks)
    assert set(checks[0]) >= {"loss", "ppl", "bpb", "stats", "eval_s", "peak_bytes"}
    near(steps[0]["loss"], math.log(320))                      # zero head, and 257 ids padded to 320
    assert steps[-1]["loss"] < 3.0 and checks[-1]["loss"] < 3.0
    assert all(r["ppl"] == pytest.approx(math.exp(r["loss"])) for r in checks)
    config = json.loads((whole / "config.json").read_text())
    assert config["model_config"]["d_model"] == 32 and config["options"]["seed"] == 0 and config["versions"]["torch"]
    assert config["options"]["threads"] is None                             # it may go on on another machine
    assert config["data"]["meta"]["shards"] and config["command"][1].endswith("train.py")
    decide = "train.py muon.py models/gpt.py nanodepth/data.py nanodepth/devices.py nanodepth/scoring.py".split()
    assert {*config["code"]} == {*decide}
    for name in decide:
        assert (whole / "source" / name).read_bytes() == (ROOT / name).read_bytes()
    opt = train.parse(flags(**SMALL))[0]
    assert [r["lr"] for r in steps] == pytest.approx([opt.muon_lr * train.lr_scale(s, opt) for s in range(40)])


@pytest.mark.quick
@pytest.mark.parametrize("end", [0.1, 0.01, 0.0])
def test_lr_schedules(end):
    opt = train.Options(max_steps=100, warmup_steps=10, decay_frac=0.2, final_lr_frac=end)
    scale = [train.lr_scale(s, opt) for s in range(100)]
    assert scale[:10] == pytest.approx([(s + 1) / 10 for s in range(10)]) and scale[10:80] == [1.0] * 70
    assert scale[80:] == pytest.approx(np.linspace(1, end, 21)[1:])
    cosine = train.Options(max_steps=100, warmup_steps=10, schedule="cosine", final_lr_frac=end)
    assert [train.lr_scale(s, cosine) for s in range(10, 100)] == pytest.approx(
        [end + (1 - end) * (1 + math.cos(math.pi * s / 90)) / 2 for s in range(90)])
    assert train.parse(["--max_steps", "2"])[0].warmup_steps == 2                       # the preset's is longer


@pytest.mark.quick
@pytest.mark.sparse
@pytest.mark.parametrize("name", models.names())
def test_every_model_learns_and_resumes(name, data, tmp_path):
    """Twelve steps at once, and a resume where Muon's momentum begins to fall: the same run."""
    small = {**SMALL, "max_steps": 12, "eval_every": 6, "model": name, "n_layer": 3}
    small = settings.fitting(name, small, train.Options)
    assert inside(*flags(**small, data=data, out=tmp_path / "a")) == 0
    assert rows(tmp_path / "a")[-1]["loss"] < 5 < rows(tmp_path / "a")[0]["loss"]
    shutil.copytree(tmp_path / "a" / "before_decay", tmp_path / "b")
    assert runs.read_checkpoint(tmp_path / "b")["step"] == 9
    assert inside(*flags(resume=tmp_path / "b")) == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")
    model, config = runs.load(tmp_path / "b")
    assert config["model"] == name and not model.training


def test_a_loss_that_is_not_finite_stops_the_run(data, tmp_path, monkeypatch, capsys):
    """In training before the step, and in validation, after saving."""
    out, words = tmp_path / "a", {**SMALL, "save_every": 1, "data": data}
    assert inside(*flags(**words | {"adamw_lr": 1e30}, out=out)) == 3
    last, step = capsys.readouterr().out.splitlines()[-1], runs.read_checkpoint(out)["step"]
    assert re.match(rf"step {step + 1}: loss .*(nan|inf)", last) and f"ckpt.pt is of step {step}" in last
    assert all(math.isfinite(r["loss"]) for r in rows(out)) and len(rows(out)) == step

    found = iter([1.0, math.nan])
    monkeypatch.setattr(scoring, "evaluate", lambda *_: {"loss": next(found), "ppl": 2, "bpb": None, "eval_tokens": 1})
    assert inside(*flags(**words | {"eval_every": 3, "save_every": 3}, out=tmp_path / "b")) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"step 3: the validation loss is nan: stopped; {tmp_path / 'b'}/ckpt.pt is of step 3"
    assert [row["loss"] for row in rows(tmp_path / "b", "val")] == [1.0, None]      # JSON has no nan
    found = iter([math.nan])
    assert inside("--resume", str(tmp_path / "b")) == 3 and rows(tmp_path / "b", "val")[-1]["step"] == 3


def test_full_disk_keeps_the_old_checkpoint(data, whole, tmp_path, monkeypatch, capsys):
    """With a limit on file sizes in place of a full disk: the log fits, the checkpoint does not. Then with one that is
    full for a while: the run goes on, and its end is the same."""
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    out, kept = tmp_path / "run", []
    printed, errors = finish(start("train.py", *flags(**SMALL, data=data, out=out), preexec_fn=limit), code=1)
    assert "Traceback" not in errors and "could not be written" in printed
    assert not list(out.glob("ckpt*")) and len(rows(out)) == 40

    def save(state, f, real=torch.save):
        if 10 < state["step"] < 30:
            f.write(b"half")
            kept.append(runs.read_checkpoint(tmp_path / "b")["step"])
            raise OSError(28, "No space left on device")
        real(state, f)
    monkeypatch.setattr(torch, "save", save)
    assert inside(*flags(**SMALL, data=data, out=tmp_path / "b")) == 0 and kept == [10, 10, 10]
    assert capsys.readouterr().out.count("(is the disk full? [Errno 28] No space left on device); ") == 3
    assert_same_run(tmp_path / "b", whole)
    assert not list((tmp_path / "b").glob("*.tmp"))


def test_the_path_of_a_moved_folder(data, tmp_path, monkeypatch, capsys):
    """It may be another run's by now."""
    out, real = tmp_path / "a", scoring.evaluate
    monkeypatch.setattr(scoring, "evaluate", lambda *given: (
        (tmp_path / "b").exists() or (out.rename(tmp_path / "b"), out.mkdir()), real(*given))[1])
    assert inside(*flags(**SMALL, data=data, out=out)) == 1 and not list(out.iterdir())
    assert f"({out} was moved or deleted)" in capsys.readouterr().out


@pytest.mark.quick
def test_what_must_not_change_the_losses(data, whole, tmp_path):
    """Evaluation and checkpoint intervals, --deterministic on a CPU: not a bit. Micro-steps: rounding only."""
    other = {"eval_every": 7, "save_every": 40, "eval_tokens": 99, "final_eval_tokens": 700, "deterministic": True}
    assert inside(*flags(**SMALL | other, data=data, out=tmp_path / "a")) == 0
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    torch._inductor.config.deterministic = False
    assert losses(tmp_path / "a") == losses(whole)
    assert [row["eval_tokens"] for row in rows(tmp_path / "a", "val")] == [99] * 6 + [700]
    assert inside(*flags(**{**SMALL, "micro_batch": 2}, data=data, out=tmp_path / "b")) == 0
    split, one = losses(tmp_path / "b"), losses(whole)
    near(split[:5], one[:5], times=64)                                      # later, rounding has grown
    assert split != one


def test_compiled_run(data, tmp_path, monkeypatch):
    """aot_eager runs the graphs that inductor makes code of."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset(), counters.clear()
    assert inside(*flags(**SHORT, data=data, out=tmp_path / "eager")) == 0 and not counters["stats"]["unique_graphs"]
    assert inside(*flags(**SHORT, data=data, out=tmp_path / "compiled"), "--compile") == 0
    assert counters["stats"]["unique_graphs"]
    near(losses(tmp_path / "compiled"), losses(tmp_path / "eager"), times=64)
    eager, compiled = (runs.read_checkpoint(tmp_path / name)["model"] for name in ("eager", "compiled"))
    assert set(eager) == set(compiled)


@pytest.mark.parametrize("more", [[], pytest.param(["--compile"], marks=pytest.mark.full)], ids=["eager", "compiled"])
def test_two_ranks_see_the_same_batch(data, tmp_path, more):
    """Also in a run that goes on with two. Compiled, the model stays one graph: DDP does not split it."""
    small = {**SMALL, "max_steps": 12, "micro_batch": 2, "model": models.names()[-1], "d_ff": 4096}     # over 1 MiB
    said, errors = finish(start("train.py", *flags(**small, data=data, out=tmp_path / "two"), *more, ranks=2,
                                env={"TORCH_LOGS": "ddp_graphs"}))
    assert f"to resume: torchrun --standalone --nproc_per_node 2 train.py --resume {tmp_path / 'two'}\n" in said
    assert "python eval.py" in said and "ddp_graphs" not in errors and "FutureWarning" not in errors, errors
    assert inside(*flags(**small, data=data, out=tmp_path / "one")) == 0
    shutil.copytree(tmp_path / "one" / "before_decay", tmp_path / "more")
    finish(start("train.py", "--resume", tmp_path / "more", ranks=2))
    for kind, names in dict(train=["loss", "grad_norm"], val=["loss", "bpb", "eval_tokens"]).items():
        for run in ("two", "more"):
            for a, b in zip(rows(tmp_path / "one", kind), rows(tmp_path / run, kind), strict=True):
                near([b[name] for name in names], [a[name] for name in names], times=16 * (1 + a["step"]))


def test_a_folder_without_a_checkpoint_is_taken_over(data, tmp_path, monkeypatch, capsys):
    """As a job left it that was killed early; not while its owner lives. A file system may have no locks."""
    words = flags(**SHORT, data=data, out=tmp_path / "a")
    assert inside(*words) == 0
    whole = losses(tmp_path / "a")
    for name in ("ckpt.pt", "before_decay"):
        shutil.move(tmp_path / "a" / name, tmp_path)
    for name in ("ckpt.pt.tmp", "config.json.tmp"):
        (tmp_path / "a" / name).write_text("half")
    (tmp_path / "a" / "tokenizer.tiktoken").write_text("of other data")
    held = runs.lock(tmp_path / "a")
    assert inside(*words) == 2 and "in use by another process" in capsys.readouterr().err
    assert (tmp_path / "a" / "ckpt.pt.tmp").exists()                        # the lock comes before the cleaning
    held.close()

    def no_locks(*_):
        raise OSError(37, "No locks available")
    monkeypatch.setattr(runs.fcntl, "flock", no_locks)
    assert inside(*words) == 0 and losses(tmp_path / "a") == whole and (tmp_path / "a" / "ckpt.pt").exists()
    assert not (tmp_path / "a" / "tokenizer.tiktoken").exists()
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_the_default_micro_batch(data):
    """As many sequences as make micro_tokens, in equal parts; fewer tokens for large models."""
    ranks = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"))
    options = train.Options(batch_tokens=1024, seq_len=16)
    with torch.device("meta"):
        model = torch.nn.Linear(1, 1)
        sizes = [torch.nn.Linear(1000, n * 1000, bias=False) for n in (536, 537, 2147, 2148)]
    for model.micro_tokens, micro in ((32768, 64), (512, 32), (511, 16), (100, 4), (3, 1)):
        assert Batches(Data(data), options, ranks, model).micro == micro
    options = train.Options(batch_tokens=131072, seq_len=16)
    assert [16 * Batches(Data(data), options, ranks, x).micro for x in sizes] == [32768, 16384, 8192, 4096]


def test_packages_that_are_missing():
    assert "pip install nowhere" in str(cli.of_the_machine(ModuleNotFoundError(name="nowhere.at.all"), ""))
    assert cli.of_the_machine(ModuleNotFoundError(name="torch.at.all"), "") is None         # a typo in an import


def test_names_and_places(scripts, tmp_path, monkeypatch):
    """A run without --out gets a numbered name. Its data are found from another folder, too. It is scored on any data
    with its own vocabulary."""
    home, away = tmp_path / "home", tmp_path / "away"
    away.mkdir()
    ranks = ranks_file(tmp_path / "ranks", [bytes([255 - i]) for i in range(256)])
    (tmp_path / "a.txt").write_text("some text " * 99)
    for name in ("text", "copy"):
        data_prep.prepare_text([tmp_path / "a.txt"], home / "data" / name, str(ranks), val_frac=0.2)
    for name in ("gpt-tiny", "gpt-tiny-2"):
        assert scripts.run("train.py", *flags(**SHORT, data="text"), cwd=home).returncode == 0
        assert (home / "runs" / name / "ckpt.pt").exists()
    assert scripts.run("eval.py", "runs/gpt-tiny/ckpt.pt", "--data", "copy", cwd=home).returncode == 0
    done = scripts.run("eval.py", home / "runs" / "gpt-tiny", cwd=away)
    assert done.returncode == 0, done.stderr
    assert scripts.run("train.py", "--resume", home / "runs" / "gpt-tiny", cwd=away).returncode == 0

    monkeypatch.chdir(away)
    ranks, made = SimpleNamespace(rank=0, share=lambda value: value, say=print), []
    monkeypatch.setattr(data_prep, "prepare_stdlib",
                        lambda: made.append(1) or shutil.copytree(home / "data/text", away / "data/stdlib"))
    for _ in range(2):                                                      # found from then on
        assert train.open_data(train.Options(), ranks).path == Path("data/stdlib")
    assert len(made) == 1


@pytest.mark.sparse
@pytest.mark.parametrize("name", models.names())
def test_a_model_file_runs_alone(name, scripts, tmp_path):
    source = Path(models.module(name).__file__).read_text()
    if "__main__" not in source and not settings.belongs(name):
        pytest.skip(f"models/{name}.py does nothing when it is run")
    (tmp_path / f"{name}.py").write_text(source)
    done = scripts.run(tmp_path / f"{name}.py", cwd=tmp_path)
    assert done.returncode == 0 and " parameters; loss after a step: " in done.stdout, done.stderr


def test_a_line_at_least_every_minute(data, tmp_path, monkeypatch, capsys):
    """Every step at first, then about every fifth of the time so far, at most every minute; by a clock of our own."""
    clock = iter(range(10 ** 9))                                            # a second passes whenever somebody looks
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    words = {**SHORT, "max_steps": 600, "eval_every": 1000, "save_every": 1000}
    assert inside(*flags(**words, data=data, out=tmp_path / "a")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "| loss" in line]
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    gaps = [b - a for a, b in zip(steps, steps[1:])]
    assert steps[:4] == [1, 2, 3, 4] and steps[-1] == 600 and max(gaps) == 20 and sorted(gaps[:-1]) == gaps[:-1]
    assert re.search(r" GiB \| about 0:\d\d:\d\d left$", lines[5]) and len(rows(tmp_path / "a")) == 600
    words |= {"max_steps": 1, "warmup_steps": 1, "batch_tokens": 150 * words["seq_len"], "micro_batch": 1}
    assert inside(*flags(**words, data=data, out=tmp_path / "b")) == 0
    assert re.findall(r"step     1/1 \| (\d+) of 150 micro-steps", capsys.readouterr().out) == ["61", "122"]


def test_a_bar_without_a_terminal(monkeypatch, capsys):
    """Nothing for a minute, then a line a minute. An item takes a second of our own clock."""
    def seconds(n):
        for _ in range(n):
            now[0] += 1
            yield now[0]

    now = [0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    assert list(cli.progress(seconds(50), "bar", 50)) == [*range(1, 51)] and not capsys.readouterr().err
    list(cli.progress(seconds(200), "bar", 200))
    assert re.findall(r"(\d+)/200", capsys.readouterr().err) == ["60", "120", "180"]


def test_what_a_cluster_does(data, tmp_path, monkeypatch, capsys):
    """Copies started by srun; half a torchrun; no hard links; what a kill left; an idle weight."""
    words = {**SMALL, "max_steps": 8, "save_every": 2, "data": data}
    for variable, said in (("SLURM_STEP_NUM_TASKS", "srun has started several copies"),
                           ("RANK", "RANK is set in the environment but LOCAL_RANK is not")):
        with monkeypatch.context() as patch:
            patch.delenv("LOCAL_RANK", raising=False)
            patch.setenv(variable, "4")
            assert inside(*flags(**words, out=tmp_path / "a")) == 2 and said in capsys.readouterr().err
    (tmp_path / "b" / "before_decay.tmp-1-x").mkdir(parents=True)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    run = runs.Run("x", {}, None, None, None, SimpleNamespace(rank=1))
    run.path, run.writes = tmp_path / "b", True
    (tmp_path / "b" / "ckpt.pt").write_text("a")
    assert run.keep_before_decay() is None and not (tmp_path / "b" / "before_decay.tmp-1-x").exists()
    assert (tmp_path / "b" / "before_decay" / "ckpt.pt").read_text() == "a"
    (tmp_path / "b" / "ckpt.pt").write_text("b")
    (tmp_path / "b" / "before_decay" / ".lock").touch()                     # somebody has continued from there
    assert run.keep_before_decay() is None and (tmp_path / "b" / "before_decay" / "ckpt.pt").read_text() == "a"
    gpt = models.module("gpt").Model
    monkeypatch.setattr(gpt, "init_weights", lambda model, init=gpt.init_weights: (
        init(model), model.register_parameter("idle", torch.nn.Parameter(torch.ones(1)))))
    assert inside(*flags(**words, out=tmp_path / "c")) == 2
    assert "models/gpt.py: idle takes no part in the loss" in capsys.readouterr().err
