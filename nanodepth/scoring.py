"""Scores a model on text: loss, perplexity, bits per byte."""
import math

import torch
import torch.nn.functional as F

from nanodepth.cli import UserError


@torch.no_grad()
def evaluate(model, batches, token_bytes=None, autocast=None, reduce=None):
    """Scores (idx, targets), each (B, T), from an iterable -> {"loss", "ppl", "bpb", "eval_tokens", "eval_bytes"}.

    loss: nats per target (targets of -1 do not count); ppl: exp(loss); bpb: bits per byte of text, from token_bytes
    (vocab_size,), or None. Targets without bytes (end-of-text) count for loss and ppl, but not for bpb. eval_tokens,
    eval_bytes: how many targets and bytes count. reduce(sums) adds up the sums of all ranks, in place.
    """
    device = next(model.parameters()).device
    widths = None if token_bytes is None else torch.as_tensor(token_bytes, device=device)
    sums = torch.zeros(4, dtype=torch.float64, device=device)                   # nats, targets; of text: nats, bytes
    for i, (idx, targets) in enumerate(batches):
        idx, targets = idx.to(device), targets.to(device)
        with autocast or torch.autocast(device.type, enabled=False):
            logits, loss = model(idx, targets)
        if i == 0:
            each = [F.cross_entropy(x.float(), y, ignore_index=-1, reduction="sum") for x, y in zip(logits, targets)]
            plain = sum(each) / (targets >= 0).sum()
            if abs(loss - plain) > 0.001:
                file = type(model).__module__.replace(".", "/") + ".py"
                raise UserError(f"{file}: the loss in validation is {loss:.4f}, but its cross-entropy is {plain:.4f}: "
                                "add penalties only if self.training")
        scored = targets >= 0
        n_bytes = scored if widths is None else widths[targets] * scored        # (B, T)
        bare = scored & (n_bytes == 0)
        bare_nats = F.cross_entropy(logits[bare].double(), targets[bare], reduction="sum")
        del logits                                                              # frees them before the next
        nats = loss.double() * scored.sum()
        sums += torch.stack((nats, scored.sum(), nats - bare_nats, n_bytes.sum()))
    if reduce:
        reduce(sums)
    nats, tokens, text_nats, text = sums.tolist()
    loss = nats / max(1, tokens)                                            # no batch was scored if a signal came first
    counted = text and widths is not None
    bpb = text_nats / math.log(2) / text if counted else None
    return {"loss": loss, "ppl": math.exp(min(loss, 700)), "bpb": bpb, "eval_tokens": int(tokens),
            "eval_bytes": int(text) if counted else None}
