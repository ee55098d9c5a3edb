"""kern.py: its residual stream is a plain sum."""
from analysis import check_depth, double  # noqa: F401


def test_depth_matrix_makes_every_input_from_the_outputs():
    check_depth("kern")
