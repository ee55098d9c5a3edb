"""Trains the runs of this study: python results/study/study.py --data wiki

A run trains at a constant learning rate. From its checkpoints at 400, 800, 1,600 and 3,200 steps the rate decays to a
tenth over another 25% of the steps, so 4,700 steps in all give models of 500, 1,000, 2,000 and 4,000 steps. Each of the
four is a stage of the run. It continues from before_decay/ of the stage before, with a larger --max_steps. If that is
lost, the run starts again for this stage.

Every system has its own learning rates; their ratios come from earlier sweeps (your own model's: --rates). Seed 0 tunes
their scale at 1,000 steps: the rates are halved, at most twice, as long as the loss on targets that are not copyable
falls (--scales 1: no tuning). If most targets are copyable, as on bytes, it is the loss on all of them.
Seed 0 of all systems is trained first, then seeds 1 and 2, then the longest stages.

You may kill it at any moment and start it again: a run continues from its last checkpoint. A finished stage is a line
in runs.csv and rows in logs.jsonl.xz (here or in --results), and is kept. With --jobs 4 four runs train at a time.

    python results/study/study.py --data notes --results runs/study-mine --systems gpt mine --steps 1000

With --steps 20 --scales 1 --seeds 1 --eval_tokens 4096 --no-compile this is a try of a minute. All other options are
passed to train.py. Finished stages must differ from those to come in length, seed and rates alone: if you change an
option, or code, name another --results. A larger study, for a GPU (29M parameters in the blocks):

    python results/study/study.py --data fineweb-edu --results runs/study-30m --preset study-30m --dtype bf16 --seeds 2
"""
import csv
import ctypes
import fcntl
import json
import lzma
import math
import os
import re
import shutil
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import publish  # noqa: E402
import torch  # noqa: E402

import models  # noqa: E402
import train  # noqa: E402
from nanodepth import ran, runs  # noqa: E402
from nanodepth.cli import Parser, UserError, run_script, shell  # noqa: E402
from nanodepth.data import Data, find_folder  # noqa: E402

STEPS, SEEDS = (500, 1000, 2000, 4000), 3
RECIPE = "--preset study --dtype fp32 --compile --model {}"
GPT, MIX = (0.007, 0.024, 0.002), (0.01, 0.024, 0.008)              # rates: muon_lr, adamw_lr, mix_lr
SYSTEMS = {  # name in the tables: model and its options, rates; on a GPU mhar compiles for longer than it trains
    "gpt": ("gpt", GPT), "muddformer": ("muddformer", (0.01, 0.024, 0.002)), "resformer": ("resformer", MIX),
    "exoformer_dynamic": ("exoformer_dynamic", MIX), "satformer": ("satformer", GPT),
    "attnres": ("attnres", (0.005, 0.024, 0.002)), "mhc": ("mhc", MIX),
    "denseformer": ("denseformer", (0.01, 0.024, 0.0005)),
    "hyperconnections": ("hyperconnections", (0.005, 0.024, 0.008)),
    "exoformer": ("exoformer", MIX), "gpt-gated": ("gpt --gate elementwise", GPT), "speedrun": ("speedrun", MIX),
    "gpt-wide": ("gpt --d_ff 448", GPT),                            # 8% more parameters and FLOPs, as exoformer and mhc
    "gpt-wide-stream": ("gpt --d_model 160 --n_head 5 --n_layer 8", GPT),       # gpt's FLOPs
    "attnres_block": ("attnres_block", (0.005, 0.024, 0.002)), "mhar": ("mhar --no-compile", (0.005, 0.024, 0.002)),
    "depth_attention": ("depth_attention", GPT), "mhc_lite": ("mhc_lite", MIX), "nuresformer": ("nuresformer", MIX),
    "resformer-half": ("resformer", tuple(rate / 2 for rate in MIX))}
MAIN = list(SYSTEMS)                                                    # those trained unless --systems names others
WIDE = "gpt-gated muddformer mhc hyperconnections attnres denseformer satformer resformer-half exoformer".split()
SYSTEMS |= {f"{name}-8x160": (f"{SYSTEMS[name][0]} --d_model 160 --n_head 5 --n_layer 8", SYSTEMS[name][1])
            for name in WIDE}                                           # in gpt-wide-stream's shape
GATED = "muddformer mhc attnres denseformer resformer-half satformer".split()
SYSTEMS |= {f"{name}-gated": (f"{SYSTEMS[name][0]} --gate elementwise", SYSTEMS[name][1]) for name in GATED}
SYSTEMS["gpt-9x512"] = ("gpt --d_model 512 --n_head 8 --n_layer 9", GPT)   # the counterpart of gpt-wide-stream at 30M
LONG = ("gpt", "gpt-gated", "resformer", "exoformer_dynamic", "satformer", "muddformer", "attnres", "mhc",
        "resformer-half")
RATES = "muon_lr", "adamw_lr", "mix_lr"
COLUMNS = ("run system scale seed steps muon_lr adamw_lr mix_lr loss bpb repeated others share tokens ms data commit "
           "cpu gpu torch").split()


class Results:
    """runs.csv (a line per stage) and logs.jsonl.xz (the rows of their logs, each with the stage's name)."""

    def __init__(self, folder):
        self.folder, self.csv, self.logs = folder, folder / "runs.csv", folder / "logs.jsonl.xz"
        folder.mkdir(parents=True, exist_ok=True)

    def stages(self):
        """{name: line of runs.csv}."""
        return {line["run"]: line for line in csv.DictReader(self.csv.open())} if self.csv.exists() else {}

    def ran(self):
        """{stage: the row of its log with the config of what ran}; older stages have none."""
        rows = map(json.loads, lzma.open(self.logs, "rt")) if self.logs.exists() else ()
        return {row["run"]: row for row in rows if row["kind"] == "ran"}

    def add(self, line, rows):
        """Adds a finished stage, or replaces the one of this name."""
        with open(self.folder / ".lock", "w") as lock:                  # one process at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines, begin = {**self.stages(), line["run"]: line}, f'{{"run": "{line["run"]}", '.encode()
            kept = self.logs.read_bytes() if self.logs.exists() else lzma.compress(b"")
            if begin in (old := lzma.decompress(kept)):                 # maybe without a line in runs.csv, after a kill
                kept = lzma.compress(b"".join(row for row in old.splitlines(True) if not row.startswith(begin)))
            text = "".join(json.dumps({"run": line["run"], **row}) + "\n" for row in rows)
            runs.write_atomically(self.logs, lambda f: f.write(kept + lzma.compress(text.encode())))
            table = [COLUMNS, *([str(x[column]).replace(",", " ") for column in COLUMNS] for x in lines.values())]
            runs.write_text(self.csv, "".join(",".join(cells) + "\n" for cells in table))


def forked(work, *args):
    """Begins work(*args) in a process that has all imports already -> its id. This process must not use the GPU."""
    if pid := os.fork():
        return pid
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGUSR1)                      # ends with its parent; train.py saves first
    try:
        run_script("study.py", lambda _: work(*args))
    except SystemExit as done:
        os._exit(done.code or 0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def ended(pid):
    """Waits for a process -> its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def claimed(path):
    """Yields whether this process gets the work. Until the block ends, other processes that ask get False."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def flags(**options):
    return [str(word) for name, x in options.items() for word in (f"--{name}", x)]


def recipe(system, rates, args):
    """The flags of train.py for a stage of this system, but for its length and seed."""
    model = SYSTEMS.get(system, (system,))[0]
    return [*RECIPE.format(model).split(), *args.options, *flags(**dict(zip(RATES, rates)))]


def rates_of(system, scale, args):
    """The learning rates of a system at this scale."""
    own = SYSTEMS.get(system, (system, args.rates))[1]
    return [rate * scale * factor for rate, factor in zip(own, args.factors)]


def check_stages(system, fingerprint, args):
    """UserError if a stage of this system, finished or begun, differs from today's in more than length and seed."""
    known = {name: row["config"] for name, row in args.results.ran().items()}
    for folder in args.out.glob(f"{system}-x*-seed*-*/"):
        if (folder / "config.json").exists():
            known[folder.name] = json.loads((folder / "config.json").read_text())
    for name, config in known.items():
        if not (found := re.fullmatch(re.escape(system) + r"-x([\d.]+)-seed(\d+)-(\d+)", name)):
            continue
        scale, _, steps = found.groups()
        options, model_config, _ = train.parse(
            recipe(system, rates_of(system, float(scale), args), args) + flags(max_steps=steps))
        now = {"model": options.model, "model_config": asdict(models.config(options.model, **model_config)),
               "options": vars(options), "data": {"fingerprint": fingerprint}, "versions": {"torch": torch.__version__},
               "code": ran.code(models.module(options.model))}
        unknown = {"vocab_size", "max_steps"} | ({"dtype"} if options.dtype == "auto" else set())
        if config["options"].get("warmup_steps") in args.steps:             # cut to the length of a stage
            unknown.add("warmup_steps")
        if differ := ran.differences(config, now, {*unknown, *args.ignore}):
            raise UserError(f"{name} was trained with other options or code than this study would use now "
                            f"({ran.in_words(differ)}): name another --results, or what may differ with --ignore")


def train_stage(folder, system, seed, scale, rates, steps, before, args):
    """Trains a stage, or the rest of it, and adds it to the results -> exit code. For a process of its own, whose
    output goes to FOLDER.txt. before: the folder of the stage before, or None.
    """
    if before and not (folder / "ckpt.pt").exists():
        shutil.rmtree(f"{folder}.part", ignore_errors=True)
        shutil.copytree(before / "before_decay", f"{folder}.part")
        Path(f"{folder}.part").rename(folder)
    options = {"max_steps": steps, "eval_every": 100}
    if (folder / "ckpt.pt").exists():
        words = flags(resume=folder, **options)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        words = recipe(system, rates, args) + flags(out=folder, data=args.data, seed=seed, **options)
    with open(f"{folder}.txt", "a") as f:
        os.dup2(f.fileno(), 1), os.dup2(f.fileno(), 2)
    torch.set_num_threads(1)
    if (code := train.main(words)) in (0, 3):                       # 3: the loss is not finite
        torch.set_float32_matmul_precision("highest")               # train.py allows TF32
        args.results.add(*summary(folder, system, scale))
        return 0
    return code


def summary(folder, system, scale):
    """(a stage's line of runs.csv, the rows of its log to keep: validations and every tenth step)."""
    config = json.loads((folder / "config.json").read_text())
    rows = [json.loads(row) for row in (folder / "log.jsonl").read_text().splitlines()]
    options, val = config["options"], [row for row in rows if row["kind"] == "val"]
    ended = math.isfinite(publish.final_loss(folder))
    split = publish.copying(folder) if ended else dict.fromkeys(("repeated", "others", "share"))
    times = sorted(row["ms"] for row in rows if row["kind"] == "train")
    line = {"run": folder.name, "system": system, "scale": scale, "steps": options["max_steps"],
            **{key: options[key] for key in ("seed", "muon_lr", "adamw_lr", "mix_lr")},
            "loss": val[-1]["loss"] if ended else math.inf, "bpb": val[-1]["bpb"], **split, "tokens": val[-1]["tokens"],
            "ms": round(times[len(times) // 2]), "data": config["data"]["fingerprint"],
            "commit": (config["git"] or {}).get("commit"), "cpu": config["cpu"], "gpu": config["gpu"],
            "torch": config["versions"]["torch"]}
    ran_row = {"kind": "ran", "step": 0, "config": ran.part(config)}
    return line, [ran_row, *(row for row in rows if row["kind"] == "val" or row["step"] % 10 == 0)]


def trunk(system, scale, seed, most, args):
    """Trains the missing stages of a run up to `most` steps -> the last one's line of runs.csv; None if another
    process does. A stage that diverged is the last.
    """
    rates = rates_of(system, scale, args)
    name = f"{system}-x{scale:g}-seed{seed}"
    stages = {steps: args.out / f"{name}-{steps}" for steps in args.steps if steps <= most}
    with claimed(args.out / name) as mine:
        before = None
        for steps, folder in stages.items():
            if folder.name not in args.results.stages():
                if not mine:
                    return None
                print(f"{folder.name}: see {folder}.txt", flush=True)
                if code := ended(forked(train_stage, folder, system, seed, scale, rates, steps, before, args)):
                    raise UserError(f"{folder}.txt: {Path(f'{folder}.txt').read_text().splitlines()[-1]}", code=code)
                print(f"{folder.name}: loss {float(args.results.stages()[folder.name]['loss']):.4f}", flush=True)
            if (folder / "before_decay").exists():
                before = folder
            stage = args.results.stages()[folder.name]
            if not math.isfinite(float(stage["loss"])):
                break
        return stage


def best_scale(system, steps, args):
    """The best scale of a system's learning rates; None if another process is tuning it."""
    if len(args.scales) == 1:
        return args.scales[0]
    best = least = None
    for scale in args.scales:
        if not (stage := trunk(system, scale, 0, steps, args)):
            return None
        loss = float(stage[publish.criterion(stage)] if math.isfinite(float(stage["loss"])) else "inf")
        if best and loss >= least:
            break
        best, least = scale, loss
    return best


def work(plan, tune, args):
    """Trains the plan [(steps, seed, system)], several times until other processes have done their part too."""
    while plan:
        plan = [(most, seed, system) for most, seed, system in plan
                if not ((scale := best_scale(system, tune, args)) and trunk(system, scale, seed, most, args))]
        time.sleep(5 if plan else 0)


def main(argv):
    parser = Parser("study.py", description=__doc__)
    parser.add_argument("--data", default="wiki", help="folder made by data_prep.py, or its name under data/ (wiki)")
    parser.add_argument("--results", type=Path, default=HERE, help="folder for runs.csv and logs.jsonl.xz (this one)")
    parser.add_argument("--out", type=Path, help="folder for the runs (runs/study; with --results, RESULTS/runs)")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help=f"lengths of the runs in steps {STEPS}")
    parser.add_argument("--scales", type=float, nargs="+", default=(1, 0.5, 0.25), help="rate factors (1 0.5 0.25)")
    parser.add_argument("--rates", type=float, nargs=3, default=GPT, metavar=("MUON", "ADAMW", "MIX"),
                        help=f"learning rates of a system that is not in the list below {GPT}")
    parser.add_argument("--factors", type=float, nargs=3, default=(1, 1, 1), metavar=("MUON", "ADAMW", "MIX"),
                        help="of all systems' learning rates, for another size of model (1 1 1)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds per system (%(default)s)")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM",
                        help=f"to train, in this order: {' '.join(MAIN)} (these), {' '.join([*SYSTEMS][len(MAIN):])}, "
                             "or any other model")
    parser.add_argument("--ignore", nargs="+", default=(), metavar="NAME",
                        help="what may differ from the stages that are there: options, files of code, or code for all")
    parser.add_argument("--jobs", type=int, default=1, help="runs that train at the same time (%(default)s)")
    args, args.options = parser.parse_known_args(argv)              # further options go to train.py
    args.out = (args.out or (Path("runs/study") if args.results == HERE else args.results / "runs")).resolve()
    args.systems = args.systems or MAIN
    if given := {word.split("=")[0] for word in args.options} & {f"--{name}" for name in RATES}:
        parser.error(f"{min(given)}: this script sets the learning rates; for a model of your own, give --rates")
    args.steps = sorted(set(args.steps))
    args.results = Results(args.results.resolve())
    fingerprint = Data(find_folder(args.data)).fingerprint
    if others := {stage["data"] for stage in args.results.stages().values()} - {fingerprint}:
        parser.error(f"{args.results.csv} has runs on other data ({', '.join(others)}): name another --results")
    for system in args.systems:                                     # a mistake in one ends the study now
        train.parse(recipe(system, rates_of(system, 1, args), args))
        check_stages(system, fingerprint, args)
    tune = max(steps for steps in args.steps if steps <= max(1000, min(args.steps)))
    short = [steps for steps in args.steps if steps < 4000] or args.steps
    longest = [x for x in args.systems if x in LONG or x not in SYSTEMS]
    plan = [(most, seed, system) for most, systems in ((max(short), args.systems), (max(args.steps), longest))
            for seed in range(args.seeds) for system in systems]
    if code := max(abs(ended(pid)) for pid in [forked(work, plan, tune, args) for _ in range(max(1, args.jobs))]):
        return code
    print(f"done: {shell('results/compare.py', args.results.folder)}")


if __name__ == "__main__":
    run_script("study.py", main)
