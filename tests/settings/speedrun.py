from settings import filled

CASES = [dict(value_embed=False, skip="backout"), dict(lambdas=False, skip="none", gate="headwise"),
         dict(value_embed=False, lambdas=False, n_layer=4)]
NEUTRAL = [dict(), dict(skip="backout", tie_embeddings=True), dict(n_layer=4, gate="elementwise")]
BAD = [dict(skip="x"), dict(n_layer=1), dict(skip="backout", n_layer=2)]
MUON = {"blocks.attn.value_gate.weight"}
MIXES = {"resid", "x0", "skips"}
neutral = filled(resid=1.0, x0=0.0, skips=0.0, backout=0.0, value_embed=0.0)
