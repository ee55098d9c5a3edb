"""Probes of mhar.py. There is no depth_matrix: each head weighs only its own channels."""
from probes.attnres import neutral, stats  # noqa: F401
