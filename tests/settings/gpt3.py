CASES = [dict(n_kv_head=4, tie_embeddings=True)]
BAD = [dict(n_head=5), dict(n_kv_head=3), dict(rope_theta=10000.0)]
