"""Probes of exoformer.py; nuresformer.py and exoformer_dynamic.py share most of them."""
import torch

from nanodepth.inside import averaged, replaced, states
from probes import watch

MAPS = dict(q="wq", k="wk", v="wv", g="gate")               # the module of a layer's attention that makes each stream


def mixing(model):
    """{layer, counted from 1: its attention}, for the layers that mix in an anchor."""
    return {i: block.attn for i, block in enumerate(model.blocks, start=1) if hasattr(block.attn.wq, "lambda_anchor")}


def gammas(model):
    """The modules that give (B, T, 4, 2) factors of the lambdas; [] unless mixing is dynamic."""
    return [attn.gamma for attn in mixing(model).values() if hasattr(attn, "gamma")]


def stats(model, idx):
    found = {f"{kind}_{s}": [getattr(getattr(attn, w), kind).mean().item() for attn in mixing(model).values()]
             for kind in ("lambda_anchor", "lambda_self") for s, w in MAPS.items()}
    if gammas(model):
        found["gamma"] = [g.mean().item() for g in watch(model, idx, gammas(model))]
    return found


def value_matrix(model, idx):
    """An anchor from outside is an extra first column (L, L + 1). Anchors count after their norm."""
    layers, L, out = mixing(model), len(model.blocks), {}
    factors = [g.mean((0, 1)).tolist() for g in watch(model, idx, gammas(model))] or [[(1, 1)] * 4] * len(layers)
    outside = int(hasattr(model, "anchor"))
    for i, (s, w) in enumerate(MAPS.items()):
        out[s] = torch.cat((torch.zeros(L, outside), torch.eye(L)), dim=1)
        for (layer, attn), gamma in zip(layers.items(), factors):
            anchor, own = gamma[i]
            out[s][layer - 1, layer - 1 + outside] = own * getattr(attn, w).lambda_self.mean().item()
            out[s][layer - 1, 0] = anchor * getattr(attn, w).lambda_anchor.mean().item()
    return out


def numbers(model, means, batches):
    """Section 3.3 of the paper: loss, similarity and core features with the anchors set to zero."""
    with replaced({norm: torch.zeros_like for norm in model.anchor_norms.values()}):
        bare = averaged(model, batches)
    return {"without_anchor": {"loss": bare["lens"][-1].item(), **states(bare)}}
