CASES = [dict(gate="elementwise", tie_embeddings=True), dict(n_kv_head=4, qk_norm=False)]
MIXES = {"blocks.attn_geodesic.scale", "blocks.mlp_geodesic.scale"}
