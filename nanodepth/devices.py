"""Devices and what they can do."""
import torch
from torch.utils.flop_counter import FlopCounterMode


def flops_per_token(model, T):
    """Forward FLOPs per token at T tokens of context: matrix products and attention, by torch's counter."""
    with torch.device("meta"):
        copy, idx = type(model)(model.config), torch.zeros(1, T, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        copy(idx)
    return counter.get_total_flops() / T
