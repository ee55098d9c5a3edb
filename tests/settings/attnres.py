"""What the generic tests run of attnres.py beside its defaults."""
MIXES = {"depth_attention.query"}
