"""satformer.py against its paper's equations in float64, arXiv:2605.03953."""
import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    GATED, compare, float64, gpt, linear, reading_layers, setup, show, sigmoid, softmax)

import models

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
    compare(satformer, *setup("satformer", **{**dict(n_layer=4, value_act="relu", last_k=None), **options}))


def test_initial_gates():
    model = models.build("satformer", vocab_size=31, n_layer=3, n_head=4, d_model=256)
    assert all(abs(block.attn.value_gate.weight.std() - 0.0197) < 0.002 for block in model.blocks[1:])
