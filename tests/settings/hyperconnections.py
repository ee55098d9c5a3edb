CASES = [dict(n_streams=2), dict(dynamic=False, n_streams=3), dict(n_streams=1)]
NEUTRAL = [dict(), dict(n_streams=1), dict(dynamic=False, n_streams=3)]
BAD = [dict(n_streams=0)]
MIXES = {f"blocks.{kind}_connection.{part}" for kind in ("attn", "mlp") for part in ("static", "W", "scale")}
