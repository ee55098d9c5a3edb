CASES = [dict(gate="elementwise"), dict(gate="headwise", tie_embeddings=True, z_loss=0.001),
         dict(qk_norm=False, n_kv_head=4)]
BAD = [dict(n_head=5), dict(n_kv_head=3), dict(gate="x"), dict(n_layer=0), dict(n_layer="2"), dict(d_model=-8),
       dict(norm_eps=-1.0), dict(rope_theta=float("nan"))]
