"""Probes of mhar.py. There is no depth_matrix: each head weighs only its own channels."""
from probes.attnres import stats  # noqa: F401
