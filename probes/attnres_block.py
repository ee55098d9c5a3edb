"""Probes of attnres_block.py."""
from probes.attnres import depth_matrix, neutral, of_sources, stats  # noqa: F401


def costs(c, T):
    """Sources of reader l: the embedding, the finished blocks, its own block so far: 1 + l / block_size, rounded up."""
    return of_sources(c, [1 + -(-l // c.block_size) for l in range(2 * c.n_layer + 1)], 2 * c.n_layer)
