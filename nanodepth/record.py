"""What a forward pass does, by hooks: hidden states, attention and output gates, layer by layer.

Any model can be watched that has `embed`, `blocks`, `final_norm` and `head`, and whose blocks have `attn`, `mlp_norm`
and `mlp`. What is particular to one model is in probes/NAME.py. The functions here take that module as `probe`. With
None the residual stream is taken for the plain sum of all outputs so far; "depth_error" says how far it is from that.
"""
import math
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from itertools import pairwise, takewhile

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from nanodepth.cli import UserError
from probes import gate_of, watch  # noqa: F401

# ----------------------------------------------------------------------------------------------------- one forward pass


class SeeAttention(TorchFunctionMode):
    """While it is active, take(weights (B, H, T, T)) gets the weights of every scaled_dot_product_attention."""

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


class Record:
    """What the layers hand to each other in one forward pass of L blocks.

    reads     what the 2 L sublayers and the final norm read, before their norms: 2 L + 1 tensors (B, T, C)
    outputs   the embedding, and what the 2 L sublayers give: 2 L + 1 tensors (B, T, C)
    gates     sigmoid outputs of the modules block.attn.gate, (B, T, H, D or 1) each
    calls     {kind: [(inputs, output)]} of the modules that the probe watches, in the order of their calls
    """

    def __init__(self):
        self.reads, self.outputs, self.gates, self.calls = [], [], [], defaultdict(list)

    def outputs_of(self, kind):
        """What the watched modules of this kind gave, in the order of their calls."""
        return [output for _, output in self.calls[kind]]

    @property
    def parallel(self):
        """Whether attention and MLP of a block read the same state."""
        return self.reads[0] is self.reads[1]

    @property
    def hidden(self):
        """The residual stream before each block and at the end: L + 1 tensors (B, T, C)."""
        return self.reads[::2]


@contextmanager
def recorded(model, probe=None):
    """A Record that the next forward pass fills. UserError if the model's parts have other names."""
    record, hooks = Record(), []
    if not all(hasattr(model, name) for name in ("embed", "blocks", "final_norm", "head")) or not all(
            hasattr(block, name) for block in model.blocks for name in ("attn", "mlp_norm", "mlp")):
        raise UserError("it must have embed, blocks with attn, mlp and mlp_norm, final_norm and head")

    def reads(module, inputs):
        """Of a block with inputs of its own for queries, keys and values, the last tensor is the residual stream."""
        record.reads.extend(list(takewhile(torch.is_tensor, inputs))[-1:])

    def gives(module, inputs, output):
        record.outputs.append(output[0] if isinstance(output, tuple) else output)

    def embeds(module, inputs, output):                     # of the token, and of its position if there is such a table
        record.outputs = [record.outputs[0] + output if record.outputs else output]

    def gate(module, inputs, output):
        if output.size(-1) % model.config.n_head == 0:
            record.gates.append(output.sigmoid().reshape(*output.shape[:2], model.config.n_head, -1))

    hooks += [table.register_forward_hook(embeds) for table in model.children() if table is model.embed or
              isinstance(table, nn.Embedding) and table.embedding_dim == model.config.d_model]
    hooks.append(model.final_norm.register_forward_pre_hook(reads))
    for block in model.blocks:
        first = block if getattr(block, "attn_norm", None) is None else block.attn_norm
        hooks.append(first.register_forward_pre_hook(reads))
        hooks += [block.mlp_norm.register_forward_pre_hook(reads), block.attn.register_forward_hook(gives),
                  block.mlp.register_forward_hook(gives)]
        if gate_of(block) is not None:
            hooks.append(gate_of(block).register_forward_hook(gate))
    for kind, modules in getattr(probe, "watched", lambda model: {})(model).items():
        for module in modules:
            hooks.append(module.register_forward_hook(
                lambda m, inputs, output, kind=kind: record.calls[kind].append((inputs, output))))
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield record


@contextmanager
def replaced(outputs):
    """While it is active, the modules of {module: function(output) -> output} give something else."""
    with ExitStack() as stack:
        for module, function in outputs.items():
            hook = module.register_forward_hook(lambda m, inputs, output, function=function: function(output))
            stack.callback(hook.remove)
        yield


# --------------------------------------------------------------------------------------------------- numbers of tensors


def attention_numbers(weights, quiet):
    """Per head (H,): entropy in nats, mean over queries; mass on the first token, mean over all later queries; and the
    share of queries at which the head is active (arXiv:2502.12170, section 3.4): its largest weight is not on the first
    two tokens, nor on a `quiet` (B, T) one (end of text, full stop, newline). weights: (B, H, T, T).
    """
    entropy = -weights.xlogy(weights).sum(-1).mean((0, 2))
    sink = weights[:, :, 1:, 0].mean((0, 2))
    at = weights.argmax(-1)                                                         # (B, H, T)
    active = (at >= 2) & ~quiet.gather(1, at.flatten(1)).view_as(at)
    return entropy, sink, active.double().mean((0, 2))


def induction(weights, idx):
    """Per head (H,), mean over all queries: the mass on tokens behind an earlier copy of the query's token, on which
    induction heads look (arXiv:2209.11895). And the share of queries that have any. weights: (B, H, T, T); idx (B, T).
    """
    behind = F.pad(idx[:, None, :-1] == idx[:, :, None], (1, 0)).tril(-1)           # (B, T, T): query, key
    return (weights * behind[:, None]).sum(-1).mean((0, 2)), behind.any(-1).double().mean()


def core_features(second, first, share=0.99):
    """Principal components that hold `share` of the variance, from E[x x^T] (C, C) and E[x] (C,)."""
    values = torch.linalg.eigvalsh(second.double() - torch.outer(first.double(), first.double())).clamp(min=0).flip(0)
    if values.sum() <= 1e-12 * second.double().trace():
        return 0
    return int((values.cumsum(0) < share * values.sum()).sum()) + 1


def token_similarity(x):
    """Mean cosine between two different tokens of a sequence; x: (B, T, C)."""
    u, T = F.normalize(x.double(), dim=-1), x.size(1)
    return ((u.sum(1).square().sum(-1) - u.square().sum((1, 2))) / (T * (T - 1))).mean()


def refinement(similarity):
    """Share of the layers after the lowest local minimum of the token similarity, L + 1 numbers from the embedding on.
    There the refinement stage begins (arXiv:2601.08131, section 3.3). None without a minimum between the ends."""
    L, moves = len(similarity) - 1, [(i, b - a) for i, (a, b) in enumerate(pairwise(similarity)) if a != b]
    lows = [i for (_, before), (i, after) in pairwise(moves) if before < 0 < after]
    return (L - min(lows, key=lambda i: (similarity[i], i))) / L if lows else None


def cosine(a, b):
    """Mean cosine of the same tokens in two layers."""
    return F.cosine_similarity(a.double(), b.double(), dim=-1, eps=1e-30).mean()


# ---------------------------------------------------------------------- what a model without a probes file is taken for


def plain_streams(model, record):
    """{stream: inputs of the L attention sublayers, before their norms}: one for all."""
    return {"x": record.reads[:-1:2]}


def plain_depth_matrix(model, record):
    """{"r": A (B, T, 2 L + 1, 2 L + 1)}: reader l, a sublayer or the head, gets sum_s A[l, s] outputs[s].

    Every sublayer reads all earlier outputs; where a block is parallel, its MLP reads what its attention reads.
    """
    n, like = len(record.reads), record.outputs[0]
    A = torch.ones(n, n, dtype=like.dtype, device=like.device).tril()
    if record.parallel:
        A[1::2] = A[:-1:2]
    return {"r": A.expand(*like.shape[:2], n, n)}


def nothing(*_):
    return {}


# --------------------------------------------------------------------------------------------------- numbers of a model


def observe(model, idx, targets, quiet, probe=None):
    """{name: tensor, a mean over the tokens of idx (B, T)}: everything that measure() makes its numbers from."""
    heads = []

    def whole(weights):                                     # not those of attention in blocks of a window
        if weights.size(0) == len(idx) and weights.shape[2:] == 2 * idx.shape[1:]:
            heads.append((*attention_numbers(weights, quiet), *induction(weights, idx)))
    with recorded(model, probe) as record, SeeAttention(whole):
        model(idx)
    L = len(model.blocks)
    if len(record.reads) != 2 * L + 1 or len(record.outputs) != 2 * L + 1:
        raise UserError("a block does not call its attn_norm, attn, mlp_norm and mlp once each: it cannot be watched")
    if not all(x.isfinite().all() for x in record.hidden):
        raise UserError("the residual stream is not finite")
    streams = getattr(probe, "streams", plain_streams)(model, record)
    gates = getattr(probe, "gates", lambda model, record: record.gates)(model, record)
    out = state_means(model, record.hidden, targets)
    if len(heads) == L:
        names = "entropy", "sink", "active", "induction", "repeats"
        out |= dict(zip(names, (torch.stack(x) for x in zip(*heads))))
    if L > 1:
        for name, inputs in streams.items():
            out[f"adjacent.{name}"] = torch.stack([cosine(a, b) for a, b in zip(inputs, inputs[1:])])
    if len(gates) == L:
        out["gate"] = torch.stack([g.mean((0, 1, 3)) for g in gates])
    A = getattr(probe, "depth_matrix", plain_depth_matrix)(model, record)
    out["depth_error"] = depth_error(A, record, streams)
    out |= {f"depth.{name}": a.mean((0, 1)) for name, a in A.items()}
    out |= {f"values.{name}": a for name, a in getattr(probe, "value_matrix", nothing)(model, record).items()}
    out |= getattr(probe, "observe", nothing)(model, record)
    return {name: x.detach().cpu() for name, x in out.items()}


def state_means(model, hidden, targets):
    """observe()'s means of the L + 1 states (B, T, C) of the residual stream."""
    flat = [x.double().flatten(0, 1) for x in hidden]
    lens = [F.cross_entropy(model.head(model.final_norm(x)).flatten(0, 1), targets.flatten()) for x in hidden]
    return {"second": torch.stack([x.mT @ x / len(x) for x in flat]), "first": torch.stack([x.mean(0) for x in flat]),
            "token_similarity": torch.stack([token_similarity(x) for x in hidden]),
            "layer_similarity": torch.stack([torch.stack([cosine(a, b) for b in hidden]) for a in hidden]),
            "norm": torch.stack([x.norm(dim=-1).mean() for x in hidden]), "lens": torch.stack(lens)}


def depth_error(A, record, streams):
    """Largest relative error of the inputs that the depth matrices make from the outputs."""
    outputs, errors = torch.stack(record.outputs, dim=-2), []
    for name, a in A.items():                               # other streams than r have rows for the attention alone
        inputs = torch.stack(record.reads if name == "r" else streams[name], dim=-2)
        rows = slice(None) if name == "r" else slice(0, -1, 2)
        errors.append((a[..., rows, :] @ outputs - inputs).norm() / inputs.norm())
    return max(errors)


def averaged(model, batches, quiet_ids, probe=None):
    """observe() over batches (idx, targets), averaged."""
    total, n = {}, 0
    for idx, targets in batches:
        for name, x in observe(model, idx, targets, torch.isin(idx, quiet_ids), probe).items():
            total[name] = total.get(name, 0) + x.double() * len(idx)
        n += len(idx)
    return {name: x / n for name, x in total.items()}


def repeated(idx, targets):
    """(B, T) bool: where the same token followed the same token before in its row, so that it could be copied."""
    pairs = torch.stack((idx, targets), dim=-1)
    return (pairs[:, :, None] == pairs[:, None]).all(-1).tril(-1).any(-1)


@torch.no_grad()
def copying(model, batches):
    """Mean loss, in nats, of the targets that repeated() finds and of all others, and the share of the first.

    A model without induction heads (arXiv:2209.11895) has not learned to copy: the two are close.
    """
    nats, count = [0.0, 0.0], [0, 0]
    for idx, targets in batches:
        seen = repeated(idx, targets)
        for i, mask in enumerate((seen & (targets >= 0), ~seen & (targets >= 0))):
            if n := int(mask.sum()):
                nats[i] += model(idx, targets.where(mask, -1))[1].item() * n
                count[i] += n
    means = [a / n if n else None for a, n in zip(nats, count)]
    return {"repeated": means[0], "others": means[1], "share": count[0] / sum(count)}


def part(means, kind):
    """{name: tensor} of all means called kind.name."""
    return {name.split(".")[1]: x for name, x in means.items() if name.startswith(f"{kind}.")}


def lists(means, kind):
    """part(), as lists of numbers."""
    return {name: x.tolist() for name, x in part(means, kind).items()}


def spaces(means):
    """What the hidden states of averaged() look like, per layer."""
    similarity = means["token_similarity"].tolist()
    return {"core_features": [core_features(a, b) for a, b in zip(means["second"], means["first"])],
            "token_similarity": similarity, "refinement": refinement(similarity)}


def attention_maps(model, idx):
    """Attention weights [layer][head][query][key] of a sequence idx (1, T), rounded; [] unless every layer has some."""
    maps = []
    with SeeAttention(lambda weights: maps.append(weights[0])):
        model(idx)
    return [[[[round(x, 4) for x in row] for row in head] for head in layer.tolist()]
            for layer in maps if len(maps) == len(model.blocks)]


@torch.no_grad()
def measure(model, batches, quiet_ids=None, probe=None):
    """All numbers of one model: a dict that JSON can hold. batches: [(idx, targets)], int64 (B, T), full rows.

    quiet_ids (n,): tokens at which a head rests; None: no token. UserError if the model cannot be watched or is not
    finite.
    """
    quiet_ids = batches[0][0].new_tensor([]) if quiet_ids is None else quiet_ids
    means = averaged(model, batches, quiet_ids, probe)
    if "repeats" in means:
        means["induction"] = means["induction"] / means["repeats"].clamp(min=1e-12)[:, None]  # of queries with any
    out = {"loss": means["lens"][-1].item(), "tokens": sum(idx.numel() for idx, _ in batches), **spaces(means)}
    attention = "entropy", "sink", "active", "induction"
    for name in (*attention, "layer_similarity", "norm", "lens", "gate", "depth_error"):
        out[name] = means[name].tolist() if name in means else None
    out |= {kind: lists(means, kind) for kind in ("adjacent", "depth", "values")}
    if not out["depth_error"] <= 1e-3:                      # what is read is no such sum of outputs
        out["depth"] = {}
    out["copying"] = copying(model, batches)
    out |= getattr(probe, "numbers", nothing)(model, means, batches, quiet_ids)
    return {**out, "maps": attention_maps(model, batches[0][0][:1, :32])}
