"""Probes of nuresformer.py: exoformer.py's, without W_anc and without lambdas in the first layer."""
from probes.exoformer import neutral, numbers, stats, value_matrix  # noqa: F401
