"""Probes of kern.py."""
from probes import watch


def costs(c, T):
    """Empty rows of the experts' blocks are not counted."""
    idle = 3 * (c.n_expert - c.top_k) * c.d_model * (c.d_ff // c.top_k)
    router = c.n_expert * c.d_model
    return c.n_layer * (idle + router + (c.router == "kern")), c.n_layer * (2 * router + 2 * c.top_k * c.d_model), 0


def stats(model, idx):
    tops = [r.topk(model.config.top_k) for r in watch(model, idx, [block.mlp.router for block in model.blocks])]
    gammas = [float(block.mlp.gamma) for block in model.blocks]
    loads = [top.indices[top.values > 0].bincount(minlength=model.config.n_expert) for top in tops]
    return {"gamma": gammas,
            "weight": [gamma * top.values.sum(-1).mean().item() for gamma, top in zip(gammas, tops)],  # of all k
            "load": [(load.max() / load.double().mean()).item() for load in loads]}    # of the busiest expert; 1: equal
