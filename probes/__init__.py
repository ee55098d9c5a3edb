"""What a model's mechanism does, measured: one file per model, found by its name. None is needed.

A file may define any of these. L is the number of blocks, and "per token" means B, T in front of the shape.

stats(model, idx)               for the training log: {quantity: [a number per layer]}
streams(model, idx)             {"q", "k", "v", "r": L inputs (B, T, C)} of the attention, where these differ
token_weights(model)            [modules] whose outputs are the weights, per token, of sums of earlier outputs
depth_matrix(model, idx, record)  where token_weights() is not enough: {"r": A (2 L + 1, 2 L + 1) per token}: reader l,
                                a sublayer or the head, reads sum_s A[l, s] outputs[s], of an inside.Record of idx
value_matrix(model, idx)        {"v" (values), "q", "k" or "g" (gates): A (L, L)}, means over the tokens: layer n has
                                sum_m A[n, m] times what layer m computes; or (L, L + 1), first a source outside
numbers(model, means, batches)  more numbers for the RUN.json of analyze.py probe: {key: value}, from means over the
                                tokens and from passes with changed parts (inside.replaced)
"""
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import torch
from torch import nn


def find(name):
    """The module of the probes of model `name`, or None if there is no such file."""
    return import_module(f"{__name__}.{name}") if Path(__file__).with_name(f"{name}.py").exists() else None


@torch.no_grad()
def watch(model, idx, modules, inputs=False):
    """The outputs of some submodules in a forward pass on idx (B, T), in fp32 and in the order of the calls: [tensor].
    With inputs=True their inputs: [tuple].

    Runs eagerly: with hooks a compiled model would be compiled once more, which takes minutes.
    """
    seen = []
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(
                lambda module, given, output: seen.append(given if inputs else output.float())))
        if modules:
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
            model(idx)
    return seen


@torch.no_grad()
def stats(name, model, idx):
    """What the mechanism of model `name` does on idx (B, T), for the log: {quantity: [a float per layer]}.

    From probes/NAME.py. Without that file: the mean output gates, if there are modules block.attn.gate.
    """
    return getattr(find(name), "stats", gate_stats)(model, idx)


def gate_stats(model, idx):
    """The mean output gate of each layer that has one; none if a model uses only the gate's weights."""
    gates = [getattr(getattr(block, "attn", None), "gate", None) for block in getattr(model, "blocks", ())]
    outputs = watch(model, idx, [gate for gate in gates if isinstance(gate, nn.Module)])
    return {"gate": [g.sigmoid().mean().item() for g in outputs]} if outputs else {}
