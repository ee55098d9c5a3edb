"""What is known about muddmoe.py, and in a trained one what to watch: muddformer.py's connections, kern.py's router."""
from probes import kern
from probes.muddformer import PICTURES, connections, depth_matrix, numbers, observe, sizes, streams, watched
from probes.muddformer import stats as mixtures

__all__ = ["PICTURES", "costs", "depth_matrix", "neutral", "numbers", "observe", "stats", "streams", "watched"]


def costs(c, T):
    """(parameters, forward FLOPs per token, numbers read per token) beyond kern.py's, in a context of T tokens."""
    parameters, flops, read = connections(c, sizes(c))
    return parameters + 2 * c.n_layer * c.d_model, flops, read                      # norms of keys and values


def neutral(model):
    """Nothing to set: it starts as kern.py."""


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    return mixtures(model, idx) | kern.stats(model, idx)
