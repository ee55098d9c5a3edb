"""probes/satformer.py: value gates and interventions against loops and against models with changed weights."""
import math

import pytest
import torch
from analysis import average, double, numbers, passed, random_model, tokens, values_of  # noqa: F401

import probes
from probes.satformer import value_matrix


@torch.no_grad()
def test_value_matrix_makes_the_values():
    """Softmax over one head is 1: then the matrix is exact."""
    model = random_model("satformer", value_act="softmax", n_kv_head=1)
    mixed, own, record = values_of(model)
    A = value_matrix(model, record)
    made = torch.einsum("nm,mbthd->nbthd", A["v"].to(own.dtype), own)
    assert set(A) == {"v"} and (made - mixed).abs().max() < 1e-9 * mixed.abs().max()


@torch.no_grad()
def test_value_matrix_has_the_means_of_what_varies():
    model = random_model("satformer")
    record = passed(model)
    A = value_matrix(model, record)["v"]
    alphas = [block.attn.value_gate(block.attn_norm(x)) for block, x in zip(model.blocks[1:], record.hidden[1:])]
    assert A[1:, 0].tolist() == pytest.approx(list(map(average, alphas)))
    assert A[:, 1:].tolist() == torch.eye(3)[:, 1:].tolist() and A[0, 0] == 1


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
        del gate.forward
        kept = gate.weight.detach().clone()
        with torch.no_grad():
            gate.weight.zero_()                                                     # relu(0) = 0
        assert found["zero"][i] == pytest.approx(perplexity() - base)
        with torch.no_grad():
            gate.weight.copy_(kept)


def test_stats_against_loops():
    model = random_model("satformer")
    found, alphas = probes.stats("satformer", model, tokens()[0]), passed(model).outputs_of("alpha")
    for n, alpha in enumerate(alphas):
        assert found["value_gate"][n] == pytest.approx(average(alpha))
        assert found["value_gate_zeros"][n] == pytest.approx(average(alpha == 0))
    assert 0 < found["value_gate_zeros"][0] < 1
