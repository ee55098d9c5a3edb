from settings import exoformer

CASES = [dict(granularity="scalar", norms="none")]
NEUTRAL = [dict(), dict(granularity="headwise", norms="qk")]
BAD = [dict(gate="none"), dict(granularity="x")]
MUON = {"anchor.weight", "blocks.attn.gamma.mix_in.weight", "blocks.attn.gamma.mix_out.weight"}
MIXES = {f"blocks.attn.{w}.lambda_{kind}" for w in ("wq", "wk", "wv", "gate") for kind in ("anchor", "self")}


def neutral(model):
    exoformer.neutral(model, own=2.0)           # a gamma starts at 1/2
