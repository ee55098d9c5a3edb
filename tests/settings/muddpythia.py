"""What the generic tests run of muddpythia.py beside its defaults."""
CASES = [
    dict(ffn_realloc=False),
]
NEUTRAL = [
    dict(ffn_realloc=False),
]
BAD = [
    dict(n_layer=1),
]
CHANGED = ("F.gelu(self.w1(", "F.silu(self.w1(")
