"""Converts published weights to a run folder for eval.py, sample.py and --init_from of train.py.

    python convert.py exoformer ckpt_step:38146.pt --out runs/exo     checkpoint of ExoFormer's authors
    python convert.py muddformer DIR --out runs/mudd                  folder of MUDDFormer-2.8B: config.json and weights
    python convert.py gpt2 DIR --out runs/gpt2                        folder of a GPT2LMHeadModel (gpt3.py)
    python convert.py pythia DIR --out runs/pythia                    folder of a GPTNeoXForCausalLM

Weights become fp32 (4 bytes a parameter, in memory too). A tensor that has no place in our model is an error, and so is
a setting that our models do not have. The tokenizer is GPT-2's for ExoFormer, else the folder's tokenizer.json, unless
--tokenizer names another. Reading such files needs the packages safetensors and tokenizers.
"""
import json
import math
import os
import re
import shutil
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch

import models
from nanodepth import runs
from nanodepth.cli import Parser, UserError, one_line, run_script, user_errors
from nanodepth.tokenizers import JsonTokenizer, load_tokenizer

# --------------------------------------------------------------------------------------------------------- layouts
# A layout is a function of the published config and tensors; it may rename tensors in their dict. It returns our
# model's name, its Config fields, a table of names, and a regular expression for the tensors that we do not need.
# KeyError if the config lacks a field, UserError for a setting that our models do not have.
#
# A table is {ours: theirs} for modules or parameters; N stands for the number of a layer. "theirs:k/n" is the k-th of n
# equal blocks of rows (from 0); in "theirs:k/n/h" each of h heads has n such blocks.


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


def rope_theta(config, base, share=1.0):
    """The base of the rotary positions. UserError if they are scaled, or rotate another share of each head."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}        # in transformers' order
    said = {"partial_rotary_factor": config.get("partial_rotary_factor") or share, **rope}
    plain = {"type": "default", "rope_type": "default", "partial_rotary_factor": share}
    for name, value in said.items():
        if name != "rope_theta" and value != plain.get(name):
            raise UserError(f"rotary positions with {name} {repr(value)[:60]} cannot be converted")
    return rope.get("rope_theta") or config.get(base) or 10000.0


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
    found = fields(config, "vocab_size=vocab_size n_layer=num_hidden_layers n_head=num_attention_heads "
                           "d_model=hidden_size d_ff=intermediate_size max_len=max_position_embeddings "
                           "tie_embeddings=tie_word_embeddings? norm_eps=layer_norm_eps")
    found["rope_theta"] = rope_theta(config, "rotary_emb_base", 0.25)
    rows = {ours: theirs.replace("/3", f"/3/{found['n_head']}") for ours, theirs in PYTHIA.items()}
    return "pythia", found, rows, r".*\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"


LAYOUTS = {"exoformer": exoformer, "muddformer": muddformer, "gpt2": gpt2, "pythia": pythia}
FILES = {"exoformer": "gpt2"}               # layouts whose source is one file: its tokenizer


# ------------------------------------------------------------------------------------------------------- converting


WEIGHTS = ("model.safetensors", "pytorch_model.bin")                       # the first found, whole or in shards


def read_file(path):
    """The dict of tensors and plain values in a .json, .safetensors or torch file. UserError if there is none."""
    try:
        if path.suffix == ".json":
            return dict(json.loads(path.read_bytes()))
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file
            return load_file(path)
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)))
    except (UserError, ModuleNotFoundError):
        raise
    except Exception as e:                                  # many kinds: a truncated zip, a foreign file
        raise UserError(f"{path} cannot be read as a dict of tensors or plain values: "
                        f"{getattr(e, 'strerror', None) or one_line(e)[:200]}") from None


def weight_files(source):
    """The weight files of a folder: a whole one, else those that its index names. UserError if there is none."""
    for name in WEIGHTS:
        if (source / name).exists():
            return [source / name]
        if (index := source / f"{name}.index.json").exists():
            return sorted({source / str(file) for file in dict(read_file(index)["weight_map"]).values()})
    raise UserError(f"{source} has no weights ({', '.join(WEIGHTS)}, or their index and shards)")


def read(layout, source):
    """(config, {name: tensor}, step) of a published checkpoint. UserError if it cannot be read."""
    if layout in FILES:
        saved = read_file(source)
        config, tensors = saved["model_args"], saved["model"]
    else:
        saved, config, tensors = {}, read_file(source / "config.json"), {}
        for file in weight_files(source):
            tensors |= read_file(file)
    tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}
    return config, tensors, saved.get("step", 0)


def fill(model, rows, tensors, unread):
    """(state dict of `model` in fp32, names not needed). UserError for a tensor that is missing, left over or unfit."""
    parameters, state, tied = model.state_dict(), {}, model.config.tie_embeddings
    table = places(rows, parameters)
    if tied:
        del table["head.weight"]
    for ours, (theirs, k, n, h) in table.items():
        shape = list(parameters[ours].shape)
        if theirs not in tensors:
            raise UserError(f"the tensor {theirs} is missing")
        tensor, whole = tensors[theirs], [n * shape[0], *shape[1:]]
        if [i for i in tensor.shape if i > 1] != [i for i in whole if i > 1] or not tensor.is_floating_point():
            raise UserError(f"{theirs} is {tuple(tensor.shape)}, {tensor.dtype}: by its config it must be "
                            f"{tuple(whole)}, a float")
        state[ours] = tensor.reshape(h, n, -1)[:, k].reshape(shape).to(torch.float32, copy=True)
    rest = sorted(set(tensors) - {theirs for theirs, *_ in table.values()})
    if tied:
        head, state["head.weight"] = rows["head"] + ".weight", state["embed.weight"]
        if head in rest and torch.equal(tensors[head].float(), state["head.weight"]):
            unread += "|" + re.escape(head)                                 # a copy of the embedding
    if left := [name for name in rest if not re.fullmatch(unread, name)]:
        raise UserError(f"the model has no place for {len(left)} of its tensors: {', '.join(left[:8])}")
    return state, rest


def choose_tokenizer(asked, layout, source, vocab_size):
    """(its name, the file to copy). UserError if there is none, or if it has ids that the model lacks."""
    name, file = asked or FILES.get(layout), source / "tokenizer.json"
    if name:
        last, file = 50256 if name == "gpt2" else load_tokenizer(name).n_vocab - 1, Path(os.path.expanduser(name))
    elif file.exists():
        name, last = "tokenizer.json", JsonTokenizer(file).n_vocab - 1
    else:
        raise UserError(f"{source} has no tokenizer.json: add --tokenizer gpt2, byte or the path of a file of merge "
                        "ranks")
    if last >= vocab_size:
        raise UserError(f"the tokenizer {name} has ids up to {last:,}, the model only {vocab_size:,} ids: name its "
                        "own with --tokenizer")
    return name, file


def convert(layout, source, out, asked=None):
    """Makes the run folder `out`; returns a line about it. UserError if that cannot be done."""
    try:
        published, tensors, step = read(layout, source)
        name, options, rows, unread = LAYOUTS[layout](published, tensors)
    except KeyError as e:
        raise UserError(f"{source} has no {e.args[0]}") from None
    with user_errors(), torch.device("meta"):
        model = models.build(name, **options)
    state, rest = fill(model, rows, tensors, unread)
    tokenizer, file = choose_tokenizer(asked, layout, source, model.config.vocab_size)
    options = {"model": name, "preset": "converted", "seq_len": min(2048, model.config.max_len), "dtype": "fp32"}
    run = {"model": name, "model_config": asdict(model.config), "tokenizer": tokenizer,
           "data": {"path": "", "fingerprint": ""}, "options": options,
           "converted": {"layout": layout, "source": str(source), "config": published}}
    checkpoint = {"model": state, "optimizers": [], "step": step}
    with runs.folder_atomically(out) as folder:
        runs.write_text(folder / "config.json", json.dumps(run, indent=1, default=str))
        runs.write_atomically(folder / "ckpt.pt", lambda f: torch.save(checkpoint, f))
        if tokenizer not in ("gpt2", "byte"):
            shutil.copyfile(file, folder / ("tokenizer.tiktoken" if asked else "tokenizer.json"))
    ignored = f"; not needed: {', '.join(rest[:8])}{' ...' * (len(rest) > 8)}" if rest else ""
    return f"{out}: {name}, {sum(p.numel() for p in model.parameters()):,} parameters{ignored}"


def main(argv):
    parser = Parser("convert.py", description=__doc__)
    parser.add_argument("layout", choices=LAYOUTS, help="format of the weights")
    parser.add_argument("source", type=Path, help=f"a file ({', '.join(FILES)}), else a folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--tokenizer", help="gpt2, byte or a file of merge ranks, instead of the published one")
    args = parser.parse_args(argv)
    if os.path.lexists(args.out):
        parser.error(f"{args.out} exists: choose another --out")
    print(convert(args.layout, args.source, args.out, args.tokenizer))
    return 0


if __name__ == "__main__":
    run_script("convert.py", main, "convert on a machine with 4 bytes of memory per parameter to spare")
