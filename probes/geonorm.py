"""What to watch in a trained geonorm.py."""
import torch.nn.functional as F

from nanodepth.record import watch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    states = [F.normalize(x, dim=-1) for x in watch(model, idx, [model.embed, *model.blocks])]
    chords = [(b - a).norm(dim=-1) for a, b in zip(states, states[1:])]
    out = {"angle": [2 * (c / 2).clamp(max=1.0).asin().mean().item() for c in chords]}      # radians, by which a block turns x
    if hasattr(model.blocks[0], "attn_geodesic"):
        out["attn_step"] = [(block.attn_geodesic.scale * block.attn_geodesic.decay).item() for block in model.blocks]
        out["mlp_step"] = [(block.mlp_geodesic.scale * block.mlp_geodesic.decay).item() for block in model.blocks]
    return out
