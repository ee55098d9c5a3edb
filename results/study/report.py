"""Makes the tables and pictures of this folder's pages and of the repository's README: python results/study/report.py

Reads runs.csv, rates.csv and logs.jsonl.xz. Rewrites what is between <!-- NAME --> and <!-- end --> in README.md and
claims.md, and three columns in the repository's README. Draws leads.png and gain.png. The time of a step comes from
speed.csv, measured on an idle machine: the runs shared theirs.
"""
import csv
import math
import re
import sys
from pathlib import Path
from statistics import mean

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
README = HERE.parents[1] / "README.md"
sys.path[:0] = [str(HERE), str(HERE.parent)]
import compare  # noqa: E402
from compare import apart, difference, final, gap, markdown, read  # noqa: E402
from study import MAIN, SYSTEMS  # noqa: E402

import models  # noqa: E402
import train  # noqa: E402
from nanodepth import pictures  # noqa: E402

FRONT = {"gpt-gated": "gpt --gate elementwise", "resformer-half": "resformer"}         # names in README's table
IGNORED = ("code", "torch")                     # the runs were made over many days, at many commits
SPEED = {line["system"]: float(line["speed"]) for line in csv.DictReader((HERE / "speed.csv").open())}  # over gpt's
USUAL = 2000                                    # steps, which all systems reached
NOT_SHOWN = "attnres_block", "depth_attention", "gpt-wide", "mhc_lite", "nuresformer"         # in leads.png
BASELINES = {"gpt": "gpt", "gpt-gated": "gpt + gate", "gpt-wide": "gpt, wider MLP", "gpt-wide-stream": "gpt, 8 x 160"}
NAMES = {**BASELINES, "resformer-half": "resformer (half lr)"}
SHAPES = {"8x160": ("8 layers of 160", "gpt-wide-stream"), "12x256": ("12 layers of 256", "gpt-12x256"),
          "12x448": ("12 layers of 448", "gpt-12x448")}
LEFT_OUT = "resformer", "depth_attention"               # at rates too high for it; no gain
PLACES = {  # of a name: right of its point, unless it would lie on another
    "gpt-wide": (6, 3, "left"), "gpt-wide-stream": (-6, 0, "right"), "gpt-gated": (-6, 0, "right"),
    "nuresformer": (-6, -1, "right"), "exoformer": (-6, -3, "right"), "exoformer_dynamic": (6, 2, "left"),
    "satformer": (-6, 4, "right"), "denseformer": (-6, -1, "right"), "resformer-half": (10, -10, "center"),
    "attnres": (6, 4, "left"), "mhc": (6, 2, "left"), "mhc_lite": (-6, -3, "right")}


def parameters(system):
    """Number of parameters of a system at the study's shape, with 4,096 token ids."""
    words = SYSTEMS[system][0].split()
    _, config, _ = train.parse(["--model", *words, "--preset", "study"])
    with torch.device("meta"):
        return sum(p.numel() for p in models.build(words[0], **{**config, "vocab_size": 4096}).parameters())


def ends(runs):
    """compare.ends() of the systems in the leads' table: not those of shapes_table() and sums_table()."""
    return compare.ends([run for run in runs if run["system"] in MAIN])


def in_order(losses):
    """The systems but gpt, by their lead over it."""
    return sorted(losses.keys() - {"gpt"}, key=lambda name: difference(losses, name, "gpt")[0])


def leads_table(at, speed):
    """Losses minus gpt's at the last three lengths, in nats: below zero the system is ahead. On targets that
    are not copyable, at the USUAL length also on all. Then the time of a step over gpt's, and in how many times the
    system's time gpt reaches its loss at the USUAL length. Between lengths gpt's loss is taken as linear in log(steps).
    """
    losses, rows, base = {steps: final(each, "others") for steps, each in at.items()}, [], parameters("gpt")
    gpt = sorted((mean(each["gpt"].values()), math.log(steps)) for steps, each in losses.items())
    usual = math.log(USUAL), mean(losses[USUAL]["gpt"].values())
    for name in in_order(losses[USUAL]):
        lead, time = difference(losses[USUAL], name, "gpt")[0], 1 / speed.get(name, math.nan)
        needed = np.interp(usual[1] + lead, *zip(*gpt), math.nan, math.nan) - usual[0]
        rows.append([f"`{name}`", f"{parameters(name) / base - 1:+.1%}",
                     *(gap(losses[steps], name) for steps in list(at)[-3:]), gap(final(at[USUAL], "loss"), name),
                     f"{time:.2f}", f"{math.exp(needed) / time:.2f}"])
    return markdown(["system", "parameters", *map(place, list(at)[-3:]), f"all targets, {place(USUAL)}",
                     "time of a step (CPU)", f"gpt's time for the loss {place(USUAL)}"], rows)


def place(steps):
    return f"at {steps * 4096 / 1e6:.1f}M"


def claims_table(columns):
    """The claims of papers.csv: each holds if the interval is below zero, and is reversed if it is above.

    columns: {heading: (losses, how the names of the systems end there, the gpt among them)}.
    """
    rows = []
    for a, b, source in list(csv.reader((HERE / "papers.csv").open()))[1:]:
        cells = [verdict(losses, *(gpt if name == "gpt" else name + end for name in (a, b)))
                 for losses, end, gpt in columns.values()]
        rows += [[f"`{a}` below `{b}`", source, *cells]] if any(cells) else []
    return markdown(["claim", "by", *columns], rows)


def verdict(losses, a, b):
    value, half = difference(losses, a, b)
    said = "" if half is None else ": unresolved" if abs(value) <= half else ": holds" if value < 0 else ": reversed"
    return gap(losses, a, b) + said


def shapes_table(losses, *shapes):
    """Each idea's lead over gpt; in other shapes, over the gpt of that shape; and how they differ from the first."""
    rows = []
    for name in MAIN:
        own, cells = "gpt-gated" if name == "exoformer" else "gpt", []
        for shape in shapes:
            other, gpt = f"{name}-{shape}", SHAPES[shape][1] if own == "gpt" else f"{own}-{shape}"
            lead = gap(losses, other, gpt)
            cells += [lead, gap(losses, (other, own), (gpt, name)), str(len(losses[other])) if lead else ""]
        rows += [[f"`{name}`", own, gap(losses, name, own), *cells]] if any(cells) else []
    head = [cell for shape in shapes for cell in (SHAPES[shape][0], "change", "seeds there")]
    return markdown(["idea", "minus", "12 layers of 128", *head], rows)


def sums_table(losses):
    """The leads over gpt of each idea, of the idea with gated attention, and how far that is from the sum of both."""
    rows = []
    for name in MAIN:
        if (both := f"{name}-gated") in losses and both not in MAIN:
            pairs = (name, "gpt"), (both, "gpt"), (both, "gpt-gated"), ((both, "gpt"), (name, "gpt-gated"))
            rows.append([f"`{name}`", *(gap(losses, *pair) for pair in pairs), str(len(losses[both]))])
    head = ["idea", "alone", "with the gate", "with the gate, minus gpt-gated", "minus the sum of both", "seeds"]
    return markdown(head, rows)


def halves_table(losses):
    """What half the learning rates change at 12 x 256. The leads over gpt there, all at the better of the two, and how
    they differ from those at 12 x 128.
    """
    better, losses = {}, dict(losses)
    for run in compare.table(HERE / "rates.csv"):
        if run["system"].endswith("-12x256") and (run["scale"], run["steps"]) == (0.5, 1000):
            losses.setdefault(f"{run['system']}, half", {})[run["seed"]] = run["others"]
    for half in (name for name in losses if name.endswith(", half")):
        name = half.removesuffix(", half")
        better[name] = half if difference(losses, half, name)[0] < 0 else name
    best = better["gpt-12x256"]
    rows = [[f"`{name[:-7]}`", gap(losses, f"{name}, half", name), str(len(losses[f"{name}, half"])),
             gap(losses, better[name], best), gap(losses, (better[name], "gpt"), (best, name[:-7]))]
            for name in sorted(better, key=lambda name: difference(losses, better[name], best)[0])]
    return markdown(["system", "all rates halved, minus unchanged", "seeds at half", "minus gpt, both at better rates",
                     "that minus the lead at 12 x 128"], rows)


def leads_picture(at):
    """Leads at the ends of all lengths; in grey the narrowest 95% interval, around zero."""
    fig, ((ax,),) = pictures.figure(1, 1, (8, 5.5))
    losses, lines = {steps: final(each, "others") for steps, each in at.items()}, []
    names = [name for name in in_order(losses[USUAL]) if name not in NOT_SHOWN]
    leads = {steps: {name: difference(now, name, "gpt") for name in names if name in now}
             for steps, now in sorted(losses.items())}
    for name, (color, dash) in zip(names, pictures.styles()):
        x, y = zip(*((steps * 4096 / 1e6, now[name][0]) for steps, now in leads.items() if name in now))
        ax.plot(x, y, dash, color=color)
        lines.append((name, color, x[-1], y[-1]))
    half = np.array([min(half for _, half in now.values()) for now in leads.values()])
    ax.fill_between(np.array(list(leads)) * 4096 / 1e6, -half, half, color="black", alpha=0.1, lw=0)
    ax.axhline(0, color="black", lw=0.8)
    ax.set(xscale="log", xlabel="training tokens (millions)", ylabel="loss minus gpt's, nats, not copyable targets")
    ax.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    ax.minorticks_off()
    ax.set_xlim(0.95 * ax.dataLim.x0, 1.05 * ax.dataLim.x1)
    pictures.label_ends(ax, lines, [0.0])
    return fig


def gain_picture(at):
    """The leads of the table against the time of a step. The line is gpt trained for longer, linear in the logarithm of
    the tokens between its two last lengths; its band is the 95% interval of its slope.
    """
    fig, ((ax,),) = pictures.figure(1, 1, (5, 4.2))
    losses, longest = final(at[USUAL], "others"), max(at)
    slope, width = difference({"now": losses["gpt"], "later": final(at[longest], "others")["gpt"]}, "later", "now")
    x = np.linspace(1, 1.5)
    doublings = np.log2(x) / np.log2(longest / USUAL)
    ax.plot(x, slope * doublings, color="0.6", lw=1.2, zorder=1)
    ax.fill_between(x, (slope - width) * doublings, (slope + width) * doublings, color="0.92", zorder=0)
    ax.annotate("gpt, trained longer", (1.47, slope * doublings[-1]), ha="right", va="top", color="0.45", fontsize=8.5)
    for name in losses.keys() & SPEED.keys() - {*LEFT_OUT}:
        place = 1 / SPEED[name], difference(losses, name, "gpt")[0]
        look = dict(mfc="white", mec="0.3") if name in BASELINES else dict(color="#0072B2")
        ax.plot(*place, "o", ms=5, zorder=3, **look)
        right, up, side = PLACES.get(name, (6, -1, "left"))
        ax.annotate(NAMES.get(name, name), place, (right, up), textcoords="offset points", fontsize=8.5, ha=side,
                    va="center", zorder=2, bbox=dict(fc="white", ec="none", alpha=0.7, pad=0))
    ax.errorbar([0.84], [-0.1], difference(losses, "muddformer", "gpt")[1], color="0.3", capsize=3, lw=1)
    ax.annotate("95%", (0.84, -0.1), (6, 0), textcoords="offset points", fontsize=8.5, va="center", color="0.3")
    ax.set(xlabel="time of a training step, relative to gpt's", ylabel="loss minus gpt's, nats", xlim=(0.79, 1.53))
    ax.set_title("What an idea gains, and what it costs", loc="left", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    return fig


def front(text, at):
    """The repository's README with these numbers in its table: the leads, the time of a step and the parameters."""
    losses, base = final(at[USUAL], "others"), parameters("gpt")
    for system in losses.keys() & SPEED.keys() - {"gpt", "resformer"}:
        cells = (f"| {difference(losses, system, 'gpt')[0]:.2f} | {1 / SPEED[system]:.2f} "
                 f"| {parameters(system) / base - 1:+.1%} |")
        row = rf"^(\| \[?`{FRONT.get(system, system)}`.*\(http.*?)(?:\|[^|\n]*){{3}}\|$"
        text = re.sub(row, lambda m: m[1] + cells, text, flags=re.M)
    return text


def pages(runs):
    """{page: its text with the tables as the runs have them}."""
    at, short = ends(runs), final(compare.ends(runs)[1000], "others")
    usual = {f"{place(steps)}, not copyable": (final(at[steps], "others"), "", "gpt") for steps in list(at)[-2:]}
    usual[f"{place(USUAL)}, all"] = final(at[USUAL], "loss"), "", "gpt"
    elsewhere = {there: (short, f"-{shape}", gpt) for shape, (there, gpt) in SHAPES.items()}
    tables = {"leads": leads_table(at, SPEED), "sums": sums_table(short), "halves": halves_table(short),
              "shape": shapes_table(short, "8x160"), "sizes": shapes_table(short, "12x256", "12x448"),
              "claims": claims_table(usual), "elsewhere": claims_table(elsewhere)}
    texts = {README: front(README.read_text(), at)}
    for page in (HERE / "README.md", HERE / "claims.md"):
        texts[page] = re.sub(r"(<!-- (\w+) -->\n).*?(\n<!-- end -->)", lambda m: m[1] + tables[m[2]] + m[3],
                             page.read_text(), flags=re.S)
    return texts


def main():
    runs = apart(read(HERE), IGNORED)
    for page, text in pages(runs).items():
        page.write_text(text)
    leads_picture(ends(runs)).savefig(HERE / "leads.png", dpi=130)
    gain_picture(ends(runs)).savefig(HERE / "gain.png", dpi=200)


if __name__ == "__main__":
    main()
