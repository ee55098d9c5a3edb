"""Probes of sas.py."""
import torch
from torch import nn


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
