"""probes/depth_attention.py against the values that attention gets."""
import pytest
import torch
from analysis import double, random_model, tokens, values_of  # noqa: F401

import probes
from probes.depth_attention import mixtures, value_matrix


@pytest.mark.parametrize("options", [{}, dict(n_kv_head=4, qk_norm=False), dict(stride=2, n_kv_head=1)], ids=str)
@torch.no_grad()
def test_shares_make_the_values(options):
    model = random_model("depth_attention", **options)
    mixed, own, found = values_of(model)                                            # (L, B, T, K, D) each
    shares = torch.stack(mixtures(model, found.outputs_of("q"), found.outputs_of("k")))
    assert (torch.einsum("nbthm,mbthd->nbthd", shares, own) - mixed).abs().max() < 1e-12
    A = value_matrix(model, found)["v"]
    assert torch.equal(A, A.tril()) and torch.allclose(A.sum(-1), torch.ones(3)) and A[0, 0] == 1
    assert all(0 < A[n, 0] < 1 for n in (1, 2))
    stats = probes.stats("depth_attention", model, tokens()[0])
    assert stats["earlier_values"] == pytest.approx((1 - A.diagonal()).tolist(), abs=1e-6)
