"""The registry: every .py file in this folder is a model under its file name. Drop in a file and it exists.

A model file defines `Config` (a dataclass) and `Model(config)`; gpt.py shows the whole contract. Here is what works for
all of them: building, loading a run, scoring text, and the papers' presets.
"""
import argparse
import math
import os
import re
import typing
from dataclasses import fields
from functools import reduce
from importlib import import_module
from pathlib import Path

import torch


def names():
    """Names of all models, gpt first."""
    found = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))
    return sorted(found, key=lambda name: name != "gpt")


def module(name):
    """The module of one model. ValueError if there is no such file."""
    if name not in names():
        raise ValueError(f"no model {name!r}: choose from {', '.join(names())}")
    return import_module(f"{__name__}.{name}")


def check_types(cls, values):
    """ValueError for the first of `values` that is not of the type of its field of the dataclass `cls`."""
    for f in fields(cls):
        kinds, value = typing.get_args(f.type) or (f.type,), values.get(f.name, f.default)
        if not (type(value) in kinds or type(value) is int and float in kinds):
            raise ValueError(f"{f.name} must be {' or '.join(k.__name__ for k in kinds)}, not {value!r}")


def build(name, **config):
    """Model `name` with the given Config fields, initialised. ValueError for a wrong name, field or value."""
    mod = module(name)
    unknown = set(config) - {f.name for f in fields(mod.Config)}
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(sorted(map(str, unknown)))}")
    check_types(mod.Config, config)
    for key, value in config.items():
        if type(value) is int and value > (10_000 if key == "n_layer" else 2 ** 31):
            raise ValueError(f"{key} {value:,} is too large")
    return mod.Model(mod.Config(**config))


CHECKPOINT = {  # where in it: {key: type}; the rest are the options, the model's and the data's own fields
    (): {"model": dict, "optimizers": list, "step": int, "tokens": int, "rng": torch.Tensor, "config": dict, "tokenizer": str},
    ("config",): {"model": str, "model_config": dict, "options": dict, "data": dict, "tokenizer": str},
    ("config", "options"): {"preset": str, "seq_len": int, "dtype": str},
    ("config", "data"): {"path": str, "fingerprint": str},
}


def read_checkpoint(run_dir):
    """The checkpoint of a run folder as plain tensors and builtins. ValueError, one line, if there is no good one."""
    path = Path(run_dir) / "ckpt.pt"
    if not os.path.isfile(path):
        raise ValueError(f"{path} does not exist: {run_dir} is not the folder of a run that has saved")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # torch raises many kinds: truncated zip, foreign file, pickled code
        raise ValueError(f"{path} is not a readable checkpoint: {one_line(e)}") from None
    at = lambda *keys: reduce(lambda tree, key: tree.get(key) if isinstance(tree, dict) else None, keys, checkpoint)
    wrong = [".".join((*where, key)) for where, kinds in CHECKPOINT.items() for key, kind in kinds.items()
             if not isinstance(at(*where, key), kind) or at(*where, key) is True]
    if wrong:
        raise ValueError(f"{path} is not a checkpoint of train.py: it lacks {', '.join(wrong)}, or has it in another form")
    return checkpoint


def write_atomically(path, write):
    """write(file) to a temporary file beside path, which then takes its place: path is whole at every instant."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class Parser(argparse.ArgumentParser):
    """A mistake in the flags is one line and exit code 2."""

    def error(self, message):
        self.exit(2, f"{self.prog.split()[0]}: error: {escaped(message)}\n")

    def _get_values(self, action, arg_strings):
        if action.option_strings and "--" in arg_strings:                           # argparse would make it an empty list
            self.error(f"argument {action.option_strings[0]}: expected a value, not '--'")
        return super()._get_values(action, arg_strings)


def out_of_memory(error):
    """Whether this exception says so, of the GPU or of the CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def escaped(message):
    """A message in which line breaks, of a file's name for instance, do not break the line."""
    return str(message).replace("\n", "\\n").replace("\r", "\\r")


def find_device(name="auto"):
    """The torch device `name`; "auto": cuda if there is one, else cpu. ValueError if it cannot be used."""
    try:
        name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        one = torch.zeros(1, device=name)
        one.item()                                                                  # not on "meta"
        return one.device                                                           # cuda gets its index
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise ValueError(f"--device {name} cannot be used: {one_line(e)}") from None


def has_bf16(device):
    """Whether the chip multiplies bf16 natively: there it is the faster choice, elsewhere it may be the slower one."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    chip = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return device.type == "cpu" and any(chip.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def peak_flops(device):
    """Dense bf16 FLOP/s by the vendor's data sheet, or None for a chip that is not in the list."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    table = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12,
             "RTX 4090": 165e12}
    return next((peak for chip, peak in table.items() if chip in name), None)


def load(run_dir, device="cpu"):
    """(model in eval mode, config of the run) from a run folder. ValueError, one line, without a good checkpoint."""
    checkpoint = read_checkpoint(run_dir)
    config = checkpoint["config"]
    try:
        model = build(config["model"], **config["model_config"])
        model.load_state_dict(checkpoint["model"])
    except (KeyError, TypeError, AttributeError, RuntimeError) as e:
        raise ValueError(f"{run_dir}: the checkpoint does not fit the model's file: {one_line(e)}") from None
    return model.to(device).eval(), config


def one_line(error):
    """The gist of an exception's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 or not lines[0].endswith(":") else f"{lines[0]} {lines[1]}"


@torch.no_grad()
def evaluate(model, batches, token_bytes=None, autocast=None, reduce=None):
    """Scores (idx, targets), each (B, T), from an iterable -> {"loss", "ppl", "bpb", "eval_tokens"}.

    loss: nats per target (targets of -1 do not count); ppl: its exponential; bpb: all nats in bits over the bytes of text
    that the targets stand for, by token_bytes (vocab_size,), or None. reduce(sums) may add up the sums of several ranks.
    """
    device, training = next(model.parameters()).device, model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)                       # nats, targets, bytes of text
    for idx, targets in batches:
        kept = targets[targets >= 0]
        text = 0 if token_bytes is None else int(token_bytes[kept].sum())
        with autocast or torch.autocast(device.type, enabled=False):
            loss = model(idx.to(device), targets.to(device))[1]
        sums += torch.stack((loss.double() * len(kept), *torch.tensor((len(kept), text), dtype=torch.float64, device=device)))
    model.train(training)
    if reduce:
        reduce(sums)
    nats, tokens, text = sums.tolist()
    loss = nats / tokens
    bpb = nats / math.log(2) / text if text else None
    return {"loss": loss, "ppl": math.exp(min(loss, 700)), "bpb": bpb, "eval_tokens": int(tokens)}


def baseline(name):
    """The model that `name` is built on, by its docstring's line `Changed from BASELINE.py:`; gpt without such a line."""
    found = re.search(r"^Changed from (\w+)\.py:", module(name).__doc__ or "", re.M)
    return found[1] if found else "gpt"


def same_shape(Config, base, asked):
    """{field: value} of the Config `base` of another model: as asked for, or else Config's default if it has the field."""
    return {f.name: asked.get(f.name, getattr(Config, f.name, f.default)) for f in fields(base)}


# Named groups of options for train.py and bench.py: differences from the defaults, shape and recipe together. A field
# that the chosen model does not have is skipped; flags win. Sources: EXO arXiv:2601.08131 and its training script, SAT
# arXiv:2605.03953 and its configs, MUDD arXiv:2502.12170. vocab_size is the paper's; data with more ids raises it.
FINEWEB = dict(data="fineweb-edu", weight_decay=0.1, eval_tokens=10_485_760)
EXO = dict(FINEWEB, vocab_size=57601, rope_theta=5e5, z_loss=1e-5, gate="elementwise", seq_len=2048, max_len=2048,
           batch_tokens=262144, optimizer="muon", second_moment=0.95, schedule="wsd", warmup_steps=1000, decay_frac=0.2,
           eval_every=1000)
SAT = dict(FINEWEB, vocab_size=32000, tie_embeddings=True, zero_init=False, seq_len=4096, max_len=4096,
           batch_tokens=524288, optimizer="adamw", schedule="cosine", eval_every=500)
MUDD = dict(FINEWEB, vocab_size=50432, qk_norm=False, zero_init=False, seq_len=2048, max_len=2048,
            batch_tokens=524288, optimizer="adamw", schedule="cosine", eval_every=500)
PRESETS = {
    "tiny": dict(
        n_layer=8, d_model=160, n_head=5, max_len=1024, data="stdlib", seq_len=256, batch_tokens=2048, max_steps=720,
        warmup_steps=20, muon_lr=0.005, adamw_lr=0.004, eval_every=180, eval_tokens=131072),
    "study": dict(                                                                  # results/study has a model's own rates
        n_layer=12, d_model=128, n_head=4, max_len=256, data="stdlib", seq_len=256, batch_tokens=4096, max_steps=1000,
        warmup_steps=30, muon_lr=0.005, adamw_lr=0.024, mix_lr=0.002, eval_every=250, eval_tokens=131072, save_every=100),
    "gpt2-124m": dict(
        FINEWEB, n_layer=12, d_model=768, n_head=12, d_ff=2048, vocab_size=50304, tie_embeddings=True, max_len=1024,
        seq_len=1024, batch_tokens=524288, max_steps=19073, warmup_steps=250, eval_every=250),
    "exo-450m": dict(
        EXO, n_layer=29, d_model=1024, n_head=16, d_ff=2048, muon_lr=1e-2, adamw_lr=3e-3, max_steps=38147,
        eval_tokens=100_000_000),
    "exo-1b": dict(
        EXO, n_layer=32, d_model=1536, n_head=16, d_ff=3072, muon_lr=3e-3, adamw_lr=1e-3, max_steps=76293,
        eval_tokens=100_000_000),
    "sat-130m": dict(
        SAT, n_layer=11, d_model=768, n_head=12, d_ff=3072, adamw_lr=2e-3, max_steps=9537, warmup_steps=96),
    "sat-340m": dict(
        SAT, n_layer=18, d_model=1024, n_head=16, d_ff=4096, adamw_lr=1.5e-3, max_steps=19074, warmup_steps=191),
    "sat-760m": dict(
        SAT, n_layer=19, d_model=1536, n_head=24, d_ff=6144, adamw_lr=1e-3, max_steps=38147, warmup_steps=382),
    "sat-1.3b": dict(
        SAT, n_layer=24, d_model=2048, n_head=32, d_ff=5632, adamw_lr=8e-4, max_steps=57221, warmup_steps=573),
    "mudd-405m": dict(
        MUDD, n_layer=24, d_model=1024, n_head=16, d_ff=2816, adamw_lr=3e-4, max_steps=13500, warmup_steps=135),
    "mudd-834m": dict(
        MUDD, n_layer=24, d_model=1536, n_head=24, d_ff=4096, adamw_lr=2.5e-4, max_steps=28611, warmup_steps=287),
    "mudd-1.4b": dict(
        MUDD, n_layer=24, d_model=2048, n_head=32, d_ff=5632, adamw_lr=2e-4, max_steps=49592, warmup_steps=496),
    "mudd-797m-deep": dict(
        MUDD, n_layer=34, d_model=1280, n_head=20, d_ff=3392, adamw_lr=2.5e-4, max_steps=28611, warmup_steps=287,
        pre_post_norm=True),
    "mudd-1.34b-deep": dict(
        MUDD, n_layer=42, d_model=1536, n_head=24, d_ff=4096, adamw_lr=2e-4, max_steps=49592, warmup_steps=496,
        pre_post_norm=True),
}
