from settings import filled
from settings.exoformer import MIXES  # noqa: F401

CASES = [dict(granularity="scalar", norms="none")]
NEUTRAL = [dict(), dict(granularity="headwise", norms="qk")]
BAD = [dict(gate="none"), dict(granularity="x")]
MUON = {"anchor.weight", "blocks.attn.gamma.mix_in.weight", "blocks.attn.gamma.mix_out.weight"}
neutral = filled(lambda_anchor=0.0, lambda_self=2.0)            # a gamma starts at 1/2
