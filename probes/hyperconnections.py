"""What to watch in a trained hyperconnections.py."""
import torch

from nanodepth.record import watch


def connections(model):
    """The modules that give the maps of the 2 L sublayers."""
    return [m for block in model.blocks for m in (block.attn_connection, block.mlp_connection)]


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    pre, post, res = zip(*watch(model, idx, connections(model)))  # H_res: None where it is the identity
    pre = [p.abs() for p in pre]
    return {"focus": [(p.amax(-1) / p.sum(-1)).mean().item() for p in pre],     # 1: reads one stream; 1/n: all alike
            "write": [p.mean().item() for p in post],                           # 1 at the start
            "keep": [1.0 if r is None else r.diagonal(dim1=-2, dim2=-1).mean().item() for r in res]}


def watched(model):
    return {"maps": connections(model)}


def depth_matrix(model, record):
    """With the n streams as sums of outputs: (n, 2 L + 1) for all tokens, or (B, T, n, 2 L + 1)."""
    n, like = len(record.reads), record.outputs[0]
    eye, A = torch.eye(n, dtype=like.dtype, device=like.device), like.new_zeros(*like.shape[:2], n, n)
    streams = eye[:1].expand(model.config.n_streams, n)                             # all are the embedding
    for row, (pre, post, res) in enumerate(record.outputs_of("maps")):
        A[..., row, :] = (pre[..., None] * streams).sum(-2)
        carried = streams if res is None else res @ streams
        streams = carried + post[..., None] * eye[row + 1]
    A[..., n - 1, :] = streams.sum(-2)
    return {"r": A}
