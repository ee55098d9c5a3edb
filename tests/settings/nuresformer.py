from settings.exoformer import MIXES, neutral  # noqa: F401

CASES = [dict(granularity="headwise", norms="none"), dict(granularity="scalar", norms="qk")]
NEUTRAL = [dict(), dict(granularity="headwise", norms="none")]
BAD = [dict(gate="none"), dict(norms="x"), dict(n_layer=1)]
