"""Probes of attnres_block.py."""
from probes.attnres import depth_matrix, neutral, stats  # noqa: F401
