from settings import filled

CASES = [dict(position="rope", kernel=5, n_kv_head=4), dict(position="alibi", gate="elementwise"),
         dict(position="none", width=8), dict(kernel=0)]
NEUTRAL = [dict(position="rope"), dict(position="rope", kernel=0, gate="headwise")]
BAD = [dict(position="x"), dict(kernel=2), dict(kernel=-1), dict(width=0)]
MIXES = {f"blocks.attn.score_bias.{part}" for part in ("p", "a", "conv_in.weight", "conv_in.bias", "conv_out.weight")}
neutral = filled(conv_out=0.0)
