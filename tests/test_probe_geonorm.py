"""probes/geonorm.py against what the model reads."""
import pytest
from analysis import check_depth, double, numbers, random_model, tokens  # noqa: F401

from nanodepth import record


@pytest.mark.parametrize("options", [{}, dict(update="unprojected", decay="geometric"), dict(update="pre_norm")],
                         ids=str)
def test_depth_matrix_makes_every_input_from_the_outputs(options):
    check_depth("geonorm", **options)


def test_states_behind_their_norms_are_no_sums():
    found = numbers(random_model("geonorm", update="post_norm"))
    assert found["depth_error"] > 1e-2 and found["depth"] == {}


def test_steps_are_the_parameters():
    model = random_model("geonorm", decay="harmonic")
    stats = record.stats("geonorm", model, tokens()[0])
    for name in ("attn", "mlp"):
        scales = [getattr(block, f"{name}_geodesic").scale.item() for block in model.blocks]
        assert stats[f"{name}_step"] == pytest.approx([s / (i + 1) for i, s in enumerate(scales)])
    assert set(record.stats("geonorm", random_model("geonorm", update="pre_norm"), tokens()[0])) == {"angle"}
