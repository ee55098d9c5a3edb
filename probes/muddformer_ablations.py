"""Probes of muddformer_ablations.py, mostly muddformer.py's."""
import torch

from models.more.muddformer_ablations import Model
from probes.muddformer import connections, mixtures, stats, streams, token_weights, wider  # noqa: F401


def costs(c, T):
    with torch.device("meta"):
        sizes = [(*m.a.shape, m.w2.in_features if c.dynamic else 0) for m in mixtures(Model(c))]
    parameters, flops, read = connections(c, sizes)
    norms, more = 2 * c.n_layer * c.multiway, wider(c) if c.ffn_realloc else 0      # of keys and values
    return parameters + c.d_model * (norms + 3 * more), flops + 6 * c.d_model * more, read


def neutral(model):
    """Nothing to set. ValueError for options with which it never equals the baseline."""
    if model.config.ffn_realloc:
        raise ValueError("ffn_realloc gives the MLPs other widths than gpt.py's")
