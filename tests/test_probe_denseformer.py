"""probes/denseformer.py against what the model reads."""
import pytest
from analysis import check_depth, double  # noqa: F401


@pytest.mark.parametrize("options", [{}, dict(dilation=2), dict(period=2)], ids=str)
def test_depth_matrix_makes_every_input_from_the_outputs(options):
    check_depth("denseformer", **options)
