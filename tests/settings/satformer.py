CASES = [dict(value_act="softmax_sigmoid", last_k=1), dict(value_act="tanh")]
NEUTRAL = [dict(value_act="relu"), dict(value_act="tanh"), dict(value_act="identity")]
BAD = [dict(value_act="x"), dict(last_k=0)]
MUON = {"blocks.attn.value_gate.weight"}


def neutral(model):
    """W_alpha = 0."""
    for key, p in model.named_parameters():
        if "value_gate" in key:
            p.zero_()
