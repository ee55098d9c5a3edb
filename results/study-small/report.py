"""Makes the tables and the picture of this folder's page: python results/study-small/report.py

Reads runs.csv and logs.jsonl.xz. Rewrites the text between <!-- NAME --> and <!-- end --> in README.md, and draws
curves.png.
"""
import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
from compare import groups, read  # noqa: E402
from publish import fill, markdown  # noqa: E402

from nanodepth import curves, pictures  # noqa: E402

GATED = "gpt gate=elementwise"
CLAIMS = (  # system with the lower loss, than this system, according to
    (GATED, "gpt", "ExoFormer, table 1"), ("resformer", "gpt", "ExoFormer, table 1; SATFormer, table 5"),
    ("satformer", "gpt", "SATFormer, table 5"), ("satformer", "resformer", "SATFormer, section 4.3, at every scale"),
    ("exoformer", GATED, "ExoFormer, table 1"), ("exoformer", "resformer", "ExoFormer, table 1"),
    ("muddformer", "gpt", "MUDDFormer, figure 3"), ("muddformer", "resformer", "SATFormer, table 5 (Wikitext)"),
    ("satformer", "muddformer", "SATFormer, table 5 (Wikitext), at 130M; at 760M the opposite"),
    ("attnres", "gpt", "Attention Residuals"), ("attnres", "denseformer", "Attention Residuals, ablations"),
    ("denseformer", "gpt", "MUDDFormer, figure 3"), ("hyperconnections", "gpt", "MUDDFormer, figure 3"),
    ("muddformer", "denseformer", "MUDDFormer, figure 3"), ("muddformer", "hyperconnections", "MUDDFormer, figure 3"),
    ("muddpythia", "pythia", "MUDDFormer, table 3"), ("gpt", "gpt3", "MUDDFormer, figure 3"),
    ("geonorm", "gpt", "GeoNorm"), ("dape", "gpt", "DAPE V2"), ("sas", "gpt", "SAS"), ("sambay", "gpt", "SambaY"),
    ("kern", "gpt", "KERN, by downstream accuracy"))


def claims_table(final):
    """The papers' claims: differences paired by seed, with Student's 95% intervals."""
    rows = []
    for a, b, source in CLAIMS:
        gap, half = curves.interval(curves.gaps(final[a], final[b], curves.end(final[a])[0]))
        verdict = "within noise" if abs(gap) <= half else "holds" if gap < 0 else "the opposite"
        rows.append([f"`{a}`", f"`{b}`", source, f"{gap:+.4f} ± {half:.4f}", verdict])
    return markdown(["lower loss expected", "than", "says", "difference (95% interval)", "here"], rows)


def tables(final):
    """{NAME: table}"""
    return {"main": curves.table(curves.summarise(final, "gpt"), "gpt").rstrip(), "claims": claims_table(final)}


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    final = groups(read(HERE), kind="final")
    fill(HERE / "README.md", **tables(final))
    rows = curves.summarise(final, "gpt")
    best = sorted((name for name in rows if name != "gpt"), key=lambda name: rows[name]["loss"])[:8]
    shown = {name: rows[name] for name in ("gpt", *best)}
    pictures.draw_curves(shown, final, "gpt").savefig(HERE / "curves.png", dpi=130)


if __name__ == "__main__":
    main()
