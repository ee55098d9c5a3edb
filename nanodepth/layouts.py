"""Layouts of published checkpoints: which of their tensors is which parameter of ours, and what they cannot be.

A layout takes the published config and tensors, and returns our model's name, its Config fields, where its parameters
come from {ours: theirs, or (theirs, which of n equal blocks of rows, n)}, and a pattern of names it does not need. It
may transpose tensors in place. UserError for a setting that our models do not have.
"""
import functools
import math
import re

import torch

from nanodepth.cli import UserError


MOVED = (  # model, pattern of the option that its file had, the file that has it today
    ("exoformer", "anchor=first_layer", "nuresformer"), ("exoformer", "mixing=dynamic", "exoformer_dynamic"),
    ("exoformer", "norm_streams=", "exoformer with --norms none"),
    ("attnres", "additive=True", "attnres_delta"), ("attnres", "block_size=(?!1$).*", "attnres_block"),
    ("hyperconnections", "connection=manifold", "mhc"), ("hyperconnections", "connection=lite", "mhc_lite"),
    ("hyperconnections", "connection=static", "hyperconnections with --no-dynamic"),
    ("muddformer", "(dynamic|multiway|ffn_realloc)=False|streams=(?!qkvr$).*", "muddformer_ablations"))


def setting(config, name, kind, *default):
    """config[name], of this type; where it is None or missing the default, if there is one. Else a UserError."""
    value = config.get(name)
    if value is None and default:
        return default[0]
    if name not in config:
        raise UserError(f"the source has no {name}")
    if not isinstance(value, (float, int) if kind is float else kind) or type(value) is bool and kind is not bool:
        raise UserError(f"{name} must be {kind.__name__}, not {str(value)[:40]!r}")
    return value


def layers(config, name, tensors):
    """range of the layers, of which there cannot be more than tensors."""
    n = setting(config, name, int)
    if not 0 < n <= len(tensors):
        raise UserError(f"{name} {n} does not fit its {len(tensors)} tensors")
    return range(n)


def need(config, **wanted):
    """UserError for a setting that changes the function to one our models do not have; a missing one is as wanted."""
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise UserError(f"{name} {repr(config[name])[:60]} cannot be converted, only {value!r}")


def pairs(ours, theirs, table, kinds=("weight",)):
    """{ours + a + ".weight": theirs + b + ".weight"} for every word a=b of the table, and so with every kind."""
    words = [word.split("=") for word in table.split()]
    return {f"{ours}{a}.{kind}": f"{theirs}{b}.{kind}" for a, b in words for kind in kinds}


def tie(tied, embed, head, tensors):
    """(name of the head's tensor, pattern of the names of a mere copy of it)."""
    twice = tied and {embed, head} <= set(tensors) and torch.equal(tensors[embed], tensors[head])
    return embed if tied else head, "|" + re.escape(head) if twice else ""


def rope_theta(config, base="rope_theta", share=1.0):
    """The base of the rotary positions. UserError if they are scaled, or turn more or less of a head than `share`."""
    found = [setting(config, name, dict, {}) for name in ("rope_scaling", "rope_parameters")]
    for rope in found:
        need({"rope_type": rope.get("type", "default"), **rope}, rope_type="default", partial_rotary_factor=share)
    return setting({"rope_theta": config.get(base), **(found[0] or found[1])}, "rope_theta", float, 10000.0)


# ---------------------------------------------------------------------------------------------------------- the layouts


def exoformer(args, tensors):
    """OBPM: q, k, v and the gate are one matrix, and so are value and gate of the MLP; lambda 1 is the anchor's."""
    need({"act_type": "gelu", "norm_pos": "after", **args}, act_type="swiglu", norm_pos="before",
         rmsnorm_use_weight=True, rmsnorm_use_bias=False, clip_qkv=None, yarn_enabled=False, logit_soft_cap=None,
         embedding_layer0_mix_enabled=False, anchor_delta_enabled=False)
    for flag, name in dict(smear_gate_enabled="smear_lambda", per_layer_backout="backout_lambdas").items():
        if tensors[name].any() if name in tensors else setting(args, flag, bool):
            raise UserError(f"{flag} cannot be converted, unless {name} is 0")
    depth, d, tied = layers(args, "n_layer", tensors), setting(args, "n_embd", int), setting(args, "weight_tying", bool)
    fc1 = setting(args, "mlp_hidden_dim", int, None) or int(d * setting(args, "mlp_ratio", float))
    n = 4 if setting(args, "gated_attention_enabled", bool) else 3
    mixed = any([setting(args, f"{s}_res_enabled", bool) for s in ("query", "key", "value", "gate")[:n]])
    external, dynamic = "anchor_proj.weight" in tensors, any(".dynamic_mixing." in name for name in tensors)
    names = {"embed.weight": "transformer.wte.weight", "final_norm.weight": "transformer.final_norm.weight",
             "head.weight": "transformer.wte.weight" if tied else "lm_head.weight",
             "anchor.weight": "anchor_proj.weight"}
    for i in depth:
        ours, theirs = f"blocks.{i}.", f"transformer.layers.{i}."
        names |= pairs(ours, theirs, "attn_norm=attn_norm attn.q_norm=attn.q_norm attn.k_norm=attn.k_norm "
                                     "attn.wo=attn.c_proj mlp_norm=mlp_norm mlp.w_down=mlp.fc2")
        for at, (w, s) in enumerate(zip(("wq", "wk", "wv", "gate")[:n], "qkvg")):
            names |= {f"{ours}attn.{w}.weight": (theirs + "attn.c_attn.weight", [at], n),
                      f"{ours}attn.{w}.lambda_anchor": f"{theirs}attn.lambda_{s}1",
                      f"{ours}attn.{w}.lambda_self": f"{theirs}attn.lambda_{s}2"}
        for at, w in enumerate(("w_up", "w_gate")):
            names[f"{ours}mlp.{w}.weight"] = theirs + "mlp.fc1.weight", [at], 2
        names |= pairs(ours + "attn.gamma.mix_", theirs + "attn.dynamic_mixing.", "in=fc1 out=fc2", ("weight", "bias"))
    config = dict(
        vocab_size=setting(args, "vocab_size", int), n_layer=len(depth), n_head=setting(args, "n_head", int), d_model=d,
        d_ff=fc1 // 2, max_len=setting(args, "block_size", int), rope_theta=setting(args, "rope_theta", float),
        norm_eps=setting(args, "rmsnorm_eps", float), tie_embeddings=tied, qk_norm=setting(args, "qk_norm", bool),
        gate="elementwise" if n == 4 else "none")
    unread = r"smear_gate\.weight|smear_lambda|backout_lambdas"
    if not mixed:
        unread += r"|anchor_\w+\.weight|.*\.[vg](_res)?_norm\.weight|.*\.dynamic_mixing\..*"
        return "gpt", config, names, unread
    need(args, gated_attention_enabled=True, query_res_enabled=True, key_res_enabled=True, value_res_enabled=True,
         gate_res_enabled=True, **{"dynamic_mixing_hidden_dim": 16} if dynamic else {})
    if dynamic and not external:
        raise UserError("dynamic_mixing_enabled without decouple_anchor cannot be converted, only with it")
    norms = exoformer_norms(args, tensors, external)
    if (normed := "".join(norms)) not in ("qkvg", "qk", ""):
        raise UserError(f"norms of the anchors {', '.join(norms)} cannot be converted, only of q and k, of all, or "
                        "of none (q_residual_norm_enabled and so on)")
    names |= {f"anchor_norms.{s}_norm.weight": norms[s] for s in norms}
    config |= dict(granularity=setting(args, "residual_mode", str), norms=normed or "none")
    if external:
        return "exoformer_dynamic" if dynamic else "exoformer", config, names, unread
    return "nuresformer", config, names, unread + r"|.*\.[vg]_norm\.weight"        # of the later layers in model2.py


def exoformer_norms(args, tensors, external):
    """{stream: the tensor with the gain of its anchor's norm}.

    Anchors of a first layer: the tensors tell which of the authors' files made them. oldmodels/model2.py normalises all
    (it has v_norm), model3.py and later what the flags say (v_res_norm, g_res_norm), model1.py none, whatever they say.
    Without such a tensor it is model1.py, unless the flags ask for neither v nor g and anchor_delta_enabled, which
    model.py dropped, is missing. Normalised anchors of q and k are the first layer's after its QK norm, so they have
    its gains.
    """
    at = "transformer.layers.0.attn."
    flagged = [s for s in "qkvg" if setting(args, f"{s}_residual_norm_enabled", bool)]
    if external:
        return {s: f"anchor_{s}_norm.weight" for s in flagged}
    if at + "v_norm.weight" in tensors:
        return {s: f"{at}{s}_norm.weight" for s in "qkvg"}
    if not {at + "v_res_norm.weight", at + "g_res_norm.weight"} & set(tensors):
        if "anchor_delta_enabled" in args or {"v", "g"} & set(flagged):
            return {}
    return {s: f"{at}{s}_{'res_' if s in 'vg' else ''}norm.weight" for s in flagged if s in "vg" or args.get("qk_norm")}


def muddformer(config, tensors):
    """MUDDFormer: w1, w3, w2 of the MLP are gate, up and down; its first block has one norm for q, k, v, ours three."""
    need(config, model_type="muddformer", dense=True, dynamic_dense=True, dense_type="qkvr", sepln=True,
         tie_word_embeddings=False)
    depth, d, n_head = layers(config, "n_layer", tensors), setting(config, "dim", int), setting(config, "n_head", int)
    need(config if config.get("n_local_heads") != -1 else {}, n_local_heads=n_head)
    need({"round64": False, "expand_last": False, **config}, round64=True, expand_last=True)
    names = {"embed.weight": "tok_embeddings.weight", "final_norm.weight": "norm.weight",
             "head.weight": "output.weight"}
    for i in depth:
        ours, theirs, mixture = f"blocks.{i}.", f"layers.{i}.", f"aggregate.{i}."
        names |= pairs(ours + "attn.", theirs + "attention.", "wq=wq wk=wk wv=wv wo=wo q_norm=q_norm k_norm=k_norm")
        names |= pairs(ours, theirs + "feed_forward.", "mlp.w_gate=w1 mlp.w_up=w3 mlp.w_down=w2")
        for j, norm in enumerate(("q_in_norm", "k_in_norm", "v_in_norm")):
            names[f"{ours}{norm}.weight"] = f"{theirs}attention_norm{f's.{j}' if i else ''}.weight"
        names |= pairs(mixture, f"dynamic_dense.{i}.", "w1=w1 w2=w2")
        names |= {mixture + "a": f"dense_bs.{i}", ours + "mlp_norm.weight": theirs + "ffn_norm.weight"}
    return "muddformer", dict(
        vocab_size=setting(config, "vocab_size", int), n_layer=len(depth), n_head=n_head, d_model=d,
        max_len=setting(config, "block_size", int),
        d_ff=setting(config, "intermediate_size", int, 256 * math.ceil(8 * d // 3 / 256)),
        rope_theta=setting(config, "rope_base", float, 10000.0), norm_eps=setting(config, "norm_eps", float, 1e-6),
        qk_norm=setting(config, "use_qk_norm", bool, False)), names, r".*[kv]_cache|.*layer_cache"


def llama(config, tensors, family="llama"):
    """LlamaForCausalLM, gpt.py without QK norm; and Qwen3ForCausalLM, which has it."""
    need(config, model_type=family, hidden_act="silu", attention_bias=False, mlp_bias=False, sliding_window=None,
         quantization_config=None)
    theta = rope_theta(config)
    depth, d, n_head = (layers(config, "num_hidden_layers", tensors), setting(config, "hidden_size", int),
                        setting(config, "num_attention_heads", int))
    d_head, tied = setting(config, "head_dim", int, None), setting(config, "tie_word_embeddings", bool, False)
    if d_head and d_head * n_head != d:
        raise UserError(f"head_dim {d_head} cannot be converted, only hidden_size / num_attention_heads")
    embed, norms = "model.embed_tokens.weight", " attn.q_norm=self_attn.q_norm attn.k_norm=self_attn.k_norm"
    head, copy = tie(tied, embed, "lm_head.weight", tensors)
    names = {"embed.weight": embed, "final_norm.weight": "model.norm.weight", "head.weight": head}
    for i in depth:
        names |= pairs(f"blocks.{i}.", f"model.layers.{i}.",
                       "attn_norm=input_layernorm mlp_norm=post_attention_layernorm attn.wq=self_attn.q_proj "
                       "attn.wk=self_attn.k_proj attn.wv=self_attn.v_proj attn.wo=self_attn.o_proj "
                       "mlp.w_gate=mlp.gate_proj mlp.w_up=mlp.up_proj mlp.w_down=mlp.down_proj"
                       + (norms if family == "qwen3" else ""))
    return "gpt", dict(
        vocab_size=setting(config, "vocab_size", int), n_layer=len(depth), n_head=n_head, d_model=d,
        n_kv_head=setting(config, "num_key_value_heads", int, n_head), d_ff=setting(config, "intermediate_size", int),
        max_len=setting(config, "max_position_embeddings", int), norm_eps=setting(config, "rms_norm_eps", float),
        rope_theta=theta, tie_embeddings=tied, qk_norm=family == "qwen3"), names, r".*rotary_emb\.inv_freq" + copy


def gpt2(config, tensors):
    """GPT2LMHeadModel, with or without `transformer.` before the names: its matrices are transposed, q, k, v one."""
    need(config, model_type="gpt2", activation_function="gelu_new", scale_attn_weights=True,
         scale_attn_by_inverse_layer_idx=False, add_cross_attention=False, quantization_config=None)
    depth, d = layers(config, "n_layer", tensors), setting(config, "n_embd", int)
    tied, both = setting(config, "tie_word_embeddings", bool, True), ("weight", "bias")
    at = "transformer." if "transformer.wte.weight" in tensors else ""
    tensors |= {name: t.T for name, t in tensors.items() if re.search(r"\.c_\w+\.weight", name) and t.ndim == 2}
    head, copy = tie(tied, at + "wte.weight", "lm_head.weight", tensors)
    names = {"embed.weight": at + "wte.weight", "pos_embed.weight": at + "wpe.weight", "head.weight": head}
    names |= pairs("", at, "final_norm=ln_f", both)
    for i in depth:
        ours, theirs = f"blocks.{i}.", f"{at}h.{i}."
        names |= pairs(ours, theirs, "attn_norm=ln_1 mlp_norm=ln_2 attn.wo=attn.c_proj mlp.w_up=mlp.c_fc "
                                     "mlp.w_down=mlp.c_proj", both)
        names |= {f"{ours}attn.w{s}.{kind}": (f"{theirs}attn.c_attn.{kind}", [j], 3)
                  for j, s in enumerate("qkv") for kind in both}
    return "gpt3", dict(
        vocab_size=setting(config, "vocab_size", int), n_layer=len(depth), n_head=setting(config, "n_head", int),
        d_model=d, d_ff=setting(config, "n_inner", int, 4 * d), max_len=setting(config, "n_positions", int),
        norm_eps=setting(config, "layer_norm_epsilon", float), tie_embeddings=tied
    ), names, r".*\.attn\.(masked_)?bias" + copy


def pythia(config, tensors):
    """GPTNeoXForCausalLM: the rows of query_key_value are head by head q, k, v."""
    need(config, model_type="gpt_neox", hidden_act="gelu", use_parallel_residual=True, attention_bias=True,
         rotary_pct=0.25, quantization_config=None)
    depth, n_head = layers(config, "num_hidden_layers", tensors), setting(config, "num_attention_heads", int)
    tied, both = setting(config, "tie_word_embeddings", bool, False), ("weight", "bias")
    embed = "gpt_neox.embed_in.weight"
    head, copy = tie(tied, embed, "embed_out.weight", tensors)
    names = {"embed.weight": embed, "head.weight": head}
    names |= pairs("", "gpt_neox.", "final_norm=final_layer_norm", both)
    for i in depth:
        ours, theirs = f"blocks.{i}.", f"gpt_neox.layers.{i}."
        names |= pairs(ours, theirs, "attn_norm=input_layernorm mlp_norm=post_attention_layernorm "
                                     "attn.wo=attention.dense mlp.w_up=mlp.dense_h_to_4h "
                                     "mlp.w_down=mlp.dense_4h_to_h", both)
        names |= {f"{ours}attn.w{s}.{kind}": (f"{theirs}attention.query_key_value.{kind}",
                                              range(j, 3 * n_head, 3), 3 * n_head)
                  for j, s in enumerate("qkv") for kind in both}
    return "pythia", dict(
        vocab_size=setting(config, "vocab_size", int), n_layer=len(depth), n_head=n_head,
        d_model=setting(config, "hidden_size", int), d_ff=setting(config, "intermediate_size", int),
        max_len=setting(config, "max_position_embeddings", int), norm_eps=setting(config, "layer_norm_eps", float),
        rope_theta=rope_theta(config, "rotary_emb_base", 0.25), tie_embeddings=tied
    ), names, r".*\.attention\.((masked_)?bias|rotary_emb\.inv_freq)" + copy


LAYOUTS = {"exoformer": exoformer, "muddformer": muddformer, "llama": llama,
           "qwen3": functools.partial(llama, family="qwen3"), "gpt2": gpt2, "pythia": pythia}
FILES = {"exoformer": "gpt2"}               # layouts of one file without a tokenizer: which one they have
