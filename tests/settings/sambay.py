"""What the generic tests run of sambay.py beside its defaults."""
CASES = [
    dict(n_layer=8, window=5), dict(n_layer=6, window=2, gmu=False, gate="headwise"),
    dict(n_layer=5, qk_norm=False, d_state=3),
]
BAD = [
    dict(window=1), dict(d_state=0), dict(gmu="x"),
]
CHANGED = ("F.silu(self.w_gate(x)) * shared", "F.gelu(self.w_gate(x)) * shared")
LINES = 220
