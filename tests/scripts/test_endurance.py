"""Kills, a lost rank, and broken inputs (fuzz.py)."""
import os
import random
import signal
import time
from pathlib import Path

import pytest

import fuzz
from nanodepth import runs
from small import SMALL, assert_same_run, finish, flags, rows, start, wait_until


@pytest.mark.parametrize("n", [2, pytest.param(8, marks=pytest.mark.full)])
def test_kills(n, data, tmp_path):
    """SIGKILL at random instants, every second one while a checkpoint (3 MB) is written: the newest checkpoint is
    there, at most one step behind the log, and the end equals that of the undisturbed run."""
    words = flags(**{**SMALL, "d_model": 96, "n_layer": 3, "max_steps": 6 * n, "save_every": 1}, data=data,
                  resume="auto")
    finish(start("train.py", *words, "--out", tmp_path / "whole"))
    run, rng, step = tmp_path / "run", random.Random(0), 0

    def n_steps():
        return max((row["step"] for row in runs.log_rows(run / "log.jsonl", 6 * n)), default=0)
    for i in range(n):
        process, aim = start("train.py", *words, "--out", run), step + rng.randrange(1, 4)
        wait_until(lambda: n_steps() >= aim, process)
        if i % 2:
            wait_until(lambda: (run / "ckpt.pt.tmp").exists() or process.poll() is not None, process)
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        process.communicate()
        before, step = step, runs.read_checkpoint(run)["step"]
        assert step >= max(before, n_steps() - 1)
    finish(start("train.py", *words, "--out", run))
    assert_same_run(run, tmp_path / "whole")


@pytest.mark.full
def test_a_lost_rank_stops_the_others(tmp_path, data):
    """SIGKILL to the second of two ranks: the first reports it and ends; the run resumes."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    finish(start("train.py", *flags(**SMALL, data=data, out=whole), ranks=2))
    process = start("train.py", *flags(**SMALL, data=data, out=run), ranks=2)
    wait_until(lambda: (run / "log.jsonl").exists() and len(rows(run)) >= 7, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(max(map(int, children)), signal.SIGKILL)
    output = "".join(finish(process, code=1))                                       # it hangs if it waits for the dead
    said, = (line for line in output.splitlines()
             if line.startswith("train.py: rank 0: another process has died, so this one stopped"))
    assert "--resume" in said and 'train.py", line' not in output, output
    finish(start("train.py", "--resume", run, ranks=2))
    assert_same_run(run, whole)


@pytest.mark.full
def test_fuzz(scripts, tmp_path):
    reports = fuzz.fuzz(200, 7, tmp_path, scripts)
    assert not reports, "\n".join(reports)
