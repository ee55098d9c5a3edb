"""Probes of attnres_block.py."""
from probes.attnres import depth_matrix, stats  # noqa: F401
