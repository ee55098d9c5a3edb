"""Makes the tables of this folder's pages from runs.csv: python results/study-cpu/report.py

Rewrites the text between <!-- NAME --> and <!-- end --> in README.md, plain.md and rates.md.
"""
import argparse
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
from compare import final, gap, groups, main_table, others, table  # noqa: E402
from publish import fill, markdown  # noqa: E402

PLAIN_RATES = (0.002, 0.004)


def plain_groups(runs):
    """{system: its runs on the plain recipe}, at the learning rate that is best for seed 0."""
    rates = [groups(runs, kind="plain", adamw_lr=rate) for rate in PLAIN_RATES]
    return {name: min((each[name] for each in rates), key=lambda some: some[0]["loss"]) for name in rates[0]}


def baseline_table(strong, plain):
    each = [losses(kind) for kind in (strong, plain) for losses in (final, others)]
    return markdown(["system", "strong recipe: difference to gpt (95%)", "strong, not copyable", "plain recipe",
                     "plain, not copyable", "final loss, plain", "seeds, plain"],
                    [[f"`{name}`", *(gap(losses, name)[0] for losses in each), f"{mean(at.values()):.4f}", str(len(at))]
                     for name, at in each[2].items()])


def depth_table(depths):
    """depths: {layers: groups()}; gpt's row has its losses."""
    each = [losses(kind) for kind in depths.values() for losses in (final, others)]
    return markdown(["system", *(f"{n} layers{part}" for n in depths for part in ("", ", not copyable"))],
                    [[f"`{name}`", *(f"{mean(losses[name].values()):.4f}" if name == "gpt" else gap(losses, name)[0]
                                     for losses in each)] for name in depths[6]])


def rates_table(runs, head, bold=lambda run: True):
    """The loss at each of the learning rates. Bold is the best of a system, among the runs that `bold` lets count."""
    rows, tries = [], {}
    for run in sorted(runs, key=lambda run: (run["system"], run["run"])):
        tries.setdefault(run["system"], []).append(run)
    for system, some in tries.items():
        best = min(filter(bold, some), key=lambda run: run["loss"], default=None)
        cells = []
        for run in some:
            rates = " ".join(f"{run[name]:g}" for name in ("muon_lr", "adamw_lr", "mix_lr") if run[name] is not None)
            mark = "**" if run is best else ""
            cells.append(f"{mark}{rates}: {run['loss']:.4f}{mark}")
        rows.append([f"`{system}`", "; ".join(cells)])
    return markdown(["system", head], rows)


def tables(runs):
    """{page: {NAME: table}}"""
    strong, plain = groups(runs, kind="main"), plain_groups(runs)
    kinds = {kind: [run for run in runs if run["kind"] == kind] for kind in ("tune", "plain", "plain-tune")}
    depths = {n: groups(runs, kind="main" if n == 12 else "depth", layers=n) for n in (6, 12, 24)}
    rates = {"rates": rates_table(kinds["tune"], "muon_lr adamw_lr mix_lr: loss after 250 steps"),
             "plain": rates_table([run for run in kinds["plain"] if run["seed"] == 0],
                                  "adamw_lr: loss after 1,000 steps", lambda run: run["adamw_lr"] in PLAIN_RATES),
             "quarter": rates_table(kinds["plain-tune"], "adamw_lr: loss after 250 steps", lambda run: False)}
    return {HERE / "README.md": {"main": main_table(strong), "depth": depth_table(depths)},
            HERE / "plain.md": {"baselines": baseline_table(strong, plain)}, HERE / "rates.md": rates}


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page, parts in tables(table(HERE / "runs.csv")).items():
        fill(page, **parts)


if __name__ == "__main__":
    main()
