"""pictures.py: the numbers drawn, and their places."""
import copy
import math

import pytest
import torch
from analysis import ROOT, double, numbers, random_model, read, write_run  # noqa: F401

from nanodepth import curves, pictures

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
    """{panel: {label: its points}}, and the figure."""
    groups = curves.systems(runs)
    fig = pictures.draw_curves(curves.summarise(groups, baseline), groups, baseline)
    found = {}
    for name, ax in zip(("tokens", "time", "gap"), fig.axes):
        drawn = [(x.get_label(), x) for x in ax.get_lines()]
        drawn += [(bars.get_label(), bars.lines[0]) for bars in ax.containers]
        found[name] = {label: torch.tensor(x.get_xydata()) for label, x in drawn if not label.startswith("_")}
    return found, fig


def test_curves(tmp_path):
    runs = read(*(write_run(tmp_path / f"{m}{s}", x, s, m, speed) for m, s, x, speed in (
        (ROOT, 0, [9, 5, 4], 1000), (ROOT, 1, [9, 5.2, 4.4], 1000), ("mine", 1, [9, 4, 3], 500),
        ("mine", 0, [9, 4.4, 3], 500))))
    drawn, fig = drawn_curves(runs)
    assert all(list(panel) == [ROOT, "mine"] for panel in drawn.values())
    line = {name: panel["mine"] for name, panel in drawn.items()}
    assert line["tokens"] == pytest.approx(torch.tensor([[0, 9], [1e-3, 4.2], [2e-3, 3]]))
    assert line["time"] == pytest.approx(torch.tensor([[0, 9], [1 / 30, 4.2], [2 / 30, 3]]))       # 1,000 at 500/s
    assert line["gap"] == pytest.approx(torch.tensor([[1e-3, -0.9], [2e-3, -1.2]]))
    bars = [bar[:, 1].tolist() for bar in fig.axes[2].containers[1].lines[2][0].get_segments()]
    wanted = [[mean - sd, mean + sd] for mean, sd in ((-0.9, 0.3 * 2 ** 0.5), (-1.2, 0.2 * 2 ** 0.5))]
    assert bars == [pytest.approx(bar) for bar in wanted]                       # gaps -0.6, -1.2, then -1.0, -1.4
    legend = fig.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [ROOT, "mine -1.2000"]
    assert "bars" in legend.get_title().get_text()
    assert "bars" not in drawn_curves(runs[1:3])[1].legends[0].get_title().get_text()               # one seed
    low, high = fig.axes[2].get_ylim()
    assert fig._repr_png_().startswith(b"\x89PNG") and low < -1.2 and high > 0          # what a notebook shows


def test_the_axes_show_what_matters(tmp_path):
    """Neither the early phase nor one system that is far away sets the scale."""
    ends = {ROOT: 0, "a": 0.01, "b": -0.02, "c": 0.03, "far": 2, "low": -3, "gone": math.nan}
    runs = read(*(write_run(tmp_path / name, [9, 8 + 5 * gap, 7, 6, 5, 4.5 + gap, 4 + gap], model=name)
                  for name, gap in ends.items()))
    _, fig = drawn_curves(runs)
    low, high = fig.axes[2].get_ylim()
    assert -0.04 < low < -0.02 and 0.03 < high < 0.05
    low, high = fig.axes[0].get_ylim()
    assert 0.5 < low < 4 and 7 < high < 8                               # without the first losses
    assert "far +2.0000" in [text.get_text() for text in fig.legends[0].get_texts()]
    _, fig = drawn_curves(runs[:1])                                     # the baseline alone
    assert len(fig.axes) == 2 and [text.get_text() for text in fig.legends[0].get_texts()] == [ROOT]


def test_a_picture_has_the_eight_best_systems(tmp_path):
    ends = {f"m{i}": 4 + (7 * i % 11) / 100 for i in range(11)} | {"m0": math.nan}
    runs = read(*(write_run(tmp_path / m, [9, end], model=m) for m, end in {**ends, ROOT: 4.02}.items()))
    drawn, fig = drawn_curves(runs)
    assert list(drawn["tokens"]) == [ROOT, *sorted(ends, key=lambda m: (math.isnan(ends[m]), ends[m]))[:8]]
    assert fig.legends[0].get_title().get_text().endswith("the 8 lowest of 11 losses")
