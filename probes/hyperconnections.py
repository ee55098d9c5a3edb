"""What to watch in a trained hyperconnections.py."""
from nanodepth.record import watch


def connections(model):
    """The modules that give H_pre, H_post and H_res of the 2 L sublayers."""
    return [m for block in model.blocks for m in (block.attn_connection, block.mlp_connection)]


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per sublayer]}."""
    pre, post, res = zip(*watch(model, idx, connections(model)))
    pre = [p.abs() for p in pre]
    return {"focus": [(p.amax(-1) / p.sum(-1)).mean().item() for p in pre],     # 1: reads one stream; 1/n: all alike
            "write": [p.mean().item() for p in post],                           # 1 at the start
            "keep": [1.0 if r is None else r.diagonal(dim1=-2, dim2=-1).mean().item() for r in res]}
