"""Pictures of the numbers of curves.py and record.py. They need matplotlib, which is imported for the first of them."""
import json
import math
import textwrap
from itertools import cycle
from statistics import mean, stdev

from nanodepth.curves import between, gaps

COLORS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")         # Okabe and Ito's
LAYERS = {                                                                          # panel: (title, unit)
    "entropy": ("attention entropy", "nats"), "sink": ("attention on the first token", "share of the mass"),
    "active": ("active heads", "share of heads and queries"),
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


def figure(rows, columns, size, **options):
    """A figure of size (width, height) inches, and its axes as a list of rows."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=size, layout="constrained")
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


def bars(ax, x, series, title, unit):
    """Two {label: numbers over the layers x} side by side."""
    for (label, y), shift, color in zip(series.items(), (-0.2, 0.2), COLORS[1:]):
        ax.bar([layer + shift for layer in x], y, 0.4, label=label, color=color)
    over_layers(ax, title, unit)


def over_layers(ax, title, unit):
    """Title, axes and legend of a panel over the layers."""
    ax.set_title(title, fontsize=10)
    ax.set_ylabel(unit, fontsize=9)
    ax.set_xlabel("layer", fontsize=9)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize=8, frameon=False)
    ax.grid(alpha=0.3, lw=0.6)


def lower(matrix):
    """The rows with what lies right of the diagonal blanked; of (L, L + 1) numbers the diagonal begins at column 1."""
    extra = len(matrix[0]) - len(matrix)
    return [[x if j <= i + extra else math.nan for j, x in enumerate(row)] for i, row in enumerate(matrix)]


def per_layer(x):
    """Means over heads, where there are heads."""
    return [mean(row) if isinstance(row, list) else row for row in x]


# --------------------------------------------------------------------------------------------------------------- curves


def draw_curves(rows, groups, baseline):
    """Losses above and differences to the baseline below, over tokens on the left and over time on the right.

    Differences over tokens are paired by seed, with their deviation. Time is tokens over the median speed: without
    compiling, validations and pauses of the machine. rows: of curves.summarise(groups, baseline).
    """
    fig, axes = figure(2, 2, (11, 7.5), sharex="col", sharey="row")
    late = []
    for (label, r), (color, dash) in zip(rows.items(), styles()):
        look = dict(color=color, ls=dash, lw=2 if label == baseline else 1.4)
        for ax, scale in zip(axes[0], (1e6, 60 * r["tok_s"])):
            ax.plot([x / scale for x, _ in r["curve"]], [y for _, y in r["curve"]], label=label, **look)
        paired = [(x / 1e6, gaps(groups[label], groups[baseline], x)) for x, _ in r["curve"][1:]]
        old = [(x / (60 * rows[baseline]["tok_s"]), y) for x, y in rows[baseline]["curve"]]
        timed = [(x / (60 * r["tok_s"]), y) for x, y in r["curve"]]
        timed = [(x, y - between(old, x)) for x, y in timed if old[1][0] <= x <= old[-1][0]]
        for ax, points in zip(axes[1], ([(x, mean(g)) for x, g in paired if g], timed)):
            if points:
                ax.plot(*zip(*points), **look)
                late += [y for x, y in points[1:] if math.isfinite(y)]
        spread = [(x, mean(g) - stdev(g), mean(g) + stdev(g)) for x, g in paired if len(g) > 1]
        if spread and label != baseline:
            axes[1, 0].fill_between(*zip(*spread), color=color, alpha=0.15, lw=0)
    finite = [[y for _, y in r["curve"][1:] if math.isfinite(y)] or [0.0] for r in rows.values()]
    low, high = min(map(min, finite)), max(ys[0] for ys in finite)
    axes[0, 0].set_ylim(low - 0.05 * (high - low) - 1e-3, high + 1e-3)
    low, high = min([*late, 0.0]), max([*late, 0.0])
    axes[1, 0].set_ylim(low - 0.1 * (high - low) - 1e-3, high + 0.1 * (high - low) + 1e-3)
    axes[0, 0].set_ylabel("validation loss (nats per token)")
    axes[1, 0].set_ylabel(f"difference to {baseline} (nats per token)")
    axes[1, 0].set_xlabel("training tokens (millions)")
    axes[1, 1].set_xlabel("training time (minutes, at the median speed of the runs)")
    seeds = sorted({len(r["seeds"]) for r in rows.values()})
    title = f"mean of {'-'.join(map(str, seeds))} seed{'s' * (seeds != [1])}"
    handles = axes[0, 0].get_legend_handles_labels()
    fig.legend(*handles, title=title, loc="outside center right", fontsize=9, frameon=False)
    for ax in axes.flat:
        ax.grid(alpha=0.3, lw=0.6)
    return fig


# ------------------------------------------------------------------------------------------------ what models do inside


def draw_layers(found):
    """One panel per quantity, one line per run. What a block does is at 1 .. L, states of the stream at 0 .. L."""
    from matplotlib.lines import Line2D
    fig, axes = figure(2, 4, (15, 7))
    for ax, (key, (title, unit)) in zip(axes.flat, LAYERS.items()):
        for (run, numbers), (color, dash) in zip(found.items(), styles()):
            if key == "adjacent":
                draw_streams(ax, numbers[key], color)
            elif numbers[key]:
                y = per_layer(numbers[key])
                first = 0 if len(y) == len(numbers["norm"]) else 1
                ax.plot(range(first, first + len(y)), y, dash, color=color, lw=1.3, marker=".", ms=4)
                if key == "token_similarity" and numbers["refinement"] is not None:
                    at = round((1 - numbers["refinement"]) * (len(y) - 1))
                    ax.plot(at, y[at], "o", color=color, ms=5)
        ax.set_title(title + (" (o: refinement begins)" if key == "token_similarity" else ""), fontsize=10)
        ax.set_ylabel(unit, fontsize=9)
        ax.set_xlabel("layer", fontsize=9)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.3, lw=0.6)
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


def draw_depth(found):
    """Who reads what, with which weight; what looks the same is drawn once."""
    panels = {}
    for run, numbers in found.items():
        for name, A in numbers["depth"].items():
            title, rows, reader = run, lower(A), "read by sublayer (last: head)"
            if len(numbers["depth"]) > 1:
                title += f", {name} input"
            if name != "r":
                rows, reader = rows[:-1:2], "read by attention of layer"            # the MLPs and the head read r
            panels.setdefault(("output of sublayer (0: embedding)", reader, json.dumps(rows)), []).append(title)
        for name, A in numbers["values"].items():
            title = f"{run}, {dict(q='queries', k='keys', v='values', g='gates')[name]}"
            source = "of layer (0: anchor)" if len(A[0]) > len(A) else "of layer"
            panels.setdefault((source, "in layer", json.dumps(lower(A))), []).append(title)
    if not panels:
        return None
    fig, axes = grid(len(panels), width=3.6, height=3.3)
    for ax, ((source, reader, A), titles) in zip(axes, panels.items()):
        A = json.loads(A)
        top = max(abs(x) for row in A for x in row if not math.isnan(x))
        image = heat(ax, A, textwrap.fill(", ".join(titles), 34), source, reader, (1, 1 if source == "of layer" else 0),
                     cmap="RdBu_r", vmin=-top, vmax=top)
        fig.colorbar(image, ax=ax)
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
