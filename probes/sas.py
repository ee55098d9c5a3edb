"""Probes of sas.py."""
import torch
from torch import nn


def costs(c, T):
    G, H, K, D, D_sim = c.n_sim, c.n_head, c.n_kv_head, c.d_head, c.d_sim
    heads, features = sum(G * (G + 1) * N * N * c.kernel for N in (H, K, K)), (D + D_sim) * D_sim
    biases, gains = 2 * G * (H + 2 * K) + 4 * D_sim, 2 * c.qk_norm * (D_sim - D)
    products, attention = D * heads + G * (H + K) * features, 2 * T * (G * H * (D_sim + D) - 2 * c.d_model)
    params, flops = heads + 2 * features + biases + gains, 2 * products + attention + G * c.d_model
    return c.n_layer * params, c.n_layer * flops, 0


@torch.no_grad()
def neutral(model):
    """Sets parameters so that the model equals gpt.py. ValueError for options with which it never does."""
    if model.config.d_sim != model.config.d_head:
        raise ValueError("sas can copy gpt.py's heads only with d_sim = d_head")
    for module in model.modules():
        if hasattr(module, "refine"):
            for p in module.parameters():
                p.zero_()
            if isinstance(module.expand, nn.Conv1d):
                nn.init.dirac_(module.expand.weight, groups=model.config.n_sim)
            else:
                nn.init.eye_(module.expand.weight)
