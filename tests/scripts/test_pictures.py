"""pictures.py: the numbers drawn, and their places."""
import copy
import json
import math
import runpy
import statistics
from pathlib import Path

import pytest
import torch
from analysis import ROOT, double, numbers, random_model, read, write_run  # noqa: F401

from nanodepth import curves, pictures

RESULTS = Path(__file__).parents[2] / "results"
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def found(double):  # noqa: F811
    """Numbers of a model, of the same with other weights in its depth matrix, and of one that reads no sum."""
    scaled, plain = random_model(ROOT), numbers(random_model(ROOT))
    scaled.blocks[1].register_forward_hook(lambda m, inputs, output: output.tanh())
    other = copy.deepcopy(plain)
    other["depth"]["r"][5][:4] = [-0.05, 0.0, 0.5, -250.0]
    return {"plain": plain, "other": other, "scaled": numbers(scaled)}


def by_title(fig):
    """{title: axes} of a figure."""
    return {ax.get_title(): ax for ax in fig.axes}


def test_heat_map_has_its_rows_and_columns_where_the_labels_say():
    _, ((ax,),) = pictures.figure(1, 1, (4, 3))
    image = pictures.heat(ax, [[1, 2, 3], [4, 5, 6]], "t", "x", "y", first=(2, 1))
    assert ax.get_xlabel() == "x" and ax.get_ylabel() == "y" and image.get_extent() == [0.5, 3.5, 3.5, 1.5]

    def at(x, y):                                                               # the value drawn at these coordinates
        cx, cy = ax.transData.transform((x, y))
        event = type("E", (), dict(x=cx, y=cy, inaxes=ax, xdata=x, ydata=y))
        return image.get_cursor_data(event)
    assert [[at(x, y) for x in (1, 2, 3)] for y in (2, 3)] == [[1, 2, 3], [4, 5, 6]]


def test_layers(found):
    streams = {**found["plain"], "adjacent": {"q": [0.5, 0.25], "r": [0.75, 1.0]}, "entropy": None}
    layers = by_title(pictures.draw_layers({**found, "streams": streams}))
    lens, entropy = layers["logit lens"].get_lines(), layers["attention entropy"].get_lines()
    assert lens[2].get_xydata().tolist() == [[i, y] for i, y in enumerate(found["scaled"]["lens"])]
    means = [[i + 1, sum(y) / 4] for i, y in enumerate(found["scaled"]["entropy"])]
    assert len(entropy) == 3 and entropy[2].get_xydata() == pytest.approx(torch.tensor(means).numpy())
    best = layers["best copying head of each layer"].get_lines()[0].get_ydata().tolist()
    assert best == list(map(max, found["plain"]["induction"]))
    adjacent = [line.get_xydata().tolist() for line in layers["similarity to the previous layer's input"].get_lines()]
    assert adjacent == [*([[i + 2, y] for i, y in enumerate(x["adjacent"]["x"])] for x in found.values()),
                        [[2, 0.5], [3, 0.25]], [[2, 0.75], [3, 1.0]]]


def test_depth_has_one_scale_and_grey_for_what_cannot_be_read(found):
    axes = by_title(pictures.draw_depth(found))
    assert set(axes) == {"plain", "other", ""}                                  # scaled is no sum of outputs
    a, b = (axes[title].get_images()[0] for title in ("plain", "other"))
    wanted = torch.tensor(found["other"]["depth"]["r"])
    assert torch.allclose(torch.tensor(b.get_array().filled(0.0)), wanted)
    assert b.get_array().mask.tolist() == torch.ones(7, 7).triu(1).bool().tolist()
    assert b.get_extent() == [-0.5, 6.5, 7.5, 0.5]

    def color(image, row, column):
        return image.cmap(image.norm(image.get_array()))[row][column].tolist()
    assert color(a, 0, 0) == color(b, 0, 0)                                     # weight 1, the same in both
    white, colors = color(b, 5, 1), [color(b, 5, j) for j in (0, 2, 3)]
    assert min(white[:3]) > 0.95 and all(x != white for x in colors) and len(set(map(tuple, colors))) == 3
    grey = axes["plain"].get_facecolor()
    assert axes["other"].get_facecolor() == grey and max(grey[:3]) < 0.8
    assert color(b, 0, 3)[3] == 0                                               # what is later lets the grey through
    assert pictures.draw_depth({"scaled": found["scaled"]}) is None


@pytest.mark.parametrize("values, extent", [
    ([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.0, 2.0]], [0.5, 3.5, 3.5, 0.5]),
    ([[0.5, 1.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [1.0, 0.25, 0.0, 2.0]], [-0.5, 3.5, 3.5, 0.5])])
def test_values_and_streams(values, extent):
    """An anchor from outside is in a first column. Queries, keys and values have rows for the attention alone."""
    numbers = {"depth": {s: torch.rand(7, 7).tril().tolist() for s in "qr"}, "values": {"v": values}}  # noqa: F811
    axes = by_title(pictures.draw_depth({"run": numbers}))
    image = axes["run, values"].get_images()[0]
    assert image.get_extent() == extent and image.get_array().filled(0.0).tolist() == values
    drawn = axes["run, q input"].get_images()[0].get_array().filled(0.0)
    assert drawn.tolist() == numbers["depth"]["q"][:-1:2]
    assert axes["run, r input"].get_images()[0].get_array().shape == (7, 7)


def drawn_curves(runs, baseline=ROOT):
    """[{label: its points} per panel], [the names at the lines' ends per panel], the text below, and the figure."""
    groups = curves.systems(runs)
    fig = pictures.draw_curves(curves.summarise(groups, baseline), groups, baseline)
    found = []
    for ax in fig.axes:
        drawn = [(x.get_label(), x) for x in ax.get_lines()]
        drawn += [(bars.get_label(), bars.lines[0]) for bars in ax.containers]
        found.append({label: torch.tensor(x.get_xydata()) for label, x in drawn if not label.startswith("_")})
    return found, [[text.get_text() for text in ax.texts] for ax in fig.axes], fig.get_supxlabel(), fig


def test_curves(tmp_path):
    """Two seeds: means, and 95% intervals of the differences 0.6, 1.2 and 1.0, 1.4 (Student's t of 1 degree)."""
    runs = read(*(write_run(tmp_path / f"{m}{s}", x, s, m) for m, s, x in (
        (ROOT, 0, [9, 5, 4]), (ROOT, 1, [9, 5.2, 4.4]), ("mine", 1, [9, 4, 3]), ("mine", 0, [9, 4.4, 3]))))
    (losses, gaps), names, text, fig = drawn_curves(runs)
    assert list(losses) == [ROOT, "mine"] and list(gaps) == ["mine"]
    assert losses["mine"] == pytest.approx(torch.tensor([[0, 9], [1e-3, 4.2], [2e-3, 3]]))
    assert gaps["mine"] == pytest.approx(torch.tensor([[1e-3, -0.9], [2e-3, -1.2]]))
    bars = [bar[:, 1].tolist() for bar in fig.axes[1].containers[0].lines[2][0].get_segments()]
    assert bars == [pytest.approx([y - half, y + half], rel=1e-3) for y, half in ((-0.9, 12.706 * 0.3),
                                                                                 (-1.2, 12.706 * 0.2))]
    assert names == [[ROOT, "mine"], ["mine -1.200"]] and text.endswith("Bars: 95% intervals.")
    low, high = fig.axes[1].get_ylim()
    assert fig._repr_png_().startswith(b"\x89PNG") and low < -1.2                       # what a notebook shows
    assert f"varies by {pictures.SEEDS} nats" in drawn_curves(runs[1:3])[2]


def test_training_losses_are_drawn_where_the_batches_are_the_same(tmp_path):
    """Line and band as curves.along() has them; the last validation, on more tokens, is a point of its own."""
    base, same, other = (write_run(tmp_path / name, [9, 5, 4, 3.5], model=name, options={"batch_tokens": size},
                                   eval_tokens=[7, 7, 7, 70]) for name, size in ((ROOT, 50), ("same", 50), ("x", 60)))
    log = same / "log.jsonl"
    log.write_text(log.read_text().replace('"tokens": 20, "loss": 1.0', '"tokens": 20, "loss": 2.0'))
    runs = read(base, same, other)
    (losses, gaps), _, text, fig = drawn_curves(runs)
    assert losses["x"] == pytest.approx(torch.tensor([[3e-3, 3.5]])) and gaps["x"].shape == gaps["same"].shape == (3, 2)
    line, = (x for x in fig.axes[1].get_lines() if x.get_xydata()[0][0] < 1e-3 and len(x.get_xydata()) > 2)
    wanted = [(15, 0.5), (25, 0.5), (35, 0), (45, 0)]                                   # means over two steps
    assert line.get_xydata() == pytest.approx(torch.tensor([(x / 1e6, y) for x, y in wanted]).numpy())
    band, = fig.axes[1].collections[:1]
    assert len(band.get_paths()) == 1 and "mean of 2 steps" in text
    ys = [y for x, y in band.get_paths()[0].vertices if x == pytest.approx(15e-6)]
    assert (min(ys), max(ys)) == pytest.approx((0, 1))                                  # 0.5 +- sd 0.707 / sqrt(2)


def test_the_axes_show_what_matters(tmp_path):
    """Neither the early phase nor one system that is far away sets the scale."""
    ends = {ROOT: 0, "a": 0.01, "b": -0.02, "c": 0.03, "longer": 2, "lower": -3, "gone": math.nan}
    runs = read(*(write_run(tmp_path / name, [9, 8 + 5 * gap, 7, 6, 5, 4.5 + gap, 4 + gap], model=name,
                            options={"batch_tokens": len(name)}) for name, gap in ends.items()))
    _, (_, names), _, fig = drawn_curves(runs)
    low, high = fig.axes[1].get_ylim()
    assert -0.04 < low < -0.02 and 0.03 < high < 0.05
    low, high = fig.axes[0].get_ylim()
    assert 0.5 < low < 4 and 7 < high < 8                               # without the first losses
    assert "longer +2.000" in names
    assert drawn_curves([runs[0], runs[5]])[-1].axes[1].get_ylim()[1] > 0       # and zero is always there
    _, names, _, fig = drawn_curves(runs[:1])                           # the baseline alone
    assert len(fig.axes) == 1 and names == [[ROOT]]


def test_a_picture_has_the_eight_best_systems(tmp_path):
    ends = {f"m{i}": 4 + (7 * i % 11) / 100 for i in range(11)} | {"m0": math.nan}
    runs = read(*(write_run(tmp_path / m, [9, end], model=m) for m, end in {**ends, ROOT: 4.02}.items()))
    drawn, _, text, _ = drawn_curves(runs)
    assert list(drawn[0]) == [ROOT, *sorted(ends, key=lambda m: (math.isnan(ends[m]), ends[m]))[:8]]
    assert text.startswith("The 8 lowest of 11 losses.")


def test_names_beside_lines_do_not_touch():
    assert pictures.spread([3.0, 0.0, 0.1], 1.0) == pytest.approx([2.7, -0.3, 0.7])


def test_the_noise_between_seeds_is_measured():
    """SEEDS is the standard deviation of the last difference in results/tiny-cpu, over seeds and threads."""
    compare = pytest.importorskip("compare")                # a copy of the repository may be without results/
    runs = compare.table(RESULTS / "tiny-cpu" / "runs.csv")
    base = {run["seed"]: run["loss"] for run in runs if run["system"] == ROOT}
    other, = {run["system"] for run in runs if run["seed"]} - {ROOT}
    gaps = [run["loss"] - base[run["seed"]] for run in runs if run["system"] == other]
    assert statistics.stdev(gaps) == pytest.approx(pictures.SEEDS, rel=0.1)


def test_the_pictures_of_the_front_page():
    """gain.png has its points where the study's page has their numbers, and no name on another name or point."""
    compare, report = pytest.importorskip("compare"), runpy.run_path(str(RESULTS / "study" / "report.py"))
    runs, speed = compare.apart(compare.read(RESULTS / "study"), report["IGNORED"]), compare.speeds(RESULTS / "study")
    fig, page = report["gain_picture"](report["ends"](runs), speed), (RESULTS / "study" / "README.md").read_text()
    ax, = fig.axes
    fig.canvas.draw()
    named = {text.get_text(): text for text in ax.texts}
    points = {tuple(line.get_xydata()[0]) for line in ax.get_lines() if line.get_marker() == "o"}
    assert len(points) == len(named) - 2 == 17                                  # names of the bar and the line
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `") and "M" not in line]
    found = [cells for cells in rows if len(cells) == 8 and cells[0].strip("`") in named]
    assert len(found) >= 10
    for name, *cells in found:
        x, y = named[name.strip("`")].xy
        assert (x, y) in points and f"{y:+.4f} ±" in cells[2] and f"{x:.2f}" == cells[5]
    boxes = [text.get_window_extent() for text in named.values()]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert not any(box.contains(*ax.transData.transform(point)) for box in boxes for point in points)
    depth = json.loads((RESULTS / "study-small" / "depth.json").read_text())
    assert [torch.tensor(matrix).shape for matrix in depth.values()] == [(17, 17)] * 4
    assert depth[ROOT] == torch.ones(17, 17).tril().tolist()
