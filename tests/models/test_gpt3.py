"""gpt3.py against loops in float64, and its initial values. test_convert.py compares it with transformers' GPT-2."""
import math

import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    OLDER, OLDER_CASES, add, attend, compare_logits, float64, linear, norm, older_initial_values, project,
    reference_logits, setup, show)


def gelu(x):
    """GPT-2's approximation."""
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))) / 2


def gpt3(p, c, x):
    x = [u + p["pos_embed.weight"][t] for t, u in enumerate(x)]
    for n in range(c.n_layer):
        at = f"blocks.{n}"
        a = [norm(p, f"{at}.attn_norm", u, c) for u in x]
        x = add(x, attend(p, c, at, project(p, c, at, a, a, a), rotate=lambda u, t, c: u))
        x = add(x, [linear(p, f"{at}.mlp.w_down", gelu(linear(p, f"{at}.mlp.w_up", norm(p, f"{at}.mlp_norm", u, c))))
                    for u in x])
    return x


@pytest.mark.parametrize("options", OLDER_CASES, ids=show)
def test_equations(options):
    model, p, c, idx, targets = setup("gpt3", OLDER, 0.2, **options)
    compare_logits(reference_logits(gpt3, p, c, idx), model, p, c, idx, targets,
                   without_gradient=lambda key: "wk.bias" in key)               # a key's bias changes no softmax


def test_initial_values():
    older_initial_values("gpt3", 0.02, 0.02 / math.sqrt(8))
