"""Runs that go on: longer than planned, with other options, from other weights, after a broken file or a Ctrl-C."""
import copy
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import types

import pytest
import torch
import torch.nn.functional as F

import data_prep
import models
import muon
import train
from nanodepth import cli, ran, runs
from nanodepth.cli import UserError
from small import SMALL, assert_same_run, finish, flags, inside, losses, near, rows, start, vals


def resumed(scripts, *words):
    done = scripts.run("train.py", "--resume", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_longer_run_is_the_one_that_was_longer_from_the_start(data, scripts, refused, tmp_path, capsys):
    short = {**SMALL, "max_steps": 40}                                      # Muon's momentum falls from step 30 on
    for name, steps in (("short", 40), ("long", 60)):
        assert inside(*flags(**{**short, "max_steps": steps}, data=data, out=tmp_path / name)) == 0
    kept = tmp_path / "short" / "before_decay"
    capsys.readouterr()
    assert runs.load(kept)[1]["step"] == 30 and f"{kept} is at step 30 of 40\n" == capsys.readouterr().err
    assert runs.load(tmp_path / "long")[1]["step"] == 60 and not capsys.readouterr().err
    said = refused("train.py", "--resume", tmp_path / "short", "--max_steps", 60)
    assert "fall from step 30 on" in said and f"resume a copy of {kept}" in said
    finished = (tmp_path / "short" / "ckpt.pt").read_bytes()
    shutil.copytree(kept, tmp_path / "copy")
    shutil.move(tmp_path / "copy", kept / "before_decay")                   # as if it was killed at step 30
    assert "going on at step 30 of 60" in resumed(scripts, kept, "--max_steps", 60)
    assert_same_run(kept, tmp_path / "long")
    assert runs.read_checkpoint(kept / "before_decay")["step"] == 45        # the longer run's
    assert (tmp_path / "short" / "ckpt.pt").read_bytes() == finished        # the shorter run is as it was
    assert json.loads((kept / "config.json").read_text())["options"]["max_steps"] == 60
    assert "is finished: it has all its 60 steps" in resumed(scripts, kept)


@pytest.mark.parametrize("changes, old, new, step, said", [
    ({}, 48, 60, 36, None), ({}, 48, 60, 37, "fall from step 36 on"),  # Muon's momentum falls 12 steps
    ({"decay_frac": 0.5}, 48, 60, 25, "fall from step 24 on"),         # the rates fall for longer
    ({"optimizer": "adamw"}, 40, 60, 32, None), ({"optimizer": "adamw"}, 40, 60, 33, "fall from step 32 on"),
    ({}, 48, 44, 33, None), ({}, 48, 44, 34, "fall from step 33 on"),
    ({"schedule": "cosine"}, 8, 60, 4, "a cosine schedule has one length")])
def test_which_lengths_fit(changes, old, new, step, said):
    options = train.Options(resume="nowhere", max_steps=new, warmup_steps=3, **changes)
    if said is None:
        runs.check_length(options, old, step)
    else:
        with pytest.raises(UserError, match=f"--max_steps {new}: nowhere is at step {step} of {old}, and .*{said}.*"
                                            "start a new run with --init_from nowhere"):
            runs.check_length(options, old, step)


def test_what_may_change(data, whole, scripts, tmp_path):
    """How often is validated and on how much, the place of the data, a preset that is gone, and a model file (which is
    said and recorded). eval.py finds the data afterwards, and the numbers of the last validation."""
    shutil.copytree(whole / "before_decay", tmp_path / "a")
    shutil.copytree(data, tmp_path / "moved")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    now, config["code"]["models/gpt.py"] = config["code"]["models/gpt.py"], "123456789abc"
    later, config["options"]["preset"] = config["code"].pop("muon.py"), "gone"             # as if imported since then
    config["versions"]["torch"] = "2.0"
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    said = resumed(scripts, tmp_path / "a" / "ckpt.pt", "--eval_every", 3, "--eval_tokens", 300, "--threads", 1,
                   "--data", tmp_path / "moved", "--dtype", "auto",
                   "--n_layer", SMALL["n_layer"], "--seq_len", SMALL["seq_len"])    # said again
    assert "\nmodels/gpt.py, muon.py: changed since the run began" in said and "up to step 30 it was 2.0\n" in said
    done = scripts.run("eval.py", tmp_path / "a", "--tokens", 300, "--json", tmp_path / "e.json")
    (scores,), last = json.loads((tmp_path / "e.json").read_text()), rows(tmp_path / "a", "val")[-1]
    for key in ("loss", "ppl", "bpb"):
        near(scores[key], last[key], times=64)
        assert f"{scores[key]:.3f}"[:4] in done.stdout
    assert done.stdout.splitlines()[1].split()[3:6] == [str(tmp_path / "moved"), str(SMALL["seq_len"]), "300"]
    assert (scores["eval_tokens"], scores["step"], done.stderr) == (300, 40, "")        # it was resumed with this code
    assert (tmp_path / "a" / "source" / "from-step-30" / "models" / "gpt.py").exists()
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["options"]["eval_tokens"] == 300 and config["model_config"]["d_model"] == 32
    assert config["code"]["models/gpt.py"] == f"123456789abc, from step 30 {now}"
    assert config["code"]["muon.py"] == f"none, from step 30 {later}"
    assert config["versions"]["torch"] == f"2.0, from step 30 {torch.__version__}"
    assert config["data"]["path"] == str(tmp_path / "moved")
    assert losses(tmp_path / "a") == losses(whole)
    assert [row["step"] for row in rows(tmp_path / "a", "val")] == [0, 10, 20, 30, 33, 36, 39, 40]
    assert rows(tmp_path / "a", "val")[-1]["eval_tokens"] == 300


def test_a_checkpoint_is_read_once_the_folder_is_locked(whole, tmp_path, monkeypatch):
    """The process that held it has saved a newer one meanwhile, the last."""
    lock = runs.lock
    shutil.copytree(whole / "before_decay", tmp_path / "a")
    monkeypatch.setattr(runs, "lock", lambda path: shutil.copy(whole / "ckpt.pt", path) and lock(path))
    assert inside("--resume", str(tmp_path / "a")) == 0 and rows(tmp_path / "a")[-1]["step"] == 30      # trains no more


def test_init_from(data, whole, scripts, tmp_path):
    """The weights, and the options of the model; the rest is a new run's."""
    few = {key: SMALL[key] for key in ("seq_len", "batch_tokens", "eval_tokens", "device", "dtype")}
    begun = tmp_path / "begun"
    shutil.copytree(whole, begun)
    assert inside(*flags(**few, max_steps=3, init_from=begun, data=data, out=tmp_path / "a")) == 0
    near(vals(tmp_path / "a")[0][1], vals(whole)[-1][1])
    saved = runs.read_checkpoint(tmp_path / "a")
    assert saved["step"] == 3 and saved["config"]["model_config"]["d_ff"] == 64
    weights = runs.load(begun)[0], models.build("gpt", **saved["config"]["model_config"])
    assert saved["config"]["begins_with"] == ran.checksum(weights[0]) != ran.checksum(weights[1])
    assert "begins_with" in ran.differences(saved["config"], runs.read_config(whole))
    shutil.rmtree(begun)                                                    # not needed to go on
    resumed(scripts, tmp_path / "a")
    tied = models.build("gpt", **saved["config"]["model_config"] | {"tie_embeddings": True})
    tied.embed.weight.data.fill_(math.nan)                                  # a run that diverged still loads
    runs.take_weights(tied, {"model": tied.state_dict()}, "the model", "a")


def test_random_numbers_and_an_own_optimizer_go_on_too(data, tmp_path, monkeypatch):
    """With dropout, as an own model may have it; validations draw none. The optimizer is one function in muon.py; it
    follows the schedule, with a momentum of its own.
    """
    def sgd(matrices, others, options):
        return [torch.optim.SGD([dict(params=matrices, lr=options.muon_lr), *others], momentum=0.7)]

    monkeypatch.setitem(muon.OPTIMIZERS, "sgd", sgd)
    mlp, plain = models.module("gpt").MLP, models.module("gpt").MLP.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: F.dropout(plain(self, x), 0.5, self.training))
    few = {**SMALL, "max_steps": 12, "optimizer": "sgd", "data": data}
    assert inside(*flags(**few, out=tmp_path / "a")) == 0
    group = runs.read_checkpoint(tmp_path / "a")["optimizers"][0]["param_groups"][0]
    options = train.parse(flags(**few))[0]
    assert group["momentum"] == 0.7 and group["lr"] == options.muon_lr * train.lr_scale(11, options)
    assert losses(tmp_path / "a")[-1][1] < losses(tmp_path / "a")[0][1]
    shutil.copytree(tmp_path / "a" / "before_decay", tmp_path / "b")
    assert inside("--resume", str(tmp_path / "b")) == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert inside(*flags(**few | {"eval_every": 12}, out=tmp_path / "c")) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "c")


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_optimizer_state_goes_by_name(kind):
    """After two lines of a model file were swapped: the same next step. And muon.py's numbers are today's."""
    def build(*names):
        model, options = torch.nn.Module(), train.Options(optimizer=kind, second_moment=0.9)
        model.blocks = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in names})
        return model, muon.optimizers(model, options)

    def step(model, optimizers, seed):
        generator = torch.Generator().manual_seed(seed)
        for _, p in sorted(model.named_parameters()):
            p.grad = torch.randn(p.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    (a, old), (b, new) = build("gate", "up"), build("up", "gate")
    step(a, old, 0)
    b.load_state_dict(a.state_dict())
    betas = new[-1].param_groups[0]["betas"]
    new[-1].param_groups[0]["betas"] = (0.5, 0.5)
    for was, optimizer in zip(old, new):
        optimizer.load_state_dict(runs.own_state(optimizer, copy.deepcopy(was.state_dict())))
    assert new[-1].param_groups[0]["betas"] == (0.5, 0.5)
    new[-1].param_groups[0]["betas"] = betas
    after, wanted = step(b, new, 1), step(a, old, 1)
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)
    with pytest.raises(ValueError, match="blocks.(up|other).bias is trained by another optimizer, or not at all"):
        runs.own_state(new[-1], build("gate", "other")[1][-1].state_dict())


def test_a_signal_stops_a_validation(tmp_path):
    """The log of the resumed run has it once, whole."""
    (tmp_path / "a.txt").write_text("the cat sat on a mat " * 100_000)
    data_prep.prepare_text([tmp_path / "a.txt"], tmp_path / "big", "byte", val_frac=0.9)
    slow = {**SMALL, "eval_tokens": 10 ** 9, "micro_batch": 1, "max_steps": 2, "warmup_steps": 1, "dtype": "auto"}
    out = tmp_path / "run"
    running = start("train.py", *flags(**slow, data=tmp_path / "big", out=out))
    assert any("to resume" in line for line in running.stdout)              # the last line before the first validation
    time.sleep(0.5)                                                         # which takes longer than this
    running.send_signal(signal.SIGINT)
    printed, errors = finish(running, 130)
    assert printed.endswith(f"interrupted after step 0; to resume: python train.py --resume {out}\n")
    assert "Traceback" not in errors, errors
    assert not rows(out, "val") and not rows(out)
    assert inside("--resume", str(out), "--eval_tokens", "500") == 0
    assert runs.read_config(out)["options"]["dtype"] in ("bf16", "fp32")    # what it was, not what was asked for
    assert [row["step"] for row in rows(out, "val")] == [0, 2]


def test_ctrl_c_when_the_terminal_is_gone(data, tmp_path):
    """As with `| tee log`: tee dies of it first."""
    running = start("train.py", *flags(**{**SMALL, "max_steps": 3000}, data=data, out=tmp_path / "run"))
    assert any("| loss" in line for line in running.stdout)
    running.stdout.close(), running.stderr.close()
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130 and runs.read_checkpoint(tmp_path / "run")["step"] == len(rows(tmp_path / "run"))


def test_only_a_second_ctrl_c_ends_a_run_at_once(capfd):
    """torchrun and shells repeat other signals."""
    with cli.signals() as got:
        for number in (numbers := [signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]):
            os.kill(os.getpid(), number)
        assert got == numbers
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL == signal.getsignal(signal.SIGINT)
    said = "\nstopping after this step"
    assert capfd.readouterr().err == 4 * f"{said}\n" + f"{said}; Ctrl-C again quits now\n"


def test_weights_and_biases(data, tmp_path, monkeypatch):
    """A run that goes on is the same one there; a copy that goes on, and before_decay, are others."""
    begun, logged = [], []
    run = types.SimpleNamespace(log=lambda row, step: logged.append((step, row)))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **given: begun.append(given) or run))
    assert inside(*flags(**{**SMALL, "max_steps": 12}, data=data, out=tmp_path / "a", wandb=True)) == 0
    assert sorted({step for step, _ in logged}) == list(range(13))
    assert all(re.fullmatch("(train|val)/(?!kind|step|tokens)\\w+", name) for _, row in logged for name in row)
    shutil.copytree(tmp_path / "a" / "before_decay", tmp_path / "b")
    for path in (tmp_path / "a", tmp_path / "b", tmp_path / "a" / "before_decay"):
        assert inside("--resume", str(path)) == 0
    ids = [given["id"] for given in begun]
    assert ids[0] == ids[1] and len(set(ids)) == 3 and all(given["resume"] == "allow" for given in begun)
