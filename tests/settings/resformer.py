from settings import filled

CASES = [dict(value_mix="identity", gate="elementwise"), dict(value_mix="learnable", last_k=1)]
NEUTRAL = [dict(value_mix="learnable"), dict(value_mix="plus", gate="elementwise")]
BAD = [dict(value_mix="constant"), dict(last_k=3)]
MIXES = {"value_mix.logits", "value_mix.lambda2", "value_mix.scale"}
neutral = filled(lambda1=0.0, scale=0.0, lambda2=1.0)
