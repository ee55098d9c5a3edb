"""Converts published weights to a run folder for eval.py, sample.py and --init_from of train.py.

    python convert.py exoformer ckpt_step:38146.pt --out runs/exo     checkpoint of ExoFormer's authors
    python convert.py muddformer DIR --out runs/mudd                  folder of MUDDFormer-2.8B: config.json and weights
    python convert.py llama DIR --out runs/llama                      folder of a LlamaForCausalLM; qwen3 likewise
    python convert.py gpt2 DIR --out runs/gpt2                        folder of a GPT2LMHeadModel (gpt3.py)
    python convert.py pythia DIR --out runs/pythia                    folder of a GPTNeoXForCausalLM

Weights become fp32 (4 bytes a parameter, in memory too). A tensor that has no place in our model is an error, and so is
a setting that our models do not have. The tokenizer is GPT-2's for ExoFormer, else the folder's tokenizer.json, unless
--tokenizer names another. Reading such files needs the packages safetensors and tokenizers.
"""
import json
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
from nanodepth.published import FILES, LAYOUTS, fields, places
from nanodepth.tokenizers import JsonTokenizer, load_tokenizer

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
    """The weight files of a folder: exactly those that its index names, if it has one, so none of an older save.

    UserError for a file that the index names and the folder lacks, and for a whole file that the index does not name.
    """
    for name in WEIGHTS:
        whole, index = source / name, source / f"{name}.index.json"
        files = [whole] if whole.exists() else sorted(source.glob(name.replace(".", "-*.")))
        if index.exists():
            indexed = read_file(index)["weight_map"]
            if not isinstance(indexed, dict) or not all(isinstance(place, str) for place in indexed.values()):
                raise UserError(f"the weight_map of {index} must give the name of a file for each tensor")
            files = sorted({source / place for place in indexed.values()})
            if missing := [file.name for file in files if not file.is_file()]:
                raise UserError(f"{source} lacks {', '.join(missing[:8])}, which {index.name} names: add them")
            if whole.exists() and whole not in files:
                raise UserError(f"{source} has {name}, and {index.name} names other files: move the older ones away")
        if files:
            return files
    raise UserError(f"{source} has no weights ({', '.join(WEIGHTS)}, or their shards)")


def read(layout, source):
    """(config, {name: tensor}, step) of a published checkpoint. UserError if it cannot be read."""
    if layout in FILES:
        saved = read_file(source)
        config, tensors = saved["model_args"], saved["model"]
    else:
        saved, config, tensors = {}, read_file(source / "config.json"), {}
        for file in weight_files(source):
            more = read_file(file)
            if twice := sorted(tensors.keys() & more.keys()):
                raise UserError(f"{twice[0]} is in two files of {source}, one is {file.name}: move the older away")
            tensors |= more
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


def choose_tokenizer(asked, layout, source, published, vocab_size):
    """(what the run's config says about its tokenizer, the file to copy). UserError if the model lacks some ids.

    A text begins with `bos` and ends with `eos`. A Llama's bos is the one of tokenizer_config.json, as in lm_eval, else
    of config.json; its eos is config.json's, as in transformers, else tokenizer_config.json's. Otherwise both are the
    tokenizer's end-of-text. `begin` holds the ids that tokenizer.json itself puts before every text.
    """
    name, said = asked or FILES.get(layout), {}
    if name:
        last, file = 50256 if name == "gpt2" else load_tokenizer(name).n_vocab - 1, Path(name).expanduser()
    elif (file := source / "tokenizer.json").exists():
        name, inner = "tokenizer.json", JsonTokenizer(file).inner
        said = {"begin": inner.encode("").ids}
        last = max([*inner.get_vocab().values(), *said["begin"]])
        if layout == "llama":
            said |= fields(published, "bos=bos_token_id? eos=eos_token_id?")
            special = source / "tokenizer_config.json"
            words = read_file(special) if special.exists() else {}
            for key in ["bos"] if "eos" in said else ["bos", "eos"]:
                word = words.get(f"{key}_token")
                word = word.get("content") if isinstance(word, dict) else word
                if word is not None:
                    said[key] = inner.token_to_id(str(word))
                    if said[key] is None:
                        raise UserError(f"{key}_token {word!r} of {special} is not in tokenizer.json: correct one")
    else:
        raise UserError(f"{source} has no tokenizer.json: add --tokenizer gpt2, byte or the path of a file of merge "
                        "ranks")
    if last >= vocab_size:
        raise UserError(f"the tokenizer {name} has ids up to {last:,}, the model only {vocab_size:,} ids: name its "
                        "own with --tokenizer")
    for key in sorted(said.keys() & {"bos", "eos"}):
        ids = said[key] if key == "eos" and isinstance(said[key], list) else [said[key]]
        if not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise UserError(f"{key}_token_id {said[key]} of config.json is no id of the model: it has {vocab_size:,}")
    return {"tokenizer": name, **said}, file


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
    tokenizer, file = choose_tokenizer(asked, layout, source, published, model.config.vocab_size)
    options = {"model": name, "preset": "converted", "seq_len": min(2048, model.config.max_len), "dtype": "fp32"}
    run = {"model": name, "model_config": asdict(model.config), **tokenizer,
           "data": {"path": "", "fingerprint": ""}, "options": options,
           "converted": {"layout": layout, "source": str(source), "config": published}}
    checkpoint = {"model": state, "optimizers": [], "step": step}
    with runs.folder_atomically(out) as folder:
        runs.write_text(folder / "config.json", json.dumps(run, indent=1, default=str))
        runs.write_atomically(folder / "ckpt.pt", lambda f: torch.save(checkpoint, f))
        if run["tokenizer"] not in ("gpt2", "byte"):
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
