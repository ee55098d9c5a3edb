"""What the generic tests run of attnres_delta.py beside its defaults."""
CASES = [dict(gate="headwise")]
MIXES = {"depth_attention.query"}
