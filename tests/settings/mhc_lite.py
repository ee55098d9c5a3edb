CASES = [dict(n_streams=3)]
NEUTRAL = [dict(), dict(n_streams=1)]
BAD = [dict(n_streams=0), dict(n_streams=7)]
MIXES = {f"blocks.{kind}_connection.{part}" for kind in ("attn", "mlp") for part in ("bias", "phi", "alpha")}
