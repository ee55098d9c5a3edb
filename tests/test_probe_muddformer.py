"""probes/muddformer.py, which serves all models with MUDD's connections: depth matrices and the dynamic weights."""
import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from analysis import (  # noqa: F401
    average, by_title, check_depth, check_gates, double, numbers, passed, random_model, tokens)

from nanodepth import record
from nanodepth.pictures import draw_depth, draw_layers
from probes.muddformer import PICTURES


@pytest.mark.parametrize("options", [
    dict(multiway=False), dict(streams="vr"), dict(dynamic=False), dict(period=2), dict(dilation=2), dict(window=1),
    dict(last_k=2, streams="vr")], ids=str)
def test_depth_matrices_make_every_input_from_the_outputs(options):
    check_depth("muddformer_ablations", expected="qkvr", **options)


def test_depth_matrices_of_the_main_form():
    check_depth("muddformer", expected="qkvr")


def test_depth_matrices_beside_a_parallel_block():
    check_depth("muddpythia", expected="qkvr", parallel=True)


def test_normed_sources_make_no_sums_of_outputs():
    found = numbers(random_model("muddformer", pre_post_norm=True))
    assert found["depth_error"] > 1e-2 and found["depth"] == {}


def test_a_copy_without_probes_is_watched_at_its_residual_stream():
    model = random_model("muddformer")
    plain, own = record.measure(model, [tokens()], torch.tensor([96])), numbers(model)
    assert plain["depth"] == {} and "dynamic" not in plain and list(plain["adjacent"]) == ["x"]
    for name in ("loss", "lens", "norm", "entropy", "layer_similarity", "core_features"):
        assert plain[name] == own[name]


def test_gates():
    check_gates(random_model("muddformer", gate="elementwise"))


def test_one_layer():
    found = numbers(random_model("muddformer_ablations", n_layer=1, ffn_realloc=False))
    assert found["adjacent"] == {} and len(found["lens"]) == 2 and found["depth_error"] < 1e-9


@pytest.mark.parametrize("name, options", [
    ("muddformer_ablations", dict(window=2)), ("muddformer", dict(pre_post_norm=True)), ("muddpythia", {})], ids=str)
@torch.no_grad()
def test_dynamic_weights_against_loops(name, options):
    model = random_model(name, **options)
    found = numbers(model)["dynamic"]
    X = [model.embed(tokens()[0])]                                                  # X_j, caught behind the blocks
    hooks = [block.register_forward_hook(lambda m, inputs, output: X.append(output)) for block in model.blocks]
    model(tokens()[0])
    for hook in hooks:
        hook.remove()
    seen = [model.pre_norms[j](x) if "pre_post_norm" in options else x for j, x in enumerate(X)]     # what is weighted
    for i in (1, 2, 3):
        names = "qkvr" if i < 3 else "r"
        sources = [[0, 1], [0, 1, 2], [0, 2, 3] if "window" in options else [0, 1, 2, 3]][i - 1]
        m, rms = model.aggregate[i - 1], (X[i].square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
        weights = m.a + m.w2(F.gelu(m.w1(X[i] / rms))).unflatten(-1, (len(names), len(sources)))
        assert found[str(i)]["streams"] == names and found[str(i)]["sources"] == sources
        for (c, _), (j, source) in product(enumerate(names), enumerate(sources)):
            w = [weights[b, t, c, j].item() for b in range(2) for t in range(12)]
            norm = sum(seen[source][b, t].square().sum().sqrt().item() for b in range(2) for t in range(12)) / 24
            m = sum(w) / 24
            sd = math.sqrt(sum((a - m) ** 2 for a in w) / 24)
            assert found[str(i)]["mean"][c][j] == pytest.approx(m * norm)
            assert found[str(i)]["sd"][c][j] == pytest.approx(sd * norm)


def test_small_deviations_of_weights_in_fp32():
    model = random_model("muddformer").to(torch.float32)
    with torch.no_grad():
        model.aggregate[1].w2.weight.normal_(std=2e-4)
        model.aggregate[1].a.fill_(1.0)
        got = numbers(model)["dynamic"]["2"]["sd"]
        wanted = numbers(model.double())["dynamic"]["2"]["sd"]
    assert torch.allclose(torch.tensor(got), torch.tensor(wanted), rtol=1e-2) and torch.tensor(wanted).min() > 0


def test_pictures_show_the_numbers():
    pytest.importorskip("matplotlib")
    found = numbers(random_model("muddformer_ablations", streams="vr"))
    lines = by_title(draw_layers({"run": found}))["input against previous layer's"].get_lines()
    assert [list(y) for y in found["adjacent"].values()] == [line.get_ydata().tolist() for line in lines]
    drawn = by_title(draw_depth({"run": found}))["run, v input"].get_images()[0]    # attention's rows alone
    assert torch.allclose(torch.tensor(drawn.get_array().filled(0.0)), torch.tensor(found["depth"]["v"])[:-1:2])
    cells = by_title(PICTURES["dynamic"]({"run": found}))["run: sd, stream V"].get_images()[0].get_array()
    assert cells[1].tolist()[:3] == pytest.approx(found["dynamic"]["2"]["sd"][0])
    assert cells.mask[1].tolist() == [False] * 3 + [True]


@pytest.mark.parametrize("name", ["muddformer", "muddpythia", "muddmoe"])
def test_stats_against_loops(name):
    model = random_model(name)
    found = record.stats(name, model, tokens()[0])
    for n, (m, made) in enumerate(zip(model.aggregate, passed(model).outputs_of("generators"))):
        rows = (m.a + made.unflatten(-1, m.a.shape)).flatten(0, -2).tolist()        # of each token and stream
        assert found["on_last"][n] == pytest.approx(average(row[-1] for row in rows), rel=1e-4)
        assert found["on_earlier"][n] == pytest.approx(average(sum(map(abs, row[:-1])) for row in rows), rel=1e-4)
    assert n == 2
