"""pythia.py against loops in float64; initial values. test_convert.py compares it with transformers' GPT-NeoX."""
import math

import pytest
from reference import (  # noqa: F401  (float64: autouse)
    OLDER, OLDER_CASES, block, compare, float64, older_initial_values, setup, show)


def pythia(p, c, x):
    for n in range(c.n_layer):
        x = block(p, c, n, x, x, x, x)
    return x


@pytest.mark.parametrize("options", OLDER_CASES, ids=show)
def test_equations(options):
    compare(pythia, *setup("pythia", OLDER, 0.2, **options))


def test_initial_values():
    older_initial_values("pythia", math.sqrt(2 / 5 / 256), 2 / 4 / 16)
