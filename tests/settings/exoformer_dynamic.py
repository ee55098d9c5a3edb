"""What the generic tests run of exoformer_dynamic.py beside its defaults."""
CASES = [
    dict(granularity="scalar", norms="none"),
]
NEUTRAL = [
    dict(), dict(granularity="headwise", norms="qk"),
]
BAD = [
    dict(gate="none"), dict(granularity="x"),
]
CHANGED = (".sigmoid().unflatten(-1, (4, 2))", ".tanh().unflatten(-1, (4, 2))")
