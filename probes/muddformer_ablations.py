"""Probes of muddformer_ablations.py, mostly muddformer.py's."""
from probes.muddformer import stats, streams, token_weights  # noqa: F401


def neutral(model):
    """Nothing to set. ValueError for options with which it never equals the baseline."""
    if model.config.ffn_realloc:
        raise ValueError("ffn_realloc gives the MLPs other widths than gpt.py's")
