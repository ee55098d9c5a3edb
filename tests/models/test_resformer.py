"""resformer.py (arXiv:2410.17897) and satformer.py (arXiv:2605.03953) against their papers' equations in float64."""
import torch
from reference import GATED, equations, float64, gpt, linear, sigmoid, softmax  # noqa: F401  (float64: autouse)

import models


def first_values(p, c, x, mixed):
    """A stack whose last k layers, never the first, have mixed(i, n, a, v, first) for values: of reading layer i, layer
    n of all, with the normalised inputs a, its own values and the first layer's.
    """
    first, layers = [], [n for n in range(1, c.n_layer) if c.last_k is None or n >= c.n_layer - c.last_k]

    def mix(n, a, S):
        if n == 0:
            first.extend(S["v"])
        return {**S, "v": mixed(layers.index(n), n, a, S["v"], first)} if n in layers else S
    return gpt(p, c, x, mix)


def resformer(p, c, x):
    """v_n <- lambda1_n v_1 + lambda2_n v_n."""
    def lambdas(i, n):
        """Of reading layer i of n."""
        if c.value_mix == "identity":
            return 0.5, 0.5
        l1, l2 = p["value_mix.logits" if c.value_mix == "plus" else "value_mix.lambda1"], p["value_mix.lambda2"]
        if c.value_mix == "learnable":
            return l1[i], l2[i]
        return p["value_mix.scale"] * softmax([l1[j] for j in range(n)])[i], l2[i]

    def mixed(i, n, a, v, first):
        l1, l2 = lambdas(i, c.n_layer - 1 if c.last_k is None else c.last_k)
        return [[l1 * v1 + l2 * own for v1, own in zip(*at)] for at in zip(first, v)]
    return first_values(p, c, x, mixed)


def value_gates(z, act):
    """The gates of one token, a number per KV head, from their pre-activations."""
    K = len(z)
    soft = [K * w for w in softmax(list(z))]
    return {"relu": [u * (u > 0) for u in z], "sigmoid": [sigmoid(u) for u in z], "identity": list(z), "softmax": soft,
            "tanh": [(torch.exp(u) - torch.exp(-u)) / (torch.exp(u) + torch.exp(-u)) for u in z],
            "softmax_sigmoid": [w * sigmoid(u) for w, u in zip(soft, z)]}[act]


def satformer(p, c, x):
    """v_n <- v_n + alpha_n v_1, alpha_n from the layer's normalised input, per token and KV head."""
    def mixed(i, n, a, v, first):
        alphas = [value_gates(linear(p, f"blocks.{n}.attn.value_gate", u), c.value_act) for u in a]
        return [[own + w * v1 for own, w, v1 in zip(*at)] for at in zip(v, alphas, first)]
    return first_values(p, c, x, mixed)


test_equations = equations(resformer, "resformer", GATED + [
    dict(value_mix="identity"), dict(value_mix="learnable"), dict(last_k=2), dict(value_mix="learnable", last_k=1)],
    n_layer=4, value_mix="plus", last_k=None)
test_equations_of_gates = equations(satformer, "satformer", GATED + [
    *(dict(value_act=act) for act in ("sigmoid", "tanh", "identity", "softmax", "softmax_sigmoid")),
    dict(last_k=1), dict(value_act="softmax_sigmoid", n_kv_head=4, last_k=2)],
    n_layer=4, value_act="relu", last_k=None)


def test_initial_values():
    def lambdas(**options):
        return models.build("resformer", vocab_size=31, n_layer=3, n_head=4, d_model=32, max_len=8, **options).value_mix
    torch.testing.assert_close(torch.stack([torch.stack(pair) for pair in lambdas()()]), torch.tensor([[1.0, 0.5]] * 2))
    assert lambdas(value_mix="identity")() == [(0.5, 0.5)] * 2
    learnable = lambdas(value_mix="learnable")
    assert (learnable.lambda1 == 0.5).all() and (learnable.lambda2 == 0.5).all()


def test_initial_gates():
    model = models.build("satformer", vocab_size=31, n_layer=3, n_head=4, d_model=256)
    assert all(abs(block.attn.value_gate.weight.std() - 0.0197) < 0.002 for block in model.blocks[1:])
