CASES = [dict(share=3, n_layer=5, gate="headwise"), dict(own=2, share=2, n_layer=4, qk_norm=False)]
NEUTRAL = [dict(share=1), dict(share=1, own=2, gate="elementwise")]
BAD = [dict(share=0), dict(share=4), dict(own=3), dict(own=-1), dict(own=2)]
