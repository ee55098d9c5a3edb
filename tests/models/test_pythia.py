"""pythia.py against the GPT-NeoX of Hugging Face transformers in float64; initial values."""
import math

import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    OLDER_CASES, equal_to_transformers, float64, older_initial_values, per_head, renamed, show)
from small import wide


def as_neox(p, c):
    """State dict of GPTNeoXForCausalLM, whose q, k and v follow each other head by head."""
    state = renamed(p, "", "gpt_neox.", "final_norm=final_layer_norm") | {
        "gpt_neox.embed_in.weight": p["embed.weight"],
        "lm_head.weight": p["embed.weight" if c.tie_embeddings else "head.weight"]}
    for i in range(c.n_layer):
        at, to = f"blocks.{i}", f"gpt_neox.layers.{i}."
        state |= renamed(p, f"{at}.", to,
                         "attn_norm=input_layernorm mlp_norm=post_attention_layernorm attn.wo=attention.dense "
                         "mlp.w_up=mlp.dense_h_to_4h mlp.w_down=mlp.dense_4h_to_h")
        qkv = [per_head(p, c, at, s) for s in "qkv"]
        state[f"{to}attention.query_key_value.weight"] = torch.stack([weight for weight, _ in qkv], dim=1).flatten(0, 2)
        state[f"{to}attention.query_key_value.bias"] = torch.stack([bias for _, bias in qkv], dim=1).flatten()
    return state


def theirs(c):
    """GPT-NeoX in its defaults, but for sizes, eps, and dropout, which is off."""
    transformers = pytest.importorskip("transformers")
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=c.vocab_size, max_position_embeddings=c.max_len, hidden_size=c.d_model, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, intermediate_size=c.d_ff, layer_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tie_embeddings)).eval()


@pytest.mark.parametrize("options", OLDER_CASES, ids=show)
@wide()
def test_equal_to_transformers(options):
    equal_to_transformers("pythia", options, theirs, as_neox)


def test_initial_values():
    older_initial_values("pythia", math.sqrt(2 / 5 / 256), 2 / 4 / 16)
