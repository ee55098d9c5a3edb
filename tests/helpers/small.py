"""A small run, whole and uninterrupted, and what tests of train.py share."""
import json
import os
import re
import subprocess
import sys
import time
import types
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import data_prep
import train
from forked import within
from nanodepth import runs

ROOT = Path(__file__).parents[2]
SMALL = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_ff": 64, "max_len": 64, "seq_len": 16, "batch_tokens": 128,
         "max_steps": 40, "warmup_steps": 3, "eval_every": 10, "eval_tokens": 500, "final_eval_tokens": "none",
         "save_every": 5, "device": "cpu", "dtype": "fp32"}


def near(found, exact, size=None, dtype=torch.float32, times=16):
    """found, from sums in `dtype`, is the float64 result but for so many roundings of `size`; None: of the result."""
    found, exact = (torch.as_tensor(x, dtype=torch.float64) for x in (found, exact))
    eps = times * torch.finfo(dtype).eps
    torch.testing.assert_close(found, exact, rtol=eps if size is None else 0, atol=0 if size is None else eps * size)


@contextmanager
def wide():
    """Everything in float64: also what transformers computes in fp32 in any model, rotary tables and RMSNorms."""
    before = torch.get_default_dtype()
    pytest.importorskip("safetensors.torch")                    # it has tables of dtypes, which are made once
    torch.set_default_dtype(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        yield
    torch.set_default_dtype(before)


def flags(**options):
    return [word for k, v in options.items() for word in ([f"--{k}"] if v is True else [f"--{k}", str(v)])]


def start(script, *words, ranks=None, env={}, **more):
    """A script as a process of its own beside the test, under torchrun with `ranks`. Most tests take scripts.run()."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
    more = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | more
    return subprocess.Popen([sys.executable, *launcher, str(ROOT / script), *map(str, words)],
                            env={"OMP_NUM_THREADS": "1", **os.environ, **env}, **more)


def wait_until(condition, process):
    """Waits for what the process does; an AssertionError with its output if it ends before, or after two minutes."""
    until = time.time() + 120
    while not condition():
        assert process.poll() is None and time.time() < until, process.communicate()
        time.sleep(0.001)


def finish(process, code=0):
    """(stdout, stderr) of a process that ends with this exit code."""
    said = process.communicate(timeout=600)
    assert process.returncode == code, (process.returncode, *said)
    return said


def inside(*words):
    """The exit code of train.py in this process."""
    return within("train.py", train.main, *words)


def files_of(folder):
    """{path: contents} without the lock files of runs and what is known of shards."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")
            if path.name not in (".lock", "shards_index.json")}


@pytest.fixture
def refused(scripts, monkeypatch, capsys, tmp_path):
    """refused(script, *words): the one line on stderr that the script says before it exits with 2, no file changed.

    at: the folder where it runs. main: that of the script, to run it in this process.
    """
    def call(script, *words, at=tmp_path, main=None, code=2):
        before = files_of(at)
        if main:
            monkeypatch.chdir(at)
            capsys.readouterr()
            found, (out, err) = within(script, main, *words), capsys.readouterr()
        else:
            done = scripts.run(script, *words, cwd=at)
            found, out, err = done.returncode, done.stdout, done.stderr
        assert (found, out, err.count("\n")) == (code, "", 1) and len(err) < 800, (found, out, err)
        assert err.startswith(f"{script}: {'error: ' if code == 2 else ''}"), err
        assert files_of(at) == before
        return err
    return call


def rows(folder, kind="train"):
    return [r for r in map(json.loads, (folder / "log.jsonl").read_text().splitlines()) if r["kind"] == kind]


def losses(folder):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in rows(folder)]


def vals(folder):
    return [(r["step"], r["loss"], r["bpb"], r["stats"]) for r in rows(folder, "val")]


def assert_same_run(a, b):
    """Same losses, same evaluations, same final weights and optimizer state, bit for bit."""
    assert losses(a) == losses(b) and vals(a) == vals(b)
    one, two = runs.read_checkpoint(a), runs.read_checkpoint(b)
    assert one["step"] == two["step"]
    assert all(torch.equal(one["model"][key], two["model"][key]) for key in one["model"])
    for x, y in zip(one["optimizers"], two["optimizers"], strict=True):
        assert x["param_groups"] == y["param_groups"]
        for i in x["state"]:
            assert all(torch.equal(x["state"][i][k], y["state"][i][k]) for k in x["state"][i])


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A data folder of 3,000 train tokens: 40 steps of 8 x 16 tokens are nearly two epochs."""
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0).choice(["the", "cat", "sat", "on", "a", "mat", "and", "ran"], 1000)
    (folder / "a.txt").write_text(" ".join(words))
    data_prep.prepare_text([folder / "a.txt"], folder / "data", "byte", val_frac=0.2)
    return folder / "data"


@pytest.fixture(scope="session")
def whole(data, scripts, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = scripts.run("train.py", *flags(**SMALL, data=data, out=out))
    assert done.returncode == 0, done.stderr
    return out


class Bomb:
    """Pickled: code that makes a file in the current folder."""

    def __reduce__(self):
        return open, ("code ran", "w")


def combined_text(heading):
    """What the section of docs/combining.md whose heading starts so makes of a model's file."""
    section = (ROOT / "docs" / "combining.md").read_text().split(f"\n## {heading}")[1].split("\n## ")[0]
    origin, patch = re.search(r"`cp (\S+) models/mine.py`.*?```diff\n(.*?)```", section, re.S).groups()
    text = (ROOT / origin).read_text()
    for hunk in re.split(r"^@@\n", patch, flags=re.M)[1:]:
        old, new = ("".join(line[1:] or "\n" for line in hunk.splitlines(keepends=True) if line[0] != sign)
                    for sign in "+-")
        assert text.count(old) == 1, f"{origin} has not once, as docs/combining.md says:\n{old}"
        text = text.replace(old, new)
    return text


def combined(heading):
    """The module of combined_text()."""
    module = types.ModuleType("mine")
    sys.modules["mine"] = module                            # dataclass looks there
    exec(compile(combined_text(heading), "mine.py", "exec"), module.__dict__)
    return module
