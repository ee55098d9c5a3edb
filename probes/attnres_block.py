"""What is known about attnres_block.py besides the model."""
from probes.attnres import depth_matrix, neutral, of_sources, stats  # noqa: F401


def costs(c, T):
    """Reader l has the embedding, the finished blocks and its own block so far: 1 + l / block_size, rounded up."""
    return of_sources(c, [1 + -(-l // c.block_size) for l in range(2 * c.n_layer + 1)], 2 * c.n_layer)
