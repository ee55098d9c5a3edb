"""Probes of mhc_lite.py."""
from math import factorial

from probes.hyperconnections import depth_matrix, neutral, stats  # noqa: F401
from probes.mhc import of_maps


def costs(c, T):
    return of_maps(c, factorial(c.n_streams))
