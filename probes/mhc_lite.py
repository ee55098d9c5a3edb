"""Probes of mhc_lite.py."""
from probes.hyperconnections import depth_matrix, stats  # noqa: F401
from probes.mhc import compiled_parts  # noqa: F401
