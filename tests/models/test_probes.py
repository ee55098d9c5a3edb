"""probes/NAME.py: what they say of a model, against loops, the values that attention gets, and changed weights."""
import math
from itertools import product

import pytest
import torch
from analysis import average, double, numbers, passed, random_model, tokens, values_of  # noqa: F401

import probes
from probes import muddformer
from probes.depth_attention import mixtures
from probes.exoformer import MAPS

IDX = tokens()[0]


def stats(model, name):
    return probes.stats(name, model, IDX)


@pytest.mark.parametrize("name, options", [
    ("resformer", {}), ("resformer", dict(value_mix="learnable")), ("resformer", dict(value_mix="identity")),
    ("resformer", dict(last_k=1)),
    ("satformer", dict(value_act="softmax", n_kv_head=1)),                          # softmax over one head is 1
    *((name, dict(granularity="scalar", norms=norms)) for name in ("exoformer", "nuresformer")
      for norms in ("qkvg", "none"))], ids=str)
@torch.no_grad()
def test_the_value_matrix_makes_the_values(name, options):
    """With one weight per layer it is exact. An anchor from outside counts as it is mixed in, normalised."""
    model, anchors = random_model(name, **options), []
    if hasattr(model, "anchor_norms"):
        model.anchor_norms["v_norm"].register_forward_hook(lambda m, inputs, output: anchors.append(output))
    mixed, own = values_of(model)                                                   # (L, B, T, K, D) each
    A = probes.find(name).value_matrix(model, IDX)
    outside = A["v"].size(1) - 3
    assert set(A) == set("qkvg" if anchors else "v") and outside == (name == "exoformer")
    A = A["v"].to(own.dtype)
    made = torch.einsum("nm,mbthd->nbthd", A[:, outside:], own)
    for n in range(1 - outside, 3) if anchors else ():
        made[n] += A[n, 0] * (anchors[0] if outside else anchors[0] - own[0])
    assert (made - mixed).abs().max() < 1e-9 * mixed.abs().max()


@pytest.mark.parametrize("options", [{}, dict(n_kv_head=4, qk_norm=False), dict(stride=2, n_kv_head=1)], ids=str)
@torch.no_grad()
def test_shares_of_depth_attention_make_the_values(options):
    model = random_model("depth_attention", **options)
    mixed, own = values_of(model)
    shares = torch.stack(mixtures(model, IDX))
    assert (torch.einsum("nbthm,mbthd->nbthd", shares, own) - mixed).abs().max() < 1e-12
    A = probes.find("depth_attention").value_matrix(model, IDX)["v"]
    assert torch.allclose(A, shares.mean((1, 2, 3))) and 0 < A[2, 0] < 1
    assert stats(model, "depth_attention")["earlier_values"] == pytest.approx((1 - A.diagonal()).tolist(), abs=1e-6)


@torch.no_grad()
def test_value_matrices_have_the_means_of_what_varies():
    model = random_model("satformer")
    A = probes.find("satformer").value_matrix(model, IDX)["v"]
    states = passed(model).reads[::2]
    alphas = [block.attn.value_gate(block.attn_norm(x)) for block, x in zip(model.blocks[1:], states[1:])]
    assert A[1:, 0].tolist() == pytest.approx(list(map(average, alphas)))
    assert A[:, 1:].tolist() == torch.eye(3)[:, 1:].tolist() and A[0, 0] == 1
    model = random_model("exoformer_dynamic")
    gamma = gammas(model)[1].mean((0, 1))[1]                                        # of k: anchor, own
    anchor, own = (g * lambdas(model, kind, "k")[1].mean() for g, kind in zip(gamma, ("lambda_anchor", "lambda_self")))
    row = probes.find("exoformer_dynamic").value_matrix(model, IDX)["k"][1].tolist()
    assert row == pytest.approx([anchor.item(), 0, own.item(), 0])


@torch.no_grad()
def gammas(model):
    """Each layer's factors (B, T, 4, 2) of exoformer_dynamic, from the states before the blocks."""
    return [block.attn.gamma(block.attn_norm(x)) for block, x in zip(model.blocks, passed(model).reads[::2])]


def lambdas(model, kind, s):
    return [getattr(getattr(block.attn, MAPS[s]), kind) for block in model.blocks]


@pytest.mark.parametrize("name", ["exoformer", "nuresformer"])
def test_anchors_removed_is_lambda_anchor_zero(name):
    model = random_model(name)
    bare = numbers(model)["without_anchor"]
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lambda_anchor" in key:
                p.zero_()
    wanted = numbers(model)
    assert bare["loss"] == pytest.approx(wanted["loss"], rel=1e-9) and bare["core_features"] == wanted["core_features"]
    assert bare["token_similarity"] == pytest.approx(wanted["token_similarity"])


def test_interventions_are_what_changed_weights_and_constant_gates_give():
    """In batches of different sizes. A constant gate has one number per layer."""
    model, batches = random_model("satformer", last_k=2, n_layer=4), [tokens(3), tokens(1, seed=1)]

    def perplexity():
        return math.exp((3 * model(*batches[0])[1].item() + model(*batches[1])[1].item()) / 4)
    whole = numbers(model, batches)
    found, base = whole["interventions"], perplexity()
    assert found["layers"] == [3, 4] and found["perplexity"] == pytest.approx(base)
    for i, layer in enumerate(found["layers"]):
        gate, mean = model.blocks[layer - 1].attn.value_gate, whole["values"]["v"][layer - 1][0]
        gate.forward = lambda x, mean=mean: torch.full((*x.shape[:2], 2), mean)
        assert found["mean"][i] == pytest.approx(perplexity() - base) and abs(found["mean"][i]) > 1e-6
        gate.forward = lambda x: torch.zeros(*x.shape[:2], 2)
        assert found["zero"][i] == pytest.approx(perplexity() - base)
        del gate.forward


@pytest.mark.parametrize("name, options", [("attnres", {}), ("attnres_block", dict(block_size=4)),
                                           ("attnres_delta", {}), ("mhar", dict(n_depth_head=2))], ids=str)
def test_stats_of_attention_over_depth(name, options):
    """Of each head, where there are several, its weights make its slice of what the reader reads."""
    model = random_model(name, **options)
    found, queries = stats(model, name), model.depth_attention.query
    outputs, n, size = passed(model).outputs, options.get("n_depth_head", 1), options.get("block_size", 1)
    assert len(found["entropy"]) == len(found["newest"]) == len(queries) == (5 if name == "attnres_delta" else 6)
    for l, w in enumerate(queries, start=1):
        sources = [outputs[0], *(sum(outputs[s:min(s + size, l + 1)]) for s in range(1, l + 1, size))]
        entropies, newest = [], []
        for b, t, i in product(range(2), range(12), range(n)):
            part = slice(i * 32 // n, (i + 1) * 32 // n)
            scores = [torch.dot(w[part], (v[b, t] / v[b, t].square().mean().sqrt())[part]).item() for v in sources]
            row = [math.exp(x) / sum(map(math.exp, scores)) for x in scores]
            entropies.append(-sum(a * math.log(a) for a in row))
            newest.append(row[-1])
        assert found["entropy"][l - 1] == pytest.approx(average(entropies), rel=1e-4)
        assert found["newest"][l - 1] == pytest.approx(average(newest), rel=1e-4)


@pytest.mark.parametrize("name, options", [("hyperconnections", {}), ("hyperconnections", dict(dynamic=False)),
                                           ("mhc", {}), ("mhc_lite", {})], ids=str)
def test_stats_of_hyperconnections_against_loops(name, options):
    model = random_model(name, **options)
    found = stats(model, name)
    modules = [m for block in model.blocks for m in (block.attn_connection, block.mlp_connection)]
    calls = probes.watch(model, IDX, modules, inputs=True)
    for n, (m, (X, _)) in enumerate(zip(modules, calls, strict=True)):
        pre, post, res = m.maps(X)
        rows = pre.abs().reshape(-1, pre.size(-1)).tolist()
        assert found["focus"][n] == pytest.approx(average(max(row) / sum(row) for row in rows), rel=1e-5)
        assert found["write"][n] == pytest.approx(average(post), rel=1e-5)
        kept = [r[i][i] for r in res.reshape(-1, 4, 4).tolist() for i in range(4)]
        assert found["keep"][n] == pytest.approx(average(kept), rel=1e-5)


@pytest.mark.parametrize("name", ["muddformer", "muddpythia", "muddmoe"])
def test_stats_of_mudd(name):
    model = random_model(name)
    found, made = stats(model, name), probes.watch(model, IDX, muddformer.token_weights(model))
    assert len(made) == 3
    for n, (m, own) in enumerate(zip(model.aggregate, made)):
        rows = (m.a + own.unflatten(-1, m.a.shape)).flatten(0, -2).tolist()         # of each token and stream
        assert found["on_last"][n] == pytest.approx(average(row[-1] for row in rows), rel=1e-4)
        assert found["on_earlier"][n] == pytest.approx(average(sum(map(abs, row[:-1])) for row in rows), rel=1e-4)


def test_stats_of_weights_and_gates():
    model = random_model("resformer", value_mix="learnable")
    assert stats(model, "resformer") == {
        name: getattr(model.value_mix, name).tolist() for name in ("lambda1", "lambda2")}
    model = random_model("exoformer_dynamic")
    found = stats(model, "exoformer_dynamic")
    for kind, s in product(("lambda_anchor", "lambda_self"), "qkvg"):
        assert found[f"{kind}_{s}"] == pytest.approx(list(map(average, lambdas(model, kind, s))))
    assert found["gamma"] == pytest.approx(list(map(average, gammas(model))), rel=1e-5)
    model = random_model("satformer")
    found, gates = stats(model, "satformer"), [block.attn.value_gate for block in model.blocks[1:]]
    for n, alpha in enumerate(probes.watch(model, IDX, gates)):
        assert found["value_gate"][n] == pytest.approx(average(alpha))
        assert found["value_gate_zeros"][n] == pytest.approx(average(alpha == 0)) and 0 < average(alpha == 0) < 1
    model = random_model("speedrun")
    gates = [block.attn.value_gate for block in model.blocks if block.attn.value_gate is not None]
    wanted = [average(2 / (1 + math.exp(-z)) for z in x.flatten().tolist()) for x in probes.watch(model, IDX, gates)]
    assert stats(model, "speedrun") == {"value_gate": pytest.approx(wanted), **{
        name: getattr(model, name).tolist() for name in ("resid", "x0", "skips")}}
    model = random_model("denseformer", dilation=2)
    alphas = [model.average[i].alpha.tolist() for i in "123"]
    assert stats(model, "denseformer") == {"on_last": pytest.approx([row[-1] for row in alphas]), "on_earlier": (
        pytest.approx([sum(map(abs, row[:-1])) for row in alphas]))}


@torch.no_grad()
def test_stats_of_geonorm():
    model = random_model("geonorm")
    found = stats(model, "geonorm")
    for name in ("attn", "mlp"):
        scales = [getattr(block, f"{name}_geodesic").scale.item() for block in model.blocks]
        assert found[f"{name}_step"] == pytest.approx([s / (i + 1) ** 0.5 for i, s in enumerate(scales)])
    streams = [model.embed(IDX), *probes.watch(model, IDX, model.blocks)]
    wanted = [torch.cosine_similarity(a, b, -1).acos().mean().item() for a, b in zip(streams, streams[1:])]
    assert found["angle"] == pytest.approx(wanted, rel=1e-5)
