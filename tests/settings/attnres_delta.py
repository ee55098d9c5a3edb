CASES = [dict(gate="headwise")]
MIXES = {"depth_attention.query"}
NEUTRAL = [dict()]
