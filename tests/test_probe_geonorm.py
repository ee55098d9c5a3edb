"""probes/geonorm.py against the model's own streams."""
import pytest
import torch
from analysis import double, random_model, tokens  # noqa: F401

import probes


@torch.no_grad()
def test_stats():
    model = random_model("geonorm")
    found = probes.stats("geonorm", model, tokens()[0])
    for name in ("attn", "mlp"):
        scales = [getattr(block, f"{name}_geodesic").scale.item() for block in model.blocks]
        assert found[f"{name}_step"] == pytest.approx([s / (i + 1) ** 0.5 for i, s in enumerate(scales)])
    streams = [model.embed(tokens()[0]), *probes.watch(model, tokens()[0], model.blocks)]
    wanted = [torch.cosine_similarity(a.double(), b.double(), -1).acos().mean().item()
              for a, b in zip(streams, streams[1:])]
    assert found["angle"] == pytest.approx(wanted, rel=1e-5)
