CASES = [dict(stride=1, gate="headwise"), dict(n_layer=4, n_kv_head=1, qk_norm=False)]
NEUTRAL = [dict(n_layer=1), dict(n_layer=1, n_kv_head=1, gate="elementwise")]
BAD = [dict(stride=0), dict(stride=-1)]
