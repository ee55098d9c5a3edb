CASES = [dict(pre_post_norm=True), dict(n_layer=2, gate="headwise")]
BAD = [dict(n_layer=1), dict(gate="x")]
MIXES = {"aggregate.a", "aggregate.w1.weight", "aggregate.w2.weight"}
