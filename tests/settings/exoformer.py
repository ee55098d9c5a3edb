CASES = [dict(granularity="headwise", norms="qk"), dict(granularity="scalar", norms="none")]
NEUTRAL = [dict(), dict(granularity="scalar", norms="none")]
BAD = [dict(gate="headwise"), dict(granularity="x"), dict(norms="v")]
MUON = {"anchor.weight"}
MIXES = {f"blocks.attn.{w}.lambda_{kind}" for w in ("wq", "wk", "wv", "gate") for kind in ("anchor", "self")}


def neutral(model, own=1.0):
    """own: lambda_self."""
    for key, p in model.named_parameters():
        if "lambda" in key:
            p.fill_(own if key.endswith("lambda_self") else 0.0)
