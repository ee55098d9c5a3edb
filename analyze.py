"""Pictures and numbers of runs: learning curves against the baseline, and what the trained mechanisms do.

    python analyze.py curves runs/*                           losses over tokens, differences, a table
    python analyze.py probe runs/A runs/B                     attention, features and mixing weights, by layer

Numbers are written as JSON and Markdown, pictures as PNG (pip install matplotlib). docs/probes.md says what they show.

curves: runs that differ only in their seed form one system; what else differs (an option, edited code, the data, the
version of torch) makes another one, unless --ignore names it. Of equal runs the newest finished one counts. Every run,
seed or loss that is left out is named. curves.md has the table, curves.json {system: its row}, curves.png the baseline
and the eight systems with the lowest final losses. Runs of one seed see the same batches, so the difference of their
training losses has little noise: it is drawn between the validations.

probe: measures the models while they read the validation split, in fp32. It writes pictures, and RUN.json with all
numbers. A number that is not finite is null in JSON.
"""
import sys
from pathlib import Path
from statistics import mode

import models
import probes
from nanodepth import curves, inside, pictures, runs
from nanodepth.cli import Parser, UserError, run_folder, run_script
from nanodepth.data import run_data
from nanodepth.devices import find_device


def note(text):
    print(f"analyze.py: {text}", file=sys.stderr)


# --------------------------------------------------------------------------------------------------------------- curves


def compare(args):
    """The command `curves`."""
    found, skipped = [], []
    for run in dict.fromkeys(str(Path(run)) for run in args.runs):
        try:
            found.append(curves.read_log(run))
        except UserError as e:                                              # one of runs/* may have only begun
            if not Path(run).exists():
                raise
            skipped.append(str(e))
    if not found:
        raise UserError(skipped[0])
    tokens = mode(map(curves.validated_on, found))
    skipped += [f"{run['run']}: validated on {curves.validated_on(run)}, other runs on {tokens}" for run in found
                if curves.validated_on(run) != tokens]
    found = [run for run in found if curves.validated_on(run) == tokens]
    systems, left = curves.usable(curves.systems(found, args.ignore))
    for message in skipped + left:
        note(f"left out: {message}")
    baseline = args.baseline or curves.find_baseline(systems)
    if baseline not in systems:
        raise UserError(f"no system {baseline!r} among the runs: choose from {', '.join(map(repr, systems))}")
    base = systems[baseline]
    for name, some in systems.items():
        if differ := curves.otherwise(systems, name, baseline, args.ignore):
            note(f"{name} and {baseline} differ in more than the idea: {differ}")
        if differ := curves.elsewhere(some, base):
            note(f"{name} and {baseline} ran differently ({differ}): do not compare their tokens/s and GiB")
        if not any(run["done"] for run in some):
            note(f"no run of {name} has finished")
        own, other = ({run["seed"] for run in group} for group in (some, base))
        if own != other:
            note(f"{name} has seeds {sorted(own)}, {baseline} {sorted(other)}: a seed that one lacks counts as far as "
                 "other systems have it")
        (tokens, _, own), (end, _, other) = (curves.curve(group)[-1] for group in (some, base))
        if any(run["val"][-1]["tokens"] > tokens for run in some):
            note(f"{name}: not all seeds have losses after more than {tokens:,} tokens: these are left out")
        if tokens != end:
            note(f"{name} has trained on {tokens:,} tokens, {baseline} on {end:,}: the table does not compare them")
        elif own != other:
            note(f"{name}'s last loss is on {own:,} tokens, {baseline}'s on {other:,}: they cannot be compared")
        if why := curves.other_batches(some, base):
            note(f"{name} and {baseline} saw other batches ({why}): the picture has their validations alone")
    args.out.mkdir(parents=True, exist_ok=True)
    rows = curves.summarise(systems, baseline)
    table = curves.table(rows, baseline)
    runs.write_text(args.out / "curves.json", runs.to_json(rows, indent=1))
    runs.write_text(args.out / "curves.md", table)
    print(table, end="")
    pictures.draw_curves(rows, systems, baseline).savefig(args.out / "curves.png", dpi=130)
    print(args.out / "curves.png")


# ---------------------------------------------------------------------------------------------------------------- probe


def probe(args):
    """The command `probe`."""
    names = [Path(run).resolve().name for run in args.runs]
    if len(set(names)) < len(names):
        names = [str(run).strip("/").replace("/", "-") for run in args.runs]
    if len(set(names)) < len(names):
        raise UserError("a run is given twice")
    for run in args.runs:                                                   # fail before minutes of work
        runs.read_checkpoint(run)
    device, found = find_device(args.device), {}
    for run, name in zip(args.runs, names):
        found[name] = numbers = measure(run, args, device)
        copied, others, share = numbers["copying"].values()
        print(f"{name}: {numbers['model']}, loss {numbers['loss']:.4f} on {numbers['tokens']:,} tokens of "
              f"{numbers['data']}, {numbers['seq_len']:,} at a time; "
              + (f"{copied:.4f} on the {share:.0%} that could be copied, {others:.4f} on the others" if share else
                 "nothing could be copied"), flush=True)
        if not numbers["depth"]:
            note(f"{name}: no depth matrix: its blocks do not read a sum of earlier outputs with fixed weights; define "
                 f"token_weights or depth_matrix in probes/{numbers['model']}.py to say where the weights come from")
        if not numbers["entropy"]:
            note(f"{name}: no attention weights to look at, so no entropy, sinks and copying heads")
    root = models.names()[0]
    found = dict(sorted(found.items(), key=lambda item: item[1]["model"] != root))     # first, the baseline is black
    args.out.mkdir(parents=True, exist_ok=True)
    for name, numbers in found.items():
        runs.write_text(args.out / f"{name}.json", runs.to_json(numbers))
    for name, draw in (("layers", pictures.draw_layers), ("depth", pictures.draw_depth)):
        if fig := draw(found):
            fig.savefig(args.out / f"{name}.png", dpi=130)
            print(args.out / f"{name}.png")


def measure(run, args, device):
    """All numbers of a run's model. UserError, with the run's name, if it cannot be measured."""
    model, config = runs.load(run, device)
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
        numbers = inside.measure(model, batches, probes.find(config["model"]))
    except UserError as e:
        raise UserError(f"{run}: {e}") from None
    return {"run": str(run), "model": config["model"], "step": config["step"], "data": str(data.path), "seq_len": T,
            **numbers}


# --------------------------------------------------------------------------------------------------------- command line


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
                     help=f"system to compare the others with, by its name in the table ({models.names()[0]})")
    one.add_argument("--ignore", nargs="+", default=(), metavar="NAME",
                     help="differences that make no other system: options, files of code, or code for all files")
    two = commands.add_parser("probe", help="what trained models do inside")
    two.add_argument("runs", nargs="+", type=run_folder, metavar="RUN", help="run folders with a checkpoint")
    two.add_argument("--out", type=Path, default=Path("analysis"), metavar="DIR",
                     help="folder for pictures and RUN.json (%(default)s)")
    two.add_argument("--data", help="data folder, or its name under data/; none: the data the run was trained on")
    two.add_argument("--tokens", type=int, default=16384,
                     help="how many validation tokens to read, from the start (%(default)s)")
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
