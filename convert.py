"""Turns published weights into a run folder for eval.py and sample.py, and runs of gpt.py into folders of transformers.

    python convert.py exoformer ckpt_step:38146.pt --out runs/exo     checkpoint of ExoFormer's authors
    python convert.py muddformer DIR --out runs/mudd                  folder of MUDDFormer-2.8B: config.json and weights
    python convert.py llama DIR --out runs/llama                      folder of a LlamaForCausalLM; qwen3 likewise
    python convert.py gpt2 DIR --out runs/gpt2                        folder of a GPT2LMHeadModel (gpt3.py)
    python convert.py pythia DIR --out runs/pythia                    folder of a GPTNeoXForCausalLM
    python convert.py export-qwen3 RUN --out DIR                      gpt.py's run as a Qwen3ForCausalLM
    python convert.py export-llama RUN --out DIR                      without QK norm, as a LlamaForCausalLM

Weights become fp32 (4 bytes a parameter, in memory too); .safetensors files need the package safetensors. Every tensor
must find its place, and a setting that our models do not have is refused. The tokenizer: ExoFormer has GPT-2's, a
folder's tokenizer.json is copied, --tokenizer names another.
"""
import json
import os
import pickle
import re
import shutil
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch

import models
from nanodepth import runs
from nanodepth.devices import out_of_memory
from nanodepth.layouts import FILES, LAYOUTS, need, setting
from nanodepth.cli import Parser, UserError, one_line, run_folder, run_script
from nanodepth.tokenizers import load_tokenizer, run_tokenizer

EXPORTS = {"export-llama": "LlamaForCausalLM", "export-qwen3": "Qwen3ForCausalLM"}


def safetensors():
    """The package safetensors. UserError without it."""
    try:
        import safetensors.torch
    except ImportError:
        raise UserError("safetensors files need the package safetensors: pip install safetensors") from None
    return safetensors


def read_file(path):
    """The object in a .json, .safetensors or torch file (only tensors and plain values). UserError if there is none."""
    try:
        if path.suffix == ".json":
            value = json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            value = safetensors().torch.load_file(path)
        else:
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UserError:
        raise
    except pickle.UnpicklingError:
        raise UserError(f"{path} has more than tensors and plain values, or is damaged") from None
    except Exception as e:                                  # of many kinds, such as a truncated zip or a foreign file
        raise UserError(f"{path} cannot be read: {getattr(e, 'strerror', None) or one_line(e)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not names and values")
    return value


def read(layout, source):
    """(config, {name: tensor}, step, tokens) of a published checkpoint. UserError if it cannot be read."""
    if not source.exists():
        raise UserError(f"{source}: no such file or folder: download the weights first")
    if layout in FILES:
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
        where = "" if layout in FILES else " (*.safetensors or pytorch_model*.bin)"
        raise UserError(f"{source} has no tensors{where}")
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
        key = theirs, *which
        if key not in made:                                                         # tied weights stay one
            blocks = tensor.reshape(shape).chunk(n)
            made[key] = torch.cat([blocks[at] for at in which]).float()
        state[ours] = made[key]
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
    if layout in FILES:
        return FILES[layout], None, None
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
    try:
        text = json.dumps(run, indent=1)
    except TypeError as e:                                                        # a tensor in model_args, for instance
        raise UserError(f"the config of {source} has more than plain values: {one_line(e)}") from None
    with runs.folder_atomically(out) as folder:
        runs.write_text(folder / "config.json", text)
        runs.write_atomically(folder / "ckpt.pt", lambda f: torch.save(checkpoint, f))
        if file:
            shutil.copyfile(file, folder / copy)
    ignored = f"; not needed: {', '.join(rest[:8])}{' ...' * (len(rest) > 8)}" if rest else ""
    return f"{out}: {name}, {sum(p.numel() for p in model.parameters()):,} parameters{ignored}"


def export(command, source, out):
    """Makes the transformers folder `out` of a run; returns a line about it. UserError or OSError if that fails."""
    if os.path.lexists(out):
        raise UserError(f"{out} exists: choose another --out")
    source = Path(run_folder(source))
    package, family, (model, run) = safetensors(), command.removeprefix("export-"), runs.load(source)
    c, n, state = model.config, run.get("n_vocab", model.config.vocab_size), model.state_dict()
    if run["model"] != "gpt":
        raise UserError(f"{source} is a run of {run['model']}: only runs of gpt can be exported")
    need(vars(c), gate="none")
    if c.qk_norm != (family == "qwen3"):
        raise UserError(f"qk_norm {c.qk_norm} is not {family}'s: use export-{'qwen3' if c.qk_norm else 'llama'}")
    eot = 50256 if run["tokenizer"] == "gpt2" else run_tokenizer(source, run).eot_token
    config = dict(
        architectures=[EXPORTS[command]], model_type=family, vocab_size=n, hidden_size=c.d_model,
        intermediate_size=c.d_ff, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
        num_key_value_heads=c.n_kv_head, head_dim=c.d_head, hidden_act="silu", max_position_embeddings=c.max_len,
        rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta, tie_word_embeddings=c.tie_embeddings, torch_dtype="float32",
        bos_token_id=eot, eos_token_id=eot)
    names = LAYOUTS[family](config, state)[2]
    if others := set(state) ^ set(names):                                           # a changed gpt.py
        raise UserError(f"{EXPORTS[command]} has other parameters than this run: {', '.join(sorted(others)[:8])}")
    with runs.folder_atomically(out) as folder:
        runs.write_text(folder / "config.json", json.dumps(config, indent=1))
        try:
            trimmed = {names[ours]: tensor[:n].contiguous() if ours in ("embed.weight", "head.weight") else tensor
                       for ours, tensor in state.items()}                           # without the padding of train.py
            package.torch.save_file(trimmed, folder / "model.safetensors", metadata={"format": "pt"})
        except package.SafetensorError as e:                                        # a full disk, for instance
            raise UserError(f"{out} cannot be written: {one_line(e)}") from None
        (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)     # else nobody else's to read
        if copied := (source / "tokenizer.json").is_file():
            shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
            kind = {"tokenizer_class": "PreTrainedTokenizerFast"}                   # else Llama's or Qwen's rules apply
            runs.write_text(folder / "tokenizer_config.json", json.dumps(kind))
    left = "" if copied else f"; without its tokenizer ({run['tokenizer']})"
    return f"{out}: {EXPORTS[command]}, {sum(t.numel() for t in trimmed.values()):,} parameters{left}"


def main(argv):
    parser = Parser("convert.py", description=__doc__)
    parser.add_argument("layout", choices=[*LAYOUTS, *EXPORTS], help="whose weights they are, or shall be")
    parser.add_argument("source", type=Path, help=f"a file ({', '.join(FILES)}), a run (export), else a folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--tokenizer", help="gpt2, byte or a file of merge ranks")
    args = parser.parse_args(argv)
    if args.layout in EXPORTS and args.tokenizer:
        parser.error("--tokenizer is for a run folder: transformers' tokenizers are other files")
    try:
        print(export(args.layout, args.source, args.out) if args.layout in EXPORTS
              else convert(args.layout, args.source, args.out, args.tokenizer))
    except (ValueError, OSError, OverflowError, RuntimeError, MemoryError) as e:    # foreign files can raise them all
        raise UserError("out of memory" if out_of_memory(e) else one_line(e)) from None
    return 0


if __name__ == "__main__":
    run_script("convert.py", main)
