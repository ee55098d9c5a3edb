"""Probes of mhc_lite.py."""
from probes.hyperconnections import depth_matrix, stats  # noqa: F401
