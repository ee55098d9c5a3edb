"""Runs that go on: longer than planned, with other options, from other weights, after a broken file or a Ctrl-C."""
import base64
import json
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
from nanodepth import runs
from nanodepth.cli import UserError
from small import ROOT, SMALL, assert_same_run, flags, inside, losses, near, rows, start, vals

LONG = {**SMALL, "max_steps": 48, "schedule": "wsd"}                        # its end begins at step 36


def resumed(scripts, *words, code=0):
    done = scripts.run("train.py", "--resume", *words)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_a_longer_run_is_the_one_that_was_longer_from_the_start(data, scripts, tmp_path):
    """With AdamW; Muon's momentum rises over a quarter of a short run, so that there only the length must fit."""
    short = {**LONG, "optimizer": "adamw", "max_steps": 40}                 # its end begins at step 32
    for name, steps in (("short", 40), ("long", 60)):
        assert inside(*flags(**{**short, "max_steps": steps}, data=data, out=tmp_path / name)) == 0
    kept = tmp_path / "short" / "before_decay"
    assert runs.read_checkpoint(kept)["step"] == 32 and runs.read_checkpoint(tmp_path / "long")["step"] == 60
    said = resumed(scripts, tmp_path / "short", "--max_steps", 60, code=2)
    assert "at step 40 of 40" in said and "begins at step 32" in said
    assert f"python train.py --resume {kept} --max_steps 60" in said and len(said.splitlines()) == 1
    finished = (tmp_path / "short" / "ckpt.pt").read_bytes()
    shutil.copytree(kept, tmp_path / "copy")
    shutil.move(tmp_path / "copy", kept / "before_decay")                   # as if it was killed at step 32
    assert "going on at step 32 of 60" in resumed(scripts, kept, "--max_steps", 60)
    assert_same_run(kept, tmp_path / "long")
    assert runs.read_checkpoint(kept / "before_decay")["step"] == 48        # the longer run's
    assert (tmp_path / "short" / "ckpt.pt").read_bytes() == finished        # the shorter run is as it was
    assert json.loads((kept / "config.json").read_text())["options"]["max_steps"] == 60
    assert "is finished: it has all its 60 steps" in resumed(scripts, kept)


@pytest.mark.parametrize("case", ["full", "used", "stuck", "no permission"])
def test_a_full_disk_takes_the_place_of_before_decay(case, data, tmp_path, monkeypatch):
    """Unless somebody went on from there, it cannot be deleted, or another thing is wrong: then the last checkpoint is
    missing, and the exit code is 1."""
    save, kept = runs.write_atomically, tmp_path / "run" / "before_decay"

    def broken(path, write):
        if path.name == "ckpt.pt" and kept.exists():
            if case == "used":
                (kept / ".lock").touch()
            if case == "no permission":
                raise PermissionError(13, "Permission denied")
            try:
                raise OSError(28, "No space left on device")
            finally:
                raise RuntimeError("unexpected pos 704 vs 598")             # as torch does
        save(path, write)
    monkeypatch.setattr(runs, "write_atomically", broken)
    if case == "stuck":
        monkeypatch.setattr(runs.shutil, "rmtree", lambda *args, **kwargs: None)
    stays = case != "full"
    assert inside(*flags(**LONG, data=data, out=tmp_path / "run")) == int(stays)
    assert runs.read_checkpoint(tmp_path / "run")["step"] == (36 if stays else 48) and kept.exists() == stays


def test_muon_goes_on_before_its_momentum_falls(data, scripts, tmp_path):
    assert inside(*flags(**LONG, data=data, out=tmp_path / "a")) == 0
    kept = tmp_path / "a" / "before_decay"
    assert runs.read_checkpoint(kept)["step"] == 36                         # 12 steps, a quarter; wsd's decay takes 10
    resumed(scripts, kept, "--max_steps", 60)
    assert [row["lr"] for row in rows(kept)[36:45]] == [rows(tmp_path / "a")[30]["lr"]] * 9
    said = resumed(scripts, tmp_path / "a", "--max_steps", 44, code=2)      # nor shorter
    assert "the shorter run's end begins at step 33" in said


def test_a_cosine_run_has_one_length(data, scripts, tmp_path):
    assert inside(*flags(**{**SMALL, "schedule": "cosine", "max_steps": 8}, data=data, out=tmp_path / "a")) == 0
    assert not (tmp_path / "a" / "before_decay").exists()
    said = resumed(scripts, tmp_path / "a", "--max_steps", 60, code=2)
    assert "cosine schedule has one length" in said and f"--init_from {tmp_path / 'a'}" in said


def test_data_that_moved(data, whole, scripts, tmp_path):
    """What --resume is told of them, eval.py knows afterwards."""
    shutil.copytree(whole / "before_decay", tmp_path / "a")
    shutil.copytree(data, tmp_path / "data")
    resumed(scripts, tmp_path / "a", "--data", tmp_path / "data")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["data"]["path"] == str(tmp_path / "data")
    assert runs.read_checkpoint(tmp_path / "a")["config"]["data"]["path"] == str(tmp_path / "data")


def test_what_may_change(data, whole, scripts, tmp_path):
    """How often is validated and on how much, a preset that is gone, a model file (which is said), and config.json."""
    shutil.copytree(whole / "before_decay", tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{broken")
    (tmp_path / "a" / "source").mkdir(exist_ok=True)
    shutil.copy(ROOT / "train.py", tmp_path / "a" / "source")
    (tmp_path / "a" / "source" / "gpt.py").write_text("as it was")
    checkpoint = runs.read_checkpoint(tmp_path / "a")
    checkpoint["config"]["options"]["preset"] = "gone"
    torch.save(checkpoint, tmp_path / "ckpt.pt")                            # the old file is mapped
    (tmp_path / "ckpt.pt").replace(tmp_path / "a" / "ckpt.pt")
    said = resumed(scripts, tmp_path / "a" / "ckpt.pt", "--eval_every", 3, "--eval_tokens", 300, "--threads", 1,
                   "--n_layer", SMALL["n_layer"], "--seq_len", SMALL["seq_len"])    # said again
    assert "source/gpt.py is what the run began with" in said and "source/train.py is" not in said
    assert "source/gpt.py is what it was trained with" in scripts.run("eval.py", tmp_path / "a").stderr
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["options"]["eval_tokens"] == 300 and config["model_config"]["d_model"] == 32
    assert losses(tmp_path / "a") == losses(whole)
    assert [row["step"] for row in rows(tmp_path / "a", "val")] == [0, 10, 20, 30, 33, 36, 39, 40]
    assert rows(tmp_path / "a", "val")[-1]["eval_tokens"] == 300


def test_init_from(data, whole, scripts, tmp_path):
    """The weights, and the options of the model; the rest is a new run's."""
    few = {key: SMALL[key] for key in ("seq_len", "batch_tokens", "eval_tokens", "device", "dtype")}
    assert inside(*flags(**few, max_steps=3, init_from=whole, data=data, out=tmp_path / "a")) == 0
    near(vals(tmp_path / "a")[0][1], vals(whole)[-1][1])
    saved = runs.read_checkpoint(tmp_path / "a")
    assert saved["step"] == 3 and saved["config"]["model_config"]["d_ff"] == 64
    shutil.move(whole, tmp_path / "moved")                                  # not needed to go on
    resumed(scripts, tmp_path / "a")
    shutil.move(tmp_path / "moved", whole)
    mistakes = ((("--n_layer", 3), "do not fit the model"), (("--model", models.names()[-1]), "do not fit the model"),
                (("--init_from", tmp_path), "ckpt.pt does not exist"))
    (tmp_path / "a.txt").write_text("other text, of two documents\n<|endoftext|>\n" * 60)
    (tmp_path / "ranks").write_bytes(b"\n".join(base64.b64encode(bytes([255 - i])) + b" %d" % i for i in range(256)))
    data_prep.prepare_text([tmp_path / "a.txt"], tmp_path / "other", str(tmp_path / "ranks"), val_frac=0.3)
    for more, said in (*mistakes, (("--data", tmp_path / "other"), "has other tokens")):
        done = scripts.run("train.py", *flags(**few, init_from=whole, data=data, out=tmp_path / "b"), *more)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
        assert not (tmp_path / "b").exists()


def test_random_numbers_go_on_too(data, tmp_path, monkeypatch):
    """With dropout, as an own model may have it."""
    mlp, plain = models.module("gpt").MLP, models.module("gpt").MLP.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: F.dropout(plain(self, x), 0.5, self.training))
    assert inside(*flags(**{**LONG, "max_steps": 12}, data=data, out=tmp_path / "a")) == 0
    shutil.copytree(tmp_path / "a" / "before_decay", tmp_path / "b")
    assert inside("--resume", str(tmp_path / "b")) == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_signal_stops_a_validation(tmp_path):
    """The log of the resumed run has it once, whole."""
    slow = {**SMALL, "eval_tokens": 10 ** 9, "micro_batch": 1, "max_steps": 2, "warmup_steps": 1}
    big = tmp_path / "big"
    (tmp_path / "val.txt").write_text("the cat sat on a mat " * 100_000)
    (tmp_path / "train.txt").write_text("the cat sat on a mat " * 20)
    data_prep.prepare_text([tmp_path / "train.txt"], big, "byte", val_files=[tmp_path / "val.txt"])
    out = tmp_path / "run"
    process = start(*flags(**slow, data=big, out=out))
    until = time.time() + 60
    while not (out / "log.jsonl").exists() and time.time() < until:
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted after step 0" in printed, errors
    assert "stopping after this step; again to quit now" in errors and "Traceback" not in errors
    assert not rows(out, "val") and not rows(out)
    assert inside("--resume", str(out), "--eval_tokens", "500") == 0
    assert [row["step"] for row in rows(out, "val")] == [0, 2]


def test_samples_and_tensorboard(data, tmp_path, capsys):
    """Samples at validations of multiples of sample_every, without a change to the losses; scalars of every row."""
    few = {**SMALL, "max_steps": 8, "eval_every": 2, "n_layer": 1, "z_loss": 0.1}
    assert inside(*flags(**few, data=data, out=tmp_path / "a")) == 0
    capsys.readouterr()
    assert inside(*flags(**few, data=data, out=tmp_path / "b", sample_every=4, tensorboard=True)) == 0
    assert capsys.readouterr().out.count("---") == 2 * 3                    # before and behind those of 0, 4 and 8
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and vals(tmp_path / "a") == vals(tmp_path / "b")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path / "b")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (row["step"], pytest.approx(row["loss"])) for row in rows(tmp_path / "b")]
    assert [e.step for e in events.Scalars("val/bpb")] == [0, 2, 4, 6, 8]
    assert inside("--resume", str(tmp_path / "b")) == 0
    again = EventAccumulator(str(tmp_path / "b")).Reload()
    assert all([e.step for e in again.Scalars(name)] == [e.step for e in events.Scalars(name)]
               for name in ("train/loss", "val/bpb"))


def test_weights_and_biases(data, tmp_path, monkeypatch):
    """A run that goes on is the same one there; a copy that goes on, and before_decay, are others."""
    begun, logged = [], []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(
        init=lambda **given: begun.append(given) or types.SimpleNamespace(log=lambda row, step: logged.append(step))))
    assert inside(*flags(**LONG, data=data, out=tmp_path / "a", wandb=True)) == 0
    assert sorted(set(logged)) == list(range(49))
    shutil.copytree(tmp_path / "a" / "before_decay", tmp_path / "b")
    for path in (tmp_path / "a", tmp_path / "b", tmp_path / "a" / "before_decay"):
        assert inside("--resume", str(path)) == 0
    ids = [given["id"] for given in begun]
    assert ids[0] == ids[1] and len(set(ids)) == 3 and all(given["resume"] == "allow" for given in begun)


def test_memory_that_is_short_is_no_wrong_checkpoint(whole, data, tmp_path, monkeypatch):
    def short(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", short)
    for words in (["--resume", str(whole)], flags(**SMALL, init_from=whole, data=data, out=tmp_path / "a")):
        with pytest.raises(UserError, match="^out of memory: "):
            inside(*words)
    with pytest.raises(torch.OutOfMemoryError):
        runs.load(whole)
