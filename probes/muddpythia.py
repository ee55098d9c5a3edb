"""Probes of muddpythia.py, mostly muddformer.py's."""
from probes.muddformer import connections, sizes, stats, streams, token_weights, wider  # noqa: F401


def costs(c, T):
    parameters, flops, read = connections(c, sizes(c))
    norms = 4 * c.n_layer * c.d_model                                               # of keys and values, with biases
    return parameters + norms + (2 * c.d_model + 1) * wider(c), flops + 4 * c.d_model * wider(c), read
