"""Pictures of the numbers of curves.py and record.py. They need matplotlib, which is imported for the first of them."""
import io
import json
import math
import textwrap
from itertools import cycle
from statistics import mean, median

import numpy as np

from nanodepth.curves import deviation, gaps, training

PAGE = 8                                # systems besides the baseline in one picture of curves
FEW = 6                                 # validations after the first: with fewer the training loss is drawn as well
COLORS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9",          # Okabe and Ito's
          "#8C564B", "#8A8A8A")                                                                 # brown and grey
GREY = "#B8B8B8"
LAYERS = {                                                                          # panel: (title, unit)
    "entropy": ("attention entropy", "nats"), "sink": ("attention on the first token", "share of the mass"),
    "active": ("active heads", "share of heads and queries"),
    "induction": ("the layer's best copying head", "mass behind earlier copies"),
    "core_features": ("core features", "components for 99% of variance"),
    "token_similarity": ("similarity of tokens", "mean cosine"),
    "adjacent": ("input against previous layer's", "mean cosine"),
    "lens": ("logit lens", "nats per token"), "gate": ("output gate", "mean activation")}


def save(figures, out):
    """Writes {name: function that draws it, or gives None} as PNG into the folder `out`; yields the files.

    ImportError before the first if there is no matplotlib.
    """
    import matplotlib.figure  # noqa: F401
    for name, draw in figures.items():
        fig = draw()
        if fig is not None:
            fig.savefig(out / f"{name}.png", dpi=130)
            yield out / f"{name}.png"


# -------------------------------------------------------------------------------------------------------- parts of them


def canvas(size):
    """An empty figure of size (width, height) inches, which a notebook shows as the last value of a cell."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=size, layout="constrained")

    def png():
        file = io.BytesIO()
        fig.savefig(file, dpi=80)
        return file.getvalue()
    fig._repr_png_ = png                                                    # IPython's name
    return fig


def figure(rows, columns, size, **options):
    """A figure of size (width, height) inches, and its axes as a list of rows."""
    fig = canvas(size)
    return fig, fig.subplots(rows, columns, squeeze=False, **options)


def grid(n, width=4.0, height=3.4, columns=4):
    """A figure with n panels, and those."""
    columns = min(n, columns)
    rows = -(-n // columns)
    fig, axes = figure(rows, columns, (width * columns, height * rows))
    for ax in axes.flat[n:]:
        ax.axis("off")
    return fig, list(axes.flat[:n])


def styles():
    """Colours and dashes that can be told apart, also without colour."""
    return cycle([(color, dash) for dash in ("-", "--", ":", "-.") for color in COLORS])


def heat(ax, matrix, title, xlabel, ylabel, first=(0, 0), **options):
    """A matrix (list of rows) as a picture; first: numbers of its first row and column."""
    n, m = len(matrix), len(matrix[0])
    extent = (first[1] - 0.5, first[1] + m - 0.5, first[0] + n - 0.5, first[0] - 0.5)
    image = ax.imshow(matrix, aspect="auto", interpolation="nearest", extent=extent, **options)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True)
    return image


def lines(ax, x, series, title, unit="", markers="ooo"):
    """Up to three {label: numbers over the layers x} in one panel; None is a gap."""
    looks = zip((COLORS[2], COLORS[4], COLORS[3]), ("-", "--", ":"), markers)
    for (label, y), (color, dash, marker) in zip(series.items(), looks):
        y = [math.nan if value is None else value for value in y]
        ax.plot(x, y, dash, color=color, marker=marker, ms=3, label=label)
    over_layers(ax, title, unit)
    ax.legend(fontsize=8, frameon=False)


def bars(ax, x, series, title, unit):
    """Two {label: numbers over the layers x} side by side."""
    for (label, y), shift, color in zip(series.items(), (-0.2, 0.2), COLORS[1:]):
        ax.bar([layer + shift for layer in x], y, 0.4, label=label, color=color)
    over_layers(ax, title, unit)
    ax.legend(fontsize=8, frameon=False)


def over_layers(ax, title, unit):
    """Title, axes and grid of a panel over the layers."""
    ax.set_title(title, fontsize=10)
    ax.set_ylabel(unit, fontsize=9)
    ax.set_xlabel("layer", fontsize=9)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.3, lw=0.6)


def lower(matrix):
    """The rows with what lies right of the diagonal blanked; of (L, L + 1) numbers the diagonal begins at column 1."""
    extra = len(matrix[0]) - len(matrix)
    return [[x if j <= i + extra else math.nan for j, x in enumerate(row)] for i, row in enumerate(matrix)]


def per_layer(x):
    """Means over heads, where there are heads."""
    return [mean(row) if isinstance(row, list) else row for row in x]


# --------------------------------------------------------------------------------------------------------------- curves


def curve_pages(name, rows, groups, baseline):
    """{file name: function that draws it} of curves.summarise(groups, baseline): the baseline and at most PAGE systems
    in each, those with the lowest final losses in the first."""
    ends = {label: row["loss"] for label, row in rows.items() if label != baseline}
    others = sorted(ends, key=lambda label: (math.isnan(ends[label]), ends[label]))
    n_pages = max(1, -(-len(others) // PAGE))
    size = -(-len(others) // n_pages) or 1
    pages = [[baseline, *others[i * size:(i + 1) * size]] for i in range(n_pages)]
    return {name if i == 1 else f"{name}-page{i}":
            lambda page=page: draw_curves({label: rows[label] for label in page}, groups, baseline)
            for i, page in enumerate(pages, start=1)}


def draw_curves(rows, groups, baseline):
    """Losses over tokens and over time, the difference at equal times; and large, the difference at equal tokens.

    Differences at equal tokens are paired by seed, with their deviation. Time is tokens over the median speed: without
    compiling, validations and pauses of the machine. rows: of curves.summarise(groups, baseline).
    """
    alone = len(rows) == 1                                                  # then there are no differences
    fig = canvas((12, 4.5 if alone else 9.5))
    axes = fig.subplot_mosaic([["tokens", "time"]] if alone else [["tokens", "time", "lead"], ["gap"] * 3],
                              height_ratios=(1,) if alone else (1, 1.7))
    old = [(x / (60 * rows[baseline]["tok_s"]), y) for x, y in rows[baseline]["curve"]]
    drawn = {key: {} for key in ("tokens", "time", "lead", "gap")}          # {panel: {system: its points}}
    for label, r in rows.items():
        timed = [(x / (60 * r["tok_s"]), y) for x, y in r["curve"]]
        drawn["tokens"][label] = [(x / 1e6, y) for x, y in r["curve"]]
        drawn["time"][label] = timed
        drawn["lead"][label] = [(x, y - np.interp(x, *zip(*old))) for x, y in timed[1:] if x <= old[-1][0]]
        paired = [(x / 1e6, gaps(groups[label], groups[baseline], x)) for x, _ in r["curve"][1:]]
        drawn["gap"][label] = [(x, mean(g)) for x, g in paired if g]
    for key, ax in axes.items():
        for (label, points), (color, dash) in zip(drawn[key].items(), styles()):
            ax.plot([x for x, _ in points], [y for _, y in points], dash, color=color, label=label,
                    marker="." if key == "gap" else "", lw=2 if label == baseline else 1.4)
        ax.grid(alpha=0.3, lw=0.6)
    draw_training(axes, rows, groups, baseline)
    bars = not alone and draw_spread(axes["gap"], rows, groups, baseline)
    ends = {label: r["curve"][-1][1] for label, r in rows.items() if math.isfinite(r["curve"][-1][1])}
    for key, ax in axes.items():
        frame(ax, drawn[key], median(ends.values() or [0.0]) if key == "tokens" else 0.0)
    axes["time"].set_ylim(axes["tokens"].get_ylim())
    other = f"difference to {baseline if len(baseline) < 25 else 'the baseline'}"
    words = {"tokens": ("training tokens (millions)", "validation loss (nats per token)"),
             "time": ("minutes of training, at one speed per system", ""),
             "lead": ("minutes of training", f"{other} at equal times"),
             "gap": ("training tokens (millions)", f"{other} at equal tokens (nats per token)")}
    for key, ax in axes.items():
        ax.set_xlabel(words[key][0], fontsize=9)
        ax.set_ylabel(words[key][1], fontsize=9)
    if not alone:
        note_outside(axes["gap"], rows)
    title_curves(fig, axes["tokens"], rows, baseline, bars)
    return fig


def draw_training(axes, rows, groups, baseline):
    """The training losses of systems with FEW validations, and their differences to the baseline's: thin lines."""
    for (label, r), (color, dash) in zip(rows.items(), styles()):
        if len(r["curve"]) - 1 < FEW:
            lines = {"tokens": training(groups[label])}
            if label != baseline:
                lines["gap"] = training(groups[label], groups[baseline])
            for key, points in lines.items():
                xy = [x / 1e6 for x, _ in points], [y for _, y in points]
                axes[key].plot(*xy, dash, color=color, lw=0.7, alpha=0.5)


def draw_spread(ax, rows, groups, baseline):
    """Deviations of the paired differences over the seeds, as thin bars side by side, about a dozen for a system;
    whether there are any."""
    found = False
    width = 0.004 * max(r["tokens"] for r in rows.values()) / 1e6
    for i, ((label, r), (color, _)) in enumerate(zip(rows.items(), styles())):
        points = r["curve"][1:][::-1][::1 + len(r["curve"]) // 16] if label != baseline else []
        paired = [(x / 1e6 + (i - len(rows) / 2) * width, gaps(groups[label], groups[baseline], x)) for x, _ in points]
        bars = [(x, mean(g), deviation(g)) for x, g in paired if len(g) > 1]
        for x, y, sd in bars:
            ax.plot([x, x], [y - sd, y + sd], color=color, lw=0.8, alpha=0.7, scalex=False, scaley=False)
        found = found or bool(bars)
    return found


def frame(ax, drawn, centre):
    """The y-axis fits the last three quarters of the curves {system: points}. A system that goes more than four times
    as far from `centre` as the median one does not count: it may leave the picture."""
    late = [[y for x, y in points if x >= points[-1][0] / 4 and math.isfinite(y)] for points in drawn.values()]
    late = [ys for ys in late if any(y != centre for y in ys)]              # without the baseline's own difference
    far = [max(abs(y - centre) for y in ys) for ys in late]
    kept = [y for ys, d in zip(late, far) for y in ys if d <= 4 * median(far)] + [centre]
    margin = 0.08 * (max(kept) - min(kept)) + 1e-3
    ax.set_ylim(min(kept) - margin, max(kept) + margin)


def note_outside(ax, rows):
    """Names at the edge the systems that end outside of the axes of the differences."""
    low, high = ax.get_ylim()
    beyond = {label: r["difference"] for label, r in rows.items() if r["difference"] is not None}
    for where, y, names in (("above", 0.98, [name for name, gap in beyond.items() if not gap < high]),
                            ("below", 0.02, [name for name, gap in beyond.items() if gap < low])):
        text = "\n".join(f"{where} this picture: {name} {beyond[name]:+.3f}" for name in names)
        ax.text(0.99, y, text, fontsize=8, ha="right", va="top" if where == "above" else "bottom",
                transform=ax.transAxes)


def title_curves(fig, ax, rows, baseline, bars):
    """The legend of the lines in ax, with the final differences; bars: whether there are deviations to explain."""
    seeds = sorted({len(r["seeds"]) for r in rows.values()})
    title = [f"mean of {'-'.join(map(str, seeds))} {'seed' if seeds == [1] else 'seeds'}"]
    if len(rows) > 1:
        title.append("final differences")
    if bars:
        title += ["bars: deviation of the", "difference over the seeds"]
    if any(len(r["curve"]) - 1 < FEW for r in rows.values()):
        title += ["thin: training loss,", "a running mean"]
    handles = [line for line in ax.get_lines() if line.get_label() in rows]
    gap = {label: "" if label == baseline or r["difference"] is None else f" {r['difference']:+.4f}"
           for label, r in rows.items()}
    texts = [textwrap.fill(line.get_label() + gap[line.get_label()], 30, break_on_hyphens=False) for line in handles]
    fig.legend(handles, texts, title="\n".join(title), loc="outside right lower", fontsize=9, frameon=False,
               alignment="left")


# ------------------------------------------------------------------------------------------------ what models do inside


def draw_layers(found):
    """One panel per quantity, one line per run. What a block does is at 1 .. L, states of the stream at 0 .. L."""
    from matplotlib.lines import Line2D
    fig, axes = figure(3, 3, (13, 10))
    for ax, (key, (title, unit)) in zip(axes.flat, LAYERS.items()):
        for (run, numbers), (color, dash) in zip(found.items(), styles()):
            if key == "adjacent":
                draw_streams(ax, numbers[key], color)
            elif numbers[key]:
                y = list(map(max, numbers[key])) if key == "induction" else per_layer(numbers[key])
                first = 0 if len(y) == len(numbers["norm"]) else 1
                ax.plot(range(first, first + len(y)), y, dash, color=color, lw=1.3, marker=".", ms=4)
                if key == "token_similarity" and numbers["refinement"] is not None:
                    at = round((1 - numbers["refinement"]) * (len(y) - 1))
                    ax.plot(at, y[at], "o", color=color, ms=5)
        over_layers(ax, title + (" (o: refinement begins)" if key == "token_similarity" else ""), unit)
    handles = [Line2D([], [], color=color, ls=dash, label=run) for run, (color, dash) in zip(found, styles())]
    fig.legend(handles=handles, loc="outside lower center", ncols=min(len(found), 7), fontsize=9, frameon=False)
    return fig


def draw_streams(ax, adjacent, color):
    """A line per stream of one model, all in its colour."""
    for name, y in adjacent.items():
        dash = {"q": ":", "k": "-.", "v": "--"}.get(name, "-")
        ax.plot(range(2, len(y) + 2), y, dash, color=color, lw=1.3, marker=".", ms=4)
        if name != "x" and y:
            ax.annotate(name, (len(y) + 1, y[-1]), xytext=(3, 0), textcoords="offset points", fontsize=8, va="center")


def depth_panels(found):
    """{title: (what is read, by whom, rows of weights)} of all depth and value matrices."""
    panels = {}
    for run, numbers in found.items():
        for name, A in numbers["depth"].items():
            rows, reader = lower(A), "read by sublayer (last: head)"
            if name != "r":
                rows, reader = rows[:-1:2], "read by attention of layer"            # the MLPs and the head read r
            title = f"{run}, {name} input" if len(numbers["depth"]) > 1 else run
            panels[title] = ("output of sublayer (0: embedding)", reader, rows)
        for name, A in numbers["values"].items():
            title = f"{run}, {dict(q='queries', k='keys', v='values', g='gates')[name]}"
            panels[title] = ("of layer (0: anchor)" if len(A[0]) > len(A) else "of layer", "in layer", lower(A))
    return panels


def draw_depth(found, only=()):
    """Who reads what, with which weight; what looks the same is drawn once. only: titles of depth_panels to draw.

    One scale for all panels, linear up to 0.1 and logarithmic from there to 10 or less; larger weights have the last
    colour, and the panel's title says so. Grey is what comes later and cannot be read.
    """
    from matplotlib.colors import SymLogNorm
    every, panels = depth_panels(found), {}
    for title in only or every:
        panels.setdefault(json.dumps(every[title]), []).append(title)
    if not panels:
        return None
    panels = [(titles, *json.loads(panel)) for panel, titles in panels.items()]
    largest = [max(abs(x) for row in A for x in row if not math.isnan(x)) for *_, A in panels]
    top = min(10.0, max(1.0, *largest))
    norm = SymLogNorm(0.1, linscale=0.5, vmin=-top, vmax=top)
    fig, axes = grid(len(panels), width=3.4, height=3.3, columns=3 if len(panels) in (5, 6) else 4)
    for ax, (titles, source, reader, A), most in zip(axes, panels, largest):
        title = ", ".join(titles) + (f" (up to {most:,.0f})" if most > top else "")
        image = heat(ax, A, textwrap.fill(title, 36), source, reader, (1, 1 if source == "of layer" else 0),
                     cmap="RdBu_r", norm=norm)
        ax.set_facecolor(GREY)
    extend = "both" if max(largest) > top else "neither"
    bar = fig.colorbar(image, ax=axes, extend=extend, aspect=40, pad=0.01,
                       label="weight, mean over tokens\n(white: 0; grey: cannot be read)")
    bar.set_ticks([x for x in (-10, -3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10) if abs(x) <= top], minor=False)
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.minorticks_off()
    return fig


def draw_similarity(found):
    """Similarity of the states after any two layers, a panel per run."""
    fig, axes = grid(len(found))
    low = min(min(map(min, numbers["layer_similarity"])) for numbers in found.values())
    for ax, (run, numbers) in zip(axes, found.items()):
        image = heat(ax, numbers["layer_similarity"], run, "state after layer", "state after layer", cmap="viridis",
                     vmin=min(low, 0), vmax=1)
    fig.colorbar(image, ax=axes, label="mean cosine, same token")
    return fig


def draw_gates(found, panels=()):
    """Output gates by layer and head; then the panels of probes files: functions that draw one, given (fig, ax)."""
    gated = {run: numbers["gate"] for run, numbers in found.items() if numbers["gate"]}
    if not gated and not panels:
        return None
    fig, axes = grid(len(gated) + len(panels), width=4.6, columns=3)
    seen = [x for gates in gated.values() for row in gates for x in row]
    for ax, (run, gates) in zip(axes, gated.items()):
        image = heat(ax, gates, f"{run}: output gate, mean", "head", "layer", (1, 1), cmap="viridis", vmin=min(seen),
                     vmax=max(seen))
        fig.colorbar(image, ax=ax)
    for ax, draw in zip(axes[len(gated):], panels):
        draw(fig, ax)
    return fig


def draw_maps(run, maps):
    """Attention of one sequence: a row per layer, a column per head. maps: [layer][head][query][key]; [] gives None."""
    if not maps:
        return None
    from matplotlib.colors import PowerNorm
    L, H = len(maps), len(maps[0])
    fig, axes = figure(L, H, (1.3 * H + 1, 1.3 * L + 0.5))
    for layer, (row, heads) in enumerate(zip(axes, maps), start=1):
        for head, (ax, weights) in enumerate(zip(row, heads), start=1):
            image = ax.imshow(weights, cmap="viridis", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
            ax.set_xticks([])
            ax.set_yticks([])
            if layer == 1:
                ax.set_title(f"head {head}", fontsize=8)
            if head == 1:
                ax.set_ylabel(f"layer {layer}", fontsize=8)
    fig.colorbar(image, ax=axes, shrink=min(1.0, 4 / L), label="attention weight", location="right")
    fig.suptitle(f"{run}: {len(maps[0][0])} tokens, query down, key across", fontsize=9)
    return fig
