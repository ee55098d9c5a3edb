"""Scores of a model on text: loss, perplexity, bits per byte. And a text of its own."""
import math

import torch


@torch.no_grad()
def evaluate(model, batches, token_bytes=None, autocast=None, reduce=None):
    """Scores (idx, targets), each (B, T), from an iterable -> {"loss", "ppl", "bpb", "eval_tokens"}.

    loss: nats per target (targets of -1 do not count); ppl: its exponential; bpb: all nats in bits over the bytes of
    text that the targets stand for, by token_bytes (vocab_size,), or None. reduce(sums) adds up the sums of all ranks.
    """
    device, training = next(model.parameters()).device, model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)                       # nats, targets, bytes of text
    for idx, targets in batches:
        scored = targets[targets >= 0]
        text = 0 if token_bytes is None else int(token_bytes[scored].sum())
        with autocast or torch.autocast(device.type, enabled=False):
            loss = model(idx.to(device), targets.to(device))[1]
        counts = torch.tensor((len(scored), text), dtype=torch.float64, device=device)
        sums += torch.stack((loss.double() * len(scored), *counts))
    model.train(training)
    if reduce:
        reduce(sums)
    nats, tokens, text = sums.tolist()
    loss = nats / max(1, tokens)                                                    # none before a signal
    bpb = nats / math.log(2) / text if text else None
    return {"loss": loss, "ppl": math.exp(min(loss, 700)), "bpb": bpb, "eval_tokens": int(tokens)}


def sample(model, tokenizer):
    """A text that the model begins by itself; the random numbers of training are not touched."""
    model.eval()
    start = torch.full((1, 1), tokenizer.eot_token, device=next(model.parameters()).device)
    generator = torch.Generator(start.device).manual_seed(0)
    n_tokens = min(100, model.config.max_len - 1)
    tokens = model.generate(start, n_tokens, 0.8, 50, generator, n_vocab=tokenizer.n_vocab)[0, 1:].tolist()
    model.train()
    return tokenizer.decode(tokens)
