CASES = [dict(value_embed=False, skip="backout"), dict(lambdas=False, skip="none", gate="headwise"),
         dict(value_embed=False, lambdas=False, n_layer=4)]
NEUTRAL = [dict(), dict(skip="backout", tie_embeddings=True), dict(n_layer=4, gate="elementwise")]
BAD = [dict(skip="x"), dict(n_layer=1), dict(skip="backout", n_layer=2)]
MUON = {"blocks.attn.value_gate.weight"}
MIXES = {"resid", "x0", "skips"}


def neutral(model):
    """Turns off tables, X_0 and skips."""
    for name, p in model.named_parameters():
        if name in ("resid", "x0", "skips", "backout") or name.endswith("value_embed.weight"):
            p.fill_(1.0 if name == "resid" else 0.0)
