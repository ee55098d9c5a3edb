"""probes/resformer.py against the values that attention gets."""
import pytest
import torch
from analysis import check_depth, double, random_model, tokens, values_of  # noqa: F401

from nanodepth import record
from nanodepth.pictures import draw_depth
from probes.resformer import value_matrix


def test_depth_matrix_makes_every_input_from_the_outputs():
    check_depth("resformer")


@pytest.mark.parametrize("options", [
    {}, dict(value_mix="learnable"), dict(value_mix="identity"), dict(last_k=1)], ids=str)
@torch.no_grad()
def test_value_matrix_makes_the_values(options):
    model = random_model("resformer", **options)
    mixed, own, record = values_of(model)
    A = value_matrix(model, record)
    assert set(A) == {"v"} and A["v"].shape == (3, 3)
    made = torch.einsum("nm,mbthd->nbthd", A["v"].to(own.dtype), own)
    assert (made - mixed).abs().max() < 1e-9 * mixed.abs().max()


def test_picture_of_the_values():
    pytest.importorskip("matplotlib")
    matrix = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.0, 2.0]]
    ax, _ = draw_depth({"run": {"depth": {}, "values": {"v": matrix}}}).axes
    image = ax.get_images()[0]
    assert ax.get_title() == "run, values" and image.get_extent() == [0.5, 3.5, 3.5, 0.5]
    assert image.get_array().filled(0.0).tolist() == matrix


def test_stats_are_the_lambdas():
    model = random_model("resformer", value_mix="learnable")
    found = record.stats("resformer", model, tokens()[0])
    assert found == {name: getattr(model.value_mix, name).tolist() for name in ("lambda1", "lambda2")}
