"""What the generic tests run of attnres_delta.py beside its defaults."""
CASES = [dict(gate="headwise")]
MIXES = {"depth_attention.query"}
CHANGED = ("dim=-1).softmax(-1)", "dim=-1).mul(2).softmax(-1)")
