"""Makes the tables and the picture of this folder's page: python results/study/report.py

Reads runs.csv and logs.jsonl.xz. Rewrites the text between <!-- NAME --> and <!-- end --> in README.md and claims.md,
and two columns in the repository's README. Draws leads.png. --results names another folder with runs, and pages if any.
The time of a step comes from speed.csv, if it exists, measured on an idle machine: the runs shared theirs.
"""
import argparse
import math
import re
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch

HERE = Path(__file__).resolve().parent
README = HERE.parents[1] / "README.md"
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
import compare  # noqa: E402
from compare import apart, claims, difference, final, gap, others, read, speeds  # noqa: E402
from publish import fill, markdown  # noqa: E402
from study import GATED, SYSTEMS, WIDE  # noqa: E402

import models  # noqa: E402
import train  # noqa: E402
from nanodepth import pictures  # noqa: E402

FRONT = {"gpt --gate elementwise": "gpt-gated", "resformer": "resformer-half"} | {name: name for name in (  # README
    "satformer exoformer nuresformer exoformer_dynamic denseformer muddformer attnres attnres_block "
    "hyperconnections mhc").split()}
IGNORED = ("code", "torch")                     # the runs were made over many days, at many commits
NOT_SHOWN = "attnres_block", "mhar", "depth_attention", "mhc_lite", "nuresformer"        # in the picture, nor
SHOWN = 13                                                              # those behind the first 13


def parameters(system):
    """Number of parameters of a system at the study's shape, with 4,096 token ids."""
    words = SYSTEMS.get(system, (system,))[0].split()
    _, config, _ = train.parse(["--model", *words, "--preset", "study"])
    with torch.device("meta"):
        return sum(p.numel() for p in models.build(words[0], **{**config, "vocab_size": 4096}).parameters())


def ends(runs):
    """compare.ends() of the systems in the leads' table: not those of shapes_table() and sums_table()."""
    extra = {*(f"{name}-8x160" for name in WIDE), *(f"{name}-gated" for name in GATED)}
    return compare.ends([run for run in runs if run["system"] not in extra])


def usual(at):
    """The longest length at which two thirds of the systems end."""
    return max(steps for steps, each in at.items() if len(each) >= 2 / 3 * max(map(len, at.values())))


def leads_table(at, speed):
    """Loss minus gpt's at the end of the last three lengths, in nats: below zero the system is ahead. On targets that
    are not copyable, at the usual() length also on all. The furthest ahead there comes first.

    Then the time of a step over gpt's; and, for the length before gpt's longest, in how many times the system's time
    gpt reaches the same loss, from gpt's own lengths: above 1 if the idea pays for its slower steps.
    """
    each, rows, base, most = at_ends(at), [], parameters("gpt"), usual(at)
    ends = [(tokens, mean(some["gpt"].values())) for tokens, some in each.items() if "gpt" in some]
    (known, loss), shown = ends[-2:][0], list(each)[-3:]
    for name in in_order(at):
        lead, time = difference(each[known], name, "gpt")[0], 1 / speed[name] if name in speed else None
        needed = None if lead is None else tokens_needed(ends, loss + lead)
        rows.append([f"`{name}`", f"{parameters(name) / base - 1:+.1%}", *(gap(each[n], name)[0] for n in shown),
                     gap(final(at[most]), name)[0],
                     *(f"{x:.2f}" if x else "" for x in (time, needed and time and needed / known / time))])
    sizes = {tokens: f"{tokens / 1e6:.1f}M" for tokens in each}
    return markdown(["system", "parameters", *(f"at {sizes[n]}" for n in shown),
                     f"all targets, at {list(sizes.values())[list(at).index(most)]}", "time of a step (CPU)",
                     f"gpt's time for the loss at {sizes[known]}"], rows)


def shapes_table(losses):
    """Each idea's lead in gpt's shape, over gpt; in gpt-wide-stream's, over that; and the second minus the first."""
    rows = []
    for name in WIDE:
        own = "gpt-gated" if name == "exoformer" else "gpt"
        wide = "gpt-gated-8x160" if name == "exoformer" else "gpt-wide-stream"
        cells = [gap(losses, *pair)[0] for pair in ((name, own), (f"{name}-8x160", wide), (
            (f"{name}-8x160", own), (wide, name)))]
        if cells[1]:
            rows.append([f"`{name}`", own, *cells, str(len(losses[f"{name}-8x160"]))])
    return markdown(["idea", "minus", "12 layers of 128", "8 layers of 160", "change", "seeds at 8 x 160"], rows)


def sums_table(losses):
    """The leads over gpt of each idea, of the idea with gated attention, and how far that is from the sum of both."""
    rows = []
    for name in GATED:
        both = f"{name}-gated"
        if both in losses:
            rows.append([f"`{name}`", gap(losses, name)[0], gap(losses, both)[0], gap(losses, both, "gpt-gated")[0],
                         gap(losses, (both, "gpt"), (name, "gpt-gated"))[0], str(len(losses[both]))])
    head = ["idea", "alone", "with the gate", "with the gate, minus gpt-gated", "minus the sum of both", "seeds"]
    return markdown(head, rows)


def tokens_needed(ends, loss):
    """How many tokens gpt needs to end with this loss; None outside of its lengths. ends: [(tokens, final loss)].

    Between two lengths the loss is linear in log(tokens). If it crosses several times, the first counts.
    """
    points = [(math.log(tokens), y) for tokens, y in sorted(ends) if math.isfinite(y)]
    if points and points[0][1] == loss:
        return math.exp(points[0][0])
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= loss < y0:
            return math.exp(x0 + (x1 - x0) * (y0 - loss) / (y0 - y1))


def along(each):
    """{tokens: {system: {seed: loss}}} of all validations but the first."""
    losses = defaultdict(lambda: defaultdict(dict))
    for name, runs in each.items():
        for run in runs:
            for row in run["val"]:
                if row["tokens"] and row["loss"]:
                    losses[row["tokens"]][name][run["seed"]] = row["loss"]
    return losses


def at_ends(at):
    """{tokens: {system: {seed: loss}}} of the targets that are not copyable, at each end of the runs."""
    return {mean(run["tokens"] for runs in each.values() for run in runs): others(each) for each in at.values()}


def leads(losses):
    """{system: [(tokens, lead, half-width of its 95% interval or None)]} of along() or at_ends()."""
    points = defaultdict(list)
    for tokens, now in sorted(losses.items()):
        for name in now:
            lead, half = difference(now, name, "gpt")
            if name != "gpt" and lead is not None:
                points[name].append((tokens, lead, half))
    return points


def in_order(at):
    """The systems but gpt; first those that reach the usual() length, by their lead there."""
    points = leads({steps: others(each) for steps, each in at.items() if steps <= usual(at)})
    return sorted(points, key=lambda name: (-points[name][-1][0], points[name][-1][1]))


def draw(ax, points, names):
    """The lead of each system against tokens; in grey the narrowest 95% interval, around zero."""
    low = min(lead for name in names for _, lead, _ in points[name])
    heights = pictures.spread([points[name][-1][1] for name in names], -low / 22)
    half, last = defaultdict(list), max(points[name][-1][0] for name in names) / 1e6
    for name, y, (color, dash) in zip(names, heights, pictures.styles()):
        tokens, lead, _ = zip(*((tokens / 1e6, *rest) for tokens, *rest in points[name]))
        ax.plot(tokens, lead, dash, color=color)
        ax.annotate(name, (tokens[-1], lead[-1]), (last * 1.2, y), color=color, va="center",
                    arrowprops=dict(arrowstyle="-", color=color, lw=0.5))
        for tokens, _, width in points[name]:
            half[tokens / 1e6].append(width or 0)
    x, width = zip(*sorted((tokens, min(widths)) for tokens, widths in half.items()))
    ax.fill_between(x, [-y for y in width], width, color="black", alpha=0.1, lw=0)
    ax.axhline(0, color="black", lw=0.8)


def leads_picture(at):
    """Leads at the ends of all lengths; those along runs of the usual() length; gpt's losses in its longest runs. None
    without gpt and another system at that length.
    """
    each = at[usual(at)]
    if len(each) < 2 or "gpt" not in each:
        return None
    fig, (axes,) = pictures.figure(1, 3, (15, 5.5), width_ratios=(3, 3, 1.5))
    names = [name for name in in_order(at) if name in each and name not in NOT_SHOWN][:SHOWN]
    draw(axes[0], leads(at_ends(at)), names)
    draw(axes[1], leads(along(each)), names)
    longest = max(steps for steps in at if "gpt" in at[steps])
    for run in at[longest]["gpt"]:
        tokens, losses = zip(*((row["tokens"] / 1e6, row["loss"]) for row in run["val"] if row["tokens"]))
        axes[2].plot(tokens, losses, color="black", lw=0.8)
    axes[0].set(title="final losses, targets that are not copyable", ylabel="loss minus gpt's, nats")
    axes[1].set(title=f"along runs of {usual(at):,} steps, all targets")
    axes[2].set(title="gpt's seeds, all targets", ylabel="loss, nats")
    for ax, room in zip(axes, (3.2, 4.4, 1.1)):                         # room for the names
        first, last = ax.dataLim.intervalx
        ax.set(xscale="log", xlabel="training tokens (millions)")
        ax.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
        ax.minorticks_off()
        ax.set_xlim(first / 1.1, room * last)
    return fig


def front(text, at, speed):
    """The repository's README with these numbers in its table: the lead at the end of the usual() length, on targets
    that are not copyable, the time of a step and the parameters.
    """
    losses, base = others(at[usual(at)]), parameters("gpt")
    for row, system in FRONT.items():
        time = f"{1 / speed[system]:.2f}" if system in speed else ""
        cells = f"| {difference(losses, system, 'gpt')[0]:.2f} | {time} | {parameters(system) / base - 1:+.1%} |"
        text = re.sub(rf"^(\| \[?`{row}`.*\(http.*?)(?:\|[^|\n]*){{3}}\|$", lambda m: m[1] + cells, text, flags=re.M)
    return text


def tables(runs, speed):
    """{name of a page: {NAME: table}}"""
    at = ends(runs)
    size, each = {steps: f"at {tokens / 1e6:.1f}M" for steps, tokens in zip(at, at_ends(at))}, at[usual(at)]
    columns = {f"{size[steps]}, not copyable": others(at[steps]) for steps in list(at)[-2:]}
    columns[f"{size[usual(at)]}, all"] = final(each)
    short = others(compare.ends(runs).get(1000, each))
    more = {"shapes": shapes_table(short), "sums": sums_table(short)}
    return {"README.md": {"leads": leads_table(at, speed), **{name: x for name, x in more.items() if "`" in x}},
            "claims.md": {"claims": claims(columns, HERE / "papers.csv")}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE, help="folder with runs.csv and logs.jsonl.xz (this one)")
    folder = parser.parse_args().results
    runs = apart(read(folder), IGNORED)
    at = ends(runs)
    for page, parts in tables(runs, speeds(folder)).items():
        if (folder / page).exists():
            fill(folder / page, **parts)
    if folder == HERE:
        README.write_text(front(README.read_text(), at, speeds(folder)))
    if fig := leads_picture(at):
        fig.savefig(folder / "leads.png", dpi=130)


if __name__ == "__main__":
    main()
