CASES = [dict(dynamic=False), dict(multiway=False, ffn_realloc=False), dict(streams="kv"),
         dict(period=2, dilation=2, n_layer=4), dict(last_k=2, streams="vr")]
NEUTRAL = [dict(ffn_realloc=False, **options) for options in (
    dict(), dict(dynamic=False), dict(multiway=False), dict(streams="kr"), dict(period=2, dilation=2), dict(window=1),
    dict(last_k=0, multiway=False))]
BAD = [dict(n_layer=1), dict(streams="x"), dict(streams=""), dict(multiway=False, streams="q"), dict(period=0),
       dict(dilation=-1), dict(window=-1), dict(last_k=-1), dict(last_k=4)]
MIXES = {"aggregate.a", "aggregate.w1.weight", "aggregate.w2.weight"}
