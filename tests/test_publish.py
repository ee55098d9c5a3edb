"""results/publish.py: runs that are made, resumed or left as they are, and what is kept of them."""
import json
import math
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from analysis import write_run

sys.path.insert(0, str(Path(__file__).parent.parent / "results"))
publish = pytest.importorskip("publish")         # a copy of the repository may be without results/


def rows(*losses):
    """A log with a validation every 15 steps."""
    return [{"kind": "train", "step": i, "loss": 5.0} for i in range(1, 31)] + [
        {"kind": "val", "step": 15 * i, "loss": loss} for i, loss in enumerate(losses)]


def write(run, *losses, end=""):
    run.mkdir()
    config = {"command": ["/opt/python", "/home/me/train.py", "--data", "/home/me/wiki4k"],
              "data": {"path": "/home/me/wiki4k"},
              "options": {"out": str(run), "data": "/home/me/wiki4k", "max_steps": 30}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(*losses)) + end)


def test_final_loss(tmp_path):
    assert publish.final_loss(tmp_path / "none") is None
    write(tmp_path / "whole", 9.0, 4.0, 3.5, end='{"kind": "va')
    write(tmp_path / "half", 9.0, 4.0)
    assert publish.final_loss(tmp_path / "whole") == 3.5 and publish.final_loss(tmp_path / "half") == math.inf


def test_what_is_published(tmp_path):
    write(tmp_path / "run", 9.0, 4.0, 3.5)
    for _ in range(2):                                                      # a second time replaces the first
        publish.publish(tmp_path / "run", tmp_path / "logs" / "a", "runs/study/a")
    config = json.loads((tmp_path / "logs" / "a" / "config.json").read_text())
    assert config["command"] == ["python", "train.py", "--data", "data/wiki"] and config["data"]["path"] == "data/wiki"
    assert config["options"] == {"out": "runs/study/a", "data": "data/wiki", "max_steps": 30}
    kept = [json.loads(line) for line in (tmp_path / "logs" / "a" / "log.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in kept] == [
        ("train", 10), ("train", 20), ("train", 30), ("val", 0), ("val", 15), ("val", 30)]
    assert publish.final_loss(tmp_path / "logs" / "a") == 3.5


@pytest.mark.parametrize("state, words", [
    ("new", "--model gpt --gate headwise --compile --out RUN --seed 1"), ("begun", "--resume RUN"), ("done", None)])
def test_train_makes_resumes_or_leaves_a_run(state, words, tmp_path, monkeypatch):
    run, calls = tmp_path / "run", []

    def script(log, name, *words):
        calls.append([name, *(str(word).replace(str(run), "RUN") for word in words)])
        shutil.rmtree(run, ignore_errors=True)
        write(run, 9.0, 4.0, 3.5)
        return 0

    monkeypatch.setattr(publish, "script", script)
    if state != "new":
        write(run, *(9.0, 4.0, 3.5)[:2 if state == "begun" else 3])
        (run / "ckpt.pt").write_text("")
    assert publish.train(run, "gpt", "--gate", "headwise", seed=1) == 3.5
    assert calls == ([["train.py", *words.split()]] if words else [])


def test_a_failed_run_ends_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "script", lambda *args: 2)
    with pytest.raises(SystemExit, match="train.py ended with 2, see .*run.txt"):
        publish.train(tmp_path / "run", "gpt")


def test_a_day_on_a_gpu(tmp_path):
    """results/gpu/day.sh with a python3 that does nothing: all pieces, once; with one that fails: again next time."""
    python, day = tmp_path / "python3", publish.TOP / "results" / "gpu" / "day.sh"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SIZE": "tiny", "OUT_DIR": str(tmp_path / "out"),
           "RUNS": str(tmp_path / "runs")}

    def call(code, **more):
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        python.chmod(0o755)
        done = subprocess.run(["bash", day], capture_output=True, text=True, env={**env, **more}, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert call(0, MINUTES="0") == "no time left before machine: call again\n"
    failed, passed = (re.findall(rf"^== (\S+): exit {code} after", call(code), re.M) for code in (1, 0))
    assert set(failed) == set(passed) and len(passed) > 30
    assert {path.stem for path in (tmp_path / "out").glob("*.ok")} == {"machine", *passed}     # it fails for nothing
    assert call(0) == f"all pieces tried; results in {tmp_path / 'out'}\n"


def test_fill(tmp_path):
    readme = tmp_path / "a.md"
    readme.write_text("one\n<!-- x -->\nold\n<!-- end -->\ntwo\n<!-- y -->\nkept\n<!-- end -->\n")
    publish.fill(readme, x=publish.markdown(["a", "b"], [["1", "\\2"]]), missing="nowhere")
    new = "| a | b |\n| --- | --- |\n| 1 | \\2 |\n"
    assert readme.read_text() == f"one\n<!-- x -->\n{new}<!-- end -->\ntwo\n<!-- y -->\nkept\n<!-- end -->\n"


@pytest.fixture(scope="module")
def report():
    return runpy.run_path(str(Path(publish.__file__).parent / "study-cpu" / "report.py"))


def test_noise_of_the_study_is_that_of_a_randomised_block_design(report):
    losses = {"gpt": {0: 4.0, 1: 4.3, 2: 4.2}, "one": {0: 3.9, 1: 4.25, 2: 4.0}, "two": {0: 4.1, 1: 4.2, 2: 4.3}}
    table = [list(at.values()) for at in losses.values()]
    center = statistics.mean(sum(table, []))
    rest = [x - statistics.mean(row) - statistics.mean(column) + center
            for row in table for x, column in zip(row, zip(*table))]
    sd, degrees = report["noise"](losses)
    assert degrees == 4 and sd == pytest.approx(math.sqrt(sum(x * x for x in rest) / 4))
    value, half = report["difference"](losses, "one", "gpt")
    assert value == pytest.approx(-0.35 / 3) and half == pytest.approx(2.776 * sd * math.sqrt(2 / 3))
    assert report["gap"](losses, "one") == (f"{value:+.4f} ± {half:.4f}", -1 if abs(value) > half else 0)
    losses["three"] = {0: 3.8}                      # one run: its mean takes it, yet its difference has an interval
    assert report["noise"](losses) == (pytest.approx(sd), 4)
    value, half = report["difference"](losses, "three", "gpt")
    assert value == pytest.approx(-0.2) and half == pytest.approx(2.776 * sd * math.sqrt(2))
    assert report["difference"](losses, "four", "gpt") is None and report["gap"](losses, "gpt") == ("", None)


def test_noise_needs_two_systems_with_two_seeds(report):
    assert report["noise"]({"gpt": {0: 4.0, 1: 4.3}}) == (None, 0)
    assert report["gap"]({"gpt": {0: 4.0}, "one": {0: 3.9}}, "one") == ("-0.1000", None)


def test_saving_by_hand(report, tmp_path, monkeypatch):
    """slow ends at 3.75 after 2,000 tokens, for which gpt needs sqrt(2) times 4,000, in steps of half the time.

    gated is timed against gated gpt, which takes 1.25 times as long as gpt; nothing timed is said of new.
    """
    for name, losses, step in (("gpt", [9, 4.0], 400), ("gpt-2000", [9, 3.5], 800), ("slow", [9, 3.75], 200),
                               ("gated", [9, 4.1], 200), ("new", [9, 3.5], 200)):
        write_run(tmp_path / "logs" / f"{name}-seed0", losses, 0, step=step, options={"max_steps": step})
    times = (("gpt", "gpt", 1.0), ("slow", "gpt", 0.5), ("gpt:gate=elementwise", "gpt", 0.8),
             ("gpt:gate=elementwise", "gpt:gate=elementwise", 1.0), ("gated", "gpt:gate=elementwise", 0.5))
    (tmp_path / "bench.json").write_text(json.dumps({"models": [
        {"model": model, "against": against, "step_ratio": [x, 0.01]} for model, against, x in times]}))
    names = report["speeds"].__globals__
    systems = {"gpt": "gpt", "gpt-g": "gpt --gate elementwise", "gated": "gated", "slow": "slow", "new": "new"}
    monkeypatch.setitem(names, "HERE", tmp_path)
    monkeypatch.setitem(names, "SYSTEMS", systems)
    assert report["speeds"]() == pytest.approx({"gpt": 1, "gpt-g": 0.8, "slow": 0.5, "gated": 0.4})
    assert report["saving_table"](report["groups"](systems=systems)).splitlines()[2:] == [
        "| `gated` | not in reach |  | 2.50 |  |", "| `slow` | 0.01M | 2.83x | 2.00 | 1.41x |",
        "| `new` | 0.01M | 4.00x |  |  |"]
