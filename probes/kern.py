"""Probes of kern.py."""
from probes import watch


def stats(model, idx):
    tops = [r.topk(model.config.top_k) for r in watch(model, idx, [block.mlp.router for block in model.blocks])]
    gammas = [float(block.mlp.gamma) for block in model.blocks]
    loads = [top.indices[top.values > 0].bincount(minlength=model.config.n_expert) for top in tops]
    return {"gamma": gammas,
            "weight": [gamma * top.values.sum(-1).mean().item() for gamma, top in zip(gammas, tops)],  # of all k
            "load": [(load.max() / load.double().mean()).item() for load in loads]}    # of the busiest expert; 1: equal
