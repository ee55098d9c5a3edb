"""Trains the runs of this study: python results/study/study.py --data wiki

A run trains at a constant learning rate. From its checkpoints at 400, 800 and 1,600 steps the rate decays to a tenth
over another 25% of the steps, so 2,300 steps in all give models of 500, 1,000 and 2,000 steps. Each of the three is a
stage of the run. It continues from before_decay/ of the stage before, with a larger --max_steps. If that is lost, the
run starts again for this stage.

Every system has its own learning rates; their ratios come from earlier sweeps. Seed 0 tries these, half of them and a
quarter, for 1,000 steps; the other seeds use the best (--scales 1: no tuning), by the loss on targets that are not
copyable, or on all if most are copyable, as on bytes.

You may kill it at any moment and start it again: a run continues from its last checkpoint. A finished stage is a line
in runs.csv and rows in logs.jsonl.xz (here or in --results), and is kept. One that fails stops no other system.
With --steps 20 --scales 1 --seeds 1 --eval_tokens 4096 --no-compile this is a try of a minute. All other options are
passed to train.py. Finished stages must differ from those to come in length, seed and rates alone: if you change an
option, or code, name another --results. A larger study, for a GPU, is in results/gpu/day.sh.
"""
import ctypes
import fcntl
import json
import lzma
import math
import os
import shutil
import signal
import sys
from dataclasses import asdict
from itertools import product
from multiprocessing import connection, get_context
from pathlib import Path
from statistics import median_high

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import torch  # noqa: E402
from compare import RATES, best_scales, read, table  # noqa: E402

import models  # noqa: E402
import train  # noqa: E402
from nanodepth import data, inside, ran, runs  # noqa: E402
from nanodepth.cli import Parser, UserError, run_script, shell  # noqa: E402
from nanodepth.devices import find_device  # noqa: E402

RECIPE = "--preset study --dtype fp32 --compile --model {}"
GPT, ATTNRES, MIX = (0.007, 0.024, 0.002), (0.005, 0.024, 0.002), (0.01, 0.024, 0.008)     # muon_lr, adamw_lr, mix_lr
WIDE, GATE = "--d_model 160 --n_head 5 --n_layer 8", "--gate elementwise"       # WIDE: at gpt's FLOPs
LARGE, LARGER = "--d_model 256 --dtype bf16", "--d_model 448 --n_head 7 --dtype bf16"       # 11.7M, 33M parameters
SYSTEMS = {  # name in the tables: model and its options, rates; on a GPU mhar compiles for longer than it trains
    "gpt": ("gpt", GPT), "gpt-gated": (f"gpt {GATE}", GPT), "muddformer": ("muddformer", (0.01, 0.024, 0.002)),
    "resformer": ("resformer", MIX), "exoformer_dynamic": ("exoformer_dynamic", MIX), "satformer": ("satformer", GPT),
    "attnres": ("attnres", ATTNRES), "mhc": ("mhc", MIX), "denseformer": ("denseformer", (0.01, 0.024, 0.0005)),
    "hyperconnections": ("hyperconnections", (0.005, 0.024, 0.008)), "exoformer": ("exoformer", MIX),
    "speedrun": ("speedrun", MIX), "gpt-wide": ("gpt --d_ff 448", GPT),     # at about exoformer's and mhc's FLOPs
    "gpt-wide-stream": (f"gpt {WIDE}", GPT), "attnres_block": ("attnres_block", ATTNRES),
    "mhar": ("mhar --no-compile", ATTNRES), "depth_attention": ("depth_attention", GPT), "mhc_lite": ("mhc_lite", MIX),
    "nuresformer": ("nuresformer", MIX), "resformer-half": ("resformer", tuple(rate / 2 for rate in MIX))}
MAIN = list(SYSTEMS)                                                    # those trained unless --systems names others
for name, (model, rates) in list(SYSTEMS.items()):
    SYSTEMS |= {f"{name}-8x160": (f"{model} {WIDE}", rates), f"{name}-12x256": (f"{model} {LARGE}", rates),
                f"{name}-12x448": (f"{model} {LARGER}", rates), f"{name}-gated": (f"{model} {GATE}", rates)}
SYSTEMS["gpt-9x512"] = ("gpt --d_model 512 --n_head 8 --n_layer 9", GPT)   # the counterpart of gpt-wide-stream at 30M
COLUMNS = ("run system scale seed steps muon_lr adamw_lr mix_lr loss bpb repeated others share tokens ms data commit "
           "cpu gpu torch").split()
name_of = "{}-x{:g}-seed{}-{}".format                   # of a stage (system, scale, seed, steps) and its folder


def start(stage, args):
    """Begins train_stage() in a process that has all imports already -> it. Its output goes to FOLDER.txt. This process
    must not use the GPU.
    """
    def child():
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGUSR1)                  # ends with its parent; train.py saves first
        with open(args.out / f"{name_of(*stage)}.txt", "a") as f:
            os.dup2(f.fileno(), 1), os.dup2(f.fileno(), 2)
        run_script("study.py", lambda _: train_stage(stage, args))

    process = get_context("fork").Process(target=child)
    process.start()
    return process


def flags(**options):
    return [str(word) for name, x in options.items() for word in (f"--{name}", x)]


def recipe(system, scale, args):
    """The flags of train.py for a stage of this system, but for its length and seed."""
    model, rates = SYSTEMS.get(system, (system, GPT))
    rates = [rate * scale * factor for rate, factor in zip(rates, args.factors)]
    return [*RECIPE.format(model).split(), *args.options, *flags(**dict(zip(RATES, rates)))]


def train_stage(stage, args):
    """Trains a stage, or the rest of it, and adds it to the results -> exit code. For a process of its own."""
    (system, scale, seed, steps), folder, words = stage, args.out / name_of(*stage), []
    if not (folder / "ckpt.pt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        before = [args.out / name_of(*stage[:3], shorter) / "before_decay" for shorter in args.steps if shorter < steps]
        if before := [path for path in before if path.exists()]:
            shutil.copytree(before[-1], f"{folder}.part", dirs_exist_ok=True)
            Path(f"{folder}.part").rename(folder)
        else:
            words = flags(out=folder, data=args.data, seed=seed)
    torch.set_num_threads(1)
    code = train.main(recipe(system, scale, args) + (words or flags(resume=folder)) +
                      flags(max_steps=steps, eval_every=100))
    if code in (0, 3):                                              # 3: the loss is not finite
        torch.set_float32_matmul_precision("highest")               # train.py allows TF32
        add(args.results, *summary(folder, system, scale))
        return 0
    return code


def summary(folder, system, scale):
    """(a stage's line of runs.csv, the rows of its log to keep: validations and every tenth step)."""
    config, rows = json.loads((folder / "config.json").read_text()), runs.log_rows(folder / "log.jsonl", math.inf)
    options, last = config["options"], [row for row in rows if row["kind"] == "val"][-1]
    loss, split = math.inf, dict.fromkeys(("repeated", "others", "share"))              # if it diverged
    if last["step"] == options["max_steps"] and last["loss"] is not None and math.isfinite(last["loss"]):
        loss, device = last["loss"], find_device()          # split on the tokens of that validation, in fp32
        batches = data.run_data(folder, config).val_batches(last["eval_tokens"], 16, options["seq_len"])
        split = inside.copying(runs.load(folder, device)[0], ((idx.to(device), y.to(device)) for idx, y in batches))
    line = {"run": folder.name, "system": system, "scale": scale, "steps": options["max_steps"], "loss": loss, **split,
            **{key: options[key] for key in ("seed", *RATES)}, "bpb": last["bpb"], "tokens": last["tokens"],
            "ms": round(median_high(row["ms"] for row in rows if row["kind"] == "train")),
            "data": config["data"]["fingerprint"], "commit": (config["git"] or {}).get("commit"), "cpu": config["cpu"],
            "gpu": config["gpu"], "torch": config["versions"]["torch"]}
    ran_row = {"kind": "ran", "step": 0, "config": ran.part(config)}
    return line, [ran_row, *(row for row in rows if row["kind"] == "val" or row["step"] % 10 == 0)]


def add(folder, line, rows):
    """Adds a finished stage to runs.csv, and the rows of its log to logs.jsonl.xz; or replaces the one of this name."""
    file, logs = folder / "runs.csv", folder / "logs.jsonl.xz"
    with open(folder / ".lock", "w") as lock:                           # one process at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        begin = f'{{"run": "{line["run"]}", '.encode()
        kept = logs.read_bytes() if logs.exists() else lzma.compress(b"")
        if begin in (old := lzma.decompress(kept)):                     # maybe without a line in runs.csv, after a kill
            kept = lzma.compress(b"".join(row for row in old.splitlines(True) if not row.startswith(begin)))
        text = "".join(json.dumps({"run": line["run"], **row}) + "\n" for row in rows)
        runs.write_atomically(logs, lambda f: f.write(kept + lzma.compress(text.encode())))
        lines = file.read_text().splitlines()[1:] if file.exists() else []
        lines = [",".join(COLUMNS), *(each for each in lines if not each.startswith(f"{line['run']},")),
                 ",".join(str(line[column]).replace(",", " ") for column in COLUMNS)]
        runs.write_text(file, "\n".join(lines) + "\n")


def check(system, known, fingerprint, args):
    """UserError if a stage of this system, finished (known: {name: its config}) or begun, differs from what this study
    would train now in more than length and seed.
    """
    for scale, seed, steps in product(args.scales, range(args.seeds), args.steps):
        name = name_of(system, scale, seed, steps)
        if (file := args.out / name / "config.json").exists():
            known[name] = json.loads(file.read_text())
        if not (config := known.get(name)):
            continue
        options, model_config, _ = train.parse(recipe(system, scale, args) + flags(max_steps=steps))
        now = {"model": options.model, "model_config": asdict(models.config(options.model, **model_config)),
               "options": vars(options), "data": {"fingerprint": fingerprint}, "versions": {"torch": torch.__version__},
               "code": ran.code(models.module(options.model), train)}
        free = {"vocab_size", "max_steps", "warmup_steps", *args.ignore}        # warm-up is cut to a stage's length
        if differ := ran.differences(config, now, free | ({"dtype"} if options.dtype == "auto" else set())):
            raise UserError(f"{name} was trained with other options or code than this study would use now "
                            f"({ran.in_words(differ)}): name another --results, or what may differ with --ignore")


def next_stage(system, seed, done, args):
    """The first stage that is missing to find the best scale of a system, or else of its run at this scale, or None.
    done: {name: line of runs.csv}.
    """
    def missing(scale, seed, lengths):
        stages = [(system, scale, seed, steps) for steps in lengths]
        return next((stage for stage in stages if name_of(*stage) not in done), None)

    tune = [steps for steps in args.steps if steps <= max(1000, args.steps[0])]
    for scale in args.scales if len(args.scales) > 1 else ():
        if stage := missing(scale, 0, tune):
            return stage
    best = best_scales([line for line in done.values() if line["scale"] in args.scales])
    return missing(best.get(system, args.scales[0]), seed, args.steps)


def finished(args):
    """{name of a finished stage: its line of runs.csv}."""
    return {line["run"]: line for line in table(args.results / "runs.csv")}


def work(plan, args):
    """Trains what is missing of the plan [(system, seed)], some stages at a time -> the largest exit code."""
    running, failed, code = {}, set(), 0                                # running: {process: its stage}
    try:
        while True:
            done = finished(args)
            for part in plan:
                stage = next_stage(*part, done, args)
                if stage and len(running) < args.jobs and stage not in {*running.values(), *failed}:
                    print(f"{name_of(*stage)}: see {args.out}/{name_of(*stage)}.txt", flush=True)
                    running[start(stage, args)] = stage
            if not running:
                return code
            connection.wait([process.sentinel for process in running])
            for process in [process for process in running if process.exitcode is not None]:
                stage = running.pop(process)
                name, code = name_of(*stage), max(code, abs(process.exitcode))
                if process.exitcode == 0:
                    print(f"{name}: loss {finished(args)[name]['loss']:.4f}", flush=True)
                    continue
                failed.add(stage)
                said = ["", *(args.out / f"{name}.txt").read_text().splitlines()][-1]
                print(f"{name}: failed with code {process.exitcode}: {said}", file=sys.stderr, flush=True)
    finally:
        for process in running:
            process.terminate()                                         # train.py saves first


def main(argv):
    parser = Parser("study.py", description=__doc__)
    parser.add_argument("--data", default="wiki", help="folder made by data_prep.py, or its name under data/ (wiki)")
    parser.add_argument("--results", type=Path, default=HERE, help="folder for runs.csv and logs.jsonl.xz (this one)")
    parser.add_argument("--out", type=Path, help="folder for the runs (runs/study; with --results, RESULTS/runs)")
    parser.add_argument("--steps", type=int, nargs="+", default=(500, 1000, 2000), help="lengths (500 1000 2000)")
    parser.add_argument("--scales", type=float, nargs="+", default=(1, 0.5, 0.25), help="rate factors (1 0.5 0.25)")
    parser.add_argument("--factors", type=float, nargs=3, default=(1, 1, 1), metavar=("MUON", "ADAMW", "MIX"),
                        help="of all systems' learning rates, for another size of model (1 1 1)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds per system (%(default)s)")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", default=MAIN,
                        help=f"to train, in this order: {' '.join(MAIN)} (these); each also with -8x160, "
                             "-12x256, -12x448 or -gated; gpt-9x512; or any other model")
    parser.add_argument("--ignore", nargs="+", default=(), metavar="NAME",
                        help="what may differ from the stages that are there: options, files of code, or code for all")
    parser.add_argument("--jobs", type=int, default=1, help="runs that train at the same time (%(default)s)")
    args, args.options = parser.parse_known_args(argv)              # further options go to train.py
    args.out = (args.out or (Path("runs/study") if args.results == HERE else args.results / "runs")).resolve()
    args.results, args.steps = args.results.resolve(), sorted(set(args.steps))
    ours = {*RATES, "model", "seed", "max_steps", "eval_every", "resume"}
    if given := {word.split("=")[0] for word in args.options} & {f"--{name}" for name in ours}:
        parser.error(f"{min(given)}: this script sets it; it has --systems, --seeds and --steps, and a line in SYSTEMS "
                     "for your model's options and learning rates")
    for folder in (args.results, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    fingerprint = data.Data(data.find_folder(args.data)).fingerprint
    if others := {line["data"] for line in finished(args).values()} - {fingerprint}:
        parser.error(f"{args.results}/runs.csv has runs on other data ({', '.join(others)}): name another --results")
    lock = open(args.out / "study.lock", "w")                       # kept by this process and the runs that it starts
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another study.py, or a run that it has left behind, in {args.out}", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    known = {run["run"]: run["config"] for run in read(args.results)}
    for system in args.systems:                                     # a mistake in one ends the study now
        train.parse(recipe(system, 1, args))
        check(system, known, fingerprint, args)
    plan = [(system, seed) for seed in range(args.seeds) for system in args.systems]
    if code := work(plan, args):
        return code
    print(f"done: {shell('results/compare.py', args.results)}")


if __name__ == "__main__":
    run_script("study.py", main)
