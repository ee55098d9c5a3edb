"""inside.py: every number against a known answer or a naive computation in float64."""
import math
from itertools import permutations, product
from unittest.mock import patch

import pytest
import settings
import torch
import torch.nn.functional as F
from analysis import ROOT, check_depth, double, numbers, passed, random_model, tokens  # noqa: F401

import models
import probes
from nanodepth import inside

CASES = [(name, options) for name in models.names() for options in ({}, *settings.of(name, "CASES"))]

# ------------------------------------------------------------------------------------------------------------ attention


@torch.no_grad()
def test_attention_of_every_layer_and_head_against_loops():
    """From each layer's own q and k."""
    model, (idx, targets) = random_model(ROOT), tokens(2, 40)
    with patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as attention:
        model(idx)
    found = inside.measure(model, [(idx, targets)])
    sources = {(b, t): [s for s in range(1, t) if idx[b, s - 1] == idx[b, t]] for b, t in product(range(2), range(40))}
    repeats = sum(map(bool, sources.values()))
    assert attention.call_count == 3 and 0 < repeats < 80
    for layer, (q, k, _) in enumerate(call.args for call in attention.call_args_list):
        scores = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(2, 1)) / math.sqrt(8)
        weights = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf).softmax(-1)
        for h in range(4):
            w = weights[:, h].tolist()
            wanted = {"entropy": -sum(x * math.log(x) for row in w for at in row for x in at if x) / 80,
                      "sink": sum(w[b][t][0] for b in range(2) for t in range(1, 40)) / 78,
                      "induction": sum(w[b][t][s] for (b, t), at in sources.items() for s in at) / repeats}
            assert {name: found[name][layer][h] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("kind", ["causal", "mask", "bias", "none"])
def test_attention_weights_are_those_of_torch(kind):
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    options = {"causal": dict(is_causal=True), "mask": dict(attn_mask=torch.ones(6, 6).tril(1).bool()),
               "bias": dict(attn_mask=torch.randn(6, 6), scale=0.3), "none": {}}[kind]
    seen = []
    with inside.SeeAttention(seen.append):
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    assert len(seen) == 1 and torch.allclose(seen[0] @ v.repeat_interleave(2, 1), out, rtol=0, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- hidden states


def moments(x):
    return x.mT @ x / len(x), x.mean(0)


def test_core_features():
    torch.manual_seed(0)
    plane = torch.linalg.qr(torch.randn(20, 3))[0]
    points = torch.randn(500, 3)
    points = torch.linalg.qr(points - points.mean(0))[0]            # centred, orthogonal: equal variances
    shifted = points @ plane.T + torch.randn(20)                    # rank 3, a mean that is not variance
    assert inside.core_features(*moments(shifted)) == 3
    assert inside.core_features(*moments((points * torch.tensor([1, 0.05, 0.05])) @ plane.T)) == 1
    assert inside.core_features(*moments(torch.cat((torch.eye(150), -torch.eye(150))))) == 149     # 99% of 150: 148.5
    assert inside.core_features(*moments(torch.ones(50, 20))) == 0


@torch.no_grad()
def test_similarities_and_lens_against_a_plain_forward_pass():
    model = random_model(ROOT)
    idx, targets = tokens()
    x, states = model.embed(idx), []
    for block in model.blocks:
        states.append(x)
        x = block(x, model.rope(12, None))
    states.append(x)
    found = numbers(model)
    for i, j in product(range(4), range(4)):
        pairs = zip(states[i].flatten(0, 1), states[j].flatten(0, 1))
        cos = [F.cosine_similarity(a, b, dim=0).item() for a, b in pairs]
        assert found["layer_similarity"][i][j] == pytest.approx(sum(cos) / len(cos))
    for i, state in enumerate(states):
        pairs = [F.cosine_similarity(x[a], x[b], dim=0).item() for x in state for a, b in permutations(range(12), 2)]
        assert found["token_similarity"][i] == pytest.approx(sum(pairs) / len(pairs))
        logp = model.head(model.final_norm(state)).log_softmax(-1)
        assert found["lens"][i] == pytest.approx(-logp.gather(-1, targets[..., None]).mean().item())
    assert found["loss"] == pytest.approx(model(idx, targets)[1].item())


# ---------------------------------------------------------------------------------------------- any model, any batches


def watched(model, *arguments):
    """numbers(); skips a user's own model whose parts have other names."""
    try:
        return numbers(model, *arguments)
    except ValueError as e:
        if not any(words in str(e) for words in ("probe needs a model with embed", "probe cannot measure it")):
            raise
        pytest.skip(str(e))


@pytest.mark.parametrize("name, options", CASES, ids=settings.show)
def test_every_model_is_watched(name, options):
    model = random_model(name, **options)
    found, L = watched(model), len(model.blocks)
    assert len(found["lens"]) == len(found["core_features"]) == L + 1
    assert found["loss"] == pytest.approx(model(*tokens())[1].item()) and found["tokens"] == 24
    no_sum = settings.of(name, "NO_DEPTH_MATRIX", False) or options.get("pre_post_norm")
    if settings.belongs(name) and not no_sum:
        assert found["depth_error"] < 1e-9
        check_depth(model)
    assert (found["depth"] == {}) == (found["depth_error"] > 1e-3)                  # what is no sum is not shown as one
    assert found["entropy"] is None or len(found["entropy"]) == L
    assert set(found) >= set(numbers(random_model(ROOT)))
    stats = probes.stats(name, model, tokens()[0])
    assert all(stats.values()) and (stats or not hasattr(probes.find(name), "stats"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", models.names())
def test_batches_are_averaged(name):
    model = random_model(name)
    (a, b), (c, d) = tokens(2), tokens(4, seed=1)
    one = watched(model, [(torch.cat((a, c)), torch.cat((b, d)))])
    two = watched(model, [(a, b), (c, d)])

    def leaves(x):
        x = list(x.values()) if isinstance(x, dict) else x
        return [y for value in x for y in leaves(value)] if isinstance(x, list) else [x] if x is not None else []
    for key, value in one.items():
        if key != "depth_error":                                    # a ratio in each batch
            assert leaves(value) == pytest.approx(leaves(two[key]), rel=1e-6, abs=1e-9), key


def test_the_stream_of_a_model_without_probes():
    """What is multiplied is still a sum of outputs; what is squashed is none, which is noticed. One layer has no
    neighbours; five have more outputs than channels."""
    assert numbers(random_model(ROOT, n_layer=1))["adjacent"] == {}
    check_depth(random_model(ROOT, n_layer=5, n_head=2, d_model=8))
    model = random_model(ROOT)
    with model.blocks[1].register_forward_hook(lambda m, inputs, output: 1.5 * output):
        check_depth(model)
        assert numbers(model)["depth"]["r"][6] == pytest.approx([1.5] * 5 + [1, 1])
    model.blocks[1].register_forward_hook(lambda m, inputs, output: output.tanh())
    found = numbers(model)
    assert found["depth_error"] > 1e-2 and found["depth"] == {}


def test_models_that_cannot_be_watched():
    model = random_model(ROOT)
    model.blocks[2].mlp_norm.forward = lambda x: model.blocks[1].mlp_norm(x)        # one is called twice
    with pytest.raises(ValueError, match="does not call attn_norm, attn, mlp_norm and mlp once each"):
        numbers(model)
    del model.blocks[2].mlp_norm
    with pytest.raises(ValueError, match="probe needs a model with embed, final_norm, head"):
        numbers(model)


def test_copying_against_loops():
    """A table of next-token logits, tokens of three kinds: what followed before in the row, by a set of its pairs."""
    table = torch.randn(3, 3)

    def model(idx, targets):
        return None, F.cross_entropy(table[idx].flatten(0, 1), targets.flatten(), ignore_index=-1)
    rows = torch.randint(3, (4, 10))
    idx, targets = rows[:, :-1], rows[:, 1:].clone()
    targets[3, 5:] = -1
    losses = {True: [], False: []}
    for row, after in zip(idx.tolist(), targets.tolist()):
        seen = set()
        for a, b in zip(row, after):
            if b >= 0:
                losses[(a, b) in seen].append(-table[a].log_softmax(-1)[b].item())
            seen.add((a, b))
    found = inside.copying(model, [(idx[:2], targets[:2]), (idx[2:], targets[2:])])
    assert min(map(len, losses.values())) > 3
    assert found == {"repeated": pytest.approx(sum(losses[True]) / len(losses[True])),
                     "others": pytest.approx(sum(losses[False]) / len(losses[False])),
                     "share": len(losses[True]) / 32}
    assert inside.copying(model, [(idx[:, :1], targets[:, :1])])["repeated"] is None


# -------------------------------------------------------------------------------------- what a model's log says of it


@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
def test_stats_of_the_baseline_are_its_mean_gates(gate):
    model, (idx, _) = random_model(ROOT, gate=gate), tokens()
    with torch.no_grad():
        means = [block.attn.gate(block.attn_norm(x)).sigmoid().mean().item()
                 for block, x in zip(model.blocks, passed(model).reads[::2])]
    assert probes.stats(ROOT, model, idx) == {"gate": pytest.approx(means)}
    assert probes.stats(ROOT, random_model(ROOT), idx) == probes.stats("mine", torch.nn.Identity(), idx) == {}
