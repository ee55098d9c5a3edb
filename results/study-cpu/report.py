"""Makes the tables and pictures of this folder's pages: python results/study-cpu/report.py

Reads runs.csv, logs.jsonl.xz and ../study/speed.csv. Rewrites the text between <!-- NAME --> and <!-- end --> in
README.md, claims.md, plain.md and rates.md. Draws curves.png.
"""
import argparse
import math
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
STUDY = HERE.parent / "study"
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
from compare import (  # noqa: E402
    CLAIMS, claims, contrast, difference, final, gap, groups, main_table, others, read, residuals, speeds)
from publish import fill, markdown  # noqa: E402

from nanodepth import curves, pictures  # noqa: E402

PLAIN_RATES = (0.002, 0.004)


def plain_groups(runs):
    """{system: its runs on the plain recipe}, at the learning rate that is best for seed 0."""
    rates = [groups(runs, kind="plain", adamw_lr=rate) for rate in PLAIN_RATES]
    return {name: min((each[name] for each in rates), key=lambda some: some[0]["loss"]) for name in rates[0]}


def coverage(losses, a, b):
    """How often the interval of difference() covers the truth if each system has the variance of its own residuals."""
    rest, left = residuals(losses)
    rest, variances = iter(rest), []
    for at in losses.values():
        variances += [mean(next(rest) ** 2 for _ in at)] * len(at)
    scale = len(variances) / left
    variance = scale * sum(weight ** 2 * x for weight, x in zip(contrast(losses, a, b), variances))
    return math.erf(difference(losses, a, b)[1] / math.sqrt(2 * variance))


# --------------------------------------------------------------------------------------------------------------- tables


def saving_table(strong, lengths):
    """How many times a system's tokens gpt needs for the same loss, and how many times its training time.

    lengths: {steps: gpt's runs}. The intervals are those of the loss; > and < lie outside of these lengths.
    """
    speed, rows = speeds(STUDY), []

    def factor(losses, name, scale):
        own, ends = losses(strong), losses(lengths)
        seeds, (lead, half) = set.intersection(*map(set, ends.values())), difference(own, name, "gpt")
        points = sorted((steps / strong["gpt"][0]["steps"], mean(at[seed] for seed in seeds))
                        for steps, at in ends.items())
        (first, most), (last, _) = points[0], points[-1]

        def text(loss):
            found, edge = curves.tokens_needed(points, loss), f"< {scale * first:.2f}"
            return f"{scale * found:.2f}" if found else edge if loss > most else f"> {scale * last:.2f}"

        loss = dict(points)[1] + lead
        return text(loss) + (f" ({text(loss + half)} to {text(loss - half)})" if half else "")

    for name in [name for name in strong if name != "gpt"]:
        tokens, time = ([factor(losses, name, scale) for losses in (final, others)] for scale in (1, speed[name]))
        rows.append([f"`{name}`", *tokens, f"{1 / speed[name]:.2f}", *time])
    return markdown(["system", "tokens, all targets", "tokens, not copyable", "time of a step", "time, all targets",
                     "time, not copyable"], rows)


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


def claims_table(strong, plain):
    return claims({name: losses(each) for recipe, each in (("strong recipe", strong), ("plain recipe", plain))
                   for name, losses in ((recipe, final), (f"{recipe.split()[0]}, not copyable", others))})


def coverage_lines(strong):
    lines = []
    for words, losses in (("Over all targets", final(strong)), ("on those that are not copyable", others(strong))):
        found = {f"{a} against {b}": coverage(losses, a, b) for a, b, _ in CLAIMS}
        least, most = min(found, key=found.get), max(found.values())
        lines.append(f"{words} {found[least]:.0%} ({least}) to {most:.0%}, {mean(found.values()):.0%} on average")
    return ";\n".join(lines) + "."


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


# ------------------------------------------------------------------------------------------------------------- pictures


def curves_picture(strong, plain):
    """Curves of the better half of the systems that have both recipes; time from the speeds on an idle machine."""
    rows = curves.summarise(strong, "gpt")
    best = sorted((name for name in plain if name != "gpt"), key=lambda name: rows[name]["loss"])[:6]
    shown = {name: {**rows[name], "tok_s": speeds(STUDY, "tokens_per_s")[name],
                    "difference": difference(final(strong), name, "gpt")[0]} for name in ("gpt", *best)}
    return pictures.draw_curves(shown, strong, "gpt")


def tables(runs):
    """{page: {NAME: table}}"""
    strong, plain = groups(runs, kind="main"), plain_groups(runs)
    kinds = {kind: [run for run in runs if run["kind"] == kind] for kind in ("tune", "plain", "plain-tune")}
    lengths = {steps: groups(runs, kind="main" if steps == 1000 else "length", steps=steps)["gpt"]
               for steps in (500, 1000, 1500, 2000)}
    depths = {n: groups(runs, kind="main" if n == 12 else "depth", layers=n) for n in (6, 12, 24)}
    rates = {"rates": rates_table(kinds["tune"], "muon_lr adamw_lr mix_lr: loss after 250 steps"),
             "plain": rates_table([run for run in kinds["plain"] if run["seed"] == 0],
                                  "adamw_lr: loss after 1,000 steps", lambda run: run["adamw_lr"] in PLAIN_RATES),
             "quarter": rates_table(kinds["plain-tune"], "adamw_lr: loss after 250 steps", lambda run: False)}
    main = {"main": main_table(strong), "saving": saving_table(strong, lengths)}
    claims = {"claims": claims_table(strong, plain), "depth": depth_table(depths), "coverage": coverage_lines(strong)}
    return {HERE / "README.md": main, HERE / "claims.md": claims,
            HERE / "plain.md": {"baselines": baseline_table(strong, plain)}, HERE / "rates.md": rates}


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    runs = read(HERE)
    for page, parts in tables(runs).items():
        fill(page, **parts)
    strong, plain = groups(runs, kind="main"), plain_groups(runs)
    list(pictures.save({"curves": lambda: curves_picture(strong, plain)}, HERE))


if __name__ == "__main__":
    main()
