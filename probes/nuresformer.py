"""Probes of nuresformer.py: exoformer.py's, without W_anc and without lambdas in the first layer."""
from probes.exoformer import mixing_costs, neutral, numbers, stats, value_matrix  # noqa: F401


def costs(c, T):
    return mixing_costs(c, c.n_layer - 1)
