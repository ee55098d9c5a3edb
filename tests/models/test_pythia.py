"""pythia.py (GPT-NeoX's parallel block, arXiv:2204.06745), muddpythia.py (2502.12170) and gpt3.py against loops in
float64; initial values. test_convert.py compares pythia and gpt3 with transformers' models.
"""
import math
from functools import partial

import pytest
import torch
from reference import add, attend, equations, float64, gelu, gpt, linear, norm, project, rope  # noqa: F401
from test_muddformer import aggregate

import models


def turned(u, pos, c):
    """A quarter of a head is rotated."""
    quarter = len(u) // 4
    return torch.cat([rope(u[:quarter], pos, c), u[quarter:]])


def mlp(p, c, at, x, act=gelu):
    return [linear(p, f"{at}.mlp.w_down", act(linear(p, f"{at}.mlp.w_up", norm(p, f"{at}.mlp_norm", u, c)))) for u in x]


def block(p, c, n, xq, xk, xv, xr):
    """X^R + attn(norm_q X^Q, norm_k X^K, norm_v X^V) + mlp(norm X^R); pythia has one norm for the three."""
    at = f"blocks.{n}"
    inputs = [[norm(p, f"{at}.{s}_in_norm" if f"{at}.{s}_in_norm.weight" in p else f"{at}.attn_norm", u, c) for u in x]
              for s, x in zip("qkv", (xq, xk, xv))]
    return add(add(xr, attend(p, c, at, project(p, c, at, *inputs), rotate=turned)), mlp(p, c, at, xr))


def pythia(p, c, x):
    for n in range(c.n_layer):
        x = block(p, c, n, x, x, x, x)
    return x


def muddpythia(p, c, x):
    X, streams = [x], [x] * 4
    for i in range(1, c.n_layer + 1):
        X.append(block(p, c, i - 1, *streams))
        streams = aggregate(p, c, i, X)
    return streams[-1]


def gpt3(p, c, x):
    """Learned positions, and GPT-2's approximation of gelu."""
    def act(x):
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))) / 2
    x = [u + p["pos_embed.weight"][t] for t, u in enumerate(x)]
    return gpt(p, c, x, attention=partial(attend, rotate=lambda u, t, c: u), mlp=partial(mlp, act=act))


COMMON = dict(vocab_size=29, n_layer=3, n_head=4, d_model=64, d_ff=48, max_len=9, norm_eps=1e-5, z_loss=0.01)
CASES = [dict(), dict(n_kv_head=2), dict(n_kv_head=1, tie_embeddings=True), dict(d_ff=None, norm_eps=0.1)]
test_equations = equations(pythia, "pythia", CASES, COMMON, 0.2)
test_equations_of_gpt3 = equations(gpt3, "gpt3", CASES, COMMON, 0.2)
test_equations_of_muddpythia = equations(muddpythia, "muddpythia", [
    dict(), dict(n_kv_head=2, d_ff=300), dict(tie_embeddings=True, n_layer=2, norm_eps=0.1)],
    COMMON, 0.2, rope_theta=50.0)


@pytest.mark.parametrize("L, d, h", [(24, 2048, 16), (32, 2560, 32)])
def test_widths(L, d, h):
    """Of the MLPs at the two sizes of arXiv:2502.12170, table 3, within rounding."""
    with torch.device("meta"):
        model = models.build("muddpythia", n_layer=L, d_model=d, n_head=h)
    widths = [block.mlp.w_up.out_features for block in model.blocks]
    assert abs(sum(widths) / (4 * d * L) - 1) < 0.005 and (widths[0], widths[-1]) == (2 * d, 6 * d)
    assert all(abs(f - 4 * d * (0.5 * (L - i) + 1.5 * (i - 1)) / (L - 1)) <= 64 for i, f in enumerate(widths, start=1))


@pytest.mark.parametrize("name, std, last", [
    ("gpt3", 0.02, 0.02 / math.sqrt(8)), ("pythia", math.sqrt(2 / 5 / 256), 2 / 4 / 16),
    ("muddpythia", math.sqrt(2 / 5 / 256), 2 / 4 / 16)])
def test_initial_values(name, std, last):
    """`last` in front of the residual stream, 0 biases, norms 1."""
    torch.manual_seed(0)
    model = models.build(name, vocab_size=512, n_layer=4, n_head=4, d_model=256, max_len=512)
    for key, p in model.named_parameters():
        module, kind = key.split(".")[-2:]
        if kind == "bias" or module == "w2":
            assert (p == 0).all(), key
        elif module.endswith("norm"):
            assert (p == 1).all(), key
        elif kind == "a":
            assert torch.equal(p, torch.eye(p.size(1))[-1:].expand_as(p)), key
        else:
            want = last if module in ("wo", "w_down") else 256 ** -0.5 if module == "w1" else std
            assert abs(p.std() / want - 1) < 0.03 or p.numel() < 4096 and abs(p.std() / want - 1) < 0.1, key
            assert abs(p.mean()) < 5 * want / math.sqrt(p.numel()) and p.abs().max() > 2.5 * want, key
