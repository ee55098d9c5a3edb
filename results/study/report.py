"""Makes the tables and the picture of this folder's page: python results/study/report.py

Reads runs.csv and logs.jsonl.xz. Rewrites the text between <!-- NAME --> and <!-- end --> in README.md, and draws
leads.png: each system's lead over gpt against tokens, with 95% bands. --results names another folder with these files.
The time of a step comes from speed.csv, if it exists, measured on an idle machine: the runs shared theirs.
"""
import argparse
import runpy
import sys
from pathlib import Path
from statistics import mean

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
from compare import best_scales, difference, final, gap, others, read, speeds  # noqa: E402
from publish import fill, markdown  # noqa: E402

import models  # noqa: E402
import train  # noqa: E402
from nanodepth import curves, pictures  # noqa: E402

SYSTEMS = runpy.run_path(str(HERE / "study.py"))["SYSTEMS"]
SHOWN = 8                                                               # systems in the picture


def parameters(system):
    """Number of parameters of a system at the study's shape, with 4,096 token ids."""
    words = SYSTEMS.get(system, (system,))[0].split()
    _, config, _ = train.parse(["--model", *words, "--preset", "study"])
    with torch.device("meta"):
        return sum(p.numel() for p in models.build(words[0], **{**config, "vocab_size": 4096}).parameters())


def ends(runs):
    """{steps: best_scales() of the runs of this length}, shortest first."""
    return {steps: best_scales([run for run in runs if run["steps"] == steps])
            for steps in sorted({run["steps"] for run in runs})}


def leads_table(at, speed, losses=final):
    """Loss minus gpt's at the end of each length, in nats: below zero the system is ahead.

    Then, for a system's longest runs: how many times their tokens gpt would need for the same loss, from gpt's own
    lengths; the time of a step over gpt's; and the first over the second, above 1 if the idea pays for its time.
    """
    rows = []
    for name in dict.fromkeys(name for each in at.values() for name in each if name != "gpt"):
        steps, each = next((steps, each) for steps, each in reversed(at.items()) if name in each)
        points = [(n / steps, mean(losses(some)["gpt"].values())) for n, some in at.items() if "gpt" in some]
        needed = curves.tokens_needed(points, mean(losses(each)[name].values()))
        time = 1 / speed[name] if name in speed else None
        rows.append([f"`{name}`", f"{parameters(name):,}", *(gap(losses(some), name)[0] for some in at.values()),
                     f"{needed:.2f}" if needed else "", f"{time:.2f}" if time else "",
                     f"{needed / time:.2f}" if needed and time else ""])
    tokens = [f"{mean(run['tokens'] for runs in each.values() for run in runs) / 1e6:.1f}M" for each in at.values()]
    return markdown(["system", "parameters", *(f"at {n}" for n in tokens), "gpt's tokens", "time of a step",
                     "tokens over time"], rows)


def lead_curve(each, system):
    """[(tokens, lead, half-width of its 95% interval or None)] at the validations that a system and gpt share."""
    loss = {name: {run["seed"]: {row["tokens"]: row["loss"] for row in run["val"] if row["loss"]} for run in each[name]}
            for name in (system, "gpt")}
    shared = set.intersection(*(set(at) for runs in loss.values() for at in runs.values())) - {0}
    found = []
    for tokens in sorted(shared):
        now = {name: {seed: at[tokens] for seed, at in runs.items()} for name, runs in loss.items()}
        found.append((tokens, *difference(now, system, "gpt")))
    return [point for point in found if point[1] is not None]


def leads_picture(at):
    """At the longest length that gpt and another system have reached: each lead against tokens, and gpt's own losses.

    None if there is no such length.
    """
    each = next((each for each in reversed(at.values()) if {"gpt"} < set(each)), None)
    if each is None:
        return None
    fig, ((left, right),) = pictures.figure(1, 2, (12, 5), width_ratios=(2, 1))
    names = sorted((name for name in each if name != "gpt"), key=lambda name: difference(others(each), name, "gpt")[0])
    for name, (color, dash) in zip(names[:SHOWN], pictures.styles()):
        tokens, lead, half = zip(*((tokens / 1e6, *rest) for tokens, *rest in lead_curve(each, name)))
        left.plot(tokens, lead, dash, color=color)
        left.annotate(name, (tokens[-1], lead[-1]), (4, 0), textcoords="offset points", color=color, va="center")
        if None not in half:
            left.fill_between(tokens, [a - b for a, b in zip(lead, half)], [a + b for a, b in zip(lead, half)],
                              color=color, alpha=0.15, lw=0)
    for run in each["gpt"]:
        points = [(row["tokens"] / 1e6, row["loss"]) for row in run["val"] if row["tokens"] and row["loss"]]
        right.plot(*zip(*points), color="black", lw=0.8)
    left.axhline(0, color="black", lw=0.8)
    left.set(ylabel="loss minus gpt's, nats (95% band)")
    right.set(ylabel="gpt: validation loss of each seed, nats")
    for ax in (left, right):
        ax.set(xscale="log", xlabel="training tokens (millions)")
        ax.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
        ax.minorticks_off()
        ax.set_xlim(0.4, 1.6 * tokens[-1])                              # room for the names
    return fig


def tables(at, speed):
    """{NAME: table}"""
    return {"leads": leads_table(at, speed), "others": leads_table(at, speed, others)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE, help="folder with runs.csv and logs.jsonl.xz (this one)")
    folder = parser.parse_args().results
    at = ends(read(folder))
    fill(folder / "README.md", **tables(at, speeds(folder)))
    list(pictures.save({"leads": lambda: leads_picture(at)}, folder))


if __name__ == "__main__":
    main()
