"""What is known about dape.py besides the model."""
import torch

from probes import watch


def costs(c, T):
    biased, learned = c.position in ("kerple", "alibi"), 2 * c.n_head * (c.position == "kerple")
    taps = c.kernel * c.width * c.n_head * (1 + biased) + c.kernel * c.n_head * c.width
    params = taps + c.width if c.kernel else 0
    flops = 2 * T * (taps + c.d_model)                          # the scores once more, beside those of the attention
    read = T * (2 * c.n_head + c.width if c.kernel else c.n_head)
    return c.n_layer * (params + learned), c.n_layer * flops, c.n_layer * read


@torch.no_grad()
def neutral(model):
    """Sets the parameters for which the model is gpt.py's. ValueError for settings without such values."""
    if model.config.position != "rope":
        raise ValueError("dape has gpt.py's positions with position=rope alone")
    if model.config.kernel:
        for block in model.blocks:
            block.attn.score_bias.conv_out.weight.zero_()


def stats(model, idx):
    biases, T, out = [block.attn.score_bias for block in model.blocks], idx.size(1), {}
    if model.config.kernel:
        out = {"delta": [], "neighbours": []}
        seen = torch.ones(T, T, device=idx.device).tril()
        n = seen.sum(-1)
        for b, delta in zip(biases, watch(model, idx, [b.conv_out for b in biases])):
            delta = delta[..., :T]                                              # (B, H, T, T)
            mean = (delta * seen).sum(-1) / n                                   # (B, H, T)
            out["delta"].append((((delta - mean[..., None]).square() * seen).sum(-1) / n).sqrt().mean().item())
            w = b.conv_in.weight.flatten(2).square()                            # (width, channels, kernel)
            out["neighbours"].append(1 - (w[..., model.config.kernel // 2].sum() / w.sum()).item())
    if model.config.position == "kerple":
        out |= {f"kerple_{name}": [getattr(b, name).mean().item() for b in biases] for name in "pa"}
    return out
