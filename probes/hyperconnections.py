"""Probes of hyperconnections.py; mhc.py and mhc_lite.py share most of them."""
import torch

from probes import watch


def maps(model, idx):
    """(H_pre, H_post, H_res) of each of the 2 L sublayers: per token, or one for all tokens if static."""
    modules = [m for block in model.blocks for m in (block.attn_connection, block.mlp_connection)]
    return [m.maps(X) for m, (X, _) in zip(modules, watch(model, idx, modules, inputs=True))]


def stats(model, idx):
    pre, post, res = zip(*maps(model, idx))
    pre = [p.abs() for p in pre]
    return {"focus": [(p.amax(-1) / p.sum(-1)).mean().item() for p in pre],     # 1: reads one stream; 1/n: all alike
            "write": [p.mean().item() for p in post],                           # 1 at the start
            "keep": [r.diagonal(dim1=-2, dim2=-1).mean().item() for r in res]}


def depth_matrix(model, idx, record):
    """Tracks the n streams as sums of outputs: (n, 2 L + 1) for all tokens, or (B, T, n, 2 L + 1)."""
    n, like = len(record.reads), record.outputs[0]
    eye, A = torch.eye(n, dtype=like.dtype, device=like.device), like.new_zeros(*like.shape[:2], n, n)
    streams = eye[:1].expand(model.config.n_streams, n)                             # all are the embedding
    for row, (pre, post, res) in enumerate(maps(model, idx)):
        A[..., row, :] = (pre[..., None] * streams).sum(-2)
        streams = res @ streams + post[..., None] * eye[row + 1]
    A[..., n - 1, :] = streams.sum(-2)
    return {"r": A}
