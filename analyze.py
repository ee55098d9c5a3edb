"""Pictures and numbers of runs: learning curves against the baseline, and what the trained mechanisms do.

    python analyze.py curves runs/*                           losses over tokens and over time, differences, a table
    python analyze.py probe runs/A runs/B --out DIR           attention, features, mixing weights, layer by layer

Numbers are written as JSON and Markdown, pictures as PNG (pip install matplotlib). docs/probes.md says what they show.

curves: runs that differ only in their seed count as one system; of equal runs the newest counts. Runs validated on
different tokens are kept apart, the largest group first: curves.md has a table of each, curves.json {system: its row}
of the first, curves-2.json of the second. A picture shows the baseline and the eight systems with the lowest final
losses: curves.png, of the second group curves-2.png.

probe: models are watched while they read the validation split, in fp32: pictures, and RUN.json with all numbers.
"""
import json
import sys
from pathlib import Path

import models
import nanodepth
import probes
from nanodepth import curves, pictures, record, runs
from nanodepth.cli import Parser, UserError, escaped, run_folder, run_script
from nanodepth.data import run_data
from nanodepth.devices import find_device


def note(text):
    print(f"analyze.py: {escaped(text)}", file=sys.stderr)


# --------------------------------------------------------------------------------------------------------------- curves


def compare(args):
    """The command `curves`."""
    found, skipped = [], []
    for run in dict.fromkeys(str(Path(run)) for run in args.runs):
        try:
            found.append(curves.read_log(run))
        except UserError as e:                                              # among runs/*, one that has only begun
            if not Path(run).exists():
                raise
            skipped.append(str(e))
    if not found:
        raise UserError(skipped[0])
    groups = [(heading, curves.systems(some)) for heading, some in curves.comparable(found)]
    kept = {run["run"] for _, systems in groups for some in systems.values() for run in some}
    skipped += [f"{run['run']}: there is a newer run of the same system with the same seed" for run in found
                if run["run"] not in kept]
    for message in skipped:
        note(f"left out: {message}")
    names = [name for _, systems in groups for name in systems]
    if args.baseline and args.baseline not in names:
        raise UserError(f"no system {args.baseline!r} among the runs: choose from {', '.join(map(repr, names))}")
    if len(groups) > 1:
        note(f"the runs were validated on {len(groups)} different sets of tokens, and only losses on the same tokens "
             "can be compared: a table and a picture of each")
    args.out.mkdir(parents=True, exist_ok=True)
    texts, figures = [], {}
    for i, (heading, systems) in enumerate(groups, start=1):
        name = "curves" if i == 1 else f"curves-{i}"
        baseline = args.baseline if args.baseline in systems else curves.find_baseline(systems)
        rows = curves.summarise(systems, baseline)
        runs.write_text(args.out / f"{name}.json", json.dumps(rows, indent=1) + "\n")
        texts.append((f"## {escaped(heading)}\n\n" if len(groups) > 1 else "") + curves.table(rows, baseline))
        figures[name] = lambda shown=(rows, systems, baseline): pictures.draw_curves(*shown)
    runs.write_text(args.out / "curves.md", "\n".join(texts))
    drawn = save(figures, args.out)
    print("\n".join(texts), drawn, sep="", end="")


# ---------------------------------------------------------------------------------------------------------------- probe


def probe(args):
    """The command `probe`."""
    names = [Path(run).resolve().name for run in args.runs]
    if len(set(names)) < len(names):
        names = [str(run).strip("/").replace("/", "-") for run in args.runs]
    if len(set(names)) < len(names):
        raise UserError("a run is given twice")
    for run in args.runs:                                                   # before minutes of work
        runs.read_checkpoint(run)
    device, found = find_device(args.device), {}
    for run, name in zip(args.runs, names):
        found[name] = numbers = measure(run, args, device)
        copied, others, share = numbers["copying"].values()
        print(f"{name}: {numbers['model']}, loss {numbers['loss']:.4f} on {numbers['tokens']:,} tokens; "
              + (f"{copied:.4f} on the {share:.0%} that could be copied, {others:.4f} on the others" if share else
                 "nothing could be copied"), flush=True)
        if not numbers["depth"]:
            note(f"{name}: no depth matrix: its blocks do not read the sum of outputs that was expected; depth_matrix "
                 f"in probes/{numbers['model']}.py can say what they read")
    root = models.names()[0]
    found = dict(sorted(found.items(), key=lambda item: item[1]["model"] != root))     # the baseline is black
    args.out.mkdir(parents=True, exist_ok=True)
    for name, numbers in found.items():
        runs.write_text(args.out / f"{name}.json", json.dumps(numbers) + "\n")
    print(save({"layers": lambda: pictures.draw_layers(found), "depth": lambda: pictures.draw_depth(found)}, args.out),
          end="")


def measure(run, args, device):
    """All numbers of a run's model. UserError, with the run's name, for a run that cannot be measured."""
    model, _, config = nanodepth.load(run, device)
    data, T = run_data(run, config, args.data), config["options"]["seq_len"]
    batches = []
    for idx, targets in data.val_batches(args.tokens, max(1, args.batch_tokens // T), T):
        full = (targets >= 0).all(1)
        if full.any():
            batches.append((idx[full].to(device), targets[full].to(device)))
    if not batches:
        raise UserError(f"--tokens {args.tokens} and the validation split of {data.path} must hold one sequence of "
                        f"{T} tokens")
    try:
        numbers = record.measure(model, batches, probes.find(config["model"]))
    except UserError as e:
        raise UserError(f"{run}: {e}") from None
    return {"run": str(run), "model": config["model"], "step": runs.read_checkpoint(run)["step"], **numbers}


# ------------------------------------------------------------------------------------------------------------ the files


def save(figures, out):
    """Writes the pictures, or says what is missing. -> lines with their paths"""
    try:
        return "".join(f"{path}\n" for path in pictures.save(figures, out))
    except ImportError:
        note("no pictures, only numbers: they need matplotlib: pip install matplotlib")
        return ""


def parse(argv):
    """The arguments. UserError for a mistake."""
    parser = Parser("analyze.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="curves|probe")
    one = commands.add_parser("curves", help="learning curves of several runs")
    one.add_argument("runs", nargs="+", type=run_folder, metavar="RUN",
                     help="run folders; config.json and log.jsonl are enough")
    one.add_argument("--out", type=Path, default=Path("analysis"), metavar="DIR",
                     help="folder for curves.png, .md and .json (%(default)s)")
    one.add_argument("--baseline", metavar="SYSTEM",
                     help=f"the system that the others are compared with, as the table calls it ({models.names()[0]})")
    two = commands.add_parser("probe", help="what trained models do inside")
    two.add_argument("runs", nargs="+", type=run_folder, metavar="RUN", help="run folders with a checkpoint")
    two.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for pictures and RUN.json")
    two.add_argument("--data", help="data folder, or its name under data/; none: the one the run was trained on")
    two.add_argument("--tokens", type=int, default=16384,
                     help="first tokens of the validation split to look at (%(default)s)")
    two.add_argument("--batch_tokens", type=int, default=2048, help="tokens per forward pass (%(default)s)")
    two.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    args = parser.parse_args(argv)
    if args.command == "probe" and min(args.tokens, args.batch_tokens) < 1:
        raise UserError("--tokens and --batch_tokens must be at least 1")
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out} is not a folder")
    return args


def main(argv):
    args = parse(argv)
    compare(args) if args.command == "curves" else probe(args)
    return 0


if __name__ == "__main__":
    run_script("analyze.py", main, "lower --batch_tokens")
