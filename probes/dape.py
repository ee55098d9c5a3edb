"""Probes of dape.py."""
import torch


@torch.no_grad()
def neutral(model):
    """Sets parameters so that the model equals gpt.py. ValueError for options with which it never does."""
    if model.config.position != "rope":
        raise ValueError("dape has gpt.py's positions only with position=rope")
    if model.config.kernel:
        for block in model.blocks:
            block.attn.score_bias.conv_out.weight.zero_()
