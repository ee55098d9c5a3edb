"""What the generic tests run of resformer.py beside its defaults."""
CASES = [
    dict(value_mix="identity"), dict(value_mix="constant", gate="elementwise"), dict(value_mix="learnable", last_k=1),
]
NEUTRAL = [
    dict(value_mix="learnable"), dict(value_mix="plus", gate="elementwise"),
]
BAD = [
    dict(value_mix="x"), dict(last_k=3),
]
COMPILED = [dict()]
CHANGED = ("self.l.softmax(0)", "self.l.sigmoid()")
