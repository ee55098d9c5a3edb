"""probes/exoformer.py: mixing weights, gates and the model without its anchors."""
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
from probes.exoformer import PICTURES, value_matrix


@torch.no_grad()
def gammas(model):
    """Mean factors of each layer, from the states before the blocks; for anchor=external."""
    return [block.attn.mix.gamma(block.attn_norm(x)).mean((0, 1))
            for block, x in zip(model.blocks, passed(model).hidden)]


def test_depth_matrix_makes_every_input_from_the_outputs():
    check_depth("exoformer")


@pytest.mark.parametrize("options", [{}, dict(norm_streams="none"), dict(anchor="first_layer")], ids=str)
@torch.no_grad()
def test_value_matrix_makes_the_values(options):
    """With one weight per layer the matrix is exact; the anchor counts as it is mixed in, normalised."""
    model = random_model("exoformer", granularity="scalar", **options)
    anchors = []
    model.anchor.register_forward_hook(lambda m, inputs, output: anchors.append(output["v"]))
    mixed, own, record = values_of(model)
    A = value_matrix(model, record)
    outside = int("anchor" not in options)
    assert set(A) == set("qkvg") and A["v"].shape == (3, 3 + outside)
    A = A["v"].to(own.dtype)
    made = torch.einsum("nm,mbthd->nbthd", A[:, outside:], own)
    for n in range(1 - outside, 3):
        made[n] += A[n, 0] * (anchors[0] if outside else anchors[0] - own[0])
    assert (made - mixed).abs().max() < 1e-9 * mixed.abs().max()


def test_value_matrix_has_the_means_of_what_varies():
    model = random_model("exoformer", mixing="dynamic")
    mix, gamma = model.blocks[1].attn.mix, gammas(model)[1]                         # anchor, own for q, k, v, g
    anchor, own = (gamma[i] * weights["k"].mean() for i, weights in ((2, mix.lambda_anchor), (3, mix.lambda_self)))
    row = value_matrix(model, passed(model))["k"][1].tolist()
    assert row == pytest.approx([anchor.item(), 0, own.item(), 0])


@pytest.mark.parametrize("mixing", ["static", "dynamic"])
def test_lambdas_are_the_parameters(mixing):
    model = random_model("exoformer", mixing=mixing)
    found = numbers(model)
    assert found["mixing_layers"] == [1, 2, 3]
    for i, s in enumerate("qkvg"):
        wanted = [g[2 * i:2 * i + 2] for g in gammas(model)] if mixing == "dynamic" else [torch.ones(2)] * 3
        assert torch.allclose(torch.tensor(found["gamma"][s]), torch.stack(wanted))
    for kind in ("lambda_anchor", "lambda_self"):
        for s, heads in dict(q=4, k=2, v=2, g=4).items():
            wanted = torch.stack([getattr(block.attn.mix, kind)[s] for block in model.blocks]).float()
            assert torch.equal(torch.tensor(found[kind][s]).float(), wanted) and wanted.shape == (3, heads, 8)


def test_share_of_lambdas_near_zero():
    """Of 3 layers with 8 channels for 4 + 2 + 2 + 4 heads, whose lambdas are not near zero, five are made so."""
    model = random_model("exoformer")
    with torch.no_grad():
        for block in model.blocks:
            for lambdas in (block.attn.mix.lambda_anchor, block.attn.mix.lambda_self):
                for p in lambdas.values():
                    p.copy_(p.sign() * (p.abs() + 0.01))
        model.blocks[1].attn.mix.lambda_anchor["k"].view(-1)[:5] = torch.tensor([0.0, 9e-4, -9e-4, 1e-5, -1e-4])
        model.blocks[2].attn.mix.lambda_self["g"].view(-1)[:2] = torch.tensor([9e-4, -1.1e-3])
    n = 3 * 8 * 12
    assert numbers(model)["near_zero"] == pytest.approx({"lambda_anchor": 5 / n, "lambda_self": 1 / n})


@pytest.mark.parametrize("options", [{}, dict(anchor="first_layer"), dict(mix_streams="v"), dict(mixing="dynamic"),
                                     dict(mix_streams="v", anchor="first_layer")], ids=str)
def test_gates(options):
    check_gates(random_model("exoformer", **options))


def test_no_gate():
    assert numbers(random_model("exoformer", gate="none", mix_streams="qkv"))["gate"] is None


@pytest.mark.parametrize("anchor", ["external", "first_layer"])
def test_anchors_removed_is_lambda_anchor_zero(anchor):
    model = random_model("exoformer", anchor=anchor)
    bare = numbers(model)["without_anchor"]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lambda_anchor" in name:
                p.zero_()
    wanted = numbers(model)
    assert bare["loss"] == pytest.approx(wanted["loss"], rel=1e-9) and bare["core_features"] == wanted["core_features"]
    assert bare["token_similarity"] == pytest.approx(wanted["token_similarity"])


def test_one_layer():
    found = numbers(random_model("exoformer", n_layer=1))
    assert found["adjacent"] == {} and len(found["lens"]) == 2 and found["depth_error"] < 1e-9


def test_pictures_show_the_numbers():
    pytest.importorskip("matplotlib")
    model = random_model("exoformer", anchor="first_layer")
    found = numbers(model)
    panels = by_title(PICTURES["anchors"]({"run": found}))
    panel = panels["run: anchor / own, K"]
    mixes = [block.attn.mix for block in model.blocks[1:]]
    wanted = torch.stack([(mix.lambda_anchor["k"] / mix.lambda_self["k"]).flatten() for mix in mixes])
    assert torch.allclose(torch.tensor(panel.get_images()[0].get_array().data), wanted)
    assert panel.get_images()[0].get_extent() == [-0.5, 15.5, 3.5, 1.5]
    assert [line.get_xdata()[0] for line in panel.get_lines()] == [7.5]             # two key heads of 8 channels
    for kind, title in (("token_similarity", "similarity of tokens"), ("core_features", "core features")):
        lines = [line.get_xydata().tolist() for line in panels[f"run: {title}"].get_lines()]
        assert lines == [[[i, y] for i, y in enumerate(x[kind])] for x in (found, found["without_anchor"])]
    bare = panels["run: anchors zero"].get_images()[0].get_array()
    assert bare.tolist() == found["without_anchor"]["layer_similarity"]


def test_stats_against_loops():
    model = random_model("exoformer", mixing="dynamic")
    found = record.stats("exoformer", model, tokens()[0])
    for kind in ("lambda_anchor", "lambda_self"):
        for s in "qkvg":
            wanted = [average(getattr(block.attn.mix, kind)[s]) for block in model.blocks]
            assert found[f"{kind}_{s}"] == pytest.approx(wanted)
    with torch.no_grad():
        gammas = [block.attn.mix.gamma(block.attn_norm(x)) for block, x in zip(model.blocks, passed(model).hidden)]
    assert found["gamma"] == pytest.approx(list(map(average, gammas)))
