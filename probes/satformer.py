"""Probes of satformer.py."""
import torch

from nanodepth.inside import replaced
from nanodepth.scoring import evaluate
from probes import watch


def value_gates(model):
    """{layer, counted from 1: its value gate}, for the layers that have one."""
    gates = {i: getattr(block.attn, "value_gate", None) for i, block in enumerate(model.blocks, start=1)}
    return {i: gate for i, gate in gates.items() if gate is not None}


def stats(model, idx):
    alphas = watch(model, idx, value_gates(model).values())
    return {"value_gate": [a.mean().item() for a in alphas],
            "value_gate_zeros": [(a == 0).float().mean().item() for a in alphas]}


def value_matrix(model, idx):
    """The values of a layer with a gate are its own plus alpha times the first layer's."""
    A = torch.eye(len(model.blocks))
    gates = value_gates(model)
    for i, alpha in zip(gates, watch(model, idx, gates.values())):
        A[i - 1, 0] = alpha.mean().cpu()
    return {"v": A}


def numbers(model, means, batches):
    """Figure 4: change in perplexity with one layer's value gate set to zero, or to its mean over tokens and heads."""
    gates = value_gates(model)

    def change(gate, function):
        with replaced({gate: function}):
            return evaluate(model, batches)["ppl"] - base

    base = evaluate(model, batches)["ppl"]
    average = {i: means["values.v"][i - 1, 0].item() for i in gates}
    return {"interventions": {
        "layers": list(gates), "perplexity": base, "zero": [change(gate, torch.zeros_like) for gate in gates.values()],
        "mean": [change(gate, lambda a, x=average[i]: torch.full_like(a, x)) for i, gate in gates.items()]}}
