"""Endurance: kills, faults and the number of processes must not change a run. Each part compares with undisturbed runs.

    python tests/endurance.py kills --n 200     SIGKILL at random moments of data preparation and training; resume
    python tests/endurance.py ranks             1, 2 and 4 processes: losses, bytes sent, checkpoints resumed on fewer
    python tests/endurance.py faults --n 5      a rank killed, a full disk, two processes on one run folder

Each part prints its figures and ends with an AssertionError if a run differs. CPU, small models, Linux only.
`test_endurance.py` runs short versions.
"""
import argparse
import contextlib
import ctypes
import gc
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import data_prep  # noqa: E402
import models  # noqa: E402
import train  # noqa: E402
from nanodepth import runs, timing  # noqa: E402
from nanodepth.data import Data  # noqa: E402

# a checkpoint of 3 MB, so that writing it takes as long as a step
RUN = dict(n_layer=3, d_model=96, n_head=2, d_ff=256, max_len=64, seq_len=16, batch_tokens=128, max_steps=12,
           warmup_steps=3, eval_every=10, eval_tokens=500, save_every=1, device="cpu", dtype="fp32")


def flags(**options):
    return [str(word) for key, value in options.items() for word in (f"--{key}", value)]


def environment():
    """Of the processes: one thread, and no memory kept by MKL, which would count as train.py's."""
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", "MKL_DISABLE_FAST_MM": "1"}


def start(script, *words, ranks=None, **kwargs):
    """Starts python SCRIPT, or torchrun SCRIPT, with all output in one pipe."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
    return subprocess.Popen([sys.executable, *launcher, str(ROOT / script), *map(str, words)], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, env=environment(), **kwargs)


def finish(process, code=0, timeout=600):
    output = process.communicate(timeout=timeout)[0]
    assert process.returncode == code, f"exit code {process.returncode} instead of {code}:\n{output}"
    return output


def inside(argv):
    """train.py in this process, silently."""
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            assert train.main([str(w) for w in argv]) == 0
    finally:
        for s, handler in zip((signal.SIGINT, signal.SIGTERM), handlers):
            signal.signal(s, handler)


@contextlib.contextmanager
def watching(saved):
    """Calls saved(path of ckpt.pt) after every checkpoint that train.py writes in this process."""
    write = runs.write_atomically

    def watched(path, content):
        write(path, content)
        if path.name == "ckpt.pt":
            saved(path)
    runs.write_atomically = watched
    try:
        yield
    finally:
        runs.write_atomically = write


def text_file(folder):
    """About 300 kB of made-up words in documents, the same each time."""
    rng = np.random.default_rng(0)
    words = np.array(["the", "cat", "sat", "on", "a", "mat", "and", "ran"])
    path = folder / "words.txt"
    path.write_text("\n<|endoftext|>\n".join(" ".join(rng.choice(words, 250)) for _ in range(300)))
    return path


def prepare(folder):
    data_prep.prepare_text([text_file(folder)], folder / "data", "byte", val_frac=0.1)
    return folder / "data"


def digest(run):
    """(step, hash of all weights and of the optimizer state) of a run's checkpoint, read without memory mapping."""
    checkpoint = runs.read_checkpoint(run)
    tensors = [*checkpoint["model"].values(), checkpoint["rng"]]
    tensors += [t for o in checkpoint["optimizers"] for s in o["state"].values() for t in s.values()
                if torch.is_tensor(t)]
    return checkpoint["step"], hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def logged(run, kind="train", *keys):
    """Rows of log.jsonl: tuples of step and the given keys."""
    rows = [json.loads(line) for line in (Path(run) / "log.jsonl").read_text().splitlines()]
    return [tuple(row[key] for key in ("step", *keys)) for row in rows if row["kind"] == kind]


def history(run):
    """Everything in a log but the times."""
    return logged(run, "train", "loss", "grad_norm", "lr"), logged(run, "val", "loss", "bpb", "stats")


# -------------------------------------------------------------------------------------------------------------- kills


class Undisturbed:
    """A whole run of one model: its log, and the digest of its state after every step."""

    def __init__(self, name, data, folder):
        self.run, self.states = folder / f"whole-{name}", {}
        with watching(lambda path: self.states.update([digest(path.parent)])):
            inside(flags(**RUN, model=name, data=data, out=self.run))
        assert len(self.states) == RUN["max_steps"] + 1


def kill(process):
    """SIGKILL; True if the process was still running."""
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def wait_until(condition, process, seconds=600):
    """Polls every half millisecond; False if the process ends first."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    raise AssertionError("waited in vain")


def n_steps(run):
    try:
        return (run / "log.jsonl").read_bytes().count(b'"kind": "train"')
    except FileNotFoundError:
        return 0


class Chain:
    """Kills one data preparation, then a training run up to `most` times; then lets it finish and compares."""

    def __init__(self, folder, seed, whole, data, seconds, most):
        self.folder, self.rng, self.whole, self.data = folder, random.Random(seed), whole, data
        self.seconds, self.most = seconds, most
        self.tally, self.run, self.latest = Counter(), folder / "run", -1       # latest: step of the last checkpoint
        folder.mkdir()

    def go(self, name):
        prepared = self.folder / "data"
        while not prepared.exists() and self.rng.random() < 0.7:
            process = self.prepare()
            time.sleep(self.rng.uniform(0, self.seconds["data"]))
            self.tally["preparing data" if kill(process) else "too late"] += 1
        if not prepared.exists():
            finish(self.prepare())
        for path in self.data.iterdir():
            assert (prepared / path.name).read_bytes() == path.read_bytes(), path
        while self.tally.total() - self.tally["too late"] < self.most and self.kill_training(name):
            pass
        finish(self.train(name))
        assert history(self.run) == history(self.whole.run)
        assert digest(self.run) == digest(self.whole.run)
        shutil.rmtree(self.folder)
        return self.tally

    def prepare(self):
        return start("data_prep.py", "text", self.folder.parent / "words.txt", "--out", self.folder / "data",
                     "--tokenizer", "byte", "--val_frac", 0.1)

    def train(self, name):
        if (self.run / "ckpt.pt").exists():
            return start("train.py", "--resume", self.run)
        shutil.rmtree(self.run, ignore_errors=True)                             # killed before it had saved anything
        return start("train.py", *flags(**RUN, model=name, data=self.folder / "data", out=self.run))

    def kill_training(self, name):
        """One kill and the checks after it. False if the run ended first."""
        instant, temporary = self.rng.choice(["any time", "a step", "a write"]), self.run / "ckpt.pt.tmp"
        process = self.train(name)
        if instant == "any time":
            time.sleep(self.rng.uniform(0, self.seconds["train"]))
        else:
            aim = max(self.latest, 0) + self.rng.randrange(1, 6)
            wait_until(lambda: n_steps(self.run) >= aim, process)
            if instant == "a write":
                wait_until(temporary.exists, process)
            time.sleep(self.rng.uniform(0, self.seconds["step"]))
        if not kill(process):
            self.tally["too late"] += 1
            return False
        if not (self.run / "ckpt.pt").exists():
            assert self.latest == -1, "the checkpoint is gone"
            self.tally["before the first checkpoint"] += 1
            return True
        step, state = digest(self.run)                                          # raises unless it is readable
        assert step >= self.latest and state == self.whole.states[step], f"step {step} after {self.latest}"
        self.tally["writing a checkpoint" if temporary.exists() else "training or starting up"] += 1
        self.latest = step
        return True


def kills(n, seed, folder, names):
    """At least n SIGKILLs in chains of one model each, two at a time; returns {what was hit: count}."""
    data, total = prepare(folder), Counter()
    wholes = {name: Undisturbed(name, data, folder) for name in names}

    def timed(process):
        began = time.monotonic()
        finish(process)
        return time.monotonic() - began

    first = Chain(folder / "timed", 0, None, None, None, 0)
    seconds = {"data": timed(first.prepare()), "train": timed(first.train(names[0]))}
    seconds["step"] = seconds["train"] / RUN["max_steps"] / 2

    def chain(i):
        name = names[i % len(names)]
        most = min(10, -(-n // 2))
        return Chain(folder / f"chain-{i}", seed * 10_000 + i, wholes[name], data, seconds, most).go(name)

    with ThreadPoolExecutor(2) as pool:
        for i in itertools.count(0, 2):
            for tally in pool.map(chain, (i, i + 1)):
                total += tally
            if total.total() - total["too late"] >= n:
                return {**total, "chains": i + 2}


# -------------------------------------------------------------------------------------------------------------- ranks


def bytes_sent():
    """Bytes sent over all TCP connections of this process, without TCP headers."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):                                      # closed since, or not a TCP socket
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as s:
                    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("=Q", info, 200)[0]             # tcpi_bytes_sent
    return total


def allocated():
    """Bytes in use in the C library's allocator, over all threads."""
    kinds = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    info = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(kind, ctypes.c_size_t) for kind in kinds]})
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = info
    numbers = mallinfo2()
    return numbers.uordblks + numbers.hblkhd


def worker(orders, dtype):
    """One rank of ranks(): several runs of train.py in one process, one after the other.

    An order has argv, and copy: {step: folder to copy the run to when that step is saved}. Writes ORDERS.RANK.json:
    for each order the bytes sent from one step to the next, and the bytes held before the last micro-step.
    """
    rank, done = int(os.environ.get("RANK", 0)), []
    torch.set_default_dtype(getattr(torch, dtype))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        dist.init_process_group = lambda *_, **__: None
    batch = Data.batch
    for order in json.loads(Path(orders).read_text()):
        sent, held = {}, {}
        gc.collect()
        before = allocated()

        def watched(self, step, *words):
            sent.setdefault(step, bytes_sent())                                 # before the first micro-step
            held[step] = allocated() - before                                   # before the last: with gradients
            return batch(self, step, *words)

        def copy(path):
            step = str(torch.load(path, weights_only=True, mmap=True)["step"])
            if step in order["copy"]:
                shutil.copytree(path.parent, order["copy"][step])

        Data.batch = watched
        with watching(copy):
            inside(order["argv"])
        done.append({"sent": [sent[b] - sent[a] for a, b in itertools.pairwise(sorted(sent))],
                     "held": min(held[step] for step in held if step >= 2)})
    Path(f"{orders}.{rank}.json").write_text(json.dumps(done))
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)


def give(world, folder, dtype, orders):
    """Runs the orders on `world` ranks; returns what worker() wrote: for each order a list with an entry per rank."""
    path = folder / f"orders-{time.monotonic_ns()}"
    path.write_text(json.dumps(orders))
    words = ("worker", "--orders", path, "--dtype", dtype)
    finish(start("tests/endurance.py", *words, ranks=world if world > 1 else None))
    return list(zip(*(json.loads(Path(f"{path}.{rank}.json").read_text()) for rank in range(world)), strict=True))


def ranks(folder, names, dtype, measured, own=None, **shape):
    """The same run of each model on 1, 2 and 4 processes, and one that goes from two to one and back to two.

    dtype: float32, or float64 to show that only rounding differs. measured: models whose bytes are measured.
    own: {model: options of its runs alone}. shape: options other than RUN's.

    Returns rows of losses (model, processes, largest difference to one process in a training loss, in a validation
    loss) and of bytes (model, processes, what, by formula, measured).
    """
    data, steps = prepare(folder), shape.get("max_steps", RUN["max_steps"])
    third, own, losses, sizes = steps // 3, own or {}, [], []

    def order(name, kind, copy=None, **changes):
        changes = changes or shape
        argv = flags(**{**RUN, "eval_every": steps, "save_every": third, "micro_batch": 2, "data": data, "model": name,
                        **changes, **own.get(name, {})},
                     out=folder / f"{name} {kind}")
        return {"argv": argv, "copy": {str(third): str(folder / f"{name} {copy}")} if copy else {}}

    def resume(name, kind, copy=None):
        copies = {str(2 * third): str(folder / f"{name} {copy}")} if copy else {}
        return {"argv": ["--resume", str(folder / f"{name} {kind}")], "copy": copies}

    def large(kind):                                                            # as many micro-steps as there can be
        return [order(name, kind, max_steps=6, save_every=6, micro_batch=1, d_model=384, d_ff=1024)
                for name in measured]

    told = {2: give(2, folder, dtype, [order(name, "2", "2, 1") for name in names] + large("large 2"))}
    give(1, folder, dtype, [order(name, "1") for name in names] + [resume(name, "2, 1", "2, 1, 2") for name in names])
    give(2, folder, dtype, [resume(name, "2, 1, 2") for name in names])
    told[4] = give(4, folder, dtype, [order(name, "4") for name in names] + large("large 4"))
    for name in names:
        one, val = (np.array(logged(folder / f"{name} 1", kind, "loss")) for kind in ("train", "val"))
        for kind in ("2", "4", "2, 1", "2, 1, 2"):
            many, last = (np.array(logged(folder / f"{name} {kind}", which, "loss")) for which in ("train", "val"))
            assert len(one) == steps, "steps are missing"
            assert (one[:, 0] == many[:, 0]).all() and (val[:, 0] == last[:, 0]).all(), "steps are missing"
            losses.append((name, kind, np.abs(one - many).max(), np.abs(val - last).max()))
    size = torch.finfo(getattr(torch, dtype)).bits / 32                         # the formulas are for float32
    for i, name in enumerate(measured):
        for world, answers in told.items():
            formula = timing.across(runs.load(folder / f"{name} large {world}")[0], world, "muon", "fp32")
            each = answers[len(names) + i]                                      # of each rank, with warm caches
            sent = max(np.median(answer["sent"]) for answer in each)
            sizes.append((name, world, "sent per step", size * (formula["gradients"] + formula["updates"]), sent))
            sizes.append((name, world, "held", size * formula["held"], max(answer["held"] for answer in each)))
    return losses, sizes


# ------------------------------------------------------------------------------------------------------------- faults


def rank_pids(launcher):
    """{rank: pid} of torchrun's children."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == launcher.pid:
                words = dict(w.split("=", 1) for w in (folder / "environ").read_text().split("\0") if "=" in w)
                found[int(words["RANK"])] = int(folder.name)
    return found


def lost_rank(folder, seed, data, whole):
    """SIGKILL to one of two ranks at a random step: the other reports it and ends; the run resumes. Returns seconds."""
    rng, run = random.Random(seed), folder / f"lost-{seed}"
    process = start("train.py", *flags(**RUN, data=data, out=run), ranks=2)
    aim = rng.randrange(1, RUN["max_steps"] - 5)
    assert wait_until(lambda: n_steps(run) >= aim, process), process.communicate()[0]
    victim = rng.randrange(2)
    os.kill(rank_pids(process)[victim], signal.SIGKILL)
    began = time.monotonic()
    output = process.communicate(timeout=600)[0]                                    # it hangs if it waits for the dead
    seconds = time.monotonic() - began
    said = [line for line in output.splitlines()
            if line.startswith(f"train.py: rank {1 - victim}: another rank is gone: stopped")]
    assert process.returncode == 1 and len(said) == 1 and "--resume" in said[0], output
    assert f"[{victim}]" not in output.split("another rank is gone")[0] and "train.py\", line" not in output, output
    digest(run)
    finish(start("train.py", "--resume", run, ranks=2))
    assert history(run) == history(whole) and digest(run) == digest(whole)
    return seconds


def full_disk(folder, data, whole, freed):
    """A run on its own disk, which fills up and is freed while the run goes on, or after it and the run is resumed.

    Needs the right to mount, see in_namespace(). Returns what the run printed.
    """
    disk = folder / f"disk {freed}"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", disk], check=True)
    try:
        run, full = disk / "run", disk / "other people's data"
        process = start("train.py", *flags(**RUN, data=data, out=run))
        assert wait_until(lambda: n_steps(run) >= 5, process)
        with contextlib.suppress(OSError), open(full, "wb", buffering=0) as f:
            while True:
                f.write(bytes(4096))
        said = next(line for line in process.stdout if "could not be written" in line or "No space" in line).strip()
        step, state = digest(run)
        assert step >= 4 and state == whole.states[step], step
        if freed:                                                               # it goes on
            full.unlink()
            output = finish(process)
            assert "Traceback" not in output and "done: " in output, output
        else:
            output = process.communicate(timeout=600)[0]
            assert process.returncode == 1 and "Traceback" not in output, output
            assert digest(run) == (step, state)
            full.unlink()
            finish(start("train.py", "--resume", run))
        assert history(run) == history(whole.run) and digest(run) == digest(whole.run)
        return said.replace(str(run), "RUN")
    finally:
        subprocess.run(["umount", disk], check=True)


def in_namespace(*words):
    """Runs this script in a namespace where it may mount disks; None if this machine does not allow that."""
    inner = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*inner, "true"], stderr=subprocess.DEVNULL).returncode:
        return None
    done = subprocess.run([*inner, sys.executable, __file__, *words], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def two_processes(folder, data, whole):
    """Two processes start with the same --out, then resume the same run: one is refused, the other is not disturbed."""
    run = folder / "shared"
    both = [start("train.py", *flags(**RUN, data=data, out=run)) for _ in range(2)]
    outputs = [process.communicate(timeout=600)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], outputs
    refused = outputs[[process.returncode for process in both].index(2)]
    assert f"{run} exists" in refused and refused.count("\n") == 1, refused
    assert history(run) == history(whole) and digest(run) == digest(whole)
    again = folder / "again"
    first = start("train.py", *flags(**RUN, data=data, out=again))
    assert wait_until((again / "ckpt.pt").exists, first)
    first.kill()
    first.communicate()
    both = [start("train.py", "--resume", again) for _ in range(2)]
    outputs = [process.communicate(timeout=600)[0] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 2], [0, 0]), outputs                   # [0, 0]: one ended before the other began
    assert codes == [0, 0] or any("in use by another process" in out and out.count("\n") == 1
                                  for out in outputs), outputs
    assert history(again) == history(whole) and digest(again) == digest(whole)
    return codes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("kills", "ranks", "faults", "disk", "worker"),
                        help="disk, worker: used by the other parts")
    parser.add_argument("--n", type=int, default=200, help="kills, or killed ranks [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("orders", "dtype"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part == "worker":
        sys.exit(worker(args.orders, args.dtype))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if args.part == "kills":
            for what, n in kills(args.n, args.seed, folder, models.names()).items():
                print(f"{n:5d}  {what}")
        elif args.part == "ranks":
            for dtype in ("float64", "float32"):
                (folder / dtype).mkdir()
                losses, sizes = ranks(folder / dtype, models.names(), dtype, models.names())
                for name, kind, train_loss, val_loss in losses:
                    print(f"{dtype} {name:11} processes {kind:8} against 1: training losses differ by at most "
                          f"{train_loss:.1e}, validation {val_loss:.1e}")
            for name, world, what, formula, measured in sizes:
                print(f"{name:11} on {world} processes, {what:13}: {formula:12,.0f} bytes by formula, "
                      f"{measured:12,.0f} measured ({measured / formula - 1:+.2%})")
        elif args.part == "disk":
            data = prepare(folder)
            whole = Undisturbed("gpt", data, folder)
            for freed in (True, False):
                print("freed while it runs:" if freed else "freed after the run:",
                      full_disk(folder, data, whole, freed))
        else:
            data = prepare(folder)
            whole = Undisturbed("gpt", data, folder)
            finish(start("train.py", *flags(**RUN, data=data, out=folder / "whole-2"), ranks=2))
            seconds = [lost_rank(folder, args.seed + i, data, folder / "whole-2") for i in range(args.n)]
            print(f"a rank of two killed, {args.n} times: the other ended within {max(seconds):.1f} s")
            print("two processes on one folder: exit codes", two_processes(folder, data, whole.run))
            print("full disk:", in_namespace("disk") or "not tried, needs unshare and the right to mount")
