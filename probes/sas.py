"""What to watch in a trained sas.py."""
from nanodepth.record import watch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    parts = [name for name in ("sim_q", "sim_k", "sim_v") if getattr(model.blocks[0].attn, name) is not None]
    ranks = []                                                                  # of a token's G N heads: 1 .. G N
    for x in watch(model, idx, [getattr(block.attn, name) for block in model.blocks for name in parts]):
        gram = (x @ x.mT).float()                                               # (B, T, G N, G N)
        ranks.append((gram.diagonal(dim1=-2, dim2=-1).sum(-1).square() / gram.square().sum((-2, -1))).mean().item())
    return {f"{name}_rank": ranks[i::len(parts)] for i, name in enumerate(parts)}
