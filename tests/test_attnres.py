"""attnres.py against its paper's equations in float64, arXiv:2603.15031."""
import pytest
import torch
from measure import SMALL, dtypes_read, extra, mixing_flops
from reference import (  # noqa: F401  (float64: autouse)
    GATED, compare, depends_on_every_parameter, float64, own_groups, rms, setup, show, softmax, sublayer,
)

import models


def read(p, c, l, sources):
    """h_l = sum_s softmax_s( w_l . RN(v_s) ) v_s at every position; reader 0 has one source and no query."""
    if l == 0:
        return sources[0]
    w, out = p["depth_attention.query"][l - 1], []
    for t in range(len(sources[0])):
        alpha = softmax([torch.dot(w, rms(v[t], c)) for v in sources])
        out.append(sum(a * v[t] for a, v in zip(alpha, sources)))
    return out


def attnres(p, c, x):
    v = [x]
    for l in range(2 * c.n_layer):
        v.append(sublayer(p, c, l + 1, read(p, c, l, v)))
    return read(p, c, 2 * c.n_layer, v)


@pytest.mark.parametrize("options", [*GATED, dict(n_layer=1)], ids=show)
def test_equations(options):
    compare(attnres, *setup("attnres", **options))


def test_reference_depends_on_every_parameter():
    depends_on_every_parameter(attnres, *setup("attnres"))


def test_costs():
    """One product for each of 9 outputs, of 8 queries; the mean reads what the readers see."""
    (parameters, flops, read), counted = extra("attnres")
    model, seen = models.build("attnres", **SMALL), []
    model.depth_attention.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    model(torch.zeros(1, 4, dtype=torch.long))
    assert counted == (parameters, 2 * 8 * 9 * 64) and parameters == 2 * 4 * 64 and len(seen) == 9
    assert flops == (2 * sum(seen) + 2 * 8 * 9 + 3 * 9) * 64 and read == sum(S - 1 for S in seen) * 64


def test_counted_flops():
    """All operations on vectors of length C, beside the products with w."""
    counted, said = mixing_flops("attnres")
    assert counted + 2 * 9 * 8 * 192 == said


def test_states_are_bf16_under_autocast():
    assert dtypes_read("attnres") == {torch.bfloat16}


@pytest.mark.parametrize("name, rows", [("attnres", 6), ("attnres_block", 6), ("attnres_delta", 5), ("mhar", 6)])
def test_initial_values_and_groups(name, rows):
    model = models.build(name, vocab_size=31, n_layer=3, n_head=4, d_model=32, max_len=8)
    assert torch.equal(model.depth_attention.query, torch.zeros(rows, 32))
    assert own_groups(model) == (set(), {"depth_attention.query"})
