"""pictures.py: the numbers drawn, and their places."""
import copy
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


def test_layers(found):
    streams = {**found["plain"], "adjacent": {"q": [0.5, 0.25], "r": [0.75, 1.0]}, "entropy": None}
    layers = {ax.get_title(): ax for ax in pictures.draw_layers({**found, "streams": streams}).axes}
    lines = {title: [line.get_xydata().tolist() for line in ax.get_lines()] for title, ax in layers.items()}
    assert lines["logit lens"][2] == [[i, y] for i, y in enumerate(found["scaled"]["lens"])]
    assert len(lines["attention entropy"]) == 3
    means = map(statistics.mean, found["scaled"]["entropy"])
    assert lines["attention entropy"][2] == [[i + 1, y] for i, y in enumerate(means)]
    best = lines["best copying head of each layer"][0]
    assert best == [[i + 1, max(y)] for i, y in enumerate(found["plain"]["induction"])]
    assert lines["similarity to the previous layer's input"][3:] == [[[2, 0.5], [3, 0.25]], [[2, 0.75], [3, 1.0]]]


def test_depth(found):
    """One scale for all; grey for what comes later; an anchor from outside is in a first column."""
    values = [[0.5, 1.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [1.0, 0.25, 0.0, 2.0]]
    streams = {"depth": {s: torch.rand(7, 7).tril().tolist() for s in "qr"}, "values": {"v": values}}
    axes = {ax.get_title(): ax for ax in pictures.draw_depth({**found, "run": streams}).axes}
    assert {"plain", "other", "run, q input", "run, r input", "run, values"} == set(axes) - {""}    # scaled is no sum
    image = axes["other"].get_images()[0]
    weights = image.get_array()
    assert torch.allclose(torch.tensor(weights.filled(0.0)), torch.tensor(found["other"]["depth"]["r"]))
    assert weights.mask.tolist() == torch.ones(7, 7).triu(1).bool().tolist()
    assert image.get_extent() == [-0.5, 6.5, 7.5, 0.5]
    colors = image.cmap(image.norm(weights))
    assert colors[5, 1, :3].min() > 0.95 and len({tuple(color) for color in colors[5, :4]}) == 4    # 0 is white
    assert colors[0, 0].tolist() == axes["plain"].get_images()[0].to_rgba([[1.0]])[0, 0].tolist()
    assert colors[0, 3, 3] == 0 and max(axes["other"].get_facecolor()[:3]) < 0.8
    image = axes["run, values"].get_images()[0]
    assert image.get_extent() == [-0.5, 3.5, 3.5, 0.5] and image.get_array().filled(0.0).tolist() == values
    assert axes["run, q input"].get_images()[0].get_array().filled(0.0).tolist() == streams["depth"]["q"][:-1:2]


def draw(runs):
    """A picture of curves: {label: its points} per panel, and the figure."""
    groups = curves.systems(runs)
    fig = pictures.draw_curves(curves.summarise(groups, ROOT), groups, ROOT)
    drawn = [[*ax.get_lines(), *(bars.lines[0] for bars in ax.containers)] for ax in fig.axes]
    names = [[*ax.get_lines(), *ax.containers] for ax in fig.axes]
    return *({x.get_label(): torch.tensor(y.get_xydata()) for x, y in zip(*both) if x.get_label()[0] != "_"}
             for both in zip(names, drawn)), fig


def test_curves(tmp_path):
    """Two seeds: means, and 95% intervals of the differences 0.6, 1.2 and 1.0, 1.4 (Student's t of 1 degree). Line and
    band: training losses. A system far away sets no scale."""
    made = [write_run(tmp_path / f"{m}{s}", x, s, m) for m, s, x in (
        (ROOT, 0, [9, 5, 4]), (ROOT, 1, [9, 5.2, 4.4]), ("mine", 1, [9, 4, 3]), ("mine", 0, [9, 4.4, 3]))]
    runs = read(*made)
    for run in runs[2:]:
        run["train"][1]["loss"] = 2.0
    losses, gaps, fig = draw(runs)
    assert list(losses) == [ROOT, "mine"] and list(gaps) == ["mine"] and fig._repr_png_().startswith(b"\x89PNG")
    assert losses["mine"] == pytest.approx(torch.tensor([[0, 9], [1e-3, 4.2], [2e-3, 3]]))
    assert gaps["mine"] == pytest.approx(torch.tensor([[1e-3, -0.9], [2e-3, -1.2]]))
    bars = [bar[:, 1].tolist() for bar in fig.axes[1].containers[0].lines[2][0].get_segments()]
    assert bars == [pytest.approx([y - half, y + half], rel=1e-3) for y, half in ((-0.9, 12.706 * 0.3),
                                                                                 (-1.2, 12.706 * 0.2))]
    assert [text.get_text() for text in fig.axes[1].texts] == ["mine -1.200"]
    line, band = fig.axes[1].get_lines()[0].get_xydata(), fig.axes[1].collections[0].get_paths()[0].vertices
    wanted = [(15, 0.5), (25, 0.5), (35, 0), (45, 0)]                                   # means over two steps
    assert line == pytest.approx(torch.tensor([(x / 1e6, y) for x, y in wanted]).numpy())
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((0, 1))                # 0.5 +- sd 0.707 / sqrt(2)
    ends = {f"m{i}": 4 + (7 * i % 11) / 100 for i in range(10)} | {"low": 1, "lost": 9}
    more = read(*(write_run(tmp_path / m, [9, end], model=m, options={"batch_tokens": 60}) for m, end in ends.items()))
    losses, _, fig = draw([runs[0], *more])
    assert list(losses) == [ROOT, *sorted(ends, key=ends.get)[:8]]
    low, high = fig.axes[1].get_ylim()
    assert -1.2 < low < 0 < high < 0.2 and fig.get_supxlabel().startswith("The 8 lowest of 12 losses.")
    assert len(draw(runs[:1])) == 2                                                     # the baseline alone


def test_the_pictures_of_the_front_page():
    """gain.png has its points where the study's page has their numbers."""
    compare, study = pytest.importorskip("compare"), RESULTS / "study"
    report, page = runpy.run_path(str(study / "report.py")), (study / "README.md").read_text()
    fig = report["gain_picture"](report["ends"](compare.apart(compare.read(study), report["IGNORED"])))
    named = {text.get_text(): text.xy for text in fig.axes[0].texts}
    points = {tuple(line.get_xydata()[0]) for line in fig.axes[0].get_lines() if line.get_marker() == "o"}
    assert len(points) == len(named) - 2 == 17                                  # names of the bar and the line
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `") and "M" not in line]
    found = [cells for cells in rows if len(cells) == 8 and cells[0].strip("`") in named]
    assert len(found) >= 10
    for name, *cells in found:
        x, y = named[name.strip("`")]
        assert (x, y) in points and f"{y:+.4f} ±" in cells[2] and f"{x:.2f}" == cells[5]
