"""Turns published weights into a run folder for eval.py and sample.py.

    python convert.py exoformer ckpt_step:38146.pt --out runs/exo     checkpoint of ExoFormer's authors
    python convert.py muddformer DIR --out runs/mudd                  folder of MUDDFormer-2.8B: config.json and weights
    python convert.py llama DIR --out runs/llama                      folder of a LlamaForCausalLM

Weights become fp32 (4 bytes a parameter, in memory too); .safetensors files need the package safetensors. Every tensor
must find its place, and a setting that our models do not have is refused. The tokenizer: ExoFormer has GPT-2's, a
folder's tokenizer.json is copied, --tokenizer names another.
"""
import json
import math
import os
import pickle
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import models
from nanodepth.devices import out_of_memory
from nanodepth.options import Parser, UserError, exit_code, one_line
from nanodepth.runs import write_atomically
from nanodepth.tokenizers import load_tokenizer


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


def pairs(ours, theirs, table):
    """{ours + a + ".weight": theirs + b + ".weight"} for every word a=b of the table."""
    return {f"{ours}{a}.weight": f"{theirs}{b}.weight" for a, b in (word.split("=") for word in table.split())}


# ------------------------------------------------------------------------------------------------------------ layouts
# A layout takes the published config and tensors, and returns our model's name, its Config fields, where its parameters
# come from {ours: theirs, or (theirs, which of n equal blocks of rows, n)}, and a pattern of names it does not need.


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
    streams = "qkvg" if setting(args, "gated_attention_enabled", bool) else "qkv"
    flags = dict(q="query", k="key", v="value", g="gate")
    mixed = "".join(s for s in streams if setting(args, f"{flags[s]}_res_enabled", bool))
    n, which = len(streams), [streams.index(s) for s in mixed]
    external, dynamic = "anchor_proj.weight" in tensors, any(".dynamic_mixing." in name for name in tensors)
    names = {"embed.weight": "transformer.wte.weight", "final_norm.weight": "transformer.final_norm.weight",
             "head.weight": "transformer.wte.weight" if tied else "lm_head.weight"}
    for i in depth:
        ours, theirs = f"blocks.{i}.", f"transformer.layers.{i}."
        names |= pairs(ours, theirs, "attn_norm=attn_norm attn.q_norm=attn.q_norm attn.k_norm=attn.k_norm "
                                     "attn.wo=attn.c_proj mlp_norm=mlp_norm mlp.w_down=mlp.fc2")
        for at, w in enumerate(("wq", "wk", "wv", "gate")[:n]):
            names[f"{ours}attn.{w}.weight"] = theirs + "attn.c_attn.weight", [at], n
        for at, w in enumerate(("w_up", "w_gate")):
            names[f"{ours}mlp.{w}.weight"] = theirs + "mlp.fc1.weight", [at], 2
        for s in mixed if external or i else "":
            names[f"{ours}attn.mix.lambda_anchor.{s}"] = f"{theirs}attn.lambda_{s}1"
            names[f"{ours}attn.mix.lambda_self.{s}"] = f"{theirs}attn.lambda_{s}2"
        ours, theirs = ours + "attn.mix.gamma.mix_", theirs + "attn.dynamic_mixing."
        names |= {ours + "in.weight": theirs + "fc1.weight", ours + "out.weight": (theirs + "fc2.weight", which, n),
                  ours + "out.bias": (theirs + "fc2.bias", which, n)}               # rows q1, q2, k1, k2 and so on
    config = dict(
        vocab_size=setting(args, "vocab_size", int), n_layer=len(depth), n_head=setting(args, "n_head", int), d_model=d,
        d_ff=fc1 // 2, max_len=setting(args, "block_size", int), rope_theta=setting(args, "rope_theta", float),
        norm_eps=setting(args, "rmsnorm_eps", float), tie_embeddings=tied, qk_norm=setting(args, "qk_norm", bool),
        gate="elementwise" if n == 4 else "none")
    unmixed = "|".join(s for s in streams if s not in mixed) or "-"
    unread = (r"smear_gate\.weight|smear_lambda|backout_lambdas"
              rf"|anchor_({unmixed})_norm\.weight|.*\.({unmixed})_res_norm\.weight")
    if not external:
        unread += r"|.*\.[vg]_norm\.weight"                                        # of the later layers in model2.py
    if not mixed:
        return "gpt", config, names, unread + r"|anchor_proj\.weight|.*\.dynamic_mixing\..*"
    if dynamic:
        need(args, dynamic_mixing_hidden_dim=16)
    norms = exoformer_norms(args, tensors, streams, external)
    normed = "".join(s for s in mixed if s in norms)
    names |= {f"anchor.norms.{s}_norm.weight": norms[s] for s in normed}
    names["anchor.proj.weight"] = "anchor_proj.weight", which, n
    return "exoformer", dict(
        config, mix_streams=mixed, norm_streams=normed, mixing="dynamic" if dynamic else "static",
        anchor="external" if external else "first_layer",
        granularity=setting(args, "residual_mode", str)), names, unread


def exoformer_norms(args, tensors, streams, external):
    """{stream: the tensor with the gain of its anchor's norm}.

    Anchors of a first layer: the tensors tell which of the authors' files made them. oldmodels/model2.py normalises all
    (it has v_norm), model3.py and later what the flags say (v_res_norm, g_res_norm), model1.py none, whatever they say.
    Without such a tensor it is model1.py, unless the flags ask for neither v nor g and anchor_delta_enabled, which
    model.py dropped, is missing. Normalised anchors of q and k are the first layer's after its QK norm, so they have
    its gains.
    """
    at = "transformer.layers.0.attn."
    flagged = [s for s in streams if setting(args, f"{s}_residual_norm_enabled", bool)]
    if external:
        return {s: f"anchor_{s}_norm.weight" for s in flagged}
    if at + "v_norm.weight" in tensors:
        return {s: f"{at}{s}_norm.weight" for s in streams}
    if not {at + "v_res_norm.weight", at + "g_res_norm.weight"} & set(tensors):
        if "anchor_delta_enabled" in args or {"v", "g"} & set(flagged):
            return {}
    return {s: f"{at}{s}_{'res_' * (s in 'vg')}norm.weight" for s in flagged if s in "vg" or args.get("qk_norm")}


def muddformer(config, tensors):
    """MUDDFormer: w1, w3, w2 of the MLP are gate, up and down; dense_bs.i and dynamic_dense.i come after block i."""
    need(config, model_type="muddformer", dense=True, dynamic_dense=True, dense_type="qkvr", sepln=True,
         tie_word_embeddings=False)
    depth, d, n_head = layers(config, "n_layer", tensors), setting(config, "dim", int), setting(config, "n_head", int)
    need(config if config.get("n_local_heads") != -1 else {}, n_local_heads=n_head)
    released = setting(config, "round64", bool, False)
    if released != setting(config, "expand_last", bool, False):
        raise UserError(f"round64 {released} with expand_last {not released} cannot be converted, only both or neither")
    names = {"embed.weight": "tok_embeddings.weight", "final_norm.weight": "norm.weight",
             "head.weight": "output.weight"}
    for i in depth:
        ours, theirs, mixture = f"blocks.{i}.", f"layers.{i}.", f"aggregate.{i + 1}.weights."
        names |= pairs(ours + "attn.", theirs + "attention.", "wq=wq wk=wk wv=wv wo=wo q_norm=q_norm k_norm=k_norm")
        names |= pairs(ours, theirs + "feed_forward.", "mlp.w_gate=w1 mlp.w_up=w3 mlp.w_down=w2")
        names |= pairs(ours, theirs, "q_in_norm=attention_norms.0 k_in_norm=attention_norms.1 "
                                     "v_in_norm=attention_norms.2" if i else "q_in_norm=attention_norm")
        names |= pairs(mixture, f"dynamic_dense.{i}.", "w1=w1 w2=w2")
        names |= {mixture + "a": f"dense_bs.{i}", ours + "mlp_norm.weight": theirs + "ffn_norm.weight"}
    return "muddformer", dict(
        vocab_size=setting(config, "vocab_size", int), n_layer=len(depth), n_head=n_head, d_model=d, released=released,
        max_len=setting(config, "block_size", int),
        d_ff=setting(config, "intermediate_size", int, 256 * math.ceil(8 * d // 3 / 256)),
        rope_theta=setting(config, "rope_base", float, 10000.0), norm_eps=setting(config, "norm_eps", float, 1e-6),
        qk_norm=setting(config, "use_qk_norm", bool, False)), names, r".*[kv]_cache|.*layer_cache"


def llama(config, tensors):
    """LlamaForCausalLM: gpt.py without QK norm."""
    rope = setting(config, "rope_scaling", dict, {}) | setting(config, "rope_parameters", dict, {})
    need(config, model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False, sliding_window=None,
         quantization_config=None)
    need({"rope_type": rope.get("type", "default"), **rope}, rope_type="default", partial_rotary_factor=1.0)
    depth, d, n_head = (layers(config, "num_hidden_layers", tensors), setting(config, "hidden_size", int),
                        setting(config, "num_attention_heads", int))
    d_head, tied = setting(config, "head_dim", int, None), setting(config, "tie_word_embeddings", bool, False)
    if d_head and d_head * n_head != d:
        raise UserError(f"head_dim {d_head} cannot be converted, only hidden_size / num_attention_heads")
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    names = {"embed.weight": embed, "final_norm.weight": "model.norm.weight", "head.weight": embed if tied else head}
    for i in depth:
        names |= pairs(f"blocks.{i}.", f"model.layers.{i}.",
                       "attn_norm=input_layernorm mlp_norm=post_attention_layernorm attn.wq=self_attn.q_proj "
                       "attn.wk=self_attn.k_proj attn.wv=self_attn.v_proj attn.wo=self_attn.o_proj "
                       "mlp.w_gate=mlp.gate_proj mlp.w_up=mlp.up_proj mlp.w_down=mlp.down_proj")
    twice = tied and {embed, head} <= set(tensors) and torch.equal(tensors[embed], tensors[head])
    return "gpt", dict(
        vocab_size=setting(config, "vocab_size", int), n_layer=len(depth), n_head=n_head, d_model=d,
        n_kv_head=setting(config, "num_key_value_heads", int, n_head), d_ff=setting(config, "intermediate_size", int),
        max_len=setting(config, "max_position_embeddings", int), norm_eps=setting(config, "rms_norm_eps", float),
        rope_theta=setting({"rope_theta": config.get("rope_theta"), **rope}, "rope_theta", float, 10000.0),
        tie_embeddings=tied, qk_norm=False), names, r".*rotary_emb\.inv_freq" + r"|lm_head\.weight" * twice


LAYOUTS = {"exoformer": exoformer, "muddformer": muddformer, "llama": llama}

# ------------------------------------------------------------------------------------------------- reading and writing


def read_file(path):
    """The object in a .json, .safetensors or torch file (only tensors and plain values). UserError if there is none."""
    try:
        if path.suffix == ".json":
            value = json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            from safetensors.torch import load_file
            value = load_file(path)
        else:
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except ImportError:
        raise UserError(f"{path} needs the package safetensors: pip install safetensors") from None
    except pickle.UnpicklingError:
        raise UserError(f"{path} has more than tensors and plain values, or is damaged") from None
    except Exception as e:                                  # of many kinds, such as a truncated zip or a foreign file
        raise UserError(f"{path} cannot be read: {getattr(e, 'strerror', None) or one_line(e)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not names and values")
    return value


def read(layout, source):
    """(config, {name: tensor}, step, tokens) of a published checkpoint. UserError if it cannot be read."""
    if layout == "exoformer":
        saved, tensors = read_file(source), {}
        config, parts = setting(saved, "model_args", dict), [setting(saved, "model", dict)]
    else:
        saved, tensors, config = {}, {}, read_file(source / "config.json")
        files = set(source.glob("*.safetensors")) or set(source.glob("pytorch_model*.bin"))
        for index in sorted(source.glob("*.index.json"))[:1]:  # of shards; model.safetensors. before pytorch_model.bin.
            files = {source / str(name) for name in setting(read_file(index), "weight_map", dict).values()}
        parts = map(read_file, sorted(files))
    for part in parts:
        for name, tensor in part.items():
            name = str(name).removeprefix("_orig_mod.")
            if name in tensors or not isinstance(tensor, torch.Tensor):
                raise UserError(f"{source} has {name} twice" if name in tensors
                                else f"{name} in {source} is not a tensor")
            tensors[name] = tensor
    if not tensors:
        raise UserError(f"{source} has no tensors" + " (*.safetensors or pytorch_model*.bin)" * (layout != "exoformer"))
    return config, tensors, setting(saved, "step", int, 0), setting(saved, "tokens_processed", int, 0)


def fill(model, names, tensors, unread):
    """(state dict of `model` in fp32, names not needed). UserError for a tensor that is missing, left over or unfit."""
    state, made = {}, {}
    for ours, like in model.state_dict().items():
        theirs, which, n = names[ours] if isinstance(names[ours], tuple) else (names[ours], [0], 1)
        if theirs not in tensors:
            raise UserError(f"the tensor {theirs} is missing")
        tensor, shape = tensors[theirs], (like.shape[0] // len(which) * n, *like.shape[1:])
        if [k for k in tensor.shape if k > 1] != [k for k in shape if k > 1] or not tensor.is_floating_point():
            raise UserError(f"{theirs} is {tuple(tensor.shape)}, {tensor.dtype}: "
                            f"by its config it must be {shape}, a float")
        if (theirs, *which) not in made:                                            # tied weights stay one
            blocks = tensor.reshape(shape).chunk(n)
            made[theirs, *which] = torch.cat([blocks[at] for at in which]).float()
        state[ours] = made[theirs, *which]
    rest = sorted(set(tensors) - {theirs for theirs, *_ in made})
    if left := [name for name in rest if not re.fullmatch(unread, name)]:
        raise UserError(f"the model has no place for {len(left)} of its tensors: {', '.join(left[:8])}")
    return state, rest


def choose_tokenizer(asked, layout, source, vocab_size):
    """(what the config says, the file to copy or None, its name in the run folder)."""
    if asked:
        n = 50257 if asked == "gpt2" else load_tokenizer(asked).n_vocab
        if n > vocab_size:
            raise UserError(f"--tokenizer {asked} has {n:,} tokens, the model only {vocab_size:,}")
        return asked, None if asked in ("gpt2", "byte") else asked, "tokenizer.tiktoken"
    if layout == "exoformer":
        return "gpt2", None, None
    if not (source / "tokenizer.json").exists():
        raise UserError(f"{source} has no tokenizer.json: "
                        "add --tokenizer gpt2, byte or the path of a file of merge ranks")
    read_file(source / "tokenizer.json")
    return "tokenizer.json", source / "tokenizer.json", "tokenizer.json"


def convert(layout, source, out, asked=None):
    """Makes the run folder `out`; returns a line about it. UserError or OSError if that cannot be done."""
    if os.path.lexists(out):
        raise UserError(f"{out} exists: choose another --out")
    published, tensors, step, tokens = read(layout, source)
    name, config, names, unread = LAYOUTS[layout](published, tensors)
    with torch.device("meta"):
        model = models.build(name, **config)
    state, rest = fill(model, names, tensors, unread)
    tokenizer, file, copy = choose_tokenizer(asked, layout, source, model.config.vocab_size)
    options = {"model": name, "preset": "converted", "seq_len": min(2048, model.config.max_len), "dtype": "fp32"}
    run = {"model": name, "model_config": asdict(model.config), "tokenizer": tokenizer,
           "data": {"path": "", "fingerprint": ""}, "options": options,
           "converted": {"layout": layout, "source": str(source), "config": published}}
    checkpoint = {"model": state, "optimizers": [], "step": step, "tokens": tokens, "config": run,
                  "rng": torch.empty(0, dtype=torch.uint8), "tokenizer": tokenizer}
    temporary = out.with_name(f"{out.name}.tmp{os.getpid()}")                       # becomes `out` when it is whole
    try:
        text = json.dumps(run, indent=1).encode()
        temporary.mkdir(parents=True)
        write_atomically(temporary / "config.json", lambda f: f.write(text))
        write_atomically(temporary / "ckpt.pt", lambda f: torch.save(checkpoint, f))
        if file:
            shutil.copyfile(file, temporary / copy)
        os.rename(temporary, out)
    except TypeError as e:                                                        # a tensor in model_args, for instance
        raise UserError(f"the config of {source} has more than plain values: {one_line(e)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    ignored = f"; not needed: {', '.join(rest[:8])}{' ...' * (len(rest) > 8)}" if rest else ""
    return f"{out}: {name}, {sum(p.numel() for p in model.parameters()):,} parameters{ignored}"


def main(argv):
    parser = Parser("convert.py", description=__doc__)
    parser.add_argument("layout", choices=[*LAYOUTS, "gpt2"], help="whose checkpoint it is (gpt2: says why not)")
    parser.add_argument("source", type=Path, help="a file for exoformer, else a folder")
    parser.add_argument("--out", type=Path, required=True, help="run folder to make")
    parser.add_argument("--tokenizer", help="gpt2, byte or a file of merge ranks")
    args = parser.parse_args(argv)
    if args.layout == "gpt2":
        parser.error("gpt2 cannot be converted: models/gpt.py has no LayerNorm, GELU, learned positions or biases")
    try:
        print(convert(args.layout, args.source, args.out, args.tokenizer))
    except (ValueError, OSError, OverflowError, RuntimeError, MemoryError) as e:    # foreign files can raise them all
        raise UserError("out of memory" if out_of_memory(e) else one_line(e)) from None
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, KeyboardInterrupt) as e:
        sys.exit(exit_code("convert.py", e))
