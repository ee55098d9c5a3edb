"""Probes of mhc_lite.py."""
from math import factorial

from probes.hyperconnections import depth_matrix, neutral, stats  # noqa: F401
from probes.mhc import compiled_parts, of_maps  # noqa: F401


def costs(c, T):
    return of_maps(c, factorial(c.n_streams))
