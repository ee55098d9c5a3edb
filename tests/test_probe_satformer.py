"""probes/satformer.py: value gates and interventions against loops and against models with changed weights."""
import math

import pytest
import torch
from analysis import (  # noqa: F401
    average, by_title, check_depth, double, numbers, passed, random_model, tokens, values_of)

from nanodepth import record
from nanodepth.pictures import draw_gates
from probes.satformer import panels, value_matrix


@torch.no_grad()
def gate_values(model):
    """{block, counted from 0: its value gate's output}, from the states before the blocks."""
    hidden = passed(model).hidden
    return {i: block.attn.value_gate(block.attn_norm(hidden[i])) for i, block in enumerate(model.blocks)
            if getattr(block.attn, "value_gate", None) is not None}


def test_depth_matrix_makes_every_input_from_the_outputs():
    check_depth("satformer")


@torch.no_grad()
def test_value_matrix_makes_the_values():
    """Softmax over one head is 1: then the matrix is exact."""
    model = random_model("satformer", value_act="softmax", n_kv_head=1)
    mixed, own, record = values_of(model)
    A = value_matrix(model, record)
    made = torch.einsum("nm,mbthd->nbthd", A["v"].to(own.dtype), own)
    assert set(A) == {"v"} and (made - mixed).abs().max() < 1e-9 * mixed.abs().max()


def test_value_matrix_has_the_means_of_what_varies():
    model = random_model("satformer")
    A = value_matrix(model, passed(model))["v"]
    assert A[1:, 0].tolist() == pytest.approx([a.mean().item() for a in gate_values(model).values()])
    assert A[:, 1:].tolist() == torch.eye(3)[:, 1:].tolist() and A[0, 0] == 1


def test_value_gate_statistics():
    model = random_model("satformer", n_kv_head=4)
    found = numbers(model)
    for i, alpha in enumerate(gate_values(model).values()):
        heads = alpha.flatten(0, 1).T.tolist()
        means = [sum(a) / len(a) for a in heads]
        centre = sum(means) / 4
        cv = math.sqrt(sum((m - centre) ** 2 for m in means) / 4) / centre
        assert found["value_gate"][i] == pytest.approx(means)
        assert found["value_gate_zeros"][i] == pytest.approx(sum(x == 0 for a in heads for x in a) / (4 * 24))
        assert found["value_gate_cv"][i] == pytest.approx(cv)
    assert 0 < found["value_gate_zeros"][0] < 1 and found["mixing_layers"] == [2, 3]
    even = numbers(random_model("satformer", value_act="softmax", n_kv_head=1))
    assert even["value_gate_cv"] == pytest.approx([0, 0], abs=1e-6) and even["value_gate"] == [[1.0], [1.0]]


def test_gates_below_zero_have_no_coefficient_of_variation():
    found = numbers(random_model("satformer", value_act="tanh"))
    means = [sum(row) / 2 for row in found["value_gate"]]
    assert [x is None for x in found["value_gate_cv"]] == [m <= 0 for m in means] and min(means) < 0


def test_interventions_are_what_changed_weights_give():
    model = random_model("satformer", last_k=2, n_layer=4)
    batches = [tokens(2), tokens(2, seed=1)]

    def perplexity():
        return math.exp(sum(model(*b)[1].item() for b in batches) / 2)
    found, base = numbers(model, batches)["interventions"], perplexity()
    assert found["layers"] == [3, 4] and found["perplexity"] == pytest.approx(base)
    for i, layer in enumerate(found["layers"]):
        weight = model.blocks[layer - 1].attn.value_gate.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()                                                          # relu(0) = 0
        assert found["zero"][i] == pytest.approx(perplexity() - base)
        with torch.no_grad():
            weight.copy_(kept)
        assert abs(found["mean"][i]) > 1e-6 and found["mean"][i] != found["zero"][i]
    constant = random_model("satformer", value_act="softmax", n_kv_head=1)          # the gate is its mean
    assert numbers(constant, batches)["interventions"]["mean"] == pytest.approx([0, 0], abs=1e-9)


def test_mean_interventions_use_one_number_per_layer():
    """They are the models whose gate is a constant, here in batches of different sizes."""
    model, batches = random_model("satformer"), [tokens(3), tokens(1, seed=1)]
    found = numbers(model, batches)
    for i, row in enumerate(found["value_gate"]):
        gate, average = model.blocks[i + 1].attn.value_gate, sum(row) / 2
        gate.forward = lambda x, average=average: torch.full((*x.shape[:2], 2), average)
        loss = (3 * model(*batches[0])[1].item() + model(*batches[1])[1].item()) / 4
        del gate.forward
        change = math.exp(loss) - found["interventions"]["perplexity"]
        assert found["interventions"]["mean"][i] == pytest.approx(change)
    assert found["interventions"]["mean"][0] != pytest.approx(found["interventions"]["mean"][1])


def test_pictures_show_the_numbers():
    pytest.importorskip("matplotlib")
    found = numbers(random_model("satformer", last_k=1, gate="headwise"))
    gates = by_title(draw_gates({"run": found}, panels("run", found)))
    assert gates["run: output gate, mean"].get_images()[0].get_array().tolist() == found["gate"]
    assert gates["run: value gate, mean"].get_images()[0].get_extent() == [0.5, 2.5, 3.5, 2.5]         # layer 3 alone
    assert [line.get_ydata().tolist() for line in gates["run: value gate"].get_lines()] == [
        [sum(found["value_gate"][0]) / 2], found["value_gate_zeros"], found["value_gate_cv"]]
    assert [bar.get_height() for bar in gates["run: one layer's gate replaced"].patches] == [
        found["interventions"][kind][0] for kind in ("zero", "mean")]


def test_stats_against_loops():
    model = random_model("satformer")
    found, alphas = record.stats("satformer", model, tokens()[0]), passed(model).outputs_of("alpha")
    for n, alpha in enumerate(alphas):
        assert found["value_gate"][n] == pytest.approx(average(alpha))
        assert found["value_gate_zeros"][n] == pytest.approx(average(alpha == 0))
    assert 0 < found["value_gate_zeros"][0] < 1
