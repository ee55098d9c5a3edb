"""Endurance: kills, faults and the number of processes must not change a run. Each part compares with undisturbed runs.

    python tests/endurance.py kills --n 200     SIGKILL at random moments of data preparation and training; resume
    python tests/endurance.py ranks             1, 2 and 4 processes, and a run that goes from 2 to 1 and back to 2
    python tests/endurance.py faults --n 5      a rank killed, two processes on one run folder, a full disk

Each part prints its figures and ends with an AssertionError if a run differs. CPU, small models, Linux only.
`test_endurance.py` runs short versions.
"""
import argparse
import contextlib
import hashlib
import io
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from small import ROOT, assert_same_run, flags, rows  # noqa: E402

import data_prep  # noqa: E402
import models  # noqa: E402
import train  # noqa: E402
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


def inside(words):
    """train.py in this process, silently. Returns the exit code."""
    with contextlib.redirect_stdout(io.StringIO()):
        return train.main([str(word) for word in words])


def prepare(folder):
    """A data folder of about 300 kB of made-up words, the same each time; the text is in words.txt beside it."""
    rng = np.random.default_rng(0)
    words = np.array(["the", "cat", "sat", "on", "a", "mat", "and", "ran"])
    text = "\n<|endoftext|>\n".join(" ".join(rng.choice(words, 250)) for _ in range(300))
    (folder / "words.txt").write_text(text)
    data_prep.prepare_text([folder / "words.txt"], folder / "data", "byte", val_frac=0.1)
    return folder / "data"


def digest(run):
    """(step, hash of the weights, the optimizers' state and the random numbers) of a run's checkpoint."""
    checkpoint = runs.read_checkpoint(run)
    states = [state for optimizer in checkpoint["optimizers"] for state in optimizer["state"].values()]
    tensors = [t for part in (checkpoint["model"], *states) for t in part.values()] + [checkpoint["rng"]]
    sha256 = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors))
    return checkpoint["step"], sha256.hexdigest()


def undisturbed(name, data, folder):
    """A whole run of one model: its folder, and {step: digest} of all its checkpoints."""
    run, states, write = folder / f"whole-{name}", {}, runs.write_atomically

    def watched(path, content):
        write(path, content)
        if path.name == "ckpt.pt":
            states.update([digest(path.parent)])

    with patch.object(runs, "write_atomically", watched):
        assert inside(flags(**RUN, model=name, data=data, out=run)) == 0
    return run, states


# -------------------------------------------------------------------------------------------------------------- kills


def kill(process):
    """SIGKILL; True if the process was still running."""
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def wait_until(condition, process):
    """Polls every half millisecond; False if the process ends first."""
    while not condition():
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    return True


def n_steps(run):
    log = run / "log.jsonl"
    return log.read_bytes().count(b'"kind": "train"') if log.exists() else 0


def preparation(folder, out):
    """data_prep.py at work on the same text as prepare(folder)."""
    return start("data_prep.py", "text", folder / "words.txt", "--out", out, "--tokenizer", "byte", "--val_frac", 0.1)


def training(name, folder):
    """train.py at work on folder / "data": it resumes the run, or begins it if that had not saved anything yet."""
    run = folder / "run"
    if (run / "ckpt.pt").exists():
        return start("train.py", "--resume", run)
    shutil.rmtree(run, ignore_errors=True)
    return start("train.py", *flags(**RUN, model=name, data=folder / "data", out=run))


def kill_training(process, run, rng, latest, seconds):
    """Kills a training process at a random instant; says what it was doing. latest: the step of its checkpoint."""
    instant, temporary = rng.choice(["any time", "a step", "a write"]), run / "ckpt.pt.tmp"
    if instant == "any time":
        time.sleep(rng.uniform(0, seconds["train"]))
    else:
        aim = max(latest, 0) + rng.randrange(1, 6)
        wait_until(lambda: n_steps(run) >= aim, process)
        if instant == "a write":
            wait_until(temporary.exists, process)
        time.sleep(rng.uniform(0, seconds["train"] / RUN["max_steps"] / 2))
    if not kill(process):
        return "too late"
    if not (run / "ckpt.pt").exists():
        return "before the first checkpoint"
    return "writing a checkpoint" if temporary.exists() else "training or starting up"


def chain(folder, rng, name, data, whole, states, seconds, most):
    """Kills one data preparation, then a training run up to `most` times; lets it finish and compares it with `whole`.

    Returns {what was hit: count}.
    """
    tally, prepared, run, latest = Counter(), folder / "data", folder / "run", -1
    folder.mkdir()
    while not prepared.exists():
        process = preparation(data.parent, prepared)
        if rng.random() < 0.3:
            finish(process)
        else:
            time.sleep(rng.uniform(0, seconds["data"]))
            tally["preparing data" if kill(process) else "too late"] += 1
    for path in data.iterdir():
        assert (prepared / path.name).read_bytes() == path.read_bytes(), path
    while tally.total() - tally["too late"] < most:
        hit = kill_training(training(name, folder), run, rng, latest, seconds)
        tally[hit] += 1
        if hit == "too late":
            break
        if hit == "before the first checkpoint":
            assert latest == -1, "the checkpoint is gone"
        else:
            step, state = digest(run)                                           # raises unless it is readable
            assert step >= latest and state == states[step], f"step {step} after {latest}"
            latest = step
    finish(training(name, folder))
    assert_same_run(run, whole)
    shutil.rmtree(folder)
    return tally


def kills(n, seed, folder, names):
    """At least n SIGKILLs in chains of one model each, two at a time; returns {what was hit: count}."""
    data, total, seconds = prepare(folder), Counter(), {}
    wholes = {name: undisturbed(name, data, folder) for name in names}
    for what in ("data", "train"):
        began, out = time.monotonic(), folder / f"timed-{what}"
        finish(preparation(folder, out) if what == "data" else start("train.py", *flags(**RUN, data=data, out=out)))
        seconds[what] = time.monotonic() - began

    def go(i):
        name, rng = names[i % len(names)], random.Random(seed * 10_000 + i)
        return chain(folder / f"chain-{i}", rng, name, data, *wholes[name], seconds, min(10, -(-n // 2)))

    with ThreadPoolExecutor(2) as pool:
        for i in itertools.count(0, 2):
            for tally in pool.map(go, (i, i + 1)):
                total += tally
            if total.total() - total["too late"] >= n:
                return {**total, "chains": i + 2}


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
            assert inside(argv) == (128 + signal.SIGTERM if last else 0)
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)


def give(world, folder, dtype, orders):
    """Runs the orders on `world` ranks."""
    path = folder / f"orders-{time.monotonic_ns()}"
    path.write_text(json.dumps(orders))
    finish(start("tests/endurance.py", "worker", path, dtype, ranks=world if world > 1 else None))


def ranks(folder, names, dtype, **shape):
    """The same run of each model on 1, 2 and 4 processes, and one that goes from two to one and back to two.

    dtype: float32, or float64 to show that only rounding differs. shape: options other than RUN's.
    Returns rows of (model, processes, largest difference to one process in a training loss, in a validation loss).
    """
    options, losses = {**RUN, "micro_batch": 2, "data": prepare(folder), **shape}, []
    options["eval_every"] = options["save_every"] = steps = options["max_steps"]

    def new(kind, last=None):
        return [(flags(**options, model=name, out=folder / f"{name} {kind}"), last) for name in names]

    def go_on(last=None):
        return [(flags(resume=folder / f"{name} 2, 1, 2"), last) for name in names]

    give(2, folder, dtype, new("2") + new("2, 1, 2", steps // 3))
    give(1, folder, dtype, new("1") + go_on(2 * (steps // 3)))
    give(2, folder, dtype, go_on())
    give(4, folder, dtype, new("4"))
    for name in names:
        for kind in ("2", "4", "2, 1, 2"):
            differences = []
            for what in ("train", "val"):
                one, many = (np.array([(row["step"], row["loss"]) for row in rows(folder / f"{name} {n}", what)])
                             for n in ("1", kind))
                assert len(one) == (steps if what == "train" else 2) and (one[:, 0] == many[:, 0]).all()
                differences.append(np.abs(one - many).max())
            losses.append((name, kind, *differences))
    return losses


# ------------------------------------------------------------------------------------------------------------- faults


def rank_pids(launcher):
    """The pids of torchrun's ranks, which it has started in order."""
    return sorted(map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()))


def lost_rank(folder, seed, data, whole):
    """SIGKILL to one of two ranks at a random step: the other reports it and ends; the run resumes. Returns seconds."""
    rng, run = random.Random(seed), folder / f"lost-{seed}"
    process = start("train.py", *flags(**RUN, data=data, out=run), ranks=2)
    aim = rng.randrange(1, RUN["max_steps"] - 5)
    assert wait_until(lambda: n_steps(run) >= aim, process), process.communicate()[0]
    victim = rng.randrange(2)
    os.kill(rank_pids(process)[victim], signal.SIGKILL)
    began = time.monotonic()
    output = finish(process, code=1)                                                # it hangs if it waits for the dead
    seconds = time.monotonic() - began
    said = [line for line in output.splitlines()
            if line.startswith(f"train.py: rank {1 - victim}: another rank is gone: stopped")]
    assert len(said) == 1 and "--resume" in said[0] and 'train.py", line' not in output, output
    digest(run)                                                                     # is readable
    finish(start("train.py", "--resume", run, ranks=2))
    assert_same_run(run, whole)
    return seconds


def full_disks(folder):
    """A run on a disk that fills up, freed while the run goes on, or freed after its end and the run is resumed.

    Prints what the runs said. Needs the right to mount, see in_namespace().
    """
    data = prepare(folder)
    whole, states = undisturbed("gpt", data, folder)
    for freed in ("while it runs", "after the run"):
        disk = folder / freed
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", disk], check=True)
        try:
            run, full = disk / "run", disk / "other people's data"
            process = start("train.py", *flags(**RUN, data=data, out=run))
            assert wait_until(lambda: n_steps(run) >= 5, process)
            with contextlib.suppress(OSError), open(full, "wb", buffering=0) as f:
                while True:
                    f.write(bytes(4096))
            said = next(line for line in process.stdout if "could not be written" in line or "No space" in line)
            print(f"freed {freed}: {said.strip().replace(str(run), 'RUN')}")
            step, state = digest(run)
            assert step >= 4 and state == states[step], step
            if freed == "while it runs":
                full.unlink()
            output = finish(process, code=0 if freed == "while it runs" else 1)
            assert "Traceback" not in output, output
            if freed == "after the run":
                assert digest(run) == (step, state)
                full.unlink()
                finish(start("train.py", "--resume", run))
            assert_same_run(run, whole)
        finally:
            subprocess.run(["umount", disk], check=True)


def in_namespace(*words):
    """Runs this script in a namespace where it may mount disks; None if this machine does not allow that."""
    inner = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*inner, "true"], stderr=subprocess.DEVNULL).returncode:
        return None
    done = subprocess.run([*inner, sys.executable, __file__, *words], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def two_processes(folder, data, whole):
    """Two processes begin with the same --out, then one resumes a run that another trains: one of the two is refused,
    and the other is not disturbed."""
    run, again = folder / "shared", folder / "again"
    both = [start("train.py", *flags(**RUN, data=data, out=run)) for _ in range(2)]
    outputs = [process.communicate(timeout=600)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], outputs
    refused = min(outputs, key=len)
    assert f"{run} exists" in refused and refused.count("\n") == 1, outputs
    first = start("train.py", *flags(**RUN, data=data, out=again))
    assert wait_until((again / "ckpt.pt").exists, first)
    first.send_signal(signal.SIGSTOP)                                               # so that it does not end too early
    refused = finish(start("train.py", "--resume", again), code=2)
    assert "in use by another process" in refused and refused.count("\n") == 1, refused
    first.send_signal(signal.SIGCONT)
    finish(first)
    for folder in (run, again):
        assert_same_run(folder, whole)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("kills", "ranks", "faults", "disk", "worker"),
                        help="disk, worker: used by the other parts")
    parser.add_argument("--n", type=int, default=200, help="kills, or killed ranks [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part == "worker":
        sys.exit(worker(*args.words))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if args.part == "kills":
            for what, n in kills(args.n, args.seed, folder, models.names()).items():
                print(f"{n:5d}  {what}")
        elif args.part == "ranks":
            for dtype in ("float64", "float32"):
                (folder / dtype).mkdir()
                for name, kind, train_loss, val_loss in ranks(folder / dtype, models.names(), dtype):
                    print(f"{dtype} {name:11} processes {kind:8} against 1: training losses differ by at most "
                          f"{train_loss:.1e}, validation {val_loss:.1e}")
        elif args.part == "disk":
            full_disks(folder)
        else:
            data = prepare(folder)
            whole, _ = undisturbed("gpt", data, folder)
            finish(start("train.py", *flags(**RUN, data=data, out=folder / "whole-2"), ranks=2))
            seconds = [lost_rank(folder, args.seed + i, data, folder / "whole-2") for i in range(args.n)]
            print(f"a rank of two killed, {args.n} times: the other ended within {max(seconds):.1f} s")
            two_processes(folder, data, whole)
            print("two processes on one folder: the second was refused")
            print("full disk:", in_namespace("disk") or "not tried, needs unshare and the right to mount")
