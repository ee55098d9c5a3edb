"""What the tests of several models count beside the baseline: parameters and FLOPs."""
from dataclasses import fields

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import models
import probes
from nanodepth.devices import flops_per_token

SMALL = dict(vocab_size=31, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)


def extra(name, T=64, **options):
    """(costs() of the model's probes, the counted (parameters, FLOPs of matrix products)), above the baseline's."""
    with torch.device("meta"):
        model, base = models.build(name, **{**SMALL, **options}), models.module(models.baseline(name))
        shared = {f.name: getattr(model.config, f.name) for f in fields(base.Config) if hasattr(model.config, f.name)}
        other = base.Model(base.Config(**shared))
    n, n0 = (sum(p.numel() for p in m.parameters()) for m in (model, other))
    counted = n - n0, flops_per_token(model, T) - flops_per_token(other, T)
    return probes.of(name, "costs")(model.config, T), counted


class VectorFlops(TorchDispatchMode):
    """Counts the additions, products and sums over vectors of length C: one FLOP per number."""

    def __init__(self, C):
        super().__init__()
        self.C, self.n = C, 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out, name = f(*args, **(kwargs or {})), f.overloadpacket.__name__
        read = {"mul": out, "add": out, "pow": args[0], "sum": args[0], "mean": args[0]}.get(name)
        self.n += read.numel() if read is not None and read.dim() and read.size(-1) == self.C else 0
        return out


def mixing_flops(name, **options):
    """FLOPs per token on vectors of length C beyond gpt's without its residual sum: (counted, by costs())."""
    counted, shape = [], dict(SMALL, d_model=192, n_kv_head=4)               # not the width of anything else
    for each, more in ((name, options), ("gpt", {})):
        model = models.build(each, **shape, **more)
        with torch.no_grad(), VectorFlops(192) as counter:
            model(torch.zeros(1, 8, dtype=torch.long))
        counted.append(counter.n / 8)
    said = probes.of(name, "costs")(models.build(name, **shape, **options).config, 8)[1]
    return counted[0] - counted[1] + 2 * SMALL["n_layer"] * 192, said
