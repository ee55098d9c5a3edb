"""Tables and pictures of this folder's README, from logs/: python results/study/report.py

Rewrites what stands between <!-- NAME --> and <!-- end --> in README.md, for NAME of main, copying, baselines, depth,
claims and rates, and draws curves.png, curves-page2.png and gaps.png. Runs that are not there yet are left out: it can
be called at any time.
"""
import json
import re
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
from publish import fill, markdown  # noqa: E402
from study import DEEP, SYSTEMS  # noqa: E402

from nanodepth import curves, pictures  # noqa: E402

CLAIMS = (  # the first has the lower loss, says
    ("gpt-gated", "gpt", "ExoFormer, table 1"), ("resformer", "gpt", "ExoFormer, table 1; SATFormer, table 5"),
    ("satformer", "gpt", "SATFormer, table 5"), ("satformer", "resformer", "SATFormer, section 4.3"),
    ("exoformer", "gpt-gated", "ExoFormer, table 1"), ("exoformer", "resformer", "ExoFormer, table 1"),
    ("exoformer-dynamic", "exoformer", "ExoFormer, table 1"), ("muddformer", "gpt", "MUDDFormer, figure 3"),
    ("muddformer", "denseformer", "MUDDFormer, figure 3"), ("muddformer", "hyperconnections", "MUDDFormer, figure 3"),
    ("muddformer", "resformer", "SATFormer, table 5"), ("attnres", "gpt", "Attention Residuals"),
    ("attnres", "denseformer", "Attention Residuals, ablations"), ("denseformer", "gpt", "MUDDFormer, figure 3"),
    ("hyperconnections", "gpt", "MUDDFormer, figure 3"),
    ("hyperconnections-manifold", "gpt", "Attention Residuals, ablations"),
    ("attnres", "hyperconnections-manifold", "Attention Residuals, ablations"),
    ("speedrun", "gpt", "nanochat; modded-nanogpt, record 11"),
    ("muddformer-trimmed", "gpt", "modded-nanogpt, record 81"),
    ("attnres-additive", "gpt", "Delta Attention Residuals"),
    ("attnres-additive", "attnres", "Delta Attention Residuals"), ("muddmoe", "kern", "MUDDFormer, figure 5"))


def logs(pattern):
    """[run] of the folders in logs/ whose whole name matches, by seed."""
    found = [path for path in (HERE / "logs").iterdir() if re.fullmatch(pattern, path.name)]
    return sorted(map(curves.read_log, found), key=lambda run: run["seed"])


def groups(prefix="", suffix="", systems=SYSTEMS):
    """{system: its runs} of those that have finished runs of this kind."""
    found = {name: logs(rf"{prefix}{name}{suffix}-seed\d+") for name in systems}
    return {name: runs for name, runs in found.items() if runs}


def final_gaps(some, base):
    return curves.gaps(some, base, curves.curve(some)[-1][0])


def gap(some, base):
    """spelled() of the differences of the final losses."""
    return spelled(final_gaps(some, base))


def spelled(differences):
    """Their mean with its interval, as text; and its sign: -1 or 1 outside of the noise, else 0."""
    value, half = curves.interval(differences)
    if half is None:
        return "" if value is None else f"{value:+.4f}", None
    return f"{value:+.4f} ± {half:.4f}", 0 if abs(value) <= half else -1 if value < 0 else 1


def main_table(strong):
    lengths = [runs for runs in (logs(rf"gpt-{steps}-seed\d+") for steps in (500, 1500, 2000)) if runs]
    rows = []
    for name, runs in strong.items():
        saved, cells = curves.saving(runs, [strong["gpt"], *lengths]), [""] * 5
        if name != "gpt":
            cells = [gap(runs, strong["gpt"])[0], "not in reach", "-", f"{saved['cost']:.2f}", "-"]
            if saved["saving"]:
                cells[1:3] = f"{saved['baseline_tokens'] / 1e6:.2f}M", f"{saved['saving']:.2f}x"
                cells[4] = f"{saved['saving_in_time']:.2f}x"
        rows.append([f"`{name}`", str(len(runs)), f"{saved['loss']:.4f}", *cells])
    return markdown(["system", "seeds", "final loss", "difference to gpt (95%)", "tokens gpt needs", "saving in tokens",
                     "time per step, gpt = 1", "saving in time"], rows)


def copied(runs):
    """{seed: record.copying()} of the runs that have it."""
    found = {run["seed"]: Path(run["run"]) / "copying.json" for run in runs}
    return {seed: json.loads(file.read_text()) for seed, file in found.items() if file.exists()}


def copying_table(strong):
    """The final losses taken apart: tokens that could be copied from the window, and all others."""
    rows, base = [], copied(strong["gpt"])
    for name, parts in ((name, copied(runs)) for name, runs in strong.items()):
        if parts:
            rows.append([f"`{name}`", ", ".join(f"{x['repeated']:.2f}" for x in parts.values()),
                         f"{mean(x['others'] for x in parts.values()):.4f}", "" if name == "gpt" else
                         spelled([parts[seed]["others"] - base[seed]["others"] for seed in parts if seed in base])[0]])
    return markdown(["system", "copied, each seed", "others, mean", "others: difference to gpt (95%)"], rows)


def baseline_table(strong, plain):
    def to_gpt(name, each):
        return "" if name == "gpt" or name not in each or "gpt" not in each else gap(each[name], each["gpt"])[0]

    return markdown(["system", "strong recipe: difference to gpt (95%)", "plain recipe: the same", "final loss, plain"],
                    [[f"`{name}`", to_gpt(name, strong), to_gpt(name, plain), f"{curves.curve(runs)[-1][1]:.4f}"]
                     for name, runs in plain.items()])


def depth_table(strong):
    at = {6: groups(suffix="-layers6", systems=DEEP), 12: strong, 24: groups(suffix="-layers24", systems=DEEP)}

    def cell(name, each):
        if name not in each or "gpt" not in each:
            return ""
        return f"{curves.curve(each[name])[-1][1]:.4f}" if name == "gpt" else gap(each[name], each["gpt"])[0]

    rows = [[f"`{name}`", *(cell(name, each) for each in at.values())] for name in DEEP]
    return markdown(["system", *(f"{n} layers" for n in at)], rows)


def claims_table(strong, plain):
    words, rows = {-1: "holds", 0: "unresolved", 1: "reversed", None: ""}, []
    for a, b, source in CLAIMS:
        cells = [gap(each[a], each[b]) if a in each and b in each else ("", None) for each in (strong, plain)]
        rows.append([f"`{a}` below `{b}`", source, *(word for text, sign in cells for word in (text, words[sign]))])
    return markdown(["claim", "by", "strong recipe", "", "plain recipe", ""], rows)


def rates_table():
    tries = {}
    for run in sorted(logs(r"tune-.*"), key=lambda run: run["run"]):
        system, *rates = re.fullmatch(r"tune-(.*?)-(\d[\d.e-]*)", Path(run["run"]).name).groups()
        tries.setdefault(system, {})[rates[0].replace("-", " ")] = run["val"][-1]["loss"]
    rows = []
    for name, losses in sorted(tries.items()):
        marks = {rates: "**" if loss == min(losses.values()) else "" for rates, loss in losses.items()}
        rows.append([f"`{name}`", "; ".join(f"{m}{rates}: {losses[rates]:.4f}{m}" for rates, m in marks.items())])
    return markdown(["system", "muon_lr adamw_lr mix_lr: loss after 250 steps"], rows)


def gaps_picture(strong, plain):
    """Differences to gpt with their intervals, of both recipes."""
    (fig, ((ax,),)), names = pictures.figure(1, 1, (7, 4)), [name for name in strong if name != "gpt"]
    for shift, (label, each) in zip((-0.15, 0.15), (("strong recipe", strong), ("plain recipe", plain))):
        at = [i for i, name in enumerate(names) if name in each and "gpt" in each]
        found = [curves.interval(final_gaps(each[names[i]], each["gpt"])) for i in at]
        ax.errorbar([gap for gap, _ in found], [i + shift for i in at], xerr=[half or 0 for _, half in found], fmt="o",
                    capsize=3, label=label)
    ax.axvline(0, color="black", lw=0.8)
    ax.set(yticks=range(len(names)), yticklabels=names, xlabel="final loss minus gpt's of the same recipe, nats (95%)")
    ax.invert_yaxis()
    ax.legend()
    return fig


def main():
    strong, plain = groups(), groups("plain-")
    tables = {"rates": rates_table}
    if "gpt" in strong:
        tables |= {"main": lambda: main_table(strong), "copying": lambda: copying_table(strong),
                   "depth": lambda: depth_table(strong), "claims": lambda: claims_table(strong, plain)}
        draw = pictures.curve_pages("curves", curves.summarise(strong, "gpt"), strong, "gpt")
        list(pictures.save({**draw, "gaps": lambda: gaps_picture(strong, plain)}, HERE))
    if "gpt" in plain:
        tables["baselines"] = lambda: baseline_table(strong, plain)
    fill(HERE / "README.md", **{name: make() for name, make in tables.items()})


if __name__ == "__main__":
    main()
