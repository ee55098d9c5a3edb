"""Compares the systems of a study with gpt, with 95% intervals: python results/compare.py FOLDER

FOLDER has the runs.csv and logs.jsonl.xz of results/study/study.py --results FOLDER. Prints one table per length of the
runs, each system at its best learning rates: those with the lowest loss on targets that are not copyable (on all
targets if most are copyable, as on bytes), at the length and seed at which most rates were tried. Runs of a system that
differ in more than their seed, length and rates are systems apart. A run that is in no table is named, and so is what
else than the idea differs between a system and gpt. The intervals are those of nanodepth/curves.py. The other scripts
of this folder import from here what they share.
"""
import csv
import json
import lzma
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from nanodepth import ran  # noqa: E402
from nanodepth.cli import Parser, UserError, run_script  # noqa: E402
from nanodepth.curves import difference, otherwise  # noqa: E402

RATES = "muon_lr", "adamw_lr", "mix_lr"
TEXTS = "run system kind model options data commit cpu gpu torch".split()      # all other columns have numbers


def markdown(head, rows):
    """A Markdown table of texts."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def number(text):
    return None if text in ("", "None") else int(text) if text.isdigit() else float(text)


def table(path):
    """[a dict per line] of a table such as runs.csv; none if there is no file."""
    lines = csv.DictReader(path.read_text().splitlines() if path.exists() else ())
    return [{name: x if name in TEXTS else number(x) for name, x in line.items()} for line in lines]


def read(folder):
    """[run]: a dict with the columns of its line in runs.csv, "val", the rows of its validations, and "config", what
    ran (None for older runs).
    """
    runs = table(folder / "runs.csv")
    logs = defaultdict(lambda: {"val": [], "config": None})
    for row in map(json.loads, lzma.open(folder / "logs.jsonl.xz", "rt") if runs else ()):
        if row["kind"] == "val":
            logs[row["run"]]["val"].append(row)
        elif row["kind"] == "ran":
            logs[row["run"]]["config"] = row["config"]
    return [{**run, **logs[run["run"]]} for run in runs]


def apart(runs, ignore=()):
    """The runs, with another name of the system for those that differ from its first run in more than RATES, length and
    seed, or from the first of all in the number of tokens of its last validation: the name and the difference.
    """
    first, found, usual = {}, [], None
    for run in runs:
        differ, ended = {}, run["val"] and math.isfinite(run["loss"])
        scored = run["val"][-1].get("eval_tokens") if ended else None
        if config := run["config"]:
            other = first.setdefault(run["system"], config)
            differ = ran.differences(other, config, {*RATES, "max_steps", "warmup_steps", *ignore})
        if scored and scored != (usual := usual or scored):
            differ["eval_tokens"] = usual, scored
        found.append({**run, "system": f"{run['system']} ({ran.in_words(differ)})"} if differ else run)
    return found


def best_scales(runs):
    """{system: the scale of its rates with the lowest loss}, at the length and seed at which most scales were tried: on
    targets that are not copyable, if these are most.
    """
    best = {}
    for name in dict.fromkeys(run["system"] for run in runs):
        own = [run for run in runs if run["system"] == name]                # also those that diverged: tried, not best
        tried = Counter((run["steps"], run["seed"]) for run in own)
        where = max(tried, key=lambda at: (tried[at], at[0], -at[1]))
        best[name] = min((run for run in own if (run["steps"], run["seed"]) == where), key=lambda run: (
            not math.isfinite(run["loss"]), run["loss" if (run["share"] or 0) > 0.5 else "others"]))["scale"]
    return best


def ends(runs):
    """{steps: {system: its runs of this length at its best scale}}, both sorted; without runs that diverged."""
    best, found = best_scales(runs), {}
    for run in sorted(runs, key=lambda run: (run["steps"], run["seed"])):
        if math.isfinite(run["loss"]) and run["scale"] == best[run["system"]]:
            found.setdefault(run["steps"], {}).setdefault(run["system"], []).append(run)
    return found


def final(each, column):
    """{system: {seed: loss}} of some runs of ends(): in the column loss, repeated (copyable targets) or others."""
    found = {name: {run["seed"]: run[column] for run in runs if run[column] is not None} for name, runs in each.items()}
    return {name: losses for name, losses in found.items() if losses}


def gap(losses, a, b="gpt"):
    """difference() as text."""
    value, half = difference(losses, a, b)
    if a == b or value is None:
        return ""
    return f"{value:+.4f}" if half is None else f"{value:+.4f} ± {half:.4f}"


def main_table(each, base):
    losses, rest, copied = (final(each, column) for column in ("loss", "others", "repeated"))
    return markdown(["system", "seeds", "final loss", f"difference to {base} (95%)",
                     f"not copyable: difference to {base} (95%)", "copyable: loss of each seed"],
                    [[f"`{name}`", str(len(at)), f"{mean(at.values()):.4f}", gap(losses, name, base),
                      gap(rest, name, base), ", ".join(f"{x:.2f}" for x in copied.get(name, {}).values())]
                     for name, at in losses.items()])


def main(argv):
    parser = Parser("compare.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with runs.csv and logs.jsonl.xz")
    parser.add_argument("--baseline", metavar="SYSTEM", help="system to compare with (gpt; without it the first)")
    parser.add_argument("--ignore", nargs="+", default=(), metavar="NAME",
                        help="differences that make no other system: options, files of code, or code for all files")
    args = parser.parse_args(argv)
    runs = apart(read(args.folder), args.ignore)
    if not runs or not {"scale", "share"} <= runs[0].keys():
        raise UserError(f"{args.folder}/runs.csv is missing, has no run, or is not one of study.py")
    at, systems = ends(runs), list(dict.fromkeys(run["system"] for run in runs))
    base = args.baseline or ("gpt" if "gpt" in systems else systems[0])
    if base not in systems:
        raise UserError(f"no system {base!r} in {args.folder}: choose from {', '.join(systems)}")
    shown = {run["run"] for each in at.values() for some in each.values() for run in some}
    for run in runs:
        if run["run"] not in shown:
            why = "was not best" if math.isfinite(run["loss"]) else "diverged"
            print(f"left out: {run['run']} {why} (scale {run['scale']:g})", file=sys.stderr)
    known = {run["system"]: [run] for run in reversed(runs) if run["config"]}
    scales = {name: sorted({run["scale"] for run in runs if run["system"] == name}) for name in systems}
    for name in systems:
        if scales[name] != scales[base]:
            print(f"learning rates were tried at scales {scales[name]} for {name}, {scales[base]} for {base}",
                  file=sys.stderr)
        if {name, base} <= known.keys():                                    # options of a model are its system's idea
            a, b = (known[each][0]["config"] for each in (name, base))
            idea = a["model_config"] if a["model"] == b["model"] else ()
            if differ := otherwise(known, name, base, {*RATES, "max_steps", "warmup_steps", *idea, *args.ignore}):
                print(f"{name} and {base} differ in more than the idea: {differ}", file=sys.stderr)
    for steps, each in at.items():
        print(f"\n{steps:,} steps\n\n{main_table(each, base)}")


if __name__ == "__main__":
    run_script("compare.py", main)
