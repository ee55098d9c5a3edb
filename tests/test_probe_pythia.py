"""pythia.py needs no probes: that a block's MLP reads what its attention reads is seen."""
from analysis import check_depth, double  # noqa: F401


def test_depth_matrix_makes_every_input_from_the_outputs():
    check_depth("pythia", parallel=True)
