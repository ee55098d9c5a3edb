from settings import filled

CASES = [dict(value_act="softmax_sigmoid", last_k=1), dict(value_act="tanh")]
NEUTRAL = [dict(value_act="relu"), dict(value_act="tanh"), dict(value_act="identity")]
BAD = [dict(value_act="x"), dict(last_k=0)]
MUON = {"blocks.attn.value_gate.weight"}
neutral = filled(value_gate=0.0)
