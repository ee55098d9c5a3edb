"""Tables and pictures of this folder's README, from logs/: python results/study-cpu/report.py [LOGS]

Rewrites what stands between <!-- NAME --> and <!-- end --> in README.md, plain.md, rates.md, copying.md and in the
repository's README.md; draws curves.png, curves-page2.png and gaps.png. Runs that are not there yet are left out: it
can be called at any time. With a folder LOGS of study.py --logs it prints the main table of that one and writes
nothing.
"""
import argparse
import json
import math
import re
import sys
from pathlib import Path
from statistics import mean

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
import publish  # noqa: E402
from publish import fill, markdown  # noqa: E402
from study import DEEP, PLAIN_RATES, STRONG_ONLY, SYSTEMS  # noqa: E402

import models  # noqa: E402
from nanodepth import curves, pictures  # noqa: E402

CLAIMS = (  # the first has the lower loss, says
    ("gpt-gated", "gpt", "ExoFormer, table 1"), ("resformer", "gpt", "ExoFormer, table 1; SATFormer, table 5"),
    ("satformer", "gpt", "SATFormer, table 5"), ("satformer", "resformer", "SATFormer, section 4.3"),
    ("exoformer", "gpt-gated", "ExoFormer, table 1"), ("exoformer", "resformer", "ExoFormer, table 1"),
    ("exoformer", "exoformer-no-norm", "ExoFormer, table 1"),
    ("exoformer-dynamic", "exoformer", "ExoFormer, table 1"), ("muddformer", "gpt", "MUDDFormer, figure 3"),
    ("muddformer", "denseformer", "MUDDFormer, figure 3"), ("muddformer", "hyperconnections", "MUDDFormer, figure 3"),
    ("muddformer", "resformer", "SATFormer, table 5"),
    ("satformer", "muddformer", "SATFormer, table 5, at 130M and 340M; at 760M the opposite"),
    ("attnres", "gpt", "Attention Residuals"),
    ("attnres", "denseformer", "Attention Residuals, ablations"), ("denseformer", "gpt", "MUDDFormer, figure 3"),
    ("hyperconnections", "gpt", "MUDDFormer, figure 3"),
    ("hyperconnections-manifold", "gpt", "Attention Residuals, ablations"),
    ("hyperconnections-manifold", "hyperconnections", "mHC"),
    ("attnres", "hyperconnections-manifold", "Attention Residuals, ablations"),
    ("speedrun", "gpt", "nanochat; modded-nanogpt, record 11"),
    ("muddformer-trimmed", "gpt", "modded-nanogpt, pull request 259"),
    ("attnres-additive", "gpt", "Delta Attention Residuals"),
    ("attnres-additive", "attnres", "Delta Attention Residuals"), ("kern", "kern-softmax", "KERN"),
    ("muddmoe", "kern-softmax", "MUDDFormer, figure 5"))


FRONT = ("gpt-gated", "resformer", "satformer", "exoformer", "muddformer", "attnres", "denseformer",
         "hyperconnections", "speedrun")                            # in the repository's README


TRIES = {  # names of logs, with system and rates; head; the number of tries among which is chosen, which if not all
    "rates": (r"tune-(?!plain-)(.*?)-(\d[\d.e-]*)", "muon_lr adamw_lr mix_lr: loss after 250 steps", 6, ()),
    "plain": (r"plain-(.*?)-(\d[\d.e-]*)-seed0", "adamw_lr: loss after 1,000 steps", len(PLAIN_RATES), PLAIN_RATES),
    "quarter": (r"tune-plain-(.*?)-(\d[\d.e-]*)", "adamw_lr: loss after 250 steps", 0, ())}


def logs(pattern, folder=None):
    """[run] of those in the folder (logs/) whose whole name matches and that did not diverge, by seed."""
    found = [path for path in (folder or HERE / "logs").iterdir() if re.fullmatch(pattern, path.name)]
    ended = [path for path in found if publish.final_loss(path) not in (None, math.inf)]
    return sorted(map(curves.read_log, ended), key=lambda run: run["seed"])


def groups(suffix="", systems=SYSTEMS, folder=None):
    """{system: its runs} of those that have finished runs of this kind."""
    found = {name: logs(rf"{name}{suffix}-seed\d+", folder) for name in systems}
    return {name: runs for name, runs in found.items() if runs}


def plain_groups():
    """{system: its runs on the plain recipe} at the rate that is best for the first seed, once all rates are tried."""
    found = {name: [logs(rf"plain-{name}-{rate:g}-seed\d+") for rate in PLAIN_RATES] for name in SYSTEMS}
    return {name: min(each, key=lambda runs: runs[0]["val"][-1]["loss"]) for name, each in found.items() if all(each)}


def final(each):
    """{system: {seed: final loss}} of groups()."""
    return {name: {run["seed"]: run["val"][-1]["loss"] for run in runs} for name, runs in each.items()}


def copied(each):
    """{system: {seed: record.copying()}} of the runs that have it."""
    found = {name: {run["seed"]: Path(run["run"]) / "copying.json" for run in runs} for name, runs in each.items()}
    read = {name: {seed: json.loads(file.read_text()) for seed, file in files.items() if file.exists()}
            for name, files in found.items()}
    return {name: parts for name, parts in read.items() if parts}


def others(each):
    """{system: {seed: loss}} of the targets that are not copyable."""
    return {name: {seed: part["others"] for seed, part in parts.items()} for name, parts in copied(each).items()}


def design(losses):
    """(X, y) of {system: {seed: loss}}: a row a run, with a 1 for its system and a 1 for its seed; y has its loss.

    This is a randomised block design: the seeds, hence the batches, are the blocks, and all systems share one standard
    deviation, which three seeds of one system alone would leave almost unknown.
    """
    rows = [(system, seed, loss) for system, at in losses.items() for seed, loss in at.items()]
    seeds = sorted({seed for _, seed, _ in rows})
    X = [[system == name for name in losses] + [seed == s for s in seeds] for system, seed, _ in rows]
    return np.array(X, dtype=float), np.array([loss for *_, loss in rows])


def residuals(losses):
    """What a mean per system and one per seed leave of the losses of design(), and its degrees of freedom."""
    X, y = design(losses)
    return y - X @ np.linalg.lstsq(X, y, rcond=None)[0], int(len(y) - np.linalg.matrix_rank(X))


def noise(losses):
    """(standard deviation of one run, degrees of freedom), by residuals()."""
    rest, left = residuals(losses)
    return (math.sqrt(rest @ rest / left) if left else None), left


def contrast(losses, a, b):
    """The weights of the runs of design() in the difference of a to b; None where nothing compares them."""
    if a not in losses or b not in losses:
        return None
    X, _ = design(losses)
    wanted = np.zeros(X.shape[1])
    wanted[list(losses).index(a)] += 1
    wanted[list(losses).index(b)] -= 1
    weights = wanted @ np.linalg.pinv(X)
    return weights if np.allclose(weights @ X, wanted) else None


def difference(losses, a, b):
    """(difference of a to b, half of its 95% interval by noise(), or None); None where nothing compares them.

    By least squares on design(): the mean difference over the seeds, if all systems have the same ones. If some have
    more, the others gain from them what these say of a and b.
    """
    weights = contrast(losses, a, b)
    if weights is None:
        return None
    sd, left = noise(losses)
    value = float(weights @ design(losses)[1])
    return value, None if sd is None else curves.t95(left) * sd * math.sqrt(weights @ weights)


def coverage(losses, a, b):
    """How often the interval of difference() holds the truth, if every system has the deviation of its own residuals.
    """
    rest, left = residuals(losses)
    variances = np.concatenate([[mean(part ** 2)] * len(part) for part in
                                np.split(rest, np.cumsum([len(at) for at in losses.values()])[:-1])])
    variance = contrast(losses, a, b) ** 2 @ variances * len(rest) / left
    return math.erf(difference(losses, a, b)[1] / math.sqrt(2 * variance))


def gap(losses, a, b="gpt"):
    """difference() as text, and its sign: -1 or 1 outside of the noise, else 0."""
    value, half = difference(losses, a, b) or (None, None)
    if a == b or value is None:
        return "", None
    if half is None:
        return f"{value:+.4f}", None
    return f"{value:+.4f} ± {half:.4f}", 0 if abs(value) <= half else -1 if value < 0 else 1


def main_table(strong):
    losses, rest, parts = final(strong), others(strong), copied(strong)
    return markdown(["system", "seeds", "final loss", "difference to gpt (95%)", "others: difference to gpt (95%)",
                     "copyable: loss of each seed"],
                    [[f"`{name}`", str(len(at)), f"{mean(at.values()):.4f}", gap(losses, name)[0], gap(rest, name)[0],
                      ", ".join(f"{part['repeated']:.2f}" for part in parts.get(name, {}).values())]
                     for name, at in losses.items()])


def speeds():
    """{system: speed of its training step over gpt's} from what bench.py wrote at the study's shape."""
    rows = {row["model"]: row for row in json.loads((HERE / "bench.json").read_text())["models"]
            if row["model"] != row["against"] or row["model"] == "gpt"}
    specs = {name: re.sub(r" --(\w+)(?: (\w+))?", lambda found: f":{found[1]}={found[2] or 'true'}", words)
             for name, words in SYSTEMS.items()}
    rows = {name: rows[spec] for name, spec in specs.items() if spec in rows}
    of = {row["model"]: row["step_ratio"][0] for row in rows.values() if row["against"] == "gpt"}
    return {name: row["step_ratio"][0] * of[row["against"]] for name, row in rows.items()}


def summary(strong):
    """curves.summarise() of what has both recipes, with difference() and bench.json's speeds, of an idle machine."""
    rows, speed = curves.summarise(strong, "gpt"), speeds()
    figures = json.loads((HERE / "bench.json").read_text())["models"]
    base = next(row["tokens_per_s"] for row in figures if row["model"] == row["against"] == "gpt")
    shown = [name for name in rows if name in speed and name not in STRONG_ONLY]
    return {name: {**rows[name], "tok_s": base * speed[name], "difference": difference(final(strong), name, "gpt")[0]}
            for name in shown}


def heads_table():
    """The two heads that look most at what followed earlier copies of the current token, of seed 0: probes/."""
    rows = []
    for name in SYSTEMS:
        file = HERE / "probes" / f"{name}-seed0.json"
        if file.exists() and (layers := json.loads(file.read_text())["induction"]):
            heads = sorted(((x, layer) for layer, row in enumerate(layers, start=1) for x in row), reverse=True)
            rows.append([f"`{name}`", *(f"{x:.2f} in layer {layer}" for x, layer in heads[:2])])
    return markdown(["system", "copying head", "the next one"], rows)


def saving_table(strong):
    """How many times its tokens gpt needs for a system's loss, by gpt's runs of other lengths on the same batches.

    With the interval that the loss has; > and < where it lies outside of these lengths. The same charged by the time
    of a step.
    """
    length, speed = curves.end(strong["gpt"])[0], speeds()
    lengths = [strong["gpt"], *(logs(rf"gpt-{steps}-seed\d+") for steps in (500, 1500, 2000))]
    lengths = {curves.end(runs)[0] / length: runs for runs in lengths if runs}

    def factor(losses, ends, name, scale):
        """Times gpt's tokens, times scale, as text: from {system: {seed: loss}} and {length: {seed: gpt's loss}}."""
        seeds, found = set(ends.get(1, ())).intersection(*ends.values()), difference(losses, name, "gpt")
        if not seeds or not found or scale is None:
            return ""
        points = sorted((times, mean(at[seed] for seed in seeds)) for times, at in ends.items())
        loss, half = dict(points)[1] + found[0], found[1]

        def text(x):
            found, (first, most), (last, _) = curves.tokens_needed(points, x), points[0], points[-1]
            edge = f"< {scale * first:.2f}" if x > most else f"> {scale * last:.2f}"
            return edge if found is None else f"{scale * found:.2f}"

        return text(loss) + ("" if half is None else f" ({text(loss + half)} to {text(loss - half)})")

    rows = []
    for name in (name for name in strong if name != "gpt"):
        step = f"{1 / speed[name]:.2f}" if name in speed else ""
        tokens, times = ([factor(losses(strong), losses(lengths), name, scale) for losses in (final, others)]
                         for scale in (1, speed.get(name)))
        rows.append([f"`{name}`", *tokens, step, *times])
    return markdown(["system", "tokens, all targets", "tokens, others", "time of a step", "time, all targets",
                     "time, others"], rows)


def baseline_table(strong, plain):
    each = [losses(kind) for kind in (strong, plain) for losses in (final, others)]
    return markdown(["system", "strong recipe: difference to gpt (95%)", "strong, others", "plain recipe",
                     "plain, others", "final loss, plain", "seeds, plain"],
                    [[f"`{name}`", *(gap(losses, name)[0] for losses in each), f"{mean(at.values()):.4f}", str(len(at))]
                     for name, at in each[2].items()])


def depth_table(strong):
    at = {6: groups(suffix="-layers6", systems=DEEP), 12: strong, 24: groups(suffix="-layers24", systems=DEEP)}
    each = [losses(kind) for kind in at.values() for losses in (final, others)]

    def cell(name, losses):
        return f"{mean(losses[name].values()):.4f}" if name == "gpt" and name in losses else gap(losses, name)[0]

    return markdown(["system", *(f"{n} layers{part}" for n in at for part in ("", ", others"))],
                    [[f"`{name}`", *(cell(name, losses) for losses in each)] for name in DEEP])


def claims_table(strong, plain):
    words, rows = {-1: ": holds", 0: ": unresolved", 1: ": reversed", None: ""}, []
    for a, b, source in CLAIMS:
        cells = [gap(losses(each), a, b) for each in (strong, plain) for losses in (final, others)]
        if any(text for text, _ in cells):
            rows.append([f"`{a}` below `{b}`", source, *(text + words[sign] for text, sign in cells)])
    return markdown(["claim", "by", "strong recipe", "strong, others", "plain recipe", "plain, others"], rows)


def coverage_lines(strong):
    """coverage() of the intervals of all claims, in words."""
    lines = []
    for words, losses in (("Over all targets", final(strong)), ("on the others", others(strong))):
        found = {f"{a} against {b}": coverage(losses, a, b) for a, b, _ in CLAIMS if contrast(losses, a, b) is not None}
        least, most = min(found, key=found.get), max(found.values())
        lines.append(f"{words} {found[least]:.0%} ({least}) to {most:.0%}, {mean(found.values()):.0%} on average")
    return ";\n".join(lines) + "."


def front_table(strong):
    """What the repository's README shows: both differences, and the speed of a step."""
    all_targets, rest, speed = final(strong), others(strong), speeds()
    return markdown(["system", "all targets", "others", "speed"],
                    [[f"`{name}`", gap(all_targets, name)[0], gap(rest, name)[0],
                      f"{speed[name]:.2f}" if name in speed else ""] for name in strong if name in FRONT])


def rates_table(name):
    """All tries of a kind in TRIES; the best is bold where all are there among which a system's best is chosen."""
    (kind, head, n, choice), tries = TRIES[name], {}
    for path in sorted((HERE / "logs").iterdir()):
        if found := re.fullmatch(kind, path.name):
            tries.setdefault(found[1], {})[found[2].replace("-", " ")] = publish.final_loss(path)
    rows = []
    for system, losses in sorted(tries.items()):
        counted = [loss for rates, loss in losses.items() if not choice or float(rates) in choice]
        marks = {rates: "**" if len(counted) == n and loss == min(counted) else "" for rates, loss in losses.items()}
        rows.append([f"`{system}`", "; ".join(f"{m}{rates}: {losses[rates]:.4f}{m}" for rates, m in marks.items())])
    return markdown(["system", head], rows)


def gaps_picture(strong, plain):
    """Differences to gpt with their intervals, of both recipes: of all targets, and of the others, the best first."""
    fig, (axes,) = pictures.figure(1, 2, (11, 5), sharey=True)
    rest = others(strong)
    names = sorted((x for x in strong if x != "gpt"), key=lambda x: (difference(rest, x, "gpt") or [math.inf])[0])
    for ax, title, losses in zip(axes, ("all targets", "others: all but the copyable ones"), (final, others)):
        for shift, label, each in ((-0.15, "strong recipe", strong), (0.15, "plain recipe", plain)):
            found = {i: difference(losses(each), name, "gpt") for i, name in enumerate(names)}
            found = {i: both for i, both in found.items() if both}
            if found:
                label += "" if any(half for _, half in found.values()) else ", one seed"
                ax.errorbar([gap for gap, _ in found.values()], [i + shift for i in found], fmt="o", capsize=3,
                            xerr=[half or 0 for _, half in found.values()], label=label)
        ax.axvline(0, color="black", lw=0.8)
        ax.set(title=title, xlabel="loss minus gpt's of the same recipe, nats (95%)")
        ax.grid(axis="y", alpha=0.3, lw=0.6)
    axes[0].set(yticks=range(len(names)), yticklabels=names)
    axes[0].invert_yaxis()
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return fig


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="?", help="folder of study.py --logs")
    folder = parser.parse_args().logs
    if folder and not folder.is_dir():
        parser.error(f"{folder} is not a folder")
    if folder:
        print(main_table(groups(systems=[*SYSTEMS, *models.names()], folder=folder)))
        return
    strong, plain = groups(), plain_groups()
    fill(HERE / "rates.md", **{name: rates_table(name) for name in TRIES})
    fill(HERE / "copying.md", heads=heads_table())
    tables = {}
    if "gpt" in strong:
        tables |= {"main": lambda: main_table(strong), "depth": lambda: depth_table(strong),
                   "claims": lambda: claims_table(strong, plain), "saving": lambda: saving_table(strong),
                   "coverage": lambda: coverage_lines(strong)}
        draw = pictures.curve_pages("curves", summary(strong), strong, "gpt")
        list(pictures.save({**draw, "gaps": lambda: gaps_picture(strong, plain)}, HERE))
    if "gpt" in plain:
        fill(HERE / "plain.md", baselines=baseline_table(strong, plain))
    fill(HERE.parents[1] / "README.md", losses=front_table(strong))
    fill(HERE / "README.md", **{name: make() for name, make in tables.items()})


if __name__ == "__main__":
    main()
