"""Draws what each idea gains and what it costs, gain.png: python results/study/gain.py

Across: the time of a training step relative to gpt's (speed.csv). Upwards: the loss minus gpt's at 8.2M tokens, on
targets that are not copyable, as in the table of README.md. The line is gpt trained for longer, up to twice the tokens,
linear in the logarithm of the tokens between its two last lengths; its band is the 95% interval of its slope.
"""
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
from compare import apart, others, read, speeds  # noqa: E402
from report import IGNORED, ends, usual  # noqa: E402

from nanodepth import pictures  # noqa: E402
from nanodepth.curves import difference  # noqa: E402

BASELINES = {"gpt": "gpt", "gpt-gated": "gpt + gate", "gpt-wide": "gpt, wider MLP", "gpt-wide-stream": "gpt, 8 x 160"}
NAMES = {**BASELINES, "resformer-half": "resformer (half lr)"}
LEFT_OUT = "resformer", "depth_attention"               # at rates too high for it; no gain
PLACES = {  # of a name: right of its point, unless it would lie on another
    "gpt-wide": (6, 3, "left"), "gpt-wide-stream": (-6, 0, "right"), "gpt-gated": (-6, 0, "right"),
    "nuresformer": (-6, -1, "right"), "exoformer": (-6, -3, "right"), "exoformer_dynamic": (-12, -10, "left"),
    "satformer": (-6, 4, "right"), "denseformer": (-6, -1, "right"), "resformer-half": (10, -10, "center"),
    "attnres": (6, 4, "left"), "mhc": (6, 2, "left"), "mhc_lite": (-6, -3, "right")}


def picture(at, speed):
    """The picture of report.ends() and the speeds over gpt's."""
    fig, ((ax,),) = pictures.figure(1, 1, (5, 4.2))
    losses, both = others(at[usual(at)]), [others(at[steps])["gpt"] for steps in (usual(at), max(at))]
    slope, width = difference(dict(zip(("now", "later"), both)), "later", "now")
    x = np.linspace(1, 1.5)
    doublings = np.log2(x) / np.log2(max(at) / usual(at))
    ax.plot(x, slope * doublings, color="0.6", lw=1.2, zorder=1)
    ax.fill_between(x, (slope - width) * doublings, (slope + width) * doublings, color="0.92", zorder=0)
    ax.annotate("gpt, trained longer", (1.47, slope * doublings[-1]), ha="right", va="top", color="0.45", fontsize=8.5)
    for name in losses.keys() & speed.keys() - {*LEFT_OUT}:
        gain, half = difference(losses, name, "gpt")
        look = dict(mfc="white", mec="0.3") if name in BASELINES else dict(color="#0072B2")
        ax.plot(1 / speed[name], gain, "o", ms=5, zorder=3, **look)
        right, up, side = PLACES.get(name, (6, -1, "left"))
        ax.annotate(NAMES.get(name, name), (1 / speed[name], gain), (right, up), textcoords="offset points",
                    fontsize=8.5, ha=side, va="center", zorder=2,
                    bbox=dict(fc="white", ec="none", alpha=0.7, pad=0))
    half = difference(losses, "muddformer", "gpt")[1]
    ax.errorbar([0.84], [-0.1], half, color="0.3", capsize=3, lw=1)
    ax.annotate("95%", (0.84, -0.1), (6, 0), textcoords="offset points", fontsize=8.5, va="center", color="0.3")
    ax.set(xlabel="time of a training step, relative to gpt's", ylabel="loss minus gpt's, nats", xlim=(0.79, 1.53))
    ax.set_title("What an idea gains, and what it costs", loc="left", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    return fig


if __name__ == "__main__":
    picture(ends(apart(read(HERE), IGNORED)), speeds(HERE)).savefig(HERE / "gain.png", dpi=200)
