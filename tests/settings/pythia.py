CASES = [dict(n_kv_head=1, z_loss=0.001)]
BAD = [dict(d_model=48), dict(n_kv_head=3), dict(gate="headwise")]
