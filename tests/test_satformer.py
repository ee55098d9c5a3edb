"""satformer.py against its paper's equations in float64, arXiv:2605.03953."""
import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    GATED, compare, depends_on_every_parameter, float64, gpt, linear, own_groups, reading_layers, setup, show,
    sigmoid, softmax,
)

import models

OWN = dict(n_layer=4, value_act="relu", last_k=None)
CASES = GATED + [dict(value_act=a) for a in ("sigmoid", "tanh", "identity", "softmax", "softmax_sigmoid")] + [
    dict(last_k=1), dict(value_act="softmax_sigmoid", n_kv_head=4, last_k=2)]


def value_gates(z, act):
    """The gates of one token, a number per KV head, from their pre-activations."""
    K = len(z)
    soft = [K * w for w in softmax(list(z))]
    return {"relu": [u * (u > 0) for u in z], "sigmoid": [sigmoid(u) for u in z], "identity": list(z), "softmax": soft,
            "tanh": [(torch.exp(u) - torch.exp(-u)) / (torch.exp(u) + torch.exp(-u)) for u in z],
            "softmax_sigmoid": [w * sigmoid(u) for w, u in zip(soft, z)]}[act]


def satformer(p, c, x):
    """v_n <- v_n + alpha_n v_1, alpha_n from the layer's normalised input, per token and KV head."""
    first = []

    def mix(n, a, S):
        if n == 0:
            first.extend(S["v"])
        if n not in reading_layers(c):
            return S
        v = []
        for t, u in enumerate(a):
            alpha = value_gates(linear(p, f"blocks.{n}.attn.value_gate", u), c.value_act)
            v.append([S["v"][t][h] + alpha[h] * first[t][h] for h in range(c.n_kv_head)])
        return {**S, "v": v}

    return gpt(p, c, x, mix)


@pytest.mark.parametrize("options", CASES, ids=show)
def test_equations(options):
    compare(satformer, *setup("satformer", **{**OWN, **options}))


def test_reference_depends_on_every_parameter():
    depends_on_every_parameter(satformer, *setup("satformer", **OWN))


def test_softmax_gates_at_zero_are_resformer():
    """With W = 0 each of the K gates is K / K = 1: lambdas (1, 1)."""
    options = dict(n_layer=4, n_kv_head=2)
    sat, *_, idx, _ = setup("satformer", value_act="softmax", **options)
    res = setup("resformer", value_mix="learnable", **options)[0]
    res.load_state_dict(sat.state_dict(), strict=False)
    with torch.no_grad():
        for block in sat.blocks[1:]:
            block.attn.value_gate.weight.zero_()
        res.value_mix.lambda1.fill_(1.0), res.value_mix.lambda2.fill_(1.0)
    torch.testing.assert_close(sat(idx)[0], res(idx)[0], atol=1e-12, rtol=0)


def test_groups():
    assert own_groups(setup("satformer", **OWN)[0]) == ({"blocks.attn.value_gate.weight"}, set())
