from settings.mhc import MIXES  # noqa: F401

CASES = [dict(n_streams=3)]
NEUTRAL = [dict(), dict(n_streams=1)]
BAD = [dict(n_streams=0), dict(n_streams=7)]
