CASES = [dict(block_size=1), dict(block_size=2, gate="headwise"), dict(block_size=9)]
NEUTRAL = [dict(block_size=1), dict(block_size=4), dict(block_size=9)]
BAD = [dict(block_size=0)]
MIXES = {"depth_attention.query"}
