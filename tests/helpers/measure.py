"""What the tests of several models count beside the baseline: FLOPs."""
from dataclasses import fields

import torch

import models
import probes
from nanodepth.devices import flops_per_token

SMALL = dict(vocab_size=31, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)


def extra(name, T=64, **options):
    """(costs() of the model's probes, the counted FLOPs of matrix products), above the baseline's."""
    with torch.device("meta"):
        model, base = models.build(name, **{**SMALL, **options}), models.module(models.baseline(name))
        shared = {f.name: getattr(model.config, f.name) for f in fields(base.Config) if hasattr(model.config, f.name)}
        other = base.Model(base.Config(**shared))
    return probes.of(name, "costs")(model.config, T), flops_per_token(model, T) - flops_per_token(other, T)
