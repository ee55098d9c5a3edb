"""Probes of nuresformer.py: exoformer.py's."""
from probes.exoformer import numbers, stats, value_matrix  # noqa: F401
