"""Probes of muddmoe.py: muddformer.py's for the connections, kern.py's for the router."""
from probes import kern, muddformer
from probes.muddformer import streams, token_weights  # noqa: F401


def stats(model, idx):
    return muddformer.stats(model, idx) | kern.stats(model, idx)
