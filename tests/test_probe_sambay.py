"""sambay.py: its residual stream is a plain sum, and not every layer has attention."""
import pytest
from analysis import check_depth, double, numbers, random_model  # noqa: F401


@pytest.mark.parametrize("options", [{}, dict(gmu="none", window=4)], ids=str)
def test_depth_matrix_makes_every_input_from_the_outputs(options):
    check_depth("sambay", **options)


def test_it_is_watched_without_attention_in_every_layer():
    found = numbers(random_model("sambay", n_layer=8, window=5, gate="headwise"))  # windows in blocks of 5 of 12 tokens
    assert found["depth_error"] < 1e-9 and len(found["lens"]) == 9 and len(found["core_features"]) == 9
    assert found["entropy"] is found["active"] is found["gate"] is None and found["maps"] == []
