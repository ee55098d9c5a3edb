"""Probes of exoformer.py, nuresformer.py and exoformer_dynamic.py: mixing weights, and the model without anchors."""
import pytest
import torch
from analysis import average, double, numbers, passed, random_model, tokens, values_of  # noqa: F401

import probes
from probes.exoformer import MAPS, value_matrix


@torch.no_grad()
def gammas(model):
    """Each layer's factors (B, T, 4, 2) of exoformer_dynamic, from the states before the blocks."""
    return [block.attn.gamma(block.attn_norm(x)) for block, x in zip(model.blocks, passed(model).hidden)]


def lambdas(model, kind, s):
    """Of each layer that mixes."""
    maps = [getattr(block.attn, MAPS[s]) for block in model.blocks]
    return [getattr(w, kind) for w in maps if hasattr(w, kind)]


@pytest.mark.parametrize("name, norms", [("exoformer", "qkvg"), ("exoformer", "none"), ("nuresformer", "qkvg")])
@torch.no_grad()
def test_value_matrix_makes_the_values(name, norms):
    """With one weight per layer the matrix is exact; the anchor counts as it is mixed in, normalised."""
    model = random_model(name, granularity="scalar", norms=norms)
    anchors = []
    model.anchor_norms["v_norm"].register_forward_hook(lambda m, inputs, output: anchors.append(output))
    mixed, own, record = values_of(model)
    A = value_matrix(model, record)
    outside = int(name == "exoformer")
    assert set(A) == set("qkvg") and A["v"].shape == (3, 3 + outside)
    A = A["v"].to(own.dtype)
    made = torch.einsum("nm,mbthd->nbthd", A[:, outside:], own)
    for n in range(1 - outside, 3):
        made[n] += A[n, 0] * (anchors[0] if outside else anchors[0] - own[0])
    assert (made - mixed).abs().max() < 1e-9 * mixed.abs().max()


def test_value_matrix_has_the_means_of_what_varies():
    model = random_model("exoformer_dynamic")
    gamma = gammas(model)[1].mean((0, 1))[1]                                        # of k: anchor, own
    anchor, own = (g * lambdas(model, kind, "k")[1].mean() for g, kind in zip(gamma, ("lambda_anchor", "lambda_self")))
    row = value_matrix(model, passed(model))["k"][1].tolist()
    assert row == pytest.approx([anchor.item(), 0, own.item(), 0])


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


def test_stats_against_loops():
    model = random_model("exoformer_dynamic")
    found = probes.stats("exoformer_dynamic", model, tokens()[0])
    for kind in ("lambda_anchor", "lambda_self"):
        for s in "qkvg":
            assert found[f"{kind}_{s}"] == pytest.approx(list(map(average, lambdas(model, kind, s))))
    assert found["gamma"] == pytest.approx(list(map(average, gammas(model))), rel=1e-5)
