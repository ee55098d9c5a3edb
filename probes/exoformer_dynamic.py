"""Probes of exoformer_dynamic.py: exoformer.py's, plus gammas (W_1: C x 16, W_2: 16 x 8, b: 8) per layer."""
from probes.exoformer import neutral, numbers, stats, value_matrix  # noqa: F401
