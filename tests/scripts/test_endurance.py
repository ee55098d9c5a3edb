"""Kills, a lost rank and broken inputs: short versions of endurance.py, and fuzz.py."""
import os
import signal
from pathlib import Path

import pytest

import endurance
import fuzz
import models
from small import SMALL, assert_same_run, finish, flags, rows, start, wait_until


@pytest.mark.parametrize("n, names", [(2, models.names()[:1]), pytest.param(
    8, [models.names()[0], models.names()[-1]], marks=pytest.mark.full)])
def test_kills(tmp_path, n, names):
    """SIGKILL at random moments: every checkpoint is there, and the end equals that of the undisturbed run."""
    assert endurance.kills(n, 0, tmp_path, names).total() >= n


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
def test_fuzz(tmp_path):
    counts, reports = fuzz.fuzz(200, 7, tmp_path)
    assert sum(counts.values()) == 200 and not reports, "\n".join(reports)
