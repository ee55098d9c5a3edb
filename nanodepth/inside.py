"""Measures what a model does inside, by hooks: hidden states, attention, and which layer reads which output.

A model can be watched if it has `embed`, `blocks`, `final_norm` and `head`, and its blocks have `attn`, `mlp_norm` and
`mlp`. What only one model has is in probes/NAME.py, the `probe` of the functions here. A depth matrix gives each
sublayer's input as a weighted sum of earlier outputs; "depth_error" is how far this sum is from the real input.
"""
import math
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from nanodepth.cli import UserError
from probes import watch

# ----------------------------------------------------------------------------------------------------- one forward pass


class SeeAttention(TorchFunctionMode):
    """While active, calls take(weights (B, H, T, T)) with the weights of every scaled_dot_product_attention."""

    def __init__(self, take):
        super().__init__()
        self.take = take

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self.take(attention_weights(*args, **kwargs))
        return function(*args, **kwargs)


def attention_weights(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Softmax weights (B, H, T, T) of a scaled_dot_product_attention with these arguments."""
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    scores = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1)


@dataclass
class Record:
    """What the layers hand to each other in one forward pass of L blocks: tensors (B, T, C)."""
    reads: list = field(default_factory=list)       # 2 L + 1: what the sublayers and final_norm read, before norms
    outputs: list = field(default_factory=list)     # 2 L + 1: the embedding, then the sublayers' outputs


def tables(model):
    """The embeddings that add up to the first output: of the token, and of the position if the model has one."""
    return [model.embed, *(table for table in model.children() if table is not model.embed
                           and isinstance(table, nn.Embedding) and table.embedding_dim == model.config.d_model)]


@contextmanager
def recorded(model):
    """A Record that the next forward pass fills. UserError if the model's parts have other names."""
    record = Record()
    if not all(hasattr(model, name) for name in ("embed", "blocks", "final_norm", "head")) or not all(
            hasattr(block, name) for block in model.blocks for name in ("attn", "mlp_norm", "mlp")):
        raise UserError("probe needs a model with embed, final_norm, head, and blocks that have attn, mlp and mlp_norm")

    def reads(module, inputs):      # if a block has inputs for queries, keys and values, the last is the residual's
        record.reads.extend(list(takewhile(torch.is_tensor, inputs))[-1:])

    def gives(module, inputs, output):
        record.outputs.append(output[0] if isinstance(output, tuple) else output)

    def embeds(module, inputs, output):
        record.outputs = [record.outputs[0] + output if record.outputs else output]

    with ExitStack() as hooks:
        for table in tables(model):
            hooks.enter_context(table.register_forward_hook(embeds))
        for block in model.blocks:
            first = getattr(block, "attn_norm", None) or block
            hooks.enter_context(first.register_forward_pre_hook(reads))
            hooks.enter_context(block.attn.register_forward_hook(gives))
            hooks.enter_context(block.mlp_norm.register_forward_pre_hook(reads))
            hooks.enter_context(block.mlp.register_forward_hook(gives))
        hooks.enter_context(model.final_norm.register_forward_pre_hook(reads))
        yield record


@contextmanager
def replaced(outputs):
    """While active, each module of {module: function} returns function(output) instead of its output."""
    with ExitStack() as hooks:
        for module, function in outputs.items():
            hooks.enter_context(module.register_forward_hook(
                lambda module, inputs, output, function=function: function(output)))
        yield


# --------------------------------------------------------------------------------------------------- numbers of tensors


def induction(weights, idx):
    """(attention on tokens that follow an earlier copy of the query's token, per head (H,), mean over all queries; and
    the share of queries that have such tokens). Induction heads look there (arXiv:2209.11895). weights: (B, H, T, T).
    """
    behind = F.pad(idx[:, None, :-1] == idx[:, :, None], (1, 0)).tril(-1)           # (B, T, T): query, key
    return (weights * behind[:, None]).sum(-1).mean((0, 2)), behind.any(-1).double().mean()


def core_features(second, first):
    """How many principal components hold 99% of the variance, from E[x x^T] (C, C) and E[x] (C,)."""
    values = torch.linalg.eigvalsh(second.double() - torch.outer(first.double(), first.double())).clamp(min=0).flip(0)
    if values.sum() <= 1e-12 * second.double().trace():
        return 0
    return int((values.cumsum(0) < 0.99 * values.sum()).sum()) + 1


def token_similarity(x):
    """Mean cosine between different tokens of a sequence; x: (B, T, C)."""
    u, T = F.normalize(x.double(), dim=-1), x.size(1)
    return ((u.sum(1).square().sum(-1) - u.square().sum((1, 2))) / (T * (T - 1))).mean()


def cosine(a, b):
    """Mean cosine between the same tokens in two layers."""
    return F.cosine_similarity(a.double(), b.double(), dim=-1, eps=1e-30).mean()


# ------------------------------------------------------------------------------------------------------- who reads what


def nothing(*_):
    return {}


def depth_matrix(model, idx, record, probe=None):
    """{stream: A (B, T, 2 L + 1, 2 L + 1)}: reader l, a sublayer or the head, reads sum_s A[l, s] record.outputs[s].

    To find A, a second pass replaces the outputs by unit vectors, and keeps the probe's token_weights() of the real
    pass. In other streams than "r", only the rows of attention count.
    """
    if hasattr(probe, "depth_matrix"):
        return probe.depth_matrix(model, idx, record)
    n, C, parts = len(record.outputs), record.outputs[0].size(-1), defaultdict(list)
    dynamic = getattr(probe, "token_weights", nothing)(model)
    weights = {module: lambda _, seen=seen: seen for module, seen in zip(dynamic, watch(model, idx, dynamic))}
    sublayers = [part for block in model.blocks for part in (block.attn, block.mlp)]
    for first in range(0, n, C):                                                    # C columns of A at a time
        units = {table: partial(unit, -1) for table in tables(model)} | {
            module: partial(unit, s - first) for s, module in enumerate((model.embed, *sublayers))}
        with replaced(units | weights):
            with recorded(model) as again:
                model(idx)
            streams = getattr(probe, "streams", nothing)(model, idx)
        for name in streams or ["r"]:
            rows = torch.stack(again.reads, dim=-2)[..., :n - first]                # (B, T, n, columns)
            if name in streams:
                rows[..., :-1:2, :] = torch.stack(streams[name], dim=-2)[..., :n - first]
            parts[name].append(rows)
    return {name: torch.cat(columns, dim=-1) for name, columns in parts.items()}


def unit(i, output):
    """The unit vector i in the shape of an output, or of the first of several; zeros if i is outside of it."""
    if isinstance(output, tuple):
        return unit(i, output[0]), *output[1:]
    one = torch.zeros_like(output)
    if 0 <= i < output.size(-1):
        one[..., i] = 1.0
    return one


def depth_error(A, record, streams):
    """Largest relative error, of any stream, of the inputs that the depth matrices compute from the outputs."""
    outputs, errors = torch.stack(record.outputs, dim=-2), []
    for name, a in A.items():
        inputs = torch.stack(record.reads if name == "r" else streams[name], dim=-2)
        rows = slice(None) if name == "r" else slice(0, -1, 2)
        errors.append((a[..., rows, :] @ outputs - inputs).norm() / inputs.norm())
    return max(errors)


# --------------------------------------------------------------------------------------------------- numbers of a model


def observe(model, idx, targets, probe=None):
    """{name: tensor, a mean over the tokens of idx (B, T)}: everything that measure() needs for its numbers."""
    heads = []

    def see(weights):                                       # skips attention in blocks of a window
        if weights.size(0) == len(idx) and weights.shape[2:] == 2 * idx.shape[1:]:
            entropy = -weights.xlogy(weights).sum(-1).mean((0, 2))          # per head (H,), in nats
            sink = weights[:, :, 1:, 0].mean((0, 2))                        # what later queries give to token 0
            heads.append((entropy, sink, *induction(weights, idx)))
    with recorded(model) as record, SeeAttention(see):
        model(idx)
    L, hidden = len(model.blocks), record.reads[::2]        # the residual stream before each block and at the end
    if len(record.reads) != 2 * L + 1 or len(record.outputs) != 2 * L + 1:
        raise UserError("probe cannot measure it: a block does not call attn_norm, attn, mlp_norm and mlp once each")
    if not all(x.isfinite().all() for x in hidden):
        raise UserError("the residual stream is not finite")
    flat = [x.double().flatten(0, 1) for x in hidden]
    lens = [F.cross_entropy(model.head(model.final_norm(x)).flatten(0, 1), targets.flatten()) for x in hidden]
    out = {"second": torch.stack([x.mT @ x / len(x) for x in flat]), "first": torch.stack([x.mean(0) for x in flat]),
           "token_similarity": torch.stack([token_similarity(x) for x in hidden]), "lens": torch.stack(lens),
           "layer_similarity": torch.stack([torch.stack([cosine(a, b) for b in hidden]) for a in hidden])}
    if len(heads) == L:
        out |= dict(zip(("entropy", "sink", "induction", "repeats"), map(torch.stack, zip(*heads))))
    streams = getattr(probe, "streams", nothing)(model, idx) or {"x": record.reads[:-1:2]}
    if L > 1:
        out |= {f"adjacent.{name}": torch.stack(list(map(cosine, inputs, inputs[1:])))
                for name, inputs in streams.items()}
    A = depth_matrix(model, idx, record, probe)
    out["depth_error"] = depth_error(A, record, streams)
    out |= {f"depth.{name}": a.mean((0, 1)) for name, a in A.items()}
    out |= {f"values.{name}": a for name, a in getattr(probe, "value_matrix", nothing)(model, idx).items()}
    return {name: x.detach().cpu() for name, x in out.items()}


def averaged(model, batches, probe=None):
    """observe() over batches (idx, targets), averaged."""
    total, n = {}, sum(len(idx) for idx, _ in batches)
    for idx, targets in batches:
        for name, x in observe(model, idx, targets, probe).items():
            total[name] = total.get(name, 0) + x.double() * len(idx) / n
    return total


@torch.no_grad()
def copying(model, batches):
    """{"repeated": mean loss of copyable targets in nats, "others": of all others, "share": fraction that is copyable}.

    A target is copyable if it followed the same token before in its row. Without induction heads (arXiv:2209.11895) a
    model has not learned to copy, and the two losses are close. batches: [(idx, targets)], int64 (B, T).
    """
    nats, count = [0.0, 0.0], [0, 0]
    for idx, targets in batches:
        pairs = torch.stack((idx, targets), dim=-1)
        seen = (pairs[:, :, None] == pairs[:, None]).all(-1).tril(-1).any(-1)       # (B, T)
        for i, mask in enumerate((seen & (targets >= 0), ~seen & (targets >= 0))):
            if n := int(mask.sum()):
                nats[i] += model(idx, targets.where(mask, -1))[1].item() * n
                count[i] += n
    means = [a / n if n else None for a, n in zip(nats, count)]
    return {"repeated": means[0], "others": means[1], "share": count[0] / sum(count)}


def states(means):
    """Numbers of the hidden states per layer, from averaged()."""
    return {"core_features": [core_features(a, b) for a, b in zip(means["second"], means["first"])],
            **{name: means[name].tolist() for name in ("token_similarity", "layer_similarity", "lens")}}


@torch.no_grad()
def measure(model, batches, probe=None):
    """All numbers of one model: a dict that JSON can hold. batches: [(idx, targets)], int64 (B, T), full rows.

    UserError if the model cannot be watched or is not finite.
    """
    means = averaged(model, batches, probe)
    if "repeats" in means:                                  # only over queries with an earlier copy
        means["induction"] = means["induction"] / means["repeats"].clamp(min=1e-12)[:, None]
    out = {"loss": means["lens"][-1].item(), "tokens": sum(idx.numel() for idx, _ in batches), **states(means)}
    for name in ("entropy", "sink", "induction", "depth_error"):
        out[name] = means[name].tolist() if name in means else None
    for kind in ("adjacent", "depth", "values"):
        out[kind] = {name.split(".")[1]: x.tolist() for name, x in means.items() if name.startswith(f"{kind}.")}
    if not out["depth_error"] <= 1e-3:                      # what is read is not such a sum
        out["depth"] = {}
    return out | {"copying": copying(model, batches)} | getattr(probe, "numbers", nothing)(model, means, batches)
