"""Pictures of the numbers from curves.py and inside.py. They need matplotlib, which is imported when one is drawn."""
import io
import math
import textwrap
from itertools import accumulate, cycle
from statistics import mean, median

import numpy as np

from nanodepth.curves import along, beside, difference

MOST = 8                                # systems besides the baseline in a picture of curves
COLORS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9",          # Okabe and Ito's
          "#8C564B", "#8A8A8A")                                                                 # brown and grey
LAYERS = {                                                                          # panel: (title, unit)
    "entropy": ("attention entropy", "nats"), "sink": ("attention on the first token", "share of attention"),
    "induction": ("best copying head of each layer", "attention on tokens after earlier copies"),
    "core_features": ("core features", "components for 99% of the variance"),
    "token_similarity": ("similarity of tokens", "mean cosine"),
    "adjacent": ("similarity to the previous layer's input", "mean cosine"),
    "lens": ("logit lens", "loss, nats per token")}
NAMES = {"q": "queries", "k": "keys", "v": "values", "g": "gates"}
STREAMS = {"q": ":", "k": "-.", "v": "--"}                                          # their lines; all others are solid


def figure(rows, columns, size):
    """A figure of size (width, height) inches, which a notebook displays, and its axes as a list of rows."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=size, layout="constrained")

    def png():
        file = io.BytesIO()
        fig.savefig(file, dpi=80)
        return file.getvalue()
    fig._repr_png_ = png                                                    # IPython calls it
    return fig, fig.subplots(rows, columns, squeeze=False)


def styles():
    """Endless (colour, dash): all colours with one dash, then all with the next."""
    return cycle([(color, dash) for dash in ("-", "--", ":", "-.") for color in COLORS])


def heat(ax, matrix, title, xlabel, ylabel, first=(0, 0), **options):
    """A matrix (list of rows) as a heat map; first: the numbers of its first row and column."""
    n, m = len(matrix), len(matrix[0])
    extent = (first[1] - 0.5, first[1] + m - 0.5, first[0] + n - 0.5, first[0] - 0.5)
    image = ax.imshow(matrix, aspect="auto", interpolation="nearest", extent=extent, **options)
    over_layers(ax, title, xlabel, ylabel)
    ax.yaxis.get_major_locator().set_params(integer=True)
    return image


def over_layers(ax, title, xlabel, ylabel):
    """Sets title and labels of a panel whose x-axis has whole numbers."""
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.xaxis.get_major_locator().set_params(integer=True)


# --------------------------------------------------------------------------------------------------------------- curves


def draw_curves(rows, groups, baseline):
    """Left the losses, right the differences to the baseline at equal tokens. rows: from curves.summarise()."""
    best = sorted((r["loss"] if math.isfinite(r["loss"]) else math.inf, name) for name, r in rows.items())
    shown = [baseline, *[name for _, name in best if name != baseline][:MOST]]
    fig, (axes,) = figure(1, min(2, len(shown)), (5.5 * min(2, len(shown)), 4.4))
    window = max(2, min(len(run["train"]) for name in shown for run in groups[name]) // 16)
    ends, halves, lines = ([], []), [], []                      # ends: of lines, for label_ends()
    for name, (color, dash) in zip(shown, styles()):
        points = np.array([(x / 1e6, y, scored) for x, y, scored in rows[name]["curve"]])
        for scored in dict.fromkeys(points[:, 2]):                          # the last may have more validation tokens
            x, y, _ = points[points[:, 2] == scored].T
            axes[0].plot(x, y, dash, color=color, label=name, marker="o" if len(x) == 1 else "", ms=4)
        ends[0].append((name, color, *points[-1, :2]))
        if name == baseline:
            continue
        if line := along(groups[name], groups[baseline], window):
            x, y, error = np.array(line).T
            axes[1].plot(x / 1e6, y, dash, lw=1, color=color)
            axes[1].fill_between(x / 1e6, y - error, y + error, color=color, alpha=0.25, lw=0)
        gaps = [(x / 1e6, *difference(beside(groups, x, scored, baseline, name), name, baseline))
                for x, _, scored in rows[name]["curve"] if x]
        if gaps := [(x, y, half or 0) for x, y, half in gaps if y is not None]:
            x, y, half = zip(*gaps)
            axes[1].errorbar(x, y, half, fmt="o" if line else f"o{dash}", ms=4, color=color, elinewidth=0.8, label=name)
            ends[1].append((f"{name} {y[-1]:+.3f}", color, x[-1], y[-1]))
            halves, lines = halves + [*half], lines + line
    for ax, some, title in zip(axes, ends, ("validation loss, nats per token", f"loss minus {baseline}'s, nats")):
        ax.set(xlabel="training tokens (millions)")
        ax.set_title(title, fontsize=10, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
        label_ends(ax, some, [0.0] if ax is not axes[0] else [])
        ax.axhline(0, color="black", lw=0.8)
    text = f"The {len(shown) - 1} lowest of {len(rows) - 1} losses. " if len(rows) > len(shown) else ""
    text += "Points on the right: validations. " if len(shown) > 1 else ""
    text += f"Lines, bands: training losses on the same batches, mean of {window} steps ± its error." if lines else ""
    text += "\nBars: 95% intervals." if any(halves) else (
        "\nOne common seed, so no intervals. The bands do not show the noise between seeds.") if len(shown) > 1 else ""
    fig.supxlabel(text, x=0.01, ha="left", fontsize=8.5)
    return fig


def label_ends(ax, ends, also):
    """Fits the y-axis to the last three quarters of the curves, except those far from the others, and to `also`; then
    writes the names beside the ends of the lines.
    """
    lines = [xy[np.isfinite(xy).all(1)] for xy in (np.array(line.get_xydata()) for line in ax.get_lines())]
    late = [xy[(xy[:, 0] >= xy[-1, 0] / 4) | (len(xy) < 4), 1] for xy in lines if len(xy)]
    if late:
        centre = median(ys[-1] for ys in late)
        far = [abs(ys - centre).max() for ys in late]
        kept = np.concatenate([also, *(ys for ys, d in zip(late, far) if d <= 4 * median(far))])
        margin = 0.08 * np.ptp(kept) + 1e-3
        ax.set_ylim(kept.min() - margin, kept.max() + margin)
    low, high = ax.get_ylim()
    ends = [(name, color, x, min(max(y, low), high)) for name, color, x, y in ends if math.isfinite(y)]
    for (name, color, x, y), at in zip(ends, spread([y for *_, y in ends], (high - low) / 20)):
        ax.annotate(name, (x, y), (1.03, at), textcoords=("axes fraction", "data"), color=color, va="center",
                    fontsize=9, arrowprops=dict(arrowstyle="-", color=color, lw=0.5), annotation_clip=False)


def spread(values, gap):
    """The values moved apart to at least `gap`, each in its place."""
    order = sorted(range(len(values)), key=values.__getitem__)
    moved = dict(zip(order, accumulate((values[i] for i in order), lambda last, x: max(x, last + gap))))
    return [moved[i] - mean(moved.values()) + mean(values) for i in range(len(values))]


# ------------------------------------------------------------------------------------------------ what models do inside


def draw_layers(found):
    """One panel per quantity, one line per run. Blocks are at x = 1 .. L, states of the residual stream at 0 .. L."""
    from matplotlib.lines import Line2D
    fig, axes = figure(2, 4, (17, 7))
    for ax, (key, (title, unit)) in zip(axes.flat, LAYERS.items()):
        for numbers, (color, dash) in zip(found.values(), styles()):
            for stream, y in numbers[key].items() if key == "adjacent" else ():
                ax.plot(range(2, len(y) + 2), y, STREAMS.get(stream, "-"), color=color, lw=1.3, marker=".", ms=4)
                ax.annotate(stream.strip("x"), (len(y) + 1, y[-1]), (3, -3), textcoords="offset points", fontsize=8)
            if key != "adjacent" and numbers[key]:
                y = numbers[key]
                if isinstance(y[0], list):                                          # one per head
                    y = list(map(max if key == "induction" else mean, y))
                first = len(numbers["lens"]) - len(y)                               # 0 for states, 1 for blocks
                ax.plot(range(first, first + len(y)), y, dash, color=color, lw=1.3, marker=".", ms=4)
        over_layers(ax, title, "layer", unit)
        ax.grid(alpha=0.3, lw=0.6)
    handles = [Line2D([], [], color=color, ls=dash, label=run) for run, (color, dash) in zip(found, styles())]
    axes.flat[-1].legend(handles=handles, loc="center", ncols=1 + len(found) // 20, fontsize=8, frameon=False)
    axes.flat[-1].axis("off")
    return fig


def lower(matrix):
    """The matrix with nan right of the diagonal, which in an (L, L + 1) matrix begins at column 1."""
    n, m = np.shape(matrix)
    return np.where(np.tri(n, m, m - n), matrix, math.nan)


def draw_depth(found):
    """Depth and value matrices: who reads what with which weight. Grey comes later and cannot be read.

    All pictures share one scale: linear up to 0.1, logarithmic up to 10; larger weights have the last colour.
    """
    from matplotlib.colors import SymLogNorm
    panels = []                                         # (title, matrix, what is read, by whom, first row and column)
    for run, numbers in found.items():
        for name, A in numbers["depth"].items():
            rows, reader = lower(A), "read by sublayer (last: head)"
            if name != "r":
                rows, reader = rows[:-1:2], "read by attention of layer"
            elif len(numbers["depth"]) > 1:             # attention reads the other streams
                reader = "residual before sublayer (last: head)"
            title = f"{run}, {name} input" if len(numbers["depth"]) > 1 else run
            panels.append((title, rows, "output of sublayer (0: embedding)", reader, (1, 0)))
        for name, A in numbers["values"].items():
            outside = len(A[0]) > len(A)
            panels.append((f"{run}, {NAMES[name]}", lower(A), "from layer (0: anchor)" if outside else "from layer",
                           "used in layer", (1, 0 if outside else 1)))
    if not panels:
        return None
    columns = min(len(panels), 4)
    height = math.ceil(len(panels) / columns)
    fig, axes = figure(height, columns, (3.4 * columns, 3.3 * height))
    for ax in axes.flat[len(panels):]:
        ax.axis("off")
    for ax, (title, rows, source, reader, first) in zip(axes.flat, panels):
        image = heat(ax, rows, textwrap.fill(title, 36), source, reader, first, cmap="RdBu_r",
                     norm=SymLogNorm(0.1, linscale=0.5, vmin=-10, vmax=10))
        ax.set_facecolor("#B8B8B8")
    bar = fig.colorbar(image, ax=axes, extend="both", aspect=40, pad=0.02,
                       label="weight, mean over tokens\n(white: 0; grey: cannot be read)")
    bar.set_ticks([-10, -3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10], minor=False)
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.minorticks_off()
    return fig
