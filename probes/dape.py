"""What to watch in a trained dape.py."""
import torch

from nanodepth.record import watch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    biases = [block.attn.score_bias for block in model.blocks]
    seen = torch.ones(idx.size(1), idx.size(1), device=idx.device).tril()
    out = {"delta": [], "neighbours": []} if model.config.kernel else {}
    for b, delta in zip(biases, watch(model, idx, [b.delta for b in biases]) if out else []):     # (B, H, T, T)
        n = seen.sum(-1)
        mean = (delta * seen).sum(-1) / n                                       # (B, H, T)
        out["delta"].append((((delta - mean[..., None]).square() * seen).sum(-1) / n).sqrt().mean().item())
        w = next(b.delta.parameters()).flatten(2).square()                      # (width or 1, channels or 1, kernel)
        out["neighbours"].append(1 - (w[..., model.config.kernel // 2].sum() / w.sum()).item())
    if model.config.position == "kerple":
        out |= {f"kerple_{name}": [getattr(b.position, name).mean().item() for b in biases] for name in "pa"}
    return out
