"""Probes of mhc.py."""
from probes.hyperconnections import depth_matrix, neutral, stats  # noqa: F401


def costs(c, T):
    return of_maps(c, c.n_streams ** 2)


def compiled_parts(model):
    """The blocks, which share one program. As a whole it would be one with every Sinkhorn step of every layer."""
    return model.blocks


def of_maps(c, n_res):
    """All n streams make n_res logits of H_res, and those of H_pre and H_post. The maps have n^2 + 2 n entries."""
    n, C, logits = c.n_streams, c.d_model, 2 * c.n_streams + n_res
    flops = 2 * n * C * logits + 2 * C * (n * n + 2 * n)
    return 2 * c.n_layer * ((n * C + 1) * logits + 3), 2 * c.n_layer * flops, 2 * c.n_layer * (n - 1) * C
