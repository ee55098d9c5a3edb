"""Probes of depth_attention.py."""
import torch
import torch.nn.functional as F

import models
from probes import watch


def mixtures(model, idx):
    """What each layer's values consist of: the shares (B, T, K, L) of the values that the L layers compute.

    It is the model's own mixing, applied to unit vectors in place of values.
    """
    L, sources, out = len(model.blocks), [], []
    seen = watch(model, idx, [part for block in model.blocks for part in (block.attn.q_norm, block.attn.k_norm)])
    for layer, (q, k) in enumerate(zip(seen[::2], seen[1::2])):
        own = F.one_hot(torch.tensor(layer, device=k.device), L).to(k).expand(*k.shape[:3], L)
        out.append(models.module("depth_attention").depth_attention(q, [*sources, (k, own)]))
        if model.blocks[layer].attn.is_source:
            sources.append((k, out[-1]))
    return out


def stats(model, idx):
    return {"earlier_values": [1 - a[..., layer].mean().item() for layer, a in enumerate(mixtures(model, idx))]}


def value_matrix(model, idx):
    """Layer n has sum_m A[n, m] times the values that layer m computes; means over tokens and heads."""
    return {"v": torch.stack([a.mean((0, 1, 2)) for a in mixtures(model, idx)])}
