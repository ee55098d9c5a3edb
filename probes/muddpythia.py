"""What to watch in a trained muddpythia.py: the same as in muddformer.py, whose dense connections it has."""
from probes.muddformer import PICTURES, depth_matrix, numbers, observe, stats, streams, watched

__all__ = ["PICTURES", "depth_matrix", "numbers", "observe", "stats", "streams", "watched"]
