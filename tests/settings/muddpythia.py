CASES = [dict(n_layer=2, n_kv_head=1)]
BAD = [dict(n_layer=1), dict(d_model=48)]
MIXES = {"aggregate.a", "aggregate.w1.weight", "aggregate.w2.weight"}
