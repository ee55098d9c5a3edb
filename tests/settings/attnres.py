"""What the generic tests run of attnres.py beside its defaults."""
MIXES = {"depth_attention.query"}
CHANGED = ("dim=-1).softmax(-1)", "dim=-1).mul(2).softmax(-1)")
