"""SIGKILL at random moments of training changes no run. test_endurance.py has a short version.

    python tests/scripts/endurance.py --n 200 --seed 0      all models

Linux only. Ends with an AssertionError if a run differs from the undisturbed one.
"""
import argparse
import itertools
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "helpers")]

from small import assert_same_run, finish, flags, start  # noqa: E402

import data_prep  # noqa: E402
import models  # noqa: E402
from nanodepth import runs  # noqa: E402

# a checkpoint of 3 MB, so that writing it takes as long as a step
RUN = dict(n_layer=3, d_model=96, n_head=2, d_ff=256, max_len=64, seq_len=16, batch_tokens=128, max_steps=12,
           warmup_steps=3, eval_every=10, eval_tokens=500, save_every=1, device="cpu", dtype="fp32", resume="auto")


def prepare(folder):
    """A data folder of about 250 kB of made-up words, the same each time."""
    words = random.Random(0).choices("the cat sat on a mat and ran".split(), k=70_000)
    (folder / "words.txt").write_text(" ".join(words))
    data_prep.prepare_text([folder / "words.txt"], folder / "data", "byte", val_frac=0.1)
    return folder / "data"


def n_steps(run):
    log = run / "log.jsonl"
    return log.read_bytes().count(b'"kind": "train"') if log.exists() else 0


def kill(process, run, rng, aim, seconds):
    """SIGKILL at any instant, or near step `aim`, or while a checkpoint is written then."""
    until = rng.choice([[], [lambda: n_steps(run) >= aim],
                        [lambda: n_steps(run) >= aim, (run / "ckpt.pt.tmp").exists]])
    for condition in until:
        while not condition() and process.poll() is None:
            time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.01 if until else seconds))
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL                                # else it had finished


def kills(n, seed, folder, names):
    """At least n SIGKILLs, up to 10 in a run; returns {what was hit: count}."""
    data, rng, tally = prepare(folder), random.Random(seed), Counter()
    for i, name in enumerate(itertools.cycle(names)):
        words, run, whole = flags(**RUN, model=name, data=data), folder / str(i), folder / name
        began, step, most = time.monotonic(), 0, tally.total() + min(10, -(-n // 2))
        finish(start("train.py", *words, "--out", whole))
        seconds = time.monotonic() - began
        while tally.total() < most and kill(start("train.py", *words, "--out", run), run, rng,
                                            step + rng.randrange(1, 6), seconds):
            if (run / "ckpt.pt").exists():
                tally["writing a checkpoint" if (run / "ckpt.pt.tmp").exists() else "training or starting up"] += 1
                before, step = step, runs.read_checkpoint(run)["step"]
                assert step >= max(before, n_steps(run) - 1)                    # of every step, but for the last
            else:
                tally["before the first checkpoint"] += 1
                assert step == 0, "the checkpoint is gone"
        finish(start("train.py", *words, "--out", run))
        assert_same_run(run, whole)
        if tally.total() >= n:
            return tally


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=200, help="kills [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for what, count in kills(args.n, args.seed, Path(folder), models.names()).items():
            print(f"{count:5d}  {what}")
