from settings.kern import MUON, ROUNDING  # noqa: F401

CASES = [dict(router="kern", n_expert=4), dict(n_expert=8, top_k=4, gate="headwise")]
NEUTRAL = [dict()]
BAD = [dict(router="x"), dict(top_k=0), dict(n_expert=4, top_k=5), dict(balance_loss=-0.1)]
MIXES = {"blocks.mlp.router.weight", "aggregate.a", "aggregate.w1.weight", "aggregate.w2.weight"}
