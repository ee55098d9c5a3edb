"""Endurance: kills, faults and the number of processes must not change a run. Each part compares with undisturbed runs.

    python tests/scripts/endurance.py kills --n 200     SIGKILL at random moments of training
    python tests/scripts/endurance.py ranks             1, 2 and 4 processes, and a run that goes from 2 to 1 to 2
    python tests/scripts/endurance.py faults --n 5      a rank of two killed

Each part prints its figures and ends with an AssertionError if a run differs. CPU, small models, Linux only.
`test_endurance.py` runs short versions.
"""
import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "helpers")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from small import ROOT, assert_same_run, flags, inside, rows  # noqa: E402

import data_prep  # noqa: E402
import models  # noqa: E402
from nanodepth import runs  # noqa: E402
from nanodepth.data import Data  # noqa: E402

# a checkpoint of 3 MB, so that writing it takes as long as a step
RUN = dict(n_layer=3, d_model=96, n_head=2, d_ff=256, max_len=64, seq_len=16, batch_tokens=128, max_steps=12,
           warmup_steps=3, eval_every=10, eval_tokens=500, save_every=1, device="cpu", dtype="fp32")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", **os.environ}


def start(script, *words, ranks=None):
    """Starts python SCRIPT, or torchrun SCRIPT, with all output in one pipe."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
    return subprocess.Popen([sys.executable, *launcher, str(ROOT / script), *map(str, words)], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)


def finish(process, code=0):
    """What the process printed, after it has ended with this exit code."""
    output = process.communicate(timeout=600)[0]
    assert process.returncode == code, f"exit code {process.returncode} instead of {code}:\n{output}"
    return output


def wait_until(condition, process):
    """Polls every half millisecond; False if the process ends first."""
    while not condition():
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    return True


def prepare(folder):
    """A data folder of about 300 kB of made-up words, the same each time; the text is in words.txt beside it."""
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
    if instant == "any":
        time.sleep(rng.uniform(0, seconds))
    else:
        wait_until(lambda: n_steps(run) >= aim, process)
        if instant == "a write":
            wait_until((run / "ckpt.pt.tmp").exists, process)
        time.sleep(rng.uniform(0, seconds / RUN["max_steps"] / 2))


def chain(folder, rng, name, whole, data, seconds, most):
    """Kills a training run up to `most` times; lets it finish and compares it with `whole`.

    Returns {what was hit: count}.
    """
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
    data, total, rng = prepare(folder), Counter(), random.Random(seed)
    began = time.monotonic()
    finish(training(names[0], data, folder / "timed"))
    seconds = time.monotonic() - began
    for name in itertools.cycle(names):
        whole = folder / f"whole-{name}"
        if not whole.exists():
            finish(start("train.py", *flags(**RUN, model=name, data=data, out=whole)))
        total += chain(folder / "chain", rng, name, whole, data, seconds, min(10, -(-n // 2)))
        total["chains"] += 1
        if total.total() - total["chains"] >= n:
            return total


# -------------------------------------------------------------------------------------------------------------- ranks


def worker(orders, dtype):
    """One rank of ranks(): several runs of train.py in one process, one after the other.

    An order is [words of train.py, the step after which the run gets a signal to stop, or None].
    """
    torch.set_default_dtype(getattr(torch, dtype))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        dist.init_process_group = lambda *_, **__: None
    batch = Data.batch
    for argv, last in json.loads(Path(orders).read_text()):
        def batch_and_signal(self, step, *words):
            if step + 1 == last and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:     # not a second time
                os.kill(os.getpid(), signal.SIGTERM)
            return batch(self, step, *words)

        with patch.object(Data, "batch", batch_and_signal):
            assert inside(*argv) == (128 + signal.SIGTERM if last else 0)
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)


def ranks(folder, names, dtype, **shape):
    """The same run of each model on 1, 2 and 4 processes, and one that goes from two to one and back to two.

    dtype: float32, or float64 to show that only rounding differs. shape: options other than RUN's.
    Returns rows of (model, processes, largest difference to one process in a training loss, in a validation loss).
    """
    steps = RUN["max_steps"]
    options = {**RUN, "micro_batch": 2, "data": prepare(folder), "eval_every": steps, "save_every": steps, **shape}

    def new(kind, last=None):
        return [(flags(**options, model=name, out=folder / f"{name} {kind}"), last) for name in names]

    def go_on(last=None):
        return [(flags(resume=folder / f"{name} 2, 1, 2"), last) for name in names]

    legs = ((2, new("2") + new("2, 1, 2", steps // 3)), (1, new("1") + go_on(2 * (steps // 3))), (2, go_on()),
            (4, new("4")))
    for i, (world, orders) in enumerate(legs):
        path = folder / f"orders-{i}"
        path.write_text(json.dumps(orders))
        finish(start("tests/scripts/endurance.py", "worker", path, dtype, ranks=world if world > 1 else None))
    found = []
    for name, kind in itertools.product(names, ("2", "4", "2, 1, 2")):
        differences = []
        for what, n in (("train", steps), ("val", 2)):
            one, many = (np.array([(row["step"], row["loss"]) for row in rows(folder / f"{name} {world}", what)])
                         for world in ("1", kind))
            assert len(one) == n and (one[:, 0] == many[:, 0]).all()
            differences.append(np.abs(one - many).max())
        found.append((name, kind, *differences))
    return found


# ------------------------------------------------------------------------------------------------------------- faults


def lost_rank(folder, seed, data, whole):
    """SIGKILL to one of two ranks at a random step: the other reports it and ends; the run resumes. Returns seconds."""
    rng, run = random.Random(seed), folder / f"lost-{seed}"
    process = start("train.py", *flags(**RUN, data=data, out=run), ranks=2)
    aim, victim = rng.randrange(1, RUN["max_steps"] - 5), rng.randrange(2)
    assert wait_until(lambda: n_steps(run) >= aim, process), process.communicate()[0]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()     # torchrun's ranks
    os.kill(sorted(map(int, children))[victim], signal.SIGKILL)
    began = time.monotonic()
    output = finish(process, code=1)                                                # it hangs if it waits for the dead
    seconds = time.monotonic() - began
    said = [line for line in output.splitlines()
            if line.startswith(f"train.py: rank {1 - victim}: another process has died, so this one stopped")]
    assert len(said) == 1 and "--resume" in said[0] and 'train.py", line' not in output, output
    finish(start("train.py", "--resume", run, ranks=2))
    assert_same_run(run, whole)
    return seconds


def main(part, n, seed, folder):
    if part == "kills":
        for what, count in kills(n, seed, folder, models.names()).items():
            print(f"{count:5d}  {what}")
    elif part == "ranks":
        for dtype in ("float64", "float32"):
            (folder / dtype).mkdir()
            for name, kind, *differences in ranks(folder / dtype, models.names(), dtype):
                print("{} {:11} processes {:8} against 1: training losses differ by at most {:.1e}, validation {:.1e}"
                      .format(dtype, name, kind, *differences))
    else:
        data = prepare(folder)
        two = folder / "whole"
        finish(start("train.py", *flags(**RUN, data=data, out=two), ranks=2))
        seconds = [lost_rank(folder, seed + i, data, two) for i in range(n)]
        print(f"a rank of two killed, {n} times: the other ended within {max(seconds):.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("kills", "ranks", "faults", "worker"), help="worker: used by ranks")
    parser.add_argument("--n", type=int, default=200, help="kills, or killed ranks [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part == "worker":
        sys.exit(worker(*args.words))
    with tempfile.TemporaryDirectory() as folder:
        main(args.part, args.n, args.seed, Path(folder))
