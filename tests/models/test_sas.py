"""sas.py against its equations in float64, arXiv:2507.07694; its initial values, sizes and cache."""
from functools import partial

import pytest
import torch
from reference import add, attend, equations, float64, gpt, linear  # noqa: F401  (float64: autouse)

import models


def conv(p, name, x):
    """out[o][d] = b[o] + sum_i sum_t w[o, i, t] x[i][d + t - (kernel - 1) / 2], with zeros beyond the ends of x[i]."""
    w, b = p[name + ".weight"], p[name + ".bias"]
    edge = torch.zeros((w.size(2) - 1) // 2)
    x = [torch.cat([edge, u, edge]) for u in x]
    D = len(x[0]) - 2 * len(edge)
    return [b[o] + sum(w[o, i, t] * u[t:t + D] for i, u in enumerate(x) for t in range(w.size(2)))
            for o in range(len(w))]


def simulate(p, c, name, x, features=True):
    """G groups of len(x) heads, from one token's heads x."""
    cnn = f"{name}.0" if features else name
    y = conv(p, f"{cnn}.expand", x)
    y = add(y, conv(p, f"{cnn}.refine", [u * (u > 0) for u in y]))
    if features:
        y = [linear(p, f"{name}.1.expand", u) for u in y]
        y = [u + linear(p, f"{name}.1.refine", u * (u > 0)) for u in y]
    return [y[s * len(x):(s + 1) * len(x)] for s in range(c.n_sim)]


def attention(p, c, at, S):
    """The mean of n_sim attentions, each with its own group of simulated heads."""
    made = {s: [simulate(p, c, f"{at}.attn.sim_{s}", u, features=s != "v") for u in S[s]] for s in "qkv"}
    groups = [attend(p, c, at, {**S, **{s: [u[g] for u in made[s]] for s in "qkv"}}) for g in range(c.n_sim)]
    return [sum(y) / c.n_sim for y in zip(*groups)]


test_equations = equations(partial(gpt, attention=attention), "sas", [
    dict(), dict(n_kv_head=4, gate="elementwise", qk_norm=False), dict(n_sim=3, kernel=5, n_layer=1),
    dict(n_kv_head=1, d_sim=14, gate="headwise"), dict(n_sim=1, d_sim=8, kernel=1, tie_embeddings=True)],
    n_layer=2, n_sim=2, d_sim=12, kernel=3)


@torch.no_grad()
def test_initial_values():
    """The maps are uniform within 1 / sqrt(inputs), PyTorch's own default."""
    model = models.build("sas", vocab_size=31, n_layer=1, n_head=8, n_kv_head=4, d_model=512)
    drawn = [(key, p) for key, p in model.named_parameters() if ".sim_" in key]
    assert len(drawn) == 2 * 8 + 4
    for key, p in drawn:
        bound = model.get_submodule(key.rpartition(".")[0]).weight[0].numel() ** -0.5
        assert 0.75 * bound < p.abs().max() <= bound, key
        if p.numel() > 1000:
            assert p.std() == pytest.approx(bound / 3 ** 0.5, rel=0.05) and abs(p.mean()) < 0.05 * bound, key


def test_sizes():
    for d_model, n_head, d_sim in ((768, 12, 96), (160, 5, 48), (24, 4, 10), (8, 4, 4)):
        assert models.module("sas").Config(n_head=n_head, d_model=d_model).d_sim == d_sim
