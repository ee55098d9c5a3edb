"""What is known about a model besides the model: one file per model, under its name, found by it. None is needed.

A file may define any of these; what it lacks, nanodepth/record.py has for a plain residual stream. `record` is a
record.Record of one forward pass, L the number of blocks, and "per token" means B, T in front of the shape.

costs(config, T)                (parameters, forward FLOPs per token, numbers read per token) more than its baseline's
                                (models.baseline), in a context of T tokens; bench.py prints the floor that they make
neutral(model)                  sets the own parameters so that the model is its baseline, which a test checks.
                                ValueError for options with which it never is
stats(model, idx)               for the training log: {quantity: [a number per layer]}
watched(model)                  {kind: [modules]} whose inputs and outputs the record keeps, in record.calls[kind]
streams(model, record)          {"q", "k", "v", "r": L inputs (B, T, C)} of the attention, where they are not one "x"
depth_matrix(model, record)     {"r" and other streams: A (2 L + 1, 2 L + 1) per token}: reader l, a sublayer or the
                                head, reads sum_s A[l, s] outputs[s]; checked against what it reads in every pass
value_matrix(model, record)     {"v" (values), "q", "k" or "g" (gates): A (L, L)}, means over the tokens: layer n has
                                sum_m A[n, m] times what layer m computes; or (L, L + 1), with a source outside first
numbers(model, means, batches)  more numbers for RUN.json: {key: value}, from means over the tokens and from passes with
                                changed parts (record.replaced)
"""
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import torch
from torch import nn


def find(name):
    """The module of the probes of model `name`, or None if there is no such file."""
    return import_module(f"{__name__}.{name}") if Path(__file__).with_name(f"{name}.py").exists() else None


def of(name, what):
    """The function `what` of the probes of model `name`, or None."""
    return getattr(find(name), what, None)


@torch.no_grad()
def watch(model, idx, modules):
    """Outputs of some submodules in a forward pass on idx (B, T), in fp32 and in the order of their calls.

    A tensor each, or a list where a module gives several, or None among them. Eager: with hooks, a compiled model would
    compile once more, as long as for training.
    """
    outputs = []

    def keep(module, inputs, output):
        outputs.append(output.float() if torch.is_tensor(output) else [x if x is None else x.float() for x in output])

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(keep))
        model.forward(idx)
    return outputs


@torch.no_grad()
def stats(name, model, idx):
    """What the mechanism of model `name` does on idx (B, T), for the log: {quantity: [a number per layer]}.

    From probes/NAME.py; without it the mean output gates, if there are modules block.attn.gate.
    """
    training = model.training
    model.eval()                                    # no dropout, and no step of a moving average
    found = (of(name, "stats") or gate_stats)(model, idx)
    model.train(training)
    if not all(isinstance(x, float) for numbers in found.values() for x in numbers):
        raise TypeError(f"stats() of probes/{name}.py must return {{name: [a float per layer]}}, not {found}")
    return found


def gate_stats(model, idx):
    gates = [gate for block in getattr(model, "blocks", ()) if (gate := gate_of(block)) is not None]
    outputs = watch(model, idx, gates) if gates else []                     # none where a model uses the weights alone
    return {"gate": [g.sigmoid().mean().item() for g in outputs]} if outputs else {}


def gate_of(block):
    """The linear map of a block's output gate, or None."""
    gate = getattr(getattr(block, "attn", None), "gate", None)
    return gate if isinstance(gate, nn.Module) else None
