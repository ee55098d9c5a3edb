"""The train loop: log, signals, full disk, ranks, compilation."""
import base64
import ctypes
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
from dataclasses import fields
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
from forked import Scripts
from nanodepth import devices, options, presets, runs
from nanodepth.data import Batches, Data
from small import ROOT, SMALL, assert_same_run, command, flags, inside, losses, near, process, rows, start, vals


def test_log_and_run_folder(whole, data):
    steps, checks = rows(whole), rows(whole, "val")
    assert [r["step"] for r in steps] == list(range(1, 41)) and [r["step"] for r in checks] == [0, 10, 20, 30, 40]
    assert all(r["tokens"] == 128 * r["step"] for r in steps + checks)
    assert set(steps[0]) >= {"loss", "lr", "grad_norm", "ms", "tok_s"}
    assert set(checks[0]) >= {"loss", "ppl", "bpb", "stats"}
    near(steps[0]["loss"], math.log(320))                      # zero head, and 257 ids padded to 320
    assert steps[-1]["loss"] < 3.0 and checks[-1]["loss"] < 3.0
    for r in checks:
        assert r["ppl"] == pytest.approx(math.exp(r["loss"])) and r["tokens"] == 128 * r["step"]
    config = json.loads((whole / "config.json").read_text())
    assert config["model_config"]["d_model"] == 32 and config["options"]["seed"] == 0 and config["versions"]["torch"]
    info = Path("/proc/cpuinfo")
    assert config["cpu"] in info.read_text() if info.exists() else "cpu" in config
    assert config["data"]["meta"]["shards"] and config["command"][1].endswith("train.py")
    for name in ("train.py", "muon.py", "models/gpt.py"):
        assert (whole / "source" / Path(name).name).read_bytes() == (ROOT / name).read_bytes()
    assert not list(whole.glob("*.tmp"))
    opt, _, _ = train.parse(flags(**SMALL))
    assert [r["lr"] for r in steps] == pytest.approx([opt.muon_lr * train.lr_scale(s, opt) for s in range(40)])


@pytest.mark.parametrize("end", [0.1, 0.01, 0.0])
def test_lr_schedules(end):
    opt = train.Options(max_steps=100, warmup_steps=10, decay_frac=0.2, final_lr_frac=end)
    scale = [train.lr_scale(s, opt) for s in range(100)]
    assert scale[:10] == pytest.approx([(s + 1) / 10 for s in range(10)]) and scale[10:80] == [1.0] * 70
    assert scale[80:] == pytest.approx(np.linspace(1, end, 21)[1:])
    cosine = train.Options(max_steps=100, warmup_steps=10, schedule="cosine", final_lr_frac=end)
    assert [train.lr_scale(s, cosine) for s in range(10, 100)] == pytest.approx(
        [end + (1 - end) * (1 + math.cos(math.pi * s / 90)) / 2 for s in range(90)])


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


def wait_for_step(folder, step, process):
    until = time.time() + 120
    while time.time() < until and process.poll() is None:
        if (folder / "log.jsonl").exists() and (folder / "log.jsonl").read_text().count('"train"') >= step:
            return
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not seen: {process.communicate()}")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_and_resume_is_exact(number, code, data, whole, scripts, tmp_path):
    out = tmp_path / "run"
    process = start(*flags(**SMALL, data=data, out=out))
    wait_for_step(out, 7, process)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in errors, errors
    assert f"python train.py --resume {out}" in printed.splitlines()[-1]
    step = runs.read_checkpoint(out)["step"]
    assert 7 <= step < 40 and f"after step {step}" in printed
    assert scripts.run("train.py", "--resume", out).returncode == 0
    assert_same_run(whole, out)


def test_non_finite_stops_before_the_step(data, scripts, tmp_path):
    out = tmp_path / "run"
    done = scripts.run("train.py", *flags(**{**SMALL, "adamw_lr": 1e30, "save_every": 1}, data=data, out=out))
    assert done.returncode == 3 and "Traceback" not in done.stderr
    last = done.stdout.splitlines()[-1]
    step = runs.read_checkpoint(out)["step"]
    assert last.startswith(f"step {step + 1}:")
    assert ("nan" in last or "inf" in last) and f"ckpt.pt is of step {step}" in last
    assert all(math.isfinite(r["loss"]) for r in rows(out)) and len(rows(out)) == step


def test_full_disk_keeps_the_old_checkpoint(data, tmp_path):
    """With a limit on file sizes in place of a full disk: the log fits, the checkpoint does not."""
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    out = tmp_path / "run"
    assert inside(*flags(**{**SMALL, "max_steps": 8, "schedule": "cosine"}, data=data, out=out)) == 0
    before = (out / "ckpt.pt").read_bytes()
    done = process(command("train.py", *flags(**SMALL, data=data, out=tmp_path / "new")), preexec_fn=limit)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "could not be written" in done.stdout
    assert not list((tmp_path / "new").glob("ckpt*")) and len(rows(tmp_path / "new")) == 40

    def broken(f):
        f.write(b"half")
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError):
        runs.write_atomically(out / "ckpt.pt", broken)
    assert (out / "ckpt.pt").read_bytes() == before and not list(out.glob("*.tmp"))


def test_a_report_is_whole_and_links_stay(tmp_path, monkeypatch):
    report, link = tmp_path / "a.json", tmp_path / "link"
    link.symlink_to(report)
    for path, text in ((report, "1"), (report, "2"), (link, "3")):
        runs.write_report(path, text)
        assert report.read_text() == text and link.is_symlink() and not report.is_symlink()

    def full(file):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(options.UserError, match="could not be written"):
        runs.write_report(report, "4")
    assert report.read_text() == "3" and sorted(tmp_path.iterdir()) == [report, link]


def test_only_what_is_raised_is_a_mistake_of_the_user():
    with pytest.raises(options.UserError, match="mine: 3 is too many"), options.user_errors("mine: "):
        raise ValueError("3 is too many")
    with pytest.raises(ValueError, match="not enough values") as bug, options.user_errors():
        _, _ = []
    assert bug.type is ValueError


def test_what_must_not_change_the_losses(data, whole, tmp_path):
    """Evaluation and checkpoint intervals: not a bit. The split into micro-steps: rounding only."""
    assert inside(*flags(**{**SMALL, "eval_every": 7, "save_every": 40, "eval_tokens": 99}, data=data,
                         out=tmp_path / "a")) == 0
    assert losses(tmp_path / "a") == losses(whole)
    assert inside(*flags(**{**SMALL, "micro_batch": 2}, data=data, out=tmp_path / "b")) == 0
    split, one = losses(tmp_path / "b"), losses(whole)
    near(split[:5], one[:5], times=64)                                      # later, rounding has grown
    assert split != one
    assert inside(*flags(**{**SMALL, "seed": 1, "max_steps": 3}, data=data, out=tmp_path / "c")) == 0
    assert losses(tmp_path / "c")[1] != losses(whole)[1]


def test_a_few_steps_are_all_warm_up(data, tmp_path):
    short = {key: value for key, value in SMALL.items() if key != "warmup_steps"} | {"max_steps": 2}
    assert inside(*flags(**short, data=data, out=tmp_path / "a")) == 0
    assert json.loads((tmp_path / "a" / "config.json").read_text())["options"]["warmup_steps"] == 2
    rates = [row["lr"] for row in map(json.loads, open(tmp_path / "a" / "log.jsonl")) if row["kind"] == "train"]
    assert rates == pytest.approx([0.0035, 0.007])                          # of the tiny preset's 0.007


def test_logged_loss_is_what_is_optimised(data, tmp_path):
    """With z-loss in training, plain cross-entropy in validation."""
    small, plain = {**SMALL, "max_steps": 3, "z_loss": 1.0, "micro_batch": 4}, math.log(320)
    assert inside(*flags(**small, data=data, out=tmp_path / "z")) == 0
    # logits of 0: z = log(320)^2
    near(losses(tmp_path / "z")[0][1], plain + plain ** 2)
    near(vals(tmp_path / "z")[0][1], plain)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_run(data, tmp_path, backend, monkeypatch):
    """aot_eager runs the graphs that inductor makes code of."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=backend))
    small = {**SMALL, "max_steps": 3, "n_layer": 1, "eval_every": 3}
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset(), counters.clear()
    assert inside(*flags(**small, data=data, out=tmp_path / "eager")) == 0 and not counters["stats"]["unique_graphs"]
    assert inside(*flags(**small, data=data, out=tmp_path / "compiled"), "--compile") == 0
    assert counters["stats"]["unique_graphs"]
    near(losses(tmp_path / "compiled"), losses(tmp_path / "eager"), times=64)
    eager, compiled = (runs.read_checkpoint(tmp_path / name)["model"] for name in ("eager", "compiled"))
    assert set(eager) == set(compiled)


@pytest.mark.parametrize("more", [[], pytest.param(["--compile"], marks=pytest.mark.full)], ids=["eager", "compiled"])
def test_two_ranks_see_the_same_batch(data, tmp_path, more):
    """Compiled, the model stays one graph: DDP does not split it."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
             str(ROOT / "train.py")]
    small = {**SMALL, "max_steps": 12, "micro_batch": 2, "model": models.names()[-1], "d_ff": 4096}     # over 1 MiB
    done = process(words + flags(**small, data=data, out=tmp_path / "two") + more,
                   env={"OMP_NUM_THREADS": "1", **os.environ, "TORCH_LOGS": "ddp_graphs"})
    assert done.returncode == 0 and "ddp_graphs" not in done.stderr, done.stderr
    assert "FutureWarning" not in done.stderr, done.stderr
    assert inside(*flags(**small, data=data, out=tmp_path / "one")) == 0
    for kind, other in dict(train="grad_norm", val="bpb").items():
        for a, b in zip(rows(tmp_path / "one", kind), rows(tmp_path / "two", kind), strict=True):
            near([b["loss"], b[other]], [a["loss"], a[other]], times=16 * (1 + a["step"]))


def test_half_a_torchrun_is_refused(data, tmp_path):
    env = {key: value for key, value in os.environ.items()
           if key not in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = process(command("train.py", *flags(**SMALL, data=data, out=tmp_path / "x")), env={**env, "RANK": "0"})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "LOCAL_RANK" in done.stderr and not (tmp_path / "x").exists()


def test_the_default_micro_batch(data):
    """As many sequences as make micro_tokens, in equal parts; fewer tokens for large models."""
    ranks = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"))
    options = train.Options(batch_tokens=1024, seq_len=16)
    with torch.device("meta"):
        model = torch.nn.Linear(1, 1)
        sizes = [torch.nn.Linear(1000, n * 1000, bias=False) for n in (536, 537, 2147, 2148)]
    found = []
    for model.micro_tokens in (32768, 512, 511, 100, 3):
        found.append(Batches(Data(data), options, ranks, model).micro)
    assert found == [64, 32, 16, 4, 1]
    options = train.Options(batch_tokens=131072, seq_len=16)
    assert [16 * Batches(Data(data), options, ranks, x).micro for x in sizes] == [32768, 16384, 8192, 4096]


def test_the_last_validation_may_be_longer(data, tmp_path):
    assert inside(*flags(**SMALL, final_eval_tokens=700, data=data, out=tmp_path / "a")) == 0
    assert [row["eval_tokens"] for row in rows(tmp_path / "a", "val")] == [500, 500, 500, 500, 700]


def test_deterministic(whole, data, tmp_path):
    """The same losses as without, on a CPU; torch refuses what it cannot do deterministically, and that is one line."""
    done = process(command("train.py", *flags(**SMALL, data=data, out=tmp_path / "a"), "--deterministic"))
    assert done.returncode == 0 and losses(tmp_path / "a") == losses(whole), done.stderr
    code = ("import torch; from nanodepth.devices import *; make_deterministic()\n"
            "with machine_errors('x'): torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))")
    done = process([sys.executable, "-c", code], cwd=ROOT)
    assert "UserError: put_ does not have a deterministic implementation: leave out" in done.stderr, done.stderr


def test_a_compiled_file_that_a_kill_cut_off(tmp_path):
    """The compiler would load it again and again."""
    (tmp_path / "kernel.so").write_bytes(b"\x7fELF")
    message = r"kernel.so, made by the compiler, .*: delete it and start"
    with pytest.raises(options.UserError, match=message), devices.machine_errors(""):
        ctypes.CDLL(str(tmp_path / "kernel.so"))


def test_eval_and_sample(whole, data, scripts, tmp_path):
    done = scripts.run("eval.py", whole, "--tokens", 500, "--json", tmp_path / "e.json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "e.json").read_text())
    last = rows(whole, "val")[-1]
    for key in ("loss", "ppl", "bpb"):
        near(row[key], last[key], times=64)
        assert f"{row[key]:.3f}"[:4] in done.stdout
    assert row["eval_tokens"] == 500 and row["step"] == 40

    model = runs.load(whole)[0].double()                                      # bits per byte by hand, token by token
    tokens, nats, size = Data(data).shards["val"][0][:501].astype(int), 0.0, 0
    for at in range(0, 500, 16):
        idx = torch.tensor(tokens[at:at + 17])
        logp = model(idx[None, :-1])[0].log_softmax(-1)[0].gather(-1, idx[1:, None])
        if len(idx) > 1:
            nats -= logp[:500 - at].sum().item()
            size += sum(t < 256 for t in idx[1:][:500 - at].tolist())
    near(row["bpb"], nats / math.log(2) / size, times=64)

    words = [whole, "--prompt", "the c", "--max_new_tokens", 20, "--seed", 3]
    first, again = scripts.run("sample.py", *words), scripts.run("sample.py", *words)
    assert first.returncode == 0 and first.stdout == again.stdout and first.stdout.startswith("the c")
    assert scripts.run("sample.py", whole, "--n", 2, "--top_k", 2, "--max_new_tokens", 4).stdout.count("---") == 2


def test_the_default_name_is_numbered(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt-tiny", "gpt-tiny-2"):
        assert inside(*flags(**{**SMALL, "max_steps": 1, "warmup_steps": 1}, data=data)) == 0
        assert (tmp_path / "runs" / name / "ckpt.pt").exists()


def test_from_another_folder(data, scripts, tmp_path, monkeypatch):
    """Data and runs are found below the working directory, the run's folders and the repository; the default data are
    made in the repository."""
    home, away = tmp_path / "home", tmp_path / "away"
    away.mkdir()
    shutil.copytree(data, home / "data" / "text")
    few = flags(**{**SMALL, "max_steps": 1, "warmup_steps": 1})
    assert scripts.run("train.py", *few, "--data", "text", cwd=home).returncode == 0
    done = scripts.run("eval.py", home / "runs" / "gpt-tiny", cwd=away)
    assert done.returncode == 0, done.stderr
    assert scripts.run("eval.py", "runs/gpt-tiny", "--data", "text", cwd=home).returncode == 0
    done = scripts.run("train.py", "--resume", home / "runs" / "gpt-tiny", cwd=away)
    assert done.returncode == 0 and "is finished" in done.stdout, done.stderr

    monkeypatch.chdir(away)
    for module in (data_prep, options):
        monkeypatch.setattr(module, "ROOT", home)
    assert options.run_folder("runs/gpt-tiny/ckpt.pt") == str(home / "runs" / "gpt-tiny")
    assert options.run_folder("runs/other") == "runs/other"
    assert Path(data_prep.train_folder("text")) == home / "data" / "text"
    monkeypatch.setattr(data_prep, "prepare_stdlib", lambda folder: Path(folder).mkdir())
    assert data_prep.train_folder("stdlib").resolve() == home / "data" / "stdlib" and not list(away.iterdir())
    assert data_prep.train_folder("stdlib") == home / "data" / "stdlib"             # found from now on


def test_a_preset_needs_no_steps(monkeypatch):
    monkeypatch.setitem(presets.PRESETS, "mine", {"n_layer": 1})
    options, config, _ = train.parse(["--preset", "mine", "--max_steps", "7"])
    assert (options.warmup_steps, config["n_layer"]) == (7, 1)
    assert train.parse(["--preset", "mine"])[0].warmup_steps == train.Options.warmup_steps


def test_eval_of_a_run_with_its_own_vocabulary(data, scripts, tmp_path):
    """Scored on its data, also from another folder with the same vocabulary; refused on byte tokens."""
    (tmp_path / "ranks").write_bytes(b"\n".join(base64.b64encode(bytes([255 - i])) + b" %d" % i for i in range(256)))
    (tmp_path / "a.txt").write_text("some text " * 99)
    for name in ("own", "copy"):
        data_prep.prepare_text([tmp_path / "a.txt"], tmp_path / name, str(tmp_path / "ranks"), val_frac=0.2)
    assert inside(*flags(**{**SMALL, "max_steps": 1, "warmup_steps": 1}, data=tmp_path / "own",
                         out=tmp_path / "run")) == 0
    assert scripts.run("eval.py", tmp_path / "run").returncode == 0
    assert scripts.run("eval.py", tmp_path / "run", "--data", tmp_path / "copy").returncode == 0
    done = scripts.run("eval.py", tmp_path / "run", "--data", data)
    assert done.returncode == 2 and "other tokens" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_help_shows_the_model_options(scripts):
    name = models.names()[-1]
    own = {f.name for f in fields(models.module(name).Config)} - {f.name for f in fields(models.module("gpt").Config)}
    done = scripts.run("train.py", "--model", name, "--help")
    assert done.returncode == 0 and own and all(f"--{option} " in done.stdout for option in own | {"muon_lr"})
    assert not re.search(r"--\w+ [A-Z]+ *\[", done.stdout), "an option without a text"


@pytest.fixture(scope="session")
def alone():
    with Scripts("--alone") as alone:
        yield alone


@pytest.mark.parametrize("name", models.names())
def test_a_model_file_runs_alone(name, alone, tmp_path):
    source = Path(models.module(name).__file__).read_text()
    if "__main__" not in source and not settings.belongs(name):
        pytest.skip(f"models/{name}.py does nothing when it is run")
    (tmp_path / f"{name}.py").write_text(source)
    done = alone.run(tmp_path / f"{name}.py", cwd=tmp_path)
    assert done.returncode == 0 and " parameters; loss after a step: " in done.stdout, done.stderr


@pytest.mark.parametrize("name", models.names())
def test_self_report(name, scripts):
    done = scripts.run("-m models", name)
    assert done.returncode == 0, done.stderr
    assert " parameters" in done.stdout and "forward FLOPs per token" in done.stdout
    assert " parameters (" in done.stdout or not settings.belongs(name)
    if hasattr(models.module(name), "neutral"):
        assert "no neutral setting" in done.stdout or float(done.stdout.split("at most ")[1]) < 1e-6


def test_threads(monkeypatch):
    """One per core; half as many while the clock says that this is clearly faster."""
    for most, fastest, chosen in ((4, 4, 4), (4, 1, 1), (4, 2, 2), (1, 1, 1)):
        now, clock = [most], [0.0]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: most)
            patch.setattr(torch, "set_num_threads", lambda n: now.__setitem__(0, n))

            def tick():
                clock[0] += 20.0 if now[0] > fastest else 1 / now[0]
                return clock[0]
            patch.setattr(devices.time, "perf_counter", tick)
            assert devices.set_threads() == chosen == now[0], (most, fastest)
            assert devices.set_threads(3) == now[0] == 3
