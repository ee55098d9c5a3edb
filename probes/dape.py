"""Probes of dape.py."""
import torch


def costs(c, T):
    biased, learned = c.position in ("kerple", "alibi"), 2 * c.n_head * (c.position == "kerple")
    taps = c.kernel * c.width * c.n_head * (1 + biased) + c.kernel * c.n_head * c.width
    params = taps + c.width if c.kernel else 0
    flops = 2 * T * (taps + c.d_model)                          # the scores a second time
    read = T * (2 * c.n_head + c.width if c.kernel else c.n_head)
    return c.n_layer * (params + learned), c.n_layer * flops, c.n_layer * read


@torch.no_grad()
def neutral(model):
    """Sets parameters so that the model equals gpt.py. ValueError for options with which it never does."""
    if model.config.position != "rope":
        raise ValueError("dape has gpt.py's positions only with position=rope")
    if model.config.kernel:
        for block in model.blocks:
            block.attn.score_bias.conv_out.weight.zero_()
