CASES = [dict(n_depth_head=1), dict(n_depth_head=4, gate="headwise")]
BAD = [dict(n_depth_head=0), dict(n_depth_head=3)]
MIXES = {"depth_attention.query"}
NO_DEPTH_MATRIX = True          # its weights act on slices of channels
NEUTRAL = [dict()]
