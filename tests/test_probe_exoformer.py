"""Probes of exoformer.py, nuresformer.py and exoformer_dynamic.py: mixing weights, gates, the model without anchors."""
import pytest
import torch
from analysis import (  # noqa: F401
    average,
    by_title,
    check_depth,
    check_gates,
    double,
    numbers,
    passed,
    random_model,
    tokens,
    values_of,
)

from nanodepth import record
from probes.exoformer import MAPS, PICTURES, value_matrix

every_model = pytest.mark.parametrize("name", ["exoformer", "nuresformer", "exoformer_dynamic"])


@torch.no_grad()
def gammas(model):
    """Each layer's factors (B, T, 4, 2) of exoformer_dynamic, from the states before the blocks."""
    return [block.attn.gamma(block.attn_norm(x)) for block, x in zip(model.blocks, passed(model).hidden)]


def lambdas(model, kind, s):
    """Of each layer that mixes."""
    maps = [getattr(block.attn, MAPS[s]) for block in model.blocks]
    return [getattr(w, kind) for w in maps if hasattr(w, kind)]


@every_model
def test_depth_matrix_makes_every_input_from_the_outputs(name):
    check_depth(name)


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


@every_model
def test_lambdas_are_the_parameters(name):
    model = random_model(name)
    found, layers = numbers(model), [1, 2, 3] if name != "nuresformer" else [2, 3]
    assert found["mixing_layers"] == layers
    for i, s in enumerate("qkvg"):
        dynamic = name == "exoformer_dynamic"
        wanted = [g.mean((0, 1))[i] for g in gammas(model)] if dynamic else [torch.ones(2)] * len(layers)
        assert torch.allclose(torch.tensor(found["gamma"][s]), torch.stack(wanted))
    for kind in ("lambda_anchor", "lambda_self"):
        for s, heads in dict(q=4, k=2, v=2, g=4).items():
            wanted = torch.stack(lambdas(model, kind, s)).float()
            assert torch.equal(torch.tensor(found[kind][s]).float(), wanted) and wanted.shape[1:] == (heads, 8)


def test_share_of_lambdas_near_zero():
    """Of 3 layers with 8 channels for 4 + 2 + 2 + 4 heads, whose lambdas are not near zero, five are made so."""
    model = random_model("exoformer")
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lambda" in key:
                p.copy_(p.sign() * (p.abs() + 0.01))
        model.blocks[1].attn.wk.lambda_anchor.view(-1)[:5] = torch.tensor([0.0, 9e-4, -9e-4, 1e-5, -1e-4])
        model.blocks[2].attn.gate.lambda_self.view(-1)[:2] = torch.tensor([9e-4, -1.1e-3])
    n = 3 * 8 * 12
    assert numbers(model)["near_zero"] == pytest.approx({"lambda_anchor": 5 / n, "lambda_self": 1 / n})


@every_model
def test_gates(name):
    check_gates(random_model(name))


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


def test_one_layer():
    found = numbers(random_model("exoformer", n_layer=1))
    assert found["adjacent"] == {} and len(found["lens"]) == 2 and found["depth_error"] < 1e-9


def test_pictures_show_the_numbers():
    pytest.importorskip("matplotlib")
    model = random_model("nuresformer")
    found = numbers(model)
    panels = by_title(PICTURES["anchors"]({"run": found}))
    panel = panels["run: anchor / own, K"]
    wanted = torch.stack([(block.attn.wk.lambda_anchor / block.attn.wk.lambda_self).flatten()
                          for block in model.blocks[1:]])
    assert torch.allclose(torch.tensor(panel.get_images()[0].get_array().data), wanted)
    assert panel.get_images()[0].get_extent() == [-0.5, 15.5, 3.5, 1.5]
    assert [line.get_xdata()[0] for line in panel.get_lines()] == [7.5]             # two key heads of 8 channels
    for kind, title in (("token_similarity", "similarity of tokens"), ("core_features", "core features")):
        lines = [line.get_xydata().tolist() for line in panels[f"run: {title}"].get_lines()]
        assert lines == [[[i, y] for i, y in enumerate(x[kind])] for x in (found, found["without_anchor"])]
    bare = panels["run: anchors zero"].get_images()[0].get_array()
    assert bare.tolist() == found["without_anchor"]["layer_similarity"]


def test_stats_against_loops():
    model = random_model("exoformer_dynamic")
    found = record.stats("exoformer_dynamic", model, tokens()[0])
    for kind in ("lambda_anchor", "lambda_self"):
        for s in "qkvg":
            assert found[f"{kind}_{s}"] == pytest.approx(list(map(average, lambdas(model, kind, s))))
    assert found["gamma"] == pytest.approx(list(map(average, gammas(model))), rel=1e-5)
