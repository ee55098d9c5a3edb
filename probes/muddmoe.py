"""What to watch in a trained muddmoe.py: muddformer.py's connections and kern.py's router."""
from probes import kern
from probes.muddformer import PICTURES, depth_matrix, numbers, observe, streams, watched
from probes.muddformer import stats as connections

__all__ = ["PICTURES", "depth_matrix", "numbers", "observe", "stats", "streams", "watched"]


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    return connections(model, idx) | kern.stats(model, idx)
