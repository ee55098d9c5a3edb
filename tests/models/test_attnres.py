"""attnres.py against its paper's equations in float64, arXiv:2603.15031."""
import pytest
import torch
from measure import SMALL, extra, mixing_flops
from reference import GATED, compare, float64, rms, setup, show, softmax, sublayer  # noqa: F401  (float64: autouse)

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


def attnres(p, c, x, read=read):
    v = [x]
    for l in range(2 * c.n_layer):
        v.append(sublayer(p, c, l + 1, read(p, c, l, v)))
    return read(p, c, 2 * c.n_layer, v)


@pytest.mark.parametrize("options", [*GATED, dict(n_layer=1)], ids=show)
def test_equations(options):
    compare(attnres, *setup("attnres", **options))


def test_costs():
    """Each of 9 outputs is multiplied with 8 queries; the mean reads what the readers see. mixing_flops counts all."""
    (_, flops, read), (_, products) = extra("attnres")
    model, seen = models.build("attnres", **SMALL), []
    model.depth_attention.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    model(torch.zeros(1, 4, dtype=torch.long))
    assert products == 2 * 8 * 9 * 64 and flops == (2 * sum(seen) + 2 * 8 * 9 + 3 * 9) * 64
    assert len(seen) == 9 and read == sum(S - 1 for S in seen) * 64
    counted, said = mixing_flops("attnres")
    assert counted + 2 * 9 * 8 * 192 == said


@pytest.mark.parametrize("name, rows", [("attnres", 6), ("attnres_block", 6), ("attnres_delta", 5), ("mhar", 6)])
def test_queries_start_at_zero(name, rows):
    model = models.build(name, vocab_size=31, n_layer=3, n_head=4, d_model=32, max_len=8)
    assert torch.equal(model.depth_attention.query, torch.zeros(rows, 32))
