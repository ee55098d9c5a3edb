"""pictures.py: the numbers drawn, and their places."""
import copy
import sys

import pytest
import torch
from analysis import ROOT, by_title, double, numbers, random_model, write_run  # noqa: F401

from nanodepth import curves, pictures

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def found(double):  # noqa: F811
    """Numbers of a model, of the same with gates, and of one whose second block doubles what it gives."""
    scaled = random_model(ROOT)
    scaled.blocks[1].register_forward_hook(lambda m, inputs, output: 2 * output)
    gated = random_model(ROOT, gate="headwise")
    return {"plain": numbers(random_model(ROOT)), "gated": numbers(gated), "scaled": numbers(scaled)}


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
    layers = by_title(pictures.draw_layers(found))
    lens, entropy = layers["logit lens"].get_lines(), layers["attention entropy"].get_lines()
    assert lens[1].get_xydata().tolist() == [[i, y] for i, y in enumerate(found["gated"]["lens"])]
    means = [[i + 1, sum(y) / 4] for i, y in enumerate(found["scaled"]["entropy"])]
    assert entropy[2].get_xydata() == pytest.approx(torch.tensor(means).numpy())
    adjacent = [line.get_xydata().tolist() for line in layers["input against previous layer's"].get_lines()]
    assert adjacent == [[[i + 2, y] for i, y in enumerate(x["adjacent"]["x"])] for x in found.values()]
    gate, = layers["output gate"].get_lines()                                       # of the one run that has some
    assert gate.get_ydata().tolist() == pytest.approx([sum(y) / 4 for y in found["gated"]["gate"]])


def test_depth_is_drawn_once_where_it_is_the_same(found):
    other = copy.deepcopy(found["plain"])
    other["depth"]["r"][2][1] = 0.25
    images = by_title(pictures.draw_depth({**found, "other": other}))
    assert "plain, gated" in images and not any("scaled" in title for title in images)      # that is no sum of outputs
    drawn = images["other"].get_images()[0]
    assert torch.allclose(torch.tensor(drawn.get_array().filled(0.0)), torch.tensor(other["depth"]["r"]))
    assert drawn.get_array().mask.tolist() == torch.ones(7, 7).triu(1).bool().tolist()
    assert drawn.get_extent() == [-0.5, 6.5, 7.5, 0.5]
    assert pictures.draw_depth({"scaled": found["scaled"]}) is None


def test_similarity(found):
    for run, ax in list(by_title(pictures.draw_similarity(found)).items())[:3]:
        assert ax.get_images()[0].get_array().tolist() == found[run]["layer_similarity"]


def test_gates_and_the_panels_of_probes(found):
    drawn = []
    fig = pictures.draw_gates(found, [lambda fig, ax: drawn.append(ax), lambda fig, ax: ax.set_title("mine")])
    axes = by_title(fig)
    assert axes["gated: output gate, mean"].get_images()[0].get_array().tolist() == found["gated"]["gate"]
    assert len(drawn) == 1 and "mine" in axes
    assert pictures.draw_gates({"plain": found["plain"]}) is None


def test_lines_and_bars():
    _, ((left, right),) = pictures.figure(1, 2, (4, 3))
    pictures.lines(left, [2, 3], {"a": [1.0, None], "b": [3.0, 4.0]}, "t", "unit")
    pictures.bars(right, [2, 3], {"a": [1.0, 2.0], "b": [3.0, 4.0]}, "t", "unit")
    assert [str(line.get_ydata().tolist()) for line in left.get_lines()] == ["[1.0, nan]", "[3.0, 4.0]"]
    assert [bar.get_height() for bar in right.patches] == [1, 2, 3, 4]
    middles = [bar.get_x() + bar.get_width() / 2 for bar in right.patches]
    assert middles == pytest.approx([1.8, 2.8, 2.2, 3.2])
    assert left.get_title() == right.get_title() == "t" and left.get_ylabel() == right.get_ylabel() == "unit"


def test_maps(found):
    maps = found["plain"]["maps"]
    drawn = pictures.draw_maps("plain", maps).axes[4 * 1 + 2].get_images()[0].get_array().data
    assert torch.equal(torch.tensor(drawn), torch.tensor(maps[1][2])) and pictures.draw_maps("none", []) is None


def test_curves(tmp_path):
    runs = [curves.read_log(write_run(tmp_path / f"{m}{s}", x, s, m, speed)) for m, s, x, speed in (
        (ROOT, 0, [9, 5, 4], 1000), (ROOT, 1, [9, 5.2, 4.4], 1000), ("mine", 1, [9, 4, 3], 500),
        ("mine", 0, [9, 4.4, 3], 500))]
    groups = curves.systems(runs)
    fig = pictures.draw_curves(curves.summarise(groups, ROOT), groups, ROOT)
    line = [ax.get_lines()[1].get_xydata() for ax in fig.axes]
    assert line[0] == pytest.approx(torch.tensor([[0, 9], [1e-3, 4.2], [2e-3, 3]]).numpy())
    assert line[1] == pytest.approx(torch.tensor([[0, 9], [1 / 30, 4.2], [2 / 30, 3]]).numpy())    # 1,000 at 500/s
    assert line[2] == pytest.approx(torch.tensor([[1e-3, -0.9], [2e-3, -1.2]]).numpy())
    assert line[3] == pytest.approx(torch.tensor([[1 / 30, 4.2 - 4.2]]).numpy())    # the baseline is at its end by then


def test_files_are_written_for_what_can_be_drawn(tmp_path, found, monkeypatch):
    figures = {"a": lambda: pictures.draw_similarity(found), "b": lambda: None}
    assert list(pictures.save(figures, tmp_path)) == [tmp_path / "a.png"]
    assert (tmp_path / "a.png").stat().st_size > 10_000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError):
        list(pictures.save({"c": lambda: None}, tmp_path))
