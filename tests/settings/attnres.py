MIXES = {"depth_attention.query"}
