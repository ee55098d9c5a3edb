"""probes/resformer.py against the values that attention gets."""
import pytest
import torch
from analysis import double, random_model, tokens, values_of  # noqa: F401

import probes
from probes.resformer import value_matrix


@pytest.mark.parametrize("options", [
    {}, dict(value_mix="learnable"), dict(value_mix="identity"), dict(last_k=1)], ids=str)
@torch.no_grad()
def test_value_matrix_makes_the_values(options):
    model = random_model("resformer", **options)
    mixed, own, record = values_of(model)
    A = value_matrix(model, record)
    assert set(A) == {"v"} and A["v"].shape == (3, 3)
    made = torch.einsum("nm,mbthd->nbthd", A["v"].to(own.dtype), own)
    assert (made - mixed).abs().max() < 1e-9 * mixed.abs().max()


def test_stats_are_the_lambdas():
    model = random_model("resformer", value_mix="learnable")
    found = probes.stats("resformer", model, tokens()[0])
    assert found == {name: getattr(model.value_mix, name).tolist() for name in ("lambda1", "lambda2")}
