"""Layouts of published checkpoints: which of their tensors becomes which of our parameters.

A layout is a function of the published config and tensors; it may rename tensors in their dict. It returns our model's
name, its Config fields, a table of names, and a regular expression for the tensors that we do not need. KeyError if the
config lacks a field, UserError for a setting that our models do not have.

A table is {ours: theirs} for modules or parameters; N stands for the number of a layer. "theirs:k/n" is the k-th of n
equal blocks of rows (from 0); in "theirs:k/n/h" each of h heads has n such blocks.
"""
import math
import re

from nanodepth.cli import UserError

HF = (  # most of a config.json of transformers
    "vocab_size=vocab_size n_layer=num_hidden_layers n_head=num_attention_heads d_model=hidden_size "
    "d_ff=intermediate_size max_len=max_position_embeddings tie_embeddings=tie_word_embeddings? ")


def table(words, block, block_words):
    """{ours: theirs} from words ours=theirs. In block_words, their names go on after `block`."""
    rows = dict(word.split("=") for word in words.split())
    return rows | {f"blocks.N.{ours}": block + theirs for ours, theirs in (w.split("=") for w in block_words.split())}


def places(rows, names):
    """{our parameter: (their tensor, k, n, h)} from a table; (0, 1, 1) is the whole tensor."""
    found = {}
    for ours in names:
        layer, general = re.search(r"\.(\d+)\.", ours), re.sub(r"\.\d+\.", ".N.", ours)
        module, kind = general.rsplit(".", 1)
        theirs, _, part = (rows.get(general) or rows[module]).partition(":")
        if general not in rows:
            theirs += f".{kind}"
        k, n, h = [*map(int, part.split("/")), 1][:3] if part else (0, 1, 1)
        found[ours] = re.sub(r"\bN\b", layer[1], theirs) if layer else theirs, k, n, h
    return found


def fields(config, words):
    """{ours: config[theirs]} from words ours=theirs. A word that ends in "?" is left out if the config lacks it."""
    pairs = [word.split("=") for word in words.split()]
    return {ours: config[theirs.rstrip("?")] for ours, theirs in pairs
            if theirs[-1] != "?" or config.get(theirs[:-1]) is not None}


def need(config, **wanted):
    """UserError if a setting is not the one that our models have. A missing one counts as wanted."""
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise UserError(f"{name} {repr(config[name])[:60]} cannot be converted, only {value!r}")


def rope_theta(config, base="rope_theta", share=1.0):
    """The base of the rotary positions. UserError if they are scaled, or rotate another share of each head."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}        # in transformers' order
    said = {"partial_rotary_factor": config.get("partial_rotary_factor") or share, **rope}
    plain = {"type": "default", "rope_type": "default", "partial_rotary_factor": share}
    for name, value in said.items():
        if name != "rope_theta" and value != plain.get(name):
            raise UserError(f"rotary positions with {name} {repr(value)[:60]} cannot be converted")
    return rope.get("rope_theta") or config.get(base) or 10000.0


# ---------------------------------------------------------------------------------------------------------- the layouts


EXOFORMER = table(
    "embed=transformer.wte final_norm=transformer.final_norm head=lm_head anchor=anchor_proj", "transformer.layers.N.",
    "attn_norm=attn_norm attn.q_norm=attn.q_norm attn.k_norm=attn.k_norm attn.wo=attn.c_proj mlp_norm=mlp_norm "
    "mlp.w_up=mlp.fc1:0/2 mlp.w_gate=mlp.fc1:1/2 mlp.w_down=mlp.fc2 attn.gamma.mix_in=attn.dynamic_mixing.fc1 "
    "attn.gamma.mix_out=attn.dynamic_mixing.fc2")


def exoformer(args, tensors):
    """ExoFormer: q, k, v and the gate are one matrix, so are the MLP's value and gate; lambda 1 is the anchor's.

    A NuResFormer comes from one of two of the authors' files. oldmodels/model2.py normalises all anchors: v and g by
    norms that only it has, q and k by the first layer's QK norm. oldmodels/model1.py normalises none, whatever the
    flags say. If they ask for q and k alone, the flag anchor_delta_enabled rules out today's model.py, which lacks it.
    """
    need({"act_type": "gelu", "norm_pos": "after", **args}, act_type="swiglu", norm_pos="before",
         rmsnorm_use_weight=True, rmsnorm_use_bias=False, clip_qkv=None, yarn_enabled=False, logit_soft_cap=None,
         smear_gate_enabled=False, per_layer_backout=False, embedding_layer0_mix_enabled=False,
         anchor_delta_enabled=False)
    found = fields(args, "vocab_size=vocab_size n_layer=n_layer n_head=n_head d_model=n_embd max_len=block_size "
                         "rope_theta=rope_theta norm_eps=rmsnorm_eps tie_embeddings=weight_tying qk_norm=qk_norm")
    found["d_ff"] = (args.get("mlp_hidden_dim") or int(args["mlp_ratio"] * found["d_model"])) // 2
    found["gate"], n = ("elementwise", 4) if args["gated_attention_enabled"] else ("none", 3)
    rows, theirs = dict(EXOFORMER), "transformer.layers.N.attn."
    for k, (name, s) in enumerate(dict(wq="q", wk="k", wv="v", gate="g").items()):
        ours = f"blocks.N.attn.{name}"
        rows |= {ours: f"{theirs}c_attn:{k}/{n}", f"{ours}.lambda_anchor": f"{theirs}lambda_{s}1",
                 f"{ours}.lambda_self": f"{theirs}lambda_{s}2", f"anchor_norms.{s}_norm": f"anchor_{s}_norm"}
    mixed = ["query_res_enabled", "key_res_enabled", "value_res_enabled", "gate_res_enabled"]
    if not any(args[flag] for flag in mixed[:n]):
        return "gpt", found, rows, r"anchor_\w+\.weight|.*\.[vg](_res)?_norm\.weight|.*\.dynamic_mixing\..*"
    need(args, gated_attention_enabled=True, **dict.fromkeys(mixed, True))
    norms = "".join(s for s in "qkvg" if args[f"{s}_residual_norm_enabled"]) or "none"
    found |= dict(granularity=args["residual_mode"], norms=norms)
    if "anchor_proj.weight" in tensors:
        dynamic = any(".dynamic_mixing." in name for name in tensors)
        return "exoformer_dynamic" if dynamic else "exoformer", found, rows, ""
    first = "transformer.layers.0.attn."
    found["norms"] = "qkvg" if f"{first}v_norm.weight" in tensors else "none"
    if found["norms"] == "none" and norms in ("q", "k", "qk") and "anchor_delta_enabled" not in args:
        raise UserError(f"this NuResFormer normalises only its anchors {norms}: only all four or none can be converted")
    rows |= {f"anchor_norms.{s}_norm": f"{first}{s}_norm" for s in "qkvg"}
    return "nuresformer", found, rows, r".*\.[vg]_norm\.weight"                     # of model2.py's later layers


MUDDFORMER = table(
    "embed=tok_embeddings final_norm=norm head=output aggregate.N.w1=dynamic_dense.N.w1 "
    "aggregate.N.w2=dynamic_dense.N.w2 aggregate.N.a=dense_bs.N", "layers.N.",
    "attn.wq=attention.wq attn.wk=attention.wk attn.wv=attention.wv attn.wo=attention.wo attn.q_norm=attention.q_norm "
    "attn.k_norm=attention.k_norm q_in_norm=attention_norms.0 k_in_norm=attention_norms.1 v_in_norm=attention_norms.2 "
    "mlp_norm=ffn_norm mlp.w_gate=feed_forward.w1 mlp.w_up=feed_forward.w3 mlp.w_down=feed_forward.w2")


def muddformer(config, tensors):
    """MUDDFormer: the MLP's w1, w3, w2 are gate, up, down. Its first block has one norm for q, k, v; ours has three."""
    need({"round64": False, "expand_last": False, **config}, model_type="muddformer", dense=True, dynamic_dense=True,
         dense_type="qkvr", sepln=True, tie_word_embeddings=False, round64=True, expand_last=True)
    found = fields(config, "vocab_size=vocab_size n_layer=n_layer n_head=n_head d_model=dim max_len=block_size "
                           "norm_eps=norm_eps? qk_norm=use_qk_norm?")
    found["d_ff"] = config.get("intermediate_size") or 256 * math.ceil(8 * found["d_model"] // 3 / 256)
    found["rope_theta"] = rope_theta(config, "rope_base")
    norm = tensors.pop("layers.0.attention_norm.weight")
    tensors |= {f"layers.0.attention_norms.{j}.weight": norm for j in range(3)}
    return "muddformer", {"qk_norm": False, **found}, MUDDFORMER, r".*[kv]_cache|.*layer_cache"


LLAMA = table(
    "embed=model.embed_tokens final_norm=model.norm head=lm_head", "model.layers.N.",
    "attn_norm=input_layernorm mlp_norm=post_attention_layernorm attn.wq=self_attn.q_proj attn.wk=self_attn.k_proj "
    "attn.wv=self_attn.v_proj attn.wo=self_attn.o_proj mlp.w_gate=mlp.gate_proj mlp.w_up=mlp.up_proj "
    "mlp.w_down=mlp.down_proj")
QWEN3 = LLAMA | table("", "model.layers.N.", "attn.q_norm=self_attn.q_norm attn.k_norm=self_attn.k_norm")


def llama(config, tensors, family="llama"):
    """LlamaForCausalLM is gpt.py without QK norm, Qwen3ForCausalLM is gpt.py with it."""
    window = config.get("sliding_window") if config.get("use_sliding_window", family == "llama") else None
    need(config | {"sliding_window": window}, model_type=family, hidden_act="silu", attention_bias=False,
         mlp_bias=False, sliding_window=None, quantization_config=None)
    found = fields(config, HF + "n_kv_head=num_key_value_heads? norm_eps=rms_norm_eps")
    d_head = config.get("head_dim")
    if d_head and d_head * found["n_head"] != found["d_model"]:
        raise UserError(f"head_dim {d_head} cannot be converted, only hidden_size / num_attention_heads")
    found |= dict(rope_theta=rope_theta(config), qk_norm=family == "qwen3")
    return "gpt", found, QWEN3 if family == "qwen3" else LLAMA, r".*rotary_emb\.inv_freq"


GPT2 = table(
    "embed=wte pos_embed=wpe final_norm=ln_f head=lm_head", "h.N.",
    "attn_norm=ln_1 mlp_norm=ln_2 attn.wq=attn.c_attn:0/3 attn.wk=attn.c_attn:1/3 attn.wv=attn.c_attn:2/3 "
    "attn.wo=attn.c_proj mlp.w_up=mlp.c_fc mlp.w_down=mlp.c_proj")


def gpt2(config, tensors):
    """GPT2LMHeadModel, with or without `transformer.` before the names. Matrices are transposed; q, k, v are one."""
    need(config, model_type="gpt2", activation_function="gelu_new", scale_attn_weights=True,
         scale_attn_by_inverse_layer_idx=False, add_cross_attention=False, quantization_config=None)
    found = fields({"tie_word_embeddings": True, **config},
                   "vocab_size=vocab_size n_layer=n_layer n_head=n_head d_model=n_embd d_ff=n_inner? "
                   "max_len=n_positions norm_eps=layer_norm_epsilon tie_embeddings=tie_word_embeddings")
    for name in list(tensors):
        tensor = tensors.pop(name)
        tensors[name.removeprefix("transformer.")] = tensor.T if re.search(r"\.c_\w+\.weight", name) else tensor
    return "gpt3", found, GPT2, r".*\.attn\.(masked_)?bias"


PYTHIA = table(
    "embed=gpt_neox.embed_in final_norm=gpt_neox.final_layer_norm head=embed_out", "gpt_neox.layers.N.",
    "attn_norm=input_layernorm mlp_norm=post_attention_layernorm attn.wq=attention.query_key_value:0/3 "
    "attn.wk=attention.query_key_value:1/3 attn.wv=attention.query_key_value:2/3 attn.wo=attention.dense "
    "mlp.w_up=mlp.dense_h_to_4h mlp.w_down=mlp.dense_4h_to_h")


def pythia(config, tensors):
    """GPTNeoXForCausalLM: the rows of query_key_value are q, k and v of the first head, then of the next."""
    need(config, model_type="gpt_neox", hidden_act="gelu", use_parallel_residual=True, attention_bias=True,
         rotary_pct=0.25, quantization_config=None)
    found = fields(config, HF + "norm_eps=layer_norm_eps")
    found["rope_theta"] = rope_theta(config, "rotary_emb_base", 0.25)
    rows = {ours: theirs.replace("/3", f"/3/{found['n_head']}") for ours, theirs in PYTHIA.items()}
    return "pythia", found, rows, r".*\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"


LAYOUTS = {"exoformer": exoformer, "muddformer": muddformer, "llama": llama,
           "qwen3": lambda config, tensors: llama(config, tensors, "qwen3"), "gpt2": gpt2, "pythia": pythia}
FILES = {"exoformer": "gpt2"}               # layouts whose source is one file: its tokenizer
