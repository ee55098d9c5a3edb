"""Compares the systems of a study with gpt, with 95% intervals: python results/compare.py FOLDER

FOLDER has the runs.csv and logs.jsonl.xz of results/study/study.py --results FOLDER. Prints one table per length of the
runs, each system at its best learning rates: those with the lowest loss on targets that are not copyable (on all
targets if most are copyable, as on bytes), at the length and seed at which most rates were tried. Runs of a system that
differ in more than their seed, length and rates are systems apart. A run that is in no table is named. The intervals
are those of nanodepth/curves.py.
"""
import csv
import json
import lzma
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from publish import criterion, markdown  # noqa: E402

from nanodepth import ran  # noqa: E402
from nanodepth.cli import Parser, UserError, run_script  # noqa: E402
from nanodepth.curves import difference  # noqa: E402

RATES = "muon_lr", "adamw_lr", "mix_lr"
TEXTS = "run system kind model options data commit cpu gpu torch".split()      # all other columns have numbers


def number(text):
    return None if text in ("", "None") else int(text) if text.isdigit() else float(text)


def table(path):
    """[a dict per line] of a table such as runs.csv."""
    with open(path) as file:
        return [{name: x if name in TEXTS else number(x) for name, x in line.items()} for line in csv.DictReader(file)]


def read(folder):
    """[run]: a dict with the columns of its line in runs.csv, and the rows of its log as "train", "val" and "ran": one
    with the config of what ran, none for older runs.
    """
    logs = defaultdict(lambda: {"train": [], "val": [], "ran": []})
    with lzma.open(folder / "logs.jsonl.xz", "rt") as file:
        for row in map(json.loads, file):
            logs[row["run"]][row["kind"]].append(row)
    return [{**line, **logs[line["run"]]} for line in table(folder / "runs.csv")]


def apart(runs, ignore=()):
    """The runs, with another name of the system for those that differ from its first run in more than RATES, length and
    seed: the name and the difference.
    """
    first, found = {}, []
    for run in runs:
        config = run["ran"][0]["config"] if run.get("ran") else None
        other = first.setdefault(run["system"], config) if config else None
        differ = ran.differences(other, config, {*RATES, "max_steps", "warmup_steps", *ignore}) if other else {}
        words = ran.in_words(differ)
        found.append({**run, "system": f"{run['system']} ({words})"} if words else run)
    return found


def speeds(folder):
    """{system: speed of its training step over gpt's}, measured by bench.py; {} if the folder has no speed.csv."""
    path = folder / "speed.csv"
    lines = csv.DictReader(path.read_text().splitlines()) if path.exists() else ()
    return {line["system"]: float(line["speed"]) for line in lines}


def groups(runs, **columns):
    """{system: its runs, sorted by seed}, of the runs that have these values in their columns and did not diverge."""
    found = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        if math.isfinite(run["loss"]) and all(run[name] == x for name, x in columns.items()):
            found.setdefault(run["system"], []).append(run)
    return found


def final(each, column="loss"):
    """{system: {seed: loss}} of groups(), without runs that lack this column."""
    found = {name: {run["seed"]: run[column] for run in runs if run[column] is not None} for name, runs in each.items()}
    return {name: losses for name, losses in found.items() if losses}


def others(each):
    """final() on the targets that are not copyable."""
    return final(each, "others")


def gap(losses, a, b="gpt"):
    """(difference() as text, its sign): -1 or 1 if the interval excludes 0, else 0; None if there is no interval."""
    value, half = difference(losses, a, b)
    if a == b or value is None:
        return "", None
    if half is None:
        return f"{value:+.4f}", None
    return f"{value:+.4f} ± {half:.4f}", 0 if abs(value) <= half else -1 if value < 0 else 1


def main_table(each, base="gpt"):
    losses, rest, copied = final(each), others(each), final(each, "repeated")
    return markdown(["system", "seeds", "final loss", f"difference to {base} (95%)",
                     f"not copyable: difference to {base} (95%)", "copyable: loss of each seed"],
                    [[f"`{name}`", str(len(at)), f"{mean(at.values()):.4f}", gap(losses, name, base)[0],
                      gap(rest, name, base)[0], ", ".join(f"{x:.2f}" for x in copied.get(name, {}).values())]
                     for name, at in losses.items()])


def claims(columns, path):
    """A table of the claims in a .csv; columns: {head: {system: {seed: loss}}}, leaves out systems that none has.

    A claim holds if the interval is below zero, is reversed if it is above, and is unresolved if it contains zero.
    """
    words, rows = {-1: ": holds", 0: ": unresolved", 1: ": reversed", None: ""}, []
    for a, b, source in list(csv.reader(path.read_text().splitlines()))[1:]:
        cells = [gap(losses, a, b) for losses in columns.values()]
        if any(text for text, _ in cells):
            rows.append([f"`{a}` below `{b}`", source, *(text + words[sign] for text, sign in cells)])
    return markdown(["claim", "by", *columns], rows)


def best_scales(runs):
    """{system: the scale of its rates with the lowest loss}, at the length and seed at which most scales were tried."""
    best = {}
    for name in dict.fromkeys(run["system"] for run in runs):
        own = [run for run in runs if run["system"] == name and math.isfinite(run["loss"])]
        tried = Counter((run["steps"], run["seed"]) for run in own)
        if tried:
            where = max(tried, key=lambda at: (tried[at], at[0], -at[1]))
            best[name] = min((run for run in own if (run["steps"], run["seed"]) == where),
                             key=lambda run: run[criterion(run)])["scale"]
    return best


def ends(runs):
    """{steps: groups() of the runs of this length, each system at its best scale}, shortest first."""
    best = best_scales(runs)
    at = {steps: groups([run for run in runs if run["scale"] == best.get(run["system"])], steps=steps)
          for steps in sorted({run["steps"] for run in runs})}
    return {steps: each for steps, each in at.items() if each}


def main(argv):
    parser = Parser("compare.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with runs.csv and logs.jsonl.xz")
    parser.add_argument("--baseline", metavar="SYSTEM", help="system to compare with (gpt; without it the first)")
    parser.add_argument("--ignore", nargs="+", default=(), metavar="NAME",
                        help="differences that make no other system: options, files of code, or code for all files")
    args = parser.parse_args(argv)
    runs = apart(read(args.folder), args.ignore)
    at, systems = ends(runs), list(dict.fromkeys(run["system"] for run in runs))
    base = args.baseline or ("gpt" if "gpt" in systems else systems[0])
    if base not in systems:
        raise UserError(f"no system {base!r} in {args.folder}: choose from {', '.join(systems)}")
    shown = {run["run"] for each in at.values() for some in each.values() for run in some}
    for run in runs:
        if run["run"] not in shown:
            why = "was not best" if math.isfinite(run["loss"]) else "diverged"
            print(f"left out: {run['run']} {why} (scale {run['scale']:g})", file=sys.stderr)
    for steps, each in at.items():
        print(f"\n{steps:,} steps\n\n{main_table(each, base)}")
        if base not in each:
            print(f"\n{base} has no run of this length")


if __name__ == "__main__":
    run_script("compare.py", main)
