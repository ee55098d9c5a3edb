CASES = [dict(n_layer=8, window=5), dict(n_layer=6, window=2, gmu=False, gate="headwise"),
         dict(n_layer=5, qk_norm=False, d_state=3)]
BAD = [dict(window=1), dict(d_state=0), dict(gmu="x")]
MUON = {f"blocks.attn.{key}.weight" for key in ("w_u", "w_z", "w_rank", "w_dt", "w_write", "w_read", "w_gate")}
MIXES = {f"blocks.attn.{key}" for key in ("A_log", "skip", "dt_bias", "conv.weight", "conv.bias")}
LINES = 220
SHALLOW = 6                     # of all kinds of mixers one
