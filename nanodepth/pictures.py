"""Pictures of the numbers from curves.py and inside.py. They need matplotlib, which is imported when one is drawn."""
import io
import math
import textwrap
from itertools import cycle
from statistics import mean, median

from nanodepth.curves import deviation, gaps

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
STREAMS = {"q": "queries", "k": "keys", "v": "values", "g": "gates"}


# -------------------------------------------------------------------------------------------------------- parts of them


def canvas(size):
    """An empty figure of size (width, height) inches, which a notebook displays."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=size, layout="constrained")

    def png():
        file = io.BytesIO()
        fig.savefig(file, dpi=80)
        return file.getvalue()
    fig._repr_png_ = png                                                    # IPython calls it
    return fig


def figure(rows, columns, size, **options):
    """A figure of size (width, height) inches, and its axes as a list of rows."""
    fig = canvas(size)
    return fig, fig.subplots(rows, columns, squeeze=False, **options)


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
    """Losses against tokens and against time; below, the difference to the baseline at equal tokens, paired by seed.

    Shows the baseline and the MOST systems with the lowest final losses. Time is tokens over the median speed, so it
    leaves out compiling, validations and pauses. rows: from curves.summarise(groups, baseline).
    """
    best = sorted((r["loss"] if math.isfinite(r["loss"]) else math.inf, name) for name, r in rows.items())
    shown = [baseline, *[name for _, name in best if name != baseline][:MOST]]
    alone = len(shown) == 1                                                 # then there are no differences
    fig = canvas((12, 4.5 if alone else 9.5))
    axes = fig.subplot_mosaic([["tokens", "time"]] if alone else [["tokens", "time"], ["gap", "gap"]],
                              height_ratios=(1,) if alone else (1, 1.7))
    for name, (color, dash) in zip(shown, styles()):
        points, minute = rows[name]["curve"], 60 * rows[name]["tok_s"]
        look = dict(color=color, ls=dash, lw=2 if name == baseline else 1.4, label=name)
        for key, unit in (("tokens", 1e6), ("time", minute)):
            axes[key].plot(*zip(*((x / unit, y) for x, y in points)), **look)
        paired = {x / 1e6: gaps(groups[name], groups[baseline], x) for x, _ in points[1:]}
        paired = {x: g for x, g in paired.items() if g}
        if paired and not alone:
            spread = [deviation(g) if len(g) > 1 else 0.0 for g in paired.values()]
            axes["gap"].errorbar(list(paired), list(map(mean, paired.values())), spread, marker=".", elinewidth=0.8,
                                 errorevery=1 + len(paired) // 12, **look)
    axes["tokens"].set(xlabel="training tokens (millions)", ylabel="validation loss (nats per token)")
    axes["time"].set(xlabel="minutes of training, at the system's median speed")
    if not alone:
        other = baseline if len(baseline) < 25 else "the baseline"
        axes["gap"].set(xlabel="training tokens (millions)",
                        ylabel=f"difference to {other} at equal tokens (nats per token)")
    for ax in axes.values():
        frame(ax)
        ax.grid(alpha=0.3, lw=0.6)
    draw_legend(fig, axes["tokens"].get_lines(), {name: rows[name] for name in shown}, len(rows))
    return fig


def frame(ax):
    """Fits the y-axis to the last three quarters of the curves, except those of systems far from the others."""
    points = [[(x, y) for x, y in line.get_xydata().tolist() if math.isfinite(y)] for line in ax.get_lines()]
    late = [[y for x, y in some if x >= some[-1][0] / 4 or len(some) < 4] for some in points if some]
    if not late:
        return
    centre = median(ys[-1] for ys in late)
    far = [max(abs(y - centre) for y in ys) for ys in late]
    kept = [y for ys, d in zip(late, far) if d <= 4 * median(far) for y in ys]
    margin = 0.08 * (max(kept) - min(kept)) + 1e-3
    ax.set_ylim(min(kept) - margin, max(kept) + margin)


def draw_legend(fig, lines, rows, n):
    """A legend: the names of the lines with the final differences of `rows`. n: number of all systems."""
    seeds = sorted({len(r["seeds"]) for r in rows.values()})
    title = f"mean of {'-'.join(map(str, seeds))} {'seed' if seeds == [1] else 'seeds'}"
    if n > 1:
        title += "\nfinal differences"
    if n > 1 and seeds[-1] > 1:
        title += "\nbars: standard deviation\nover seeds"
    if n > len(rows):
        title += f"\nthe {len(rows) - 1} lowest of {n - 1} losses"
    texts = []
    for name, r in rows.items():
        gap = f" {r['difference']:+.4f}" if texts and r["difference"] is not None else ""
        texts.append(textwrap.fill(name + gap, 30, break_on_hyphens=False))
    fig.legend(lines, texts, title=title, loc="outside right lower", fontsize=9, frameon=False, alignment="left")


# ------------------------------------------------------------------------------------------------ what models do inside


def draw_layers(found):
    """One panel per quantity, one line per run. Blocks are at x = 1 .. L, states of the residual stream at 0 .. L."""
    from matplotlib.lines import Line2D
    fig, axes = figure(2, 4, (17, 7))
    for ax, (key, (title, unit)) in zip(axes.flat, LAYERS.items()):
        for numbers, (color, dash) in zip(found.values(), styles()):
            if key == "adjacent":
                draw_streams(ax, numbers[key], color)
            elif numbers[key]:
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


def draw_streams(ax, adjacent, color):
    """One line per stream of a model, all in the model's colour."""
    for name, y in adjacent.items():
        dash = {"q": ":", "k": "-.", "v": "--"}.get(name, "-")
        ax.plot(range(2, len(y) + 2), y, dash, color=color, lw=1.3, marker=".", ms=4)
        if name != "x":
            ax.annotate(name, (len(y) + 1, y[-1]), xytext=(3, 0), textcoords="offset points", fontsize=8, va="center")


def lower(matrix):
    """The matrix with nan right of the diagonal. In an (L, L + 1) matrix the diagonal begins at column 1."""
    extra = len(matrix[0]) - len(matrix)
    return [[x if j <= i + extra else math.nan for j, x in enumerate(row)] for i, row in enumerate(matrix)]


def draw_depth(found):
    """Depth and value matrices: who reads what with which weight. Grey comes later and cannot be read.

    All pictures share one scale: linear up to 0.1, logarithmic up to 10; larger weights have the last colour.
    """
    from matplotlib.colors import SymLogNorm
    panels = []                                         # (title, matrix, what is read, by whom, first row and column)
    for run, numbers in found.items():
        for name, A in numbers["depth"].items():
            rows, reader = lower(A), "read by sublayer (last: head)"
            if name != "r":                             # the MLPs and the head read r
                rows, reader = rows[:-1:2], "read by attention of layer"
            title = f"{run}, {name} input" if len(numbers["depth"]) > 1 else run
            panels.append((title, rows, "output of sublayer (0: embedding)", reader, (1, 0)))
        for name, A in numbers["values"].items():
            outside = len(A[0]) > len(A)
            panels.append((f"{run}, {STREAMS[name]}", lower(A), "from layer (0: anchor)" if outside else "from layer",
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
    bar = fig.colorbar(image, ax=axes, extend="both", aspect=40, pad=0.01,
                       label="weight, mean over tokens\n(white: 0; grey: cannot be read)")
    bar.set_ticks([-10, -3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10], minor=False)
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.minorticks_off()
    return fig
