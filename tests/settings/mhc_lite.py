"""What the generic tests run of mhc_lite.py beside its defaults."""
CASES = [dict(n_streams=3)]
NEUTRAL = [dict(), dict(n_streams=1)]
BAD = [dict(n_streams=0), dict(n_streams=7)]
CHANGED = ("2 * post.sigmoid()", "3 * post.sigmoid()")
