CASES = [dict(gate="elementwise", tie_embeddings=True), dict(n_kv_head=4, qk_norm=False)]
BAD = [dict(n_head=5), dict(gate="x")]
MIXES = {"blocks.attn_geodesic.scale", "blocks.mlp_geodesic.scale"}
