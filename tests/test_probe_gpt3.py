"""gpt3.py needs no probes: its learned positions are part of the embedding."""
from analysis import check_depth, double  # noqa: F401


def test_depth_matrix_makes_every_input_from_the_outputs():
    check_depth("gpt3")
