"""depth_attention.py against its equations in float64, arXiv:2606.05014, and what its cache keeps."""
import pytest
import torch
from measure import dtypes_read
from reference import (  # noqa: F401  (float64: autouse)
    GATED, add, attend, compare, depends_on_every_parameter, float64, gpt, norm, own_groups, project, setup, show,
    softmax,
)

import models
import probes
from nanodepth import timing

OWN = dict(n_layer=4, stride=2)
CASES = GATED + [dict(stride=1), dict(stride=3), dict(n_layer=5, stride=1, n_kv_head=1), dict(n_kv_head=4),
                 dict(n_layer=2, qk_norm=False, stride=None)]


def depth_attention(p, c, x):
    """Without rotation: a query and a key of one position are rotated alike."""
    stored, stride = [], c.stride or c.n_layer // 2                                 # [layer][token][head]: (key, value)

    def mix(n, a, S):
        at, group, own = f"blocks.{n}.attn", c.n_head // c.n_kv_head, []

        def ready(s, u):
            return norm(p, f"{at}.{s}_norm", u, c) if c.qk_norm else u

        for t in range(len(a)):
            own.append([])
            for h in range(c.n_kv_head):
                q = sum(ready("q", u) for u in S["q"][t][h * group:(h + 1) * group]) / group
                read = [stored[j][t][h] for j in range(0, n, stride)] + [(ready("k", S["k"][t][h]), S["v"][t][h])]
                weights = softmax([torch.dot(q, k) / len(q) ** 0.5 for k, _ in read])
                own[t].append((read[-1][0], sum(w * v for w, (_, v) in zip(weights, read, strict=True))))
        stored.append(own)
        return {**S, "v": [[v for _, v in token] for token in own]}

    return gpt(p, c, x, mix)


@pytest.mark.parametrize("options", CASES, ids=show)
def test_equations(options):
    compare(depth_attention, *setup("depth_attention", **{**OWN, **options}))


def test_reference_depends_on_every_parameter():
    depends_on_every_parameter(depth_attention, *setup("depth_attention", **OWN))


@torch.no_grad()
def test_parameters_and_cache_are_those_of_gpt():
    """The cache keeps the mixed values: nothing beside them is read when the next token comes."""
    shape = dict(vocab_size=31, n_layer=4, n_head=4, n_kv_head=2, d_model=32, max_len=16)
    model, base = models.build("depth_attention", **shape, zero_init=False), models.build("gpt", **shape)
    assert [(key, p.shape) for key, p in model.named_parameters()] == [
        (key, p.shape) for key, p in base.named_parameters()]
    caches = [models.module(name).Cache(m, 2, 16) for name, m in (("depth_attention", model), ("gpt", base))]
    for name in ("k", "v", "pos"):
        assert [t.shape for t in timing.tensors_of(getattr(caches[0], name))] == [
            t.shape for t in timing.tensors_of(getattr(caches[1], name))]
    own = []
    for block in model.blocks:
        block.attn.wv.register_forward_hook(lambda m, inputs, output: own.append(output.view(2, 5, 2, 8)))
    model(torch.arange(10).view(2, 5), cache=caches[0])
    kept = [v[:, :, :5].transpose(1, 2) for v in caches[0].v]
    assert torch.equal(kept[0], own[0]) and (kept[1] - own[1]).abs().max() > 1e-3


def test_default_is_half_the_layers():
    for L, stride in ((1, 1), (3, 1), (12, 6), (48, 24)):
        assert models.module("depth_attention").Config(n_layer=L).stride == stride


def test_groups():
    assert own_groups(setup("depth_attention", **OWN)[0]) == (set(), set())


def test_costs():
    """With four layers and stride 2 they mix 1, 2, 2 and 3 values of 2 heads with 16 numbers each."""
    config = models.module("depth_attention").Config(n_layer=4, n_head=4, n_kv_head=2, d_model=64, stride=2)
    scores_and_sums, means = 32 * (2 * 8 + 2 * 8 - 4), 4 * 64
    assert probes.of("depth_attention", "costs")(config, 8) == (0, scores_and_sums + means, 2 * 32 * (8 - 4))


def test_states_are_bf16_under_autocast():
    assert dtypes_read("depth_attention") == {torch.bfloat16}
