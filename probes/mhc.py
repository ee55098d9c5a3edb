"""Probes of mhc.py."""
from probes.hyperconnections import depth_matrix, stats  # noqa: F401


def compiled_parts(model):
    """The blocks, which share one program. As a whole it would be one with every Sinkhorn step of every layer."""
    return model.blocks
