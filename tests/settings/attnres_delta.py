CASES = [dict(gate="headwise")]
MIXES = {"depth_attention.query"}
