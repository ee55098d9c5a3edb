"""Probes of muddformer_ablations.py, mostly muddformer.py's."""
from probes.muddformer import stats, streams, token_weights  # noqa: F401
