"""What the generic tests run of sambay.py beside its defaults."""
CASES = [
    dict(n_layer=8, window=5, scan_chunk=4), dict(n_layer=6, window=2, gmu="none", gate="headwise"),
    dict(n_layer=5, gmu="sigmoid", qk_norm=False, d_conv=1, d_state=3, scan_chunk=1),
]
BAD = [
    dict(window=1), dict(gmu="x"), dict(n_layer=1), dict(scan_chunk=0),
]
CHANGED = ("F.silu(self.w_gate(x)) * memory", "F.gelu(self.w_gate(x)) * memory")
