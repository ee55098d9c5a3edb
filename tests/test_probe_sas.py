"""sas.py: its residual stream is a plain sum, and every simulated head has a map."""
from analysis import check_depth, double, numbers, random_model  # noqa: F401


def test_depth_matrix_makes_every_input_from_the_outputs():
    check_depth("sas")


def test_maps_of_simulated_heads():
    found = numbers(random_model("sas"))                                            # 4 heads, 3 of each
    assert [len(layer) for layer in found["maps"]] == [12] * 3 == [len(layer) for layer in found["entropy"]]
