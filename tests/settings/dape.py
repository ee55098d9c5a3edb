"""What the generic tests run of dape.py beside its defaults."""
CASES = [
    dict(position="rope", kernel=5), dict(position="alibi", gate="elementwise"), dict(position="none", width=8),
    dict(conv="heads"), dict(conv="heads", position="rope", kernel=7, n_kv_head=4), dict(kernel=1), dict(kernel=0),
]
NEUTRAL = [
    dict(position="rope"), dict(position="rope", kernel=5, gate="headwise"), dict(position="rope", conv="heads"),
]
BAD = [
    dict(position="x"), dict(conv="x"), dict(kernel=2), dict(kernel=-1), dict(width=0), dict(kernel=0, width=8),
    dict(conv="heads", width=8), dict(conv="heads", kernel=9),
]
CHANGED = ("F.leaky_relu", "F.elu")
