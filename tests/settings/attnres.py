MIXES = {"depth_attention.query"}
NEUTRAL = [dict()]
