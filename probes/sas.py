"""What to watch in a trained sas.py."""
from nanodepth.record import watch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    attn = model.blocks[0].attn
    parts = [name for name in ("sim_q", "sim_k", "sim_v") if getattr(attn, name, None) is not None]
    ranks = []                                                                  # of a token's S N heads: 1 .. S N
    for x in watch(model, idx, [getattr(block.attn, name) for block in model.blocks for name in parts]):
        gram = (x @ x.mT).float()                                               # (B, T, S N, S N)
        ranks.append((gram.diagonal(dim1=-2, dim2=-1).sum(-1).square() / gram.square().sum((-2, -1))).mean().item())
    return {f"{name}_rank": ranks[i::len(parts)] for i, name in enumerate(parts)}
