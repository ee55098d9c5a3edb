CASES = [dict(n_streams=2, sinkhorn_steps=3)]
NEUTRAL = [dict(), dict(n_streams=3), dict(n_streams=1)]
BAD = [dict(n_streams=0), dict(sinkhorn_steps=0)]
MIXES = {f"blocks.{kind}_connection.{part}" for kind in ("attn", "mlp") for part in ("bias", "phi", "alpha")}
