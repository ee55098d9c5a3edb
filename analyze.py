"""Pictures and numbers of runs: learning curves against the baseline, and what the trained mechanisms do.

    python analyze.py curves runs/*                           losses over tokens and over time, differences, a table
    python analyze.py probe runs/A runs/B --out DIR           attention, features, gates, mixing weights, layer by layer

Numbers are written as JSON and Markdown, pictures as PNG (pip install matplotlib).

curves: runs that differ only in their seed count as one system; of equal runs the newest counts. Runs validated on
different tokens are kept apart, the largest group first: curves.md has a table of each, curves.json {system: its row}
of the first, curves-2.json of the second. A picture shows the baseline and at most eight systems, the lowest final
losses first: curves.png, curves-page2.png; of the second group curves-2.png.

probe: models are watched through hooks while they read the validation split, in fp32. Any model can be watched that has
`embed`, `blocks`, `final_norm` and `head`, and whose blocks have `attn`, `mlp_norm` and `mlp`; what is particular to it
is in probes/NAME.py.
"""
import json
import sys
from pathlib import Path

import torch

import models
import nanodepth
import probes
from nanodepth import curves, pictures, record, runs
from nanodepth.devices import find_device, machine_errors
from nanodepth.cli import Parser, UserError, escaped, run_folder, run_script
from nanodepth.data import run_data


def compare(args):
    """The command `curves`."""
    found, skipped = [], []
    for run in dict.fromkeys(str(Path(run)) for run in args.runs):
        try:
            found.append(curves.read_log(run))
        except UserError as e:
            if not Path(run).exists():
                raise
            skipped.append(str(e))
    if not found:
        raise UserError(skipped[0])
    found, repeats = curves.newest(found)
    skipped += [f"{old}: {new} is the same system with the same seed, and newer" for old, new in repeats]
    for message in skipped:                                                 # of runs/*, the one that has only begun
        print(f"analyze.py: left out: {escaped(message)}", file=sys.stderr)
    groups = [(heading, curves.systems(some)) for heading, some in curves.comparable(found)]
    names = [name for _, systems in groups for name in systems]
    if args.baseline and args.baseline not in names:
        raise UserError(f"no system {args.baseline!r} among the runs: choose from {', '.join(map(repr, names))}")
    if len(groups) > 1:
        print(f"analyze.py: the runs were validated on {len(groups)} different sets of tokens, and only losses on the "
              "same tokens can be compared: a table and a picture of each", file=sys.stderr)
    args.out.mkdir(parents=True, exist_ok=True)
    texts, figures = [], {}
    for i, (heading, systems) in enumerate(groups, start=1):
        name = "curves" if i == 1 else f"curves-{i}"
        baseline = args.baseline if args.baseline in systems else curves.find_baseline(systems)
        rows = curves.summarise(systems, baseline)
        runs.write_text(args.out / f"{name}.json", json.dumps(rows, indent=1) + "\n")
        texts.append((f"## {escaped(heading)}\n\n" if len(groups) > 1 else "") + curves.table(rows, baseline))
        figures |= pictures.curve_pages(name, rows, systems, baseline)
    runs.write_text(args.out / "curves.md", "\n".join(texts))
    drawn = save(figures, args.out)
    print("\n".join(texts), drawn, sep="", end="")


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
        found[name] = measure(run, args, device)
        print(f"{name}: {found[name]['model']}, loss {found[name]['loss']:.4f} on {found[name]['tokens']:,} tokens; "
              f"{copied(**found[name]['copying'])}", flush=True)
        if found[name].get("depth") == {}:
            print(f"analyze.py: {name}: no depth matrix: its blocks do not read the sum of outputs that was expected; "
                  f"depth_matrix in probes/{found[name]['model']}.py can say what they read", file=sys.stderr)
    root = models.names()[0]
    found = dict(sorted(found.items(), key=lambda item: item[1]["model"] != root))     # the baseline is black
    args.out.mkdir(parents=True, exist_ok=True)
    maps = {name: numbers.pop("maps") for name, numbers in found.items()}
    for name, numbers in found.items():
        runs.write_text(args.out / f"{name}.json", json.dumps(numbers) + "\n")
        runs.write_text(args.out / f"maps-{name}.json", json.dumps({"maps": maps[name]}) + "\n")
    print(save(probe_pictures(found, maps), args.out), end="")


def copied(repeated, others, share):
    """record.copying() in words; a text without a repetition has no loss of them."""
    return f"{repeated:.4f} on the {share:.0%} that could be copied, {others:.4f} on the others" if share else \
        "nothing could be copied"


def measure(run, args, device):
    """All numbers of a run's model. UserError, with the run's name, for a run that cannot be measured."""
    model, tokenizer, config = nanodepth.load(run, device)
    data, T = run_data(run, config, args.data), config["options"]["seq_len"]
    if T < 2:
        raise UserError(f"{run} was trained on sequences of {T} token: probes need 2")
    ends = [tokenizer.encode_ordinary(text) for text in (".", "\n")]
    quiet = torch.tensor(sorted({tokenizer.eot_token, *(ids[0] for ids in ends if len(ids) == 1)}), device=device)
    batches = []
    for idx, targets in data.val_batches(args.tokens, max(1, args.batch_tokens // T), T):
        full = (targets >= 0).all(1)
        if full.any():
            batches.append((idx[full].to(device), targets[full].to(device)))
    if not batches:
        raise UserError(f"--tokens {args.tokens} and the validation split of {data.path} must hold one sequence of "
                        f"{T} tokens")
    try:
        numbers = record.measure(model, batches, quiet, probes.find(config["model"]))
    except UserError as e:
        raise UserError(f"{run}: {e}") from None
    return {"run": str(run), "model": config["model"], "step": runs.read_checkpoint(run)["step"], **numbers}


def probe_pictures(found, maps):
    """{file name: function that draws it}: of all models, and what the probes files of some add."""
    own = {run: probes.find(numbers["model"]) for run, numbers in found.items()}
    panels = [panel for run in found for panel in getattr(own[run], "panels", record.nothing)(run, found[run])]
    some = {}                                                               # {(file name, function): its runs}
    for run, numbers in found.items():
        for picture in getattr(own[run], "PICTURES", {}).items():
            some.setdefault(picture, {})[run] = numbers
    return {"layers": lambda: pictures.draw_layers(found), "depth": lambda: pictures.draw_depth(found),
            "similarity": lambda: pictures.draw_similarity(found), "gates": lambda: pictures.draw_gates(found, panels),
            **{name: lambda draw=draw, which=which: draw(which) for (name, draw), which in some.items()},
            **{f"maps-{run}": lambda run=run: pictures.draw_maps(run, maps[run]) for run in found}}


def save(figures, out):
    """Writes the pictures, or says what is missing. -> lines with their paths"""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("analyze.py: no pictures, only numbers: they need matplotlib: pip install matplotlib", file=sys.stderr)
        return ""
    return "".join(f"{path}\n" for path in pictures.save(figures, out))


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
    two.add_argument("--out", type=Path, required=True, metavar="DIR",
                     help="folder for pictures, RUN.json and maps-RUN.json")
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


@machine_errors("lower --batch_tokens")
def main(argv):
    args = parse(argv)
    compare(args) if args.command == "curves" else probe(args)
    return 0


if __name__ == "__main__":
    run_script("analyze.py", main)
