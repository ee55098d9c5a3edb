"""Probes of mhc.py."""
from probes.hyperconnections import depth_matrix, stats  # noqa: F401
