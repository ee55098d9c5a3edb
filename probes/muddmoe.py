"""Probes of muddmoe.py: muddformer.py's for the connections, kern.py's for the router."""
from probes import kern, muddformer
from probes.muddformer import connections, sizes, streams, token_weights  # noqa: F401


def costs(c, T):
    """Beyond kern.py's."""
    parameters, flops, read = connections(c, sizes(c))
    return parameters + 2 * c.n_layer * c.d_model, flops, read                      # norms of keys and values


def neutral(model):
    """Nothing to set: it starts as kern.py."""


def stats(model, idx):
    return muddformer.stats(model, idx) | kern.stats(model, idx)
