CASES = [dict(value_mix="identity", gate="elementwise"), dict(value_mix="learnable", last_k=1)]
NEUTRAL = [dict(value_mix="learnable"), dict(value_mix="plus", gate="elementwise")]
BAD = [dict(value_mix="constant"), dict(last_k=3)]
MIXES = {"value_mix.logits", "value_mix.lambda2", "value_mix.scale"}


def neutral(model):
    """lambda1 = 0, lambda2 = 1."""
    mix = model.value_mix
    (mix.scale if model.config.value_mix == "plus" else mix.lambda1).zero_()
    mix.lambda2.fill_(1.0)
