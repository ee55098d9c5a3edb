"""Makes the tables of this folder's page: python results/study-small/report.py

Reads runs.csv and logs.jsonl.xz. Rewrites the text between <!-- NAME --> and <!-- end --> in README.md.
"""
import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
from compare import groups, read  # noqa: E402
from publish import fill, markdown  # noqa: E402

from nanodepth import curves  # noqa: E402

SHOWN = "gpt geonorm dape sas sambay kern gpt3 pythia muddpythia".split()       # later studies have the other systems
CLAIMS = (  # system with the lower loss, than this system, according to
    ("muddpythia", "pythia", "MUDDFormer, table 3"), ("gpt", "gpt3", "MUDDFormer, figure 3"),
    ("geonorm", "gpt", "GeoNorm"), ("dape", "gpt", "DAPE V2"), ("sas", "gpt", "SAS"), ("sambay", "gpt", "SambaY"),
    ("kern", "gpt", "KERN, by downstream accuracy"))


def claims_table(final):
    """The papers' claims: differences paired by seed, with Student's 95% intervals."""
    rows = []
    for a, b, source in CLAIMS:
        losses = {name: {run["seed"]: run["val"][-1]["loss"] for run in final[name]} for name in (a, b)}
        gap, half = curves.difference(losses, a, b)
        verdict = "within noise" if abs(gap) <= half else "holds" if gap < 0 else "the opposite"
        rows.append([f"`{a}`", f"`{b}`", source, f"{gap:+.4f} ± {half:.4f}", verdict])
    return markdown(["lower loss expected", "than", "says", "difference (95% interval)", "here"], rows)


def tables(final):
    """{NAME: table}"""
    shown = {name: curves.summarise({"gpt": final["gpt"], name: final[name]}, "gpt")[name] for name in SHOWN}
    return {"main": curves.table(shown, "gpt").rstrip(), "claims": claims_table(final)}


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    fill(HERE / "README.md", **tables(groups(read(HERE), kind="final")))


if __name__ == "__main__":
    main()
