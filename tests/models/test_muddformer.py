"""muddformer.py and muddformer_ablations.py against their paper's equations in float64: arXiv:2502.12170, table 5 and
figure 9.
"""
from types import SimpleNamespace

import torch
from reference import (  # noqa: F401  (float64: autouse)
    GATED, add, attend, equations, float64, gelu, linear, mlp_sublayer, norm, project, rms, setup)
from small import combined

import models

OWN = dict(n_layer=5, d_ff=256)
# the defaults of muddformer_ablations.py are muddformer.py
ALL = dict(dynamic=True, multiway=True, streams="qkvr", ffn_realloc=True, period=1, dilation=1, window=0, last_k=None)


def mixed(c, i):
    """(streams, sources) of the mixtures after block i: the head's after the last one."""
    c = SimpleNamespace(**ALL | vars(c))
    if i % c.period and i != c.n_layer or c.last_k is not None and i <= c.n_layer - c.last_k:
        return "", []
    sources = [j for j in range(i + 1) if (i - j) % c.dilation == 0]
    if c.window:                                # the last outputs, and the embedding
        sources = sorted({0} | {j for j in range(1, i + 1) if j > i - c.window})
    return "r" if i == c.n_layer else [s for s in "qkvr" if s in c.streams] if c.multiway else "x", sources


def muddformer(p, c, x, mlp=mlp_sublayer):
    """Blocks with four inputs; H = X^R + attn(X^Q, X^K, X^V), X_i = H + mlp(H)."""
    X = [x]
    xq = xk = xv = xr = x
    for i in range(1, c.n_layer + 1):
        at = f"blocks.{i - 1}"
        names = [f"{at}.{s}_in_norm" if f"{at}.{s}_in_norm.weight" in p else f"{at}.q_in_norm" for s in "qkv"]
        inputs = [[norm(p, name, u, c) for u in part] for name, part in zip(names, (xq, xk, xv))]
        H = add(xr, attend(p, c, at, project(p, c, at, *inputs)))
        X.append(add(H, mlp(p, c, at, H)))
        xq, xk, xv, xr = aggregate(p, c, i, X)
    return xr


def aggregate(p, c, i, X):
    """X^c = sum_j A_cj X_j after block i, for the streams; the other inputs are X_i. Stream x: all four inputs."""
    streams, sources = mixed(c, i)
    at, out = f"aggregate.{i - 1}", {s: [] for s in streams}
    for t, u in enumerate(X[i] if streams else []):
        A = p[f"{at}.a"]
        assert A.shape == (len(streams), len(sources))
        if f"{at}.w1.weight" in p:
            A = A + linear(p, f"{at}.w2", gelu(linear(p, f"{at}.w1", rms(u, c)))).view(A.shape)
        for row, s in enumerate(streams):
            if f"post_norms.{i - 1}.{row}.weight" in p:
                y = sum(A[row, m] * norm(p, f"pre_norms.{j}", X[j][t], c) for m, j in enumerate(sources))
                out[s].append(u + norm(p, f"post_norms.{i - 1}.{row}", y, c))
            else:
                out[s].append(sum(A[row, m] * X[j][t] for m, j in enumerate(sources)))
    return [out["x"]] * 4 if streams == "x" else [out.get(s, X[i]) for s in "qkvr"]


test_equations = equations(muddformer, "muddformer", GATED + [
    dict(pre_post_norm=True), dict(pre_post_norm=True, n_layer=2), dict(n_layer=15, d_ff=24)], **OWN)
test_equations_of_ablations = equations(muddformer, "muddformer_ablations", [
    dict(period=2, dilation=2), dict(window=2, multiway=False, ffn_realloc=False), dict(last_k=2, streams="vr"),
    dict(dynamic=False, streams="qkr"), dict(multiway=False, dynamic=False), dict(streams="kvr"),
    dict(streams="qvr"), dict(streams="qkv"), dict(window=1, period=3), dict(last_k=4, period=2),
    dict(multiway=False, dilation=3), dict(last_k=0, multiway=False), dict()], **OWN)


def test_widths_of_ablations():
    """w1 of n S, up to the next multiple of 64; after the last block 4 S; without re-allocation MLPs have d_ff."""
    def widths(**options):
        p = setup("muddformer_ablations", n_layer=20, d_ff=24, ffn_realloc=False, **options)[1]
        assert {len(q) for key, q in p.items() if "w_up" in key} == {24}
        return [len(q) for key, q in p.items() if ".w1." in key]
    assert widths(multiway=False) == [64] * 19 + [128] and widths(streams="vr") == [64] * 19 + [128]
    assert widths(streams="qkv") == [64] * 19 + [128] and widths(streams="qkvr") == [64] * 14 + [128] * 6
    assert widths(window=8) == [64] * 20 and widths(period=7) == [64, 64, 128]


def test_initial_values():
    """The mixture starts as the last output: one-hot a, no dynamic part. W1 has variance 1 / d_model."""
    small = dict(vocab_size=31, n_layer=3, n_head=4, d_model=256, d_ff=64, max_len=16)
    for name in ("muddformer", "muddmoe"):
        for m in models.build(name, **small).aggregate:
            assert torch.equal(m.a, torch.eye(m.a.size(1))[-1].expand_as(m.a)) and (m.w2.weight == 0).all()
            assert abs(m.w1.weight.std() * 16 - 1) < 0.1
    for key, p in models.build("muddformer", **small, pre_post_norm=True).named_parameters():
        if "norm" in key or key.endswith(".a"):
            assert (p == (1e-3 if "post_norms" in key else 1.0 if "norm" in key else 0.0)).all(), key


@torch.no_grad()
def test_with_value_residuals_as_docs_combine_them():
    """Mixed with 0 and 1 the values are a layer's own; with 1 and 0 all layers have the first one's."""
    model, p, c, idx, _ = setup("muddformer", **OWN)
    mine, seen = combined("MUDDFormer with value"), []
    both = mine.Model(mine.Config(**vars(c))).double()
    assert both.load_state_dict(model.state_dict(), strict=False).missing_keys == [
        f"blocks.{i}.attn.value_mix" for i in range(1, c.n_layer)]
    for block in both.blocks:
        block.attn.wo.register_forward_hook(lambda m, inputs, y: seen.append(inputs[0][:, 0]))  # token 0 sees its value
    mixes = [block.attn.value_mix for block in both.blocks[1:]]
    assert all(mix.tolist() == [0.5, 0.5] for mix in mixes)
    for own in (1.0, 0.0):
        for mix in mixes:
            mix.copy_(torch.tensor([1 - own, own]))
        assert torch.allclose(both(idx)[0], model(idx)[0], rtol=0, atol=1e-12) == (own == 1)
    assert all(torch.allclose(y, seen[-c.n_layer], rtol=0, atol=1e-12) for y in seen[-c.n_layer:])
