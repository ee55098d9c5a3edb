"""Endurance: kills, a lost rank and the number of processes change no run. test_endurance.py has short versions.

    python tests/scripts/endurance.py --n 200 --seed 0      SIGKILL at random moments of training, all models

Linux only. Ends with an AssertionError if a run differs from the undisturbed one.
"""
import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "helpers")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from small import assert_same_run, finish, flags, inside, rows, start, wait_until  # noqa: E402

import data_prep  # noqa: E402
import models  # noqa: E402
from nanodepth import runs  # noqa: E402

# a checkpoint of 3 MB, so that writing it takes as long as a step
RUN = dict(n_layer=3, d_model=96, n_head=2, d_ff=256, max_len=64, seq_len=16, batch_tokens=128, max_steps=12,
           warmup_steps=3, eval_every=10, eval_tokens=500, save_every=1, device="cpu", dtype="fp32")


def prepare(folder):
    """A data folder of about 300 kB of made-up words, the same each time."""
    rng = np.random.default_rng(0)
    words = np.array(["the", "cat", "sat", "on", "a", "mat", "and", "ran"])
    text = "\n<|endoftext|>\n".join(" ".join(rng.choice(words, 250)) for _ in range(300))
    (folder / "words.txt").write_text(text)
    data_prep.prepare_text([folder / "words.txt"], folder / "data", "byte", val_frac=0.1)
    return folder / "data"


def n_steps(run):
    log = run / "log.jsonl"
    return log.read_bytes().count(b'"kind": "train"') if log.exists() else 0


# -------------------------------------------------------------------------------------------------------------- kills


def training(name, data, run):
    """train.py at work: it resumes the run, or begins it once more if that had not saved anything yet."""
    new = flags(**RUN, model=name, data=data, out=run)
    return start("train.py", *(["--resume", run] if (run / "ckpt.pt").exists() else new))


def wait(process, run, rng, step, seconds):
    """Until any instant, one within a step, or one within a write. step: that of the run's checkpoint."""
    instant, aim = rng.choice(["any", "a step", "a write"]), step + rng.randrange(1, 6)
    reached = [] if instant == "any" else [lambda: n_steps(run) >= aim]
    reached += [(run / "ckpt.pt.tmp").exists] if instant == "a write" else []
    for condition in reached:
        while not condition() and process.poll() is None:
            time.sleep(0.0005)
    time.sleep(rng.uniform(0, seconds / RUN["max_steps"] / 2 if reached else seconds))


def chain(folder, rng, name, whole, data, seconds, most):
    """Kills a training run up to `most` times; lets it finish and compares it with `whole` -> {what was hit: count}."""
    tally, run, step = Counter(), folder / "run", 0
    folder.mkdir()
    while tally.total() < most:
        process = training(name, data, run)
        wait(process, run, rng, step, seconds)
        process.kill()
        process.communicate()
        if process.returncode != -signal.SIGKILL:                               # it had finished
            break
        if (run / "ckpt.pt").exists():
            tally["writing a checkpoint" if (run / "ckpt.pt.tmp").exists() else "training or starting up"] += 1
            before, step = step, runs.read_checkpoint(run)["step"]
            assert step >= max(before, n_steps(run) - 1)                        # of every step, but for the last
        else:
            tally["before the first checkpoint"] += 1
            assert step == 0, "the checkpoint is gone"
    finish(training(name, data, run))
    assert_same_run(run, whole)
    shutil.rmtree(folder)
    return tally


def kills(n, seed, folder, names):
    """At least n SIGKILLs in chains of one model each; returns {what was hit: count}."""
    data, total, rng, began = prepare(folder), Counter(), random.Random(seed), time.monotonic()
    for name in itertools.cycle(names):
        whole = folder / f"whole-{name}"
        if not whole.exists():
            began = time.monotonic()
            finish(training(name, data, whole))
            seconds = time.monotonic() - began
        total += chain(folder / "chain", rng, name, whole, data, seconds, min(10, -(-n // 2)))
        if total.total() >= n:
            return total


# ------------------------------------------------------------------------------------------------------ several ranks


def worker(orders):
    """One rank of ranks(): several runs of train.py, given by their flags, in one process, in float64."""
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        dist.init_process_group = lambda *_, **__: None
    for words in json.loads(Path(orders).read_text()):
        assert inside(*words) == 0
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)


def ranks(folder, names, **shape):
    """{(model, processes): largest difference in a loss to the run on one process}. "1, 2": from one to two processes,
    where the learning rate begins to fall. shape: options other than RUN's.
    """
    steps, found = RUN["max_steps"], {}
    options = {**RUN, "micro_batch": 2, "data": prepare(folder), "eval_every": steps, "save_every": steps, **shape}
    for kind in ("1", "2", "1, 2", "2, 1"):
        orders = []
        for name in names:
            run = folder / f"{name} {kind}"
            if "," in kind:
                shutil.copytree(folder / f"{name} {kind[0]}" / "before_decay", run)
            orders.append(flags(resume=run) if "," in kind else flags(**options, model=name, out=run))
        (folder / kind).write_text(json.dumps(orders))
        finish(start("tests/scripts/endurance.py", "--worker", folder / kind, ranks=2 if kind[-1] == "2" else None))
        for name in names:
            one, many = ([(row["step"], row["loss"]) for what in ("train", "val")
                          for row in rows(folder / f"{name} {each}", what)] for each in ("1", kind))
            assert len(one) == steps + 2
            found[name, kind] = np.abs(np.array(one) - many).max()
    return found


def lost_rank(folder, seed, data, whole):
    """SIGKILL to one of two ranks at a random step: the other reports it and ends; the run resumes."""
    rng, run = random.Random(seed), folder / f"lost-{seed}"
    process = start("train.py", *flags(**RUN, data=data, out=run), ranks=2)
    aim, victim = rng.randrange(1, RUN["max_steps"] - 5), rng.randrange(2)
    wait_until(lambda: n_steps(run) >= aim, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()     # torchrun's ranks
    os.kill(sorted(map(int, children))[victim], signal.SIGKILL)
    output = "".join(finish(process, code=1))                                       # it hangs if it waits for the dead
    said = [line for line in output.splitlines()
            if line.startswith(f"train.py: rank {1 - victim}: another process has died, so this one stopped")]
    assert len(said) == 1 and "--resume" in said[0] and 'train.py", line' not in output, output
    finish(start("train.py", "--resume", run, ranks=2))
    assert_same_run(run, whole)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=200, help="kills [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", metavar="ORDERS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        sys.exit(worker(args.worker))
    with tempfile.TemporaryDirectory() as folder:
        for what, count in kills(args.n, args.seed, Path(folder), models.names()).items():
            print(f"{count:5d}  {what}")
