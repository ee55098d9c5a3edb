from settings import filled

CASES = [dict(granularity="headwise", norms="qk"), dict(granularity="scalar", norms="none")]
NEUTRAL = [dict(), dict(granularity="scalar", norms="none")]
BAD = [dict(gate="headwise"), dict(granularity="x"), dict(norms="v")]
MUON = {"anchor.weight"}
MIXES = {f"blocks.attn.{w}.lambda_{kind}" for w in ("wq", "wk", "wv", "gate") for kind in ("anchor", "self")}
neutral = filled(lambda_anchor=0.0, lambda_self=1.0)
