"""What to watch in a trained hyperconnections.py."""
import torch

from nanodepth.record import watch


def connections(model):
    """Modules that give the maps of the 2 L sublayers: (.., n, 2 + n), columns H_pre, H_post and H_res transposed, or
    (.., n, 2) where H_res is the identity."""
    return [m for block in model.blocks for m in (block.attn_connection, block.mlp_connection)]


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    maps = watch(model, idx, connections(model))
    pre = [m[..., 0].abs() for m in maps]
    return {"focus": [(p.amax(-1) / p.sum(-1)).mean().item() for p in pre],     # 1: reads one stream; 1/n: all alike
            "write": [m[..., 1].mean().item() for m in maps],                   # H_post; 1 at the start
            "keep": [m[..., 2:].diagonal(dim1=-2, dim2=-1).mean().item() if m.size(-1) > 2 else 1.0 for m in maps]}


def watched(model):
    return {"maps": connections(model)}


def depth_matrix(model, record):
    """With the n streams as sums of outputs: (B, T, n, 2 L + 1)."""
    n, like = len(record.reads), record.outputs[0]
    eye, A = torch.eye(n, dtype=like.dtype, device=like.device), like.new_zeros(*like.shape[:2], n, n)
    streams = eye[:1].expand(model.config.n_streams, n)                             # all are the embedding
    for row, maps in enumerate(record.outputs_of("maps")):
        A[..., row, :] = (maps[..., :1] * streams).sum(-2)
        carried = maps[..., 2:].mT @ streams if maps.size(-1) > 2 else streams
        streams = carried + maps[..., 1:2] * eye[row + 1]
    A[..., n - 1, :] = streams.sum(-2)
    return {"r": A}
