"""muddformer.py against its paper's equations in float64, arXiv:2502.12170."""
import pytest
import torch
from measure import SMALL, dtypes_read, extra
from reference import (  # noqa: F401  (float64: autouse)
    GATED, add, attend, compare, depends_on_every_parameter, float64, gelu, linear, mlp_sublayer, norm, own_groups,
    project, rms, setup, show,
)
from small import combined

import models

OWN = dict(n_layer=5, d_ff=128, dynamic=True, multiway=True, streams="qkvr", ffn_realloc=True, pre_post_norm=False,
           period=1, dilation=1, window=None, last_k=None)
CASES = GATED + [dict(dynamic=False), dict(multiway=False), dict(multiway=False, dynamic=False)] + [
    dict(streams=s) for s in ("kvr", "qvr", "qkr", "qkv", "qr")] + [
    dict(period=2), dict(dilation=2), dict(period=2, dilation=2), dict(window=2), dict(window=1, period=3),
    dict(last_k=2, streams="vr", ffn_realloc=False), dict(last_k=1), dict(last_k=4, period=2, pre_post_norm=True),
    dict(pre_post_norm=True), dict(pre_post_norm=True, dilation=2),
    dict(pre_post_norm=True, multiway=False, dynamic=False), dict(ffn_realloc=False), dict(released=True),
    dict(released=True, multiway=False), dict(last_k=0, multiway=False)]


def muddformer(p, c, x):
    """Blocks with four inputs; H = X^R + attn(X^Q, X^K, X^V), X_i = H + mlp(H)."""
    X = [x]
    xq = xk = xv = xr = x
    for i in range(1, c.n_layer + 1):
        at = f"blocks.{i - 1}"
        names = ("q_in_norm", "k_in_norm", "v_in_norm") if c.multiway and i > 1 else ("q_in_norm",) * 3
        inputs = [[norm(p, f"{at}.{name}", u, c) for u in part] for name, part in zip(names, (xq, xk, xv))]
        H = add(xr, attend(p, c, at, project(p, c, at, *inputs)))
        X.append(add(H, mlp_sublayer(p, c, at, H)))
        xq, xk, xv, xr = aggregate(p, c, i, X)
    return xr


def mudd_sources(c, i):
    """Indices j of the X_j that the aggregates after block i sum over."""
    if c.window is not None:                    # the last outputs, and the embedding
        return sorted({0} | {j for j in range(1, i + 1) if j > i - c.window})
    return [j for j in range(i + 1) if (i - j) % c.dilation == 0]


def aggregate(p, c, i, X):
    """X^c = sum_j A_cj X_j for c = Q, K, V, R after block i; after the last block only R."""
    at, last = f"aggregate.{i}", i == c.n_layer
    if i % c.period and not last or c.last_k is not None and i <= c.n_layer - c.last_k:
        return X[i], X[i], X[i], X[i]
    streams = "r" if last else [s for s in "qkvr" if s in c.streams] if c.multiway else "x"
    sources, out = mudd_sources(c, i), {s: [] for s in streams}
    for t, u in enumerate(X[i]):
        A = p[f"{at}.weights.a"]
        assert A.shape == (len(streams), len(sources))
        if c.dynamic:
            A = A + linear(p, f"{at}.weights.w2", gelu(linear(p, f"{at}.weights.w1", rms(u, c)))).view(A.shape)
        for row, s in enumerate(streams):
            if c.pre_post_norm:
                mixed = sum(A[row, m] * norm(p, f"pre_norms.{j}_pre_norm", X[j][t], c) for m, j in enumerate(sources))
                out[s].append(u + norm(p, f"{at}.post_norms.{s}_post_norm", mixed, c))
            else:
                out[s].append(sum(A[row, m] * X[j][t] for m, j in enumerate(sources)))
    return [out["x"]] * 4 if streams == "x" else [out.get(s, X[i]) for s in "qkvr"]


@pytest.mark.parametrize("options", CASES, ids=show)
def test_equations(options):
    compare(muddformer, *setup("muddformer", **{**OWN, **options}))


def test_reference_depends_on_every_parameter():
    depends_on_every_parameter(muddformer, *setup("muddformer", **OWN))


def test_widths():
    """From 0.5 to 1.5 d_ff in equal steps, rounded to multiples of 64."""
    for d_ff, widths in {128: [64, 128, 128, 128, 192], 256: [128, 192, 256, 320, 384], 8: [64] * 5}.items():
        p = setup("muddformer", **{**OWN, "d_ff": d_ff})[1]
        assert [len(p[f"blocks.{n}.mlp.w_up.weight"]) for n in range(5)] == widths


def test_released_widths():
    """MLPs in multiples of 128; K = 4 (i+1), up to the next multiple of 64; after the last block 4 K = 4 (L+1)."""
    p = setup("muddformer", released=True, d_ff=384, n_layer=17)[1]
    widths = [len(p[f"aggregate.{i}.weights.w1.weight"]) for i in range(1, 18)]
    assert widths == [64] * 14 + [128, 128, 128]                # K = 8, 12, .. 60, 64, 68, and 4 * 18
    assert [p[f"aggregate.{i}.weights.w2.weight"].shape for i in (1, 15, 17)] == [(8, 64), (64, 128), (18, 128)]
    assert [len(p[f"blocks.{n}.mlp.w_up.weight"]) for n in (0, 4, 8, 12, 16)] == [256, 256, 384, 512, 512]


@pytest.mark.parametrize("options", [
    dict(), dict(d_ff=1000, n_layer=7), dict(dynamic=False, period=2), dict(streams="kv", dilation=2),
    dict(multiway=False, window=2), dict(multiway=False, dynamic=False), dict(pre_post_norm=True),
    dict(last_k=2, streams="vr"), dict(last_k=3, pre_post_norm=True),
    dict(pre_post_norm=True, streams="kv", period=3, n_layer=5), dict(released=True, n_layer=17)], ids=show)
def test_costs(options):
    """The counter sees matrix products only, the sums over depth are 2 FLOPs for each weight and channel."""
    (parameters, flops, read), counted = extra("muddformer", **options)
    with torch.device("meta"):
        sizes = [a.weights.a.shape for a in models.build("muddformer", **{**SMALL, **options}).aggregate.values()]
    assert (parameters, flops - sum(2 * n * S * 64 for n, S in sizes)) == counted
    assert read == sum(S - 1 for _, S in sizes) * 64


@pytest.mark.parametrize("options", [dict(), dict(dynamic=False), dict(pre_post_norm=True, streams="kv")], ids=show)
def test_states_are_bf16_under_autocast(options):
    assert dtypes_read("muddformer", **options) == {torch.bfloat16}


def test_initial_values():
    """The mixture starts as the last output: one-hot a, no dynamic part. W1 has variance 1 / d_model."""
    small = dict(vocab_size=31, n_layer=3, n_head=4, n_kv_head=2, d_model=32, d_ff=64, max_len=16)
    for i, aggregate in models.build("muddformer", **small).aggregate.items():
        a = aggregate.weights.a
        assert torch.equal(a, torch.eye(int(i) + 1)[-1].expand_as(a)) and (aggregate.weights.w2.weight == 0).all()
    big = models.build("muddformer", **{**small, "d_model": 256})
    assert abs(big.aggregate["2"].weights.w1.weight.std() * 16 - 1) < 0.1
    post = models.build("muddformer", **small, pre_post_norm=True)
    assert all((p == 1e-3).all() for key, p in post.named_parameters() if "post_norm" in key)
    assert all((p == 1).all() for key, p in post.named_parameters() if "pre_norm" in key)
    assert all((p == 0).all() for key, p in post.named_parameters() if key.endswith("weights.a"))


def test_groups():
    mixing = {f"aggregate.weights.{key}" for key in ("a", "w1.weight", "w2.weight")}
    assert own_groups(setup("muddformer", **OWN)[0]) == (set(), mixing)


def test_with_value_residuals_as_docs_combine_them():
    """Mixed with 0 and 1 the values are a layer's own; with 1 and 0 all layers have the first one's."""
    model, p, c, idx, targets = setup("muddformer", **OWN)
    mine = combined("MUDDFormer with value")
    both = mine.Model(mine.Config(**vars(c))).double()
    assert both.load_state_dict(model.state_dict(), strict=False).missing_keys == [
        f"blocks.{i}.attn.value_mix" for i in range(1, c.n_layer)]
    mixes = [block.attn.value_mix for block in both.blocks[1:]]
    assert all(mix.tolist() == [0.5, 0.5] for mix in mixes)
    seen = []
    hooks = [block.attn.wo.register_forward_hook(lambda m, inputs, y: seen.append(inputs[0])) for block in both.blocks]
    with torch.no_grad():
        for own in (1.0, 0.0):
            for mix in mixes:
                mix.copy_(torch.tensor([1 - own, own]))
            logits = both(idx)[0]
            assert torch.allclose(logits, model(idx)[0], rtol=0, atol=1e-12) == (own == 1)
    first = [y[:, 0] for y in seen[-c.n_layer:]]            # token 0 attends to itself: its values
    assert all(torch.allclose(y, first[0], rtol=0, atol=1e-12) for y in first)
    for hook in hooks:
        hook.remove()
    cache = mine.Cache(both, 2, 7)
    steps = torch.cat([both(idx[:, t:t + 1], cache=cache)[0] for t in range(7)], dim=1)
    assert torch.allclose(steps, logits, atol=1e-10)
