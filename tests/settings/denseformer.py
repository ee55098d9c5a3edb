CASES = [dict(dilation=2, period=3, n_layer=7), dict(period=2, gate="headwise")]
NEUTRAL = [dict(), dict(dilation=2, period=3, n_layer=7)]
BAD = [dict(period=0), dict(period=4), dict(dilation=0), dict(dilation=4), dict(dilation=3, period=2)]
MIXES = {"average.alpha"}
