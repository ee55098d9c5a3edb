"""gpt3.py against the GPT-2 of Hugging Face transformers in float64; initial values of the releases."""
import math

import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    OLDER_CASES, equal_to_transformers, float64, older_initial_values, per_head, renamed, show)


def as_gpt2(p, c):
    """State dict of GPT2LMHeadModel, whose matrices are transposed."""
    state = renamed(p, "", "transformer.", "final_norm=ln_f") | {
        "transformer.wte.weight": p["embed.weight"], "transformer.wpe.weight": p["pos_embed.weight"],
        "lm_head.weight": p["embed.weight" if c.tie_embeddings else "head.weight"]}
    for i in range(c.n_layer):
        at, to = f"blocks.{i}", f"transformer.h.{i}."
        state |= renamed(p, f"{at}.", to,
                         "attn_norm=ln_1 mlp_norm=ln_2 attn.wo=attn.c_proj mlp.w_up=mlp.c_fc mlp.w_down=mlp.c_proj")
        qkv = [per_head(p, c, at, s) for s in "qkv"]
        state[f"{to}attn.c_attn.weight"] = torch.cat([weight.flatten(0, 1) for weight, _ in qkv])
        state[f"{to}attn.c_attn.bias"] = torch.cat([bias.flatten() for _, bias in qkv])
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            state[f"{to}{name}.weight"] = state[f"{to}{name}.weight"].T
    return state


def theirs(c):
    """GPT-2 in its defaults, but for sizes, eps, and dropout, which is off."""
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.max_len, n_embd=c.d_model, n_layer=c.n_layer, n_head=c.n_head,
        n_inner=c.d_ff, layer_norm_epsilon=c.norm_eps, tie_word_embeddings=c.tie_embeddings)).eval()


@pytest.mark.parametrize("options", OLDER_CASES, ids=show)
def test_equal_to_transformers(options):
    equal_to_transformers("gpt3", options, theirs, as_gpt2)


def test_initial_values():
    older_initial_values("gpt3", 0.02, 0.02 / math.sqrt(8))
