"""satformer.py against its paper's equations in float64, arXiv:2605.03953."""
import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    GATED, compare, depends_on_every_parameter, float64, gpt, linear, own_groups, reading_layers, setup, show,
    sigmoid, softmax,
)

import models
from nanodepth.devices import flops_per_token
from probes.satformer import costs

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
    depends_on_every_parameter(satformer, *setup("satformer", **{**OWN, "value_act": "sigmoid"}))


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


def test_initial_gates():
    model = models.build("satformer", vocab_size=31, n_layer=3, n_head=4, d_model=256)
    assert all(abs(block.attn.value_gate.weight.std() - 0.0197) < 0.002 for block in model.blocks[1:])


def test_groups():
    assert own_groups(setup("satformer", **OWN)[0]) == ({"blocks.attn.value_gate.weight"}, set())


SHAPE = dict(vocab_size=50, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)


@pytest.mark.parametrize("options", [{}, dict(last_k=2), dict(last_k=1, value_act="softmax_sigmoid", n_kv_head=4)],
                         ids=str)
def test_costs(options):
    """Parameters exactly; FLOPs: the counter sees the gate's product, the formula also the sums."""
    shape = {**SHAPE, "n_kv_head": options.get("n_kv_head", 2)}
    model, base = models.build("satformer", **{**SHAPE, **options}), models.build("gpt", **shape)
    params, flops, read = costs(model.config, 64)
    assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    assert flops_per_token(model, 64) - flops_per_token(base, 64) == flops - 2 * read
    assert read == options.get("last_k", 3) * shape["n_kv_head"] * 16


@pytest.mark.parametrize("value_act", ["relu", "softmax", "softmax_sigmoid"])
def test_gated_values_stay_bf16_under_autocast(value_act):
    """Under autocast a softmax is fp32; the values must stay bf16."""
    model, seen = models.build("satformer", **SHAPE, value_act=value_act).float(), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, **options):
        seen.append(v.dtype)
        return attend(q, k, v, **options)
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        model(torch.zeros(2, 8, dtype=torch.long))
    assert seen == [torch.bfloat16] * 4
