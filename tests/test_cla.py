"""cla.py against its equations in float64, arXiv:2405.12981, and the size of its cache."""
import pytest
import torch
from measure import dtypes_read, extra
from reference import (  # noqa: F401  (float64: autouse)
    GATED, add, compare, depends_on_every_parameter, float64, heads, linear, mlp_sublayer, norm, own_groups, rope,
    setup, show, sigmoid, softmax)

import models
from nanodepth import timing

OWN = dict(share=2, own=0)
CASES = GATED + [dict(share=3), dict(share=1), dict(n_layer=5), dict(n_layer=5, own=1), dict(n_layer=4, own=2),
                 dict(n_layer=5, share=4, n_kv_head=1), dict(n_layer=2, qk_norm=False, gate="elementwise")]


def maker(c, n):
    """The layer whose keys and values layer n reads."""
    while n > c.own and (n - c.own) % c.share:
        n -= 1
    return n


def cla(p, c, x):
    """Keys and values of a layer are made again for each of its readers, from what it read."""
    read, D = [], c.d_model // c.n_head
    for n in range(c.n_layer):
        at, of = f"blocks.{n}", f"blocks.{maker(c, n)}"
        read.append([norm(p, f"{at}.attn_norm", u, c) for u in x])
        a, b, out = read[n], read[maker(c, n)], []
        for t, u in enumerate(a):
            y = []
            for h, q in enumerate(heads(linear(p, f"{at}.attn.wq", u), c.n_head)):
                kv, scores, values = h * c.n_kv_head // c.n_head, [], []
                q = norm(p, f"{at}.attn.q_norm", q, c) if c.qk_norm else q
                for j in range(t + 1):
                    k = heads(linear(p, f"{of}.attn.wk", b[j]), c.n_kv_head)[kv]
                    k = norm(p, f"{of}.attn.k_norm", k, c) if c.qk_norm else k
                    scores.append(torch.dot(rope(q, t, c), rope(k, j, c)) / D ** 0.5)
                    values.append(heads(linear(p, f"{of}.attn.wv", b[j]), c.n_kv_head)[kv])
                y.append(sum(w * v for w, v in zip(softmax(scores), values)))
            if c.gate != "none":
                g = heads(linear(p, f"{at}.attn.gate", u), c.n_head)
                y = [v * sigmoid(z) for v, z in zip(y, g)]
            out.append(linear(p, f"{at}.attn.wo", torch.cat(y)))
        x = add(x, out)
        x = add(x, mlp_sublayer(p, c, at, x))
    return x


@pytest.mark.parametrize("options", CASES, ids=show)
def test_equations(options):
    compare(cla, *setup("cla", **{**OWN, **options}))


def test_reference_depends_on_every_parameter():
    depends_on_every_parameter(cla, *setup("cla", **OWN))


@pytest.mark.parametrize("L, options, makers", [
    (4, dict(), [0, 2]), (5, dict(), [0, 2, 4]), (12, dict(share=3), [0, 3, 6, 9]), (12, dict(share=12), [0]),
    (12, dict(own=6, share=6), [0, 1, 2, 3, 4, 5, 6]), (5, dict(own=1), [0, 1, 3]),
    (20, dict(own=1), [0, *range(1, 20, 2)]), (20, dict(own=9, share=10), [*range(10), 19])])
def test_cache_and_parameters(L, options, makers):
    """As bench.py counts the bytes of a cache: those of gpt.py times the share of layers with keys and values.

    The last two are CLA2-KeepEnds and CLA2-DenseFront of the paper's table 1, with 11 such layers of 20.
    """
    shape = dict(vocab_size=31, n_layer=L, n_head=4, n_kv_head=2, d_model=32, d_ff=24, max_len=64)
    model, base = models.build("cla", **shape, **options), models.build("gpt", **shape)
    assert [n for n, block in enumerate(model.blocks) if block.attn.wk is not None] == makers
    sizes = [sum(t.nbytes for t in timing.tensors_of(models.module(name).Cache(m, 3, 50)))
             for name, m in (("cla", model), ("gpt", base))]
    assert sizes[0] * L == sizes[1] * len(makers) and sizes[1] == L * 2 * 3 * 2 * 50 * 8 * 8
    missing = set(dict(base.named_parameters())) - set(dict(model.named_parameters()))
    assert missing == {f"blocks.{n}.attn.{part}.weight" for n in range(L) if n not in makers
                       for part in ("wk", "wv", "k_norm")}


@torch.no_grad()
def test_equal_keys_and_values_need_no_sharing():
    """share=1 where the second layer reads what the first one reads and has its keys and values too."""
    one, _, _, idx, _ = setup("cla", share=1, n_layer=2)
    two = setup("cla", share=2, n_layer=2)[0]
    two.load_state_dict(one.state_dict(), strict=False)
    for model in (one, two):
        model.blocks[0].attn.wo.weight.zero_(), model.blocks[0].mlp.w_down.weight.zero_()
    for name in ("attn.wk", "attn.wv", "attn.k_norm", "attn_norm"):
        one.blocks[1].get_submodule(name).load_state_dict(one.blocks[0].get_submodule(name).state_dict())
    two.blocks[1].attn_norm.load_state_dict(two.blocks[0].attn_norm.state_dict())
    assert (one(idx)[0] - two(idx)[0]).abs().max() < 1e-12


def test_groups():
    assert own_groups(setup("cla", **OWN)[0]) == (set(), set())


@pytest.mark.parametrize("options, without", [
    (dict(), 2), (dict(share=4, qk_norm=False), 3), (dict(own=1, share=3), 2)], ids=str)
def test_costs(options, without):
    """4 layers with 2 heads of 16 keys and values each; `without` of them have none."""
    (parameters, flops, read), counted = extra("cla", **options)
    assert (parameters, flops) == counted and read == 0
    assert flops == -without * 2 * 2 * 64 * 32
    assert parameters == -without * (2 * 64 * 32 + 16 * options.get("qk_norm", True))


def test_states_are_bf16_under_autocast():
    assert dtypes_read("cla") == {torch.bfloat16}
