"""Probes of exoformer_dynamic.py: exoformer.py's, plus gammas (W_1: C x 16, W_2: 16 x 8, b: 8) per layer."""
from probes import exoformer
from probes.exoformer import neutral, numbers, stats, value_matrix  # noqa: F401


def costs(c, T):
    (params, flops, read), matrices = exoformer.costs(c, T), 16 * (c.d_model + 8)
    return params + c.n_layer * (matrices + 8), flops + c.n_layer * 2 * matrices, read
