"""probes/hyperconnections.py against what the model reads."""
import pytest
from analysis import check_depth, double  # noqa: F401


@pytest.mark.parametrize("connection, n_streams", dict(static=2, dynamic=4, manifold=3, identity=4).items())
def test_depth_matrix_makes_every_input_from_the_outputs(connection, n_streams):
    check_depth("hyperconnections", connection=connection, n_streams=n_streams)
