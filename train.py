"""Trains one model of models/ on token shards.

    python train.py                                             the tiny preset: minutes on a laptop, offline
    python train.py --model exoformer --preset exo-450m         a paper's run on one GPU
    torchrun --standalone --nproc_per_node 8 train.py --model muddformer --preset mudd-1.4b
    python train.py --resume runs/exoformer-exo-450m            go on after an interruption
    python train.py --model satformer --help                    every option, the model's own included
"""
import argparse
import difflib
import fcntl
import hashlib
import inspect
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import typing
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import data_prep
import models
import muon

# ---------------------------------------------------------------------------------------------------------------- options


@dataclass
class Options:
    model: str = "gpt"              # a file of models/
    preset: str = "tiny"            # a named group of options, see models/__init__.py; flags win over it
    data: str = "stdlib"            # a folder made by data_prep.py, or its name under data/
    out: str | None = None          # run folder; none: runs/MODEL-PRESET, numbered if that exists
    resume: str | None = None       # run folder to go on with; its options hold
    seed: int = 0                   # of the initial weights and of the order of the data
    device: str = "auto"            # auto (cuda, else cpu) or a torch device
    dtype: str = "auto"             # bf16 (autocast over fp32 weights) | fp32 | auto (bf16 where the chip has bf16 arithmetic)
    compile: bool | None = None     # torch.compile; none: on cuda only, where it pays at once
    max_steps: int = 1000           # optimizer steps
    batch_tokens: int = 8192        # tokens per optimizer step, over all ranks
    seq_len: int = 1024             # tokens per sequence
    micro_batch: int | None = None  # sequences per forward pass and rank: memory only, not results; none: up to 32,768 tokens
    optimizer: str = "muon"         # muon (matrices of the blocks; AdamW for the rest) | adamw
    muon_lr: float = 0.02           # peak rate of Muon
    adamw_lr: float = 0.004         # peak rate of AdamW
    weight_decay: float = 0.1       # on the matrices only; cautious under Muon
    schedule: str = "wsd"           # wsd (constant, then linear to 10%) | cosine (to 10%); both after a linear warm-up
    warmup_steps: int = 100         # steps of warm-up
    decay_frac: float = 0.2         # part of the steps in wsd's final decay
    grad_clip: float = 1.0          # largest gradient norm
    eval_every: int = 250           # steps between validations; also at step 0 and at the end
    eval_tokens: int = 1048576      # tokens of the validation split that are scored, the same ones each time
    save_every: int | None = None   # steps between checkpoints; none: eval_every
    wandb: bool = False             # also log to Weights & Biases (pip install wandb)

    def __post_init__(self):
        for name in ("max_steps", "batch_tokens", "seq_len", "grad_clip", "eval_every", "eval_tokens", "muon_lr", "adamw_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name} must be positive, not {getattr(self, name)}")
        for name in ("micro_batch", "save_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} must be positive, not {getattr(self, name)}")
        for name, allowed in dict(optimizer=("muon", "adamw"), schedule=("wsd", "cosine"), dtype=("auto", "bf16", "fp32")).items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"--{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if not 0 <= self.decay_frac <= 1 or not 0 <= self.warmup_steps <= self.max_steps or not 0 <= self.weight_decay < math.inf:
            raise ValueError("--decay_frac must lie in 0..1, --warmup_steps in 0..max_steps, and --weight_decay must not be negative")
        if self.seed < 0:
            raise ValueError(f"--seed must not be negative, not {self.seed}")


MAY_CHANGE = {"resume", "data", "device", "compile", "micro_batch", "save_every", "wandb"}   # on resume; the rest must agree


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_options(parser, title, cls, preset):
    """One flag per field of the dataclass `cls`; the comment behind the field is its help."""
    group = parser.add_argument_group(title)
    notes = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.M))
    for f in fields(cls):
        kind, *optional = typing.get_args(f.type) or (f.type,)
        default = preset.get(f.name, f.default)
        text = f"{notes.get(f.name, '')} [{'none' if default is None else default}]".replace("%", "%%")
        if kind is bool:
            group.add_argument(f"--{f.name}", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            def convert(s, kind=kind, optional=optional):
                return None if optional and s.lower() == "none" else kind(s)
            convert.__name__ = kind.__name__
            group.add_argument(f"--{f.name}", type=convert, default=argparse.SUPPRESS, metavar=kind.__name__.upper(), help=text)


def parse(argv):
    """(Options, dict of the model's Config fields, dict of the flags as given). Leaves with one line if they are wrong."""
    first = Parser(prog="train.py", add_help=False, allow_abbrev=False)
    for name in ("model", "preset", "resume"):
        first.add_argument(f"--{name}")
    asked = first.parse_known_args(argv)[0]
    parser = Parser(prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    try:
        old = models.read_checkpoint(asked.resume)["config"] if asked.resume else {"options": {}, "model_config": {}}
        name = asked.model or old["options"].get("model", Options.model)
        preset = asked.preset or old["options"].get("preset", Options.preset)
        if preset not in models.PRESETS:
            raise ValueError(f"no preset {preset!r}: choose from {', '.join(models.PRESETS)}")
        base = {**models.PRESETS[preset], **old["options"], **old["model_config"]}
        config_class = models.module(name).Config
    except ValueError as e:
        parser.error(str(e))
    add_options(parser, "training", Options, base)
    add_options(parser, f"model {name}", config_class, base)
    flags, unknown = parser.parse_known_args(argv)
    flags = vars(flags)
    if unknown:
        known = [s for a in parser._actions for s in a.option_strings]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, 1)
        parser.error(f"unknown argument {unknown[0]}" + (f": did you mean {near[0]}?" if near else ": see --help"))
    for key, value in flags.items() if asked.resume else ():
        if key not in MAY_CHANGE and value != base.get(key):
            parser.error(f"--{key} {value} contradicts the run in {asked.resume}, which has {base.get(key)}: leave it away")
    chosen = {**base, **flags}
    opt = {f.name: chosen[f.name] for f in fields(Options) if f.name in chosen}
    config = {f.name: chosen[f.name] for f in fields(config_class) if f.name in chosen}
    try:
        return Options(**opt), config, flags
    except ValueError as e:
        parser.error(str(e))


# -------------------------------------------------------------------------------------------------------- small functions


def stop(message, code=2):
    """Ends the process with one line on stderr."""
    print(f"train.py: {'error: ' if code == 2 else ''}{message}", file=sys.stderr)
    sys.stderr.flush()
    sys.exit(code)


def lr_scale(step, opt):
    """The rate of optimizer step `step` (from 0) as a part of the peak."""
    if step < opt.warmup_steps:
        return (step + 1) / opt.warmup_steps
    if opt.schedule == "cosine":
        return 0.55 + 0.45 * math.cos(math.pi * (step - opt.warmup_steps) / max(1, opt.max_steps - opt.warmup_steps))
    n_decay = round(opt.decay_frac * opt.max_steps)
    return 1.0 - 0.9 * max(0, step + 1 - (opt.max_steps - n_decay)) / max(1, n_decay)


def has_bf16(device):
    """Whether the chip multiplies bf16 natively: there it is the faster choice, elsewhere the slower one."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    chip = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return device.type == "cpu" and any(chip.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def peak_flops(device):
    """Dense bf16 FLOP/s by the vendor's data sheet, or None for a chip not in the list."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    table = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
    return next((peak for chip, peak in table.items() if chip in name), None)


@torch.no_grad()
def evaluate(model, data, opt, micro, device, autocast):
    """Loss on the first eval_tokens of the validation split, each rank a share: {"loss", "ppl", "bpb", "eval_s"}."""
    began, world, rank = time.perf_counter(), *world_and_rank()
    model.eval()
    total = torch.zeros(3, dtype=torch.float64, device=device)                      # nats, tokens, bytes of text
    widths = torch.zeros(data.vocab_size) if data.token_bytes is None else torch.from_numpy(data.token_bytes)
    for i, (idx, targets) in enumerate(data.val_batches(opt.eval_tokens, micro, opt.seq_len)):
        if i % world == rank:
            n = (targets >= 0).sum()
            with autocast:
                loss = model(idx.to(device), targets.to(device))[1]
            total += torch.stack((loss.double() * n.to(device), n.to(device), widths[targets[targets >= 0]].sum().to(device)))
    model.train()
    if world > 1:
        dist.all_reduce(total)
    nats, tokens, text = total.tolist()
    bpb = nats / math.log(2) / text if text else None
    return {"loss": nats / tokens, "ppl": math.exp(min(nats / tokens, 700)), "bpb": bpb, "eval_s": time.perf_counter() - began}


def world_and_rank():
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def write_atomically(path, write):
    """write(file) to a temporary file beside path, then take its place: at every instant path is whole, old or new."""
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


def new_run_folder(opt):
    """Makes the run folder: --out must not exist, a default name gets the next free number."""
    names = [opt.out] if opt.out else (f"runs/{opt.model}-{opt.preset}{'' if i == 1 else f'-{i}'}" for i in range(1, 10 ** 6))
    for name in names:
        try:
            os.makedirs(name)
            return Path(name)
        except FileExistsError:
            pass
    stop(f"{opt.out} exists: choose another --out, or go on with --resume {opt.out}")


def lock(run):
    """Holds the run folder until this process ends, however it ends."""
    handle = open(run / ".lock", "w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stop(f"{run} is in use by another process")
    return handle


def git_state():
    """(commit, whether files differ from it) of the folder this file is in, or (None, None)."""
    def git(*words):
        return subprocess.run(("git", *words), cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None, None


# ------------------------------------------------------------------------------------------------------------------- main


def main(argv):
    opt, config, flags = parse(argv)

    # ---- ranks, device, precision
    if ranked := "RANK" in os.environ:                                              # started by torchrun
        cuda = opt.device.startswith("cuda") or opt.device == "auto" and torch.cuda.is_available()
        opt.device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else opt.device
        dist.init_process_group("nccl" if cuda else "gloo")
    world, rank = world_and_rank()
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if opt.device == "auto" else torch.device(opt.device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e:
        stop(f"--device {opt.device} cannot be used: {str(e).splitlines()[0]}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if opt.dtype == "auto":
        opt.dtype = "bf16" if has_bf16(device) else "fp32"
    compiled = device.type == "cuda" if opt.compile is None else opt.compile
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=opt.dtype == "bf16")

    # ---- data
    try:
        folder = Path(opt.data) if Path(opt.data).is_dir() else Path("data") / opt.data
        if rank == 0 and opt.data == "stdlib" and not folder.exists():
            print("preparing data/stdlib, the Python standard library's own source text (once)", flush=True)
            data_prep.prepare_stdlib(folder)
        if ranked:
            dist.barrier()
        data = data_prep.Data(folder)
        data.n_windows(opt.seq_len)                                                 # refuses data shorter than a sequence
    except data_prep.DataError as e:
        stop(e)
    if opt.seq_len > config.get("max_len", models.module(opt.model).Config.max_len):
        stop(f"--seq_len {opt.seq_len} is longer than the model's max_len: add --max_len {opt.seq_len}")

    # ---- batch: so many sequences per step, split over ranks and micro-steps
    n_seq, rest = divmod(opt.batch_tokens, opt.seq_len)
    if rest or n_seq % world:
        stop(f"--batch_tokens {opt.batch_tokens:,} must be a multiple of seq_len x ranks = {opt.seq_len} x {world}")
    per_rank = n_seq // world
    micro = opt.micro_batch or max(m for m in range(1, per_rank + 1) if per_rank % m == 0 and (m == 1 or m * opt.seq_len <= 32768))
    if per_rank % micro:
        stop(f"--micro_batch {micro} must divide the {per_rank} sequences that a rank has per step")
    n_micro = per_rank // micro

    # ---- model and optimizers
    if "vocab_size" in flags and config["vocab_size"] < data.vocab_size:
        stop(f"--vocab_size {config['vocab_size']} is smaller than that of the data, {data.vocab_size}")
    config["vocab_size"] = max(config.get("vocab_size", 0), data.vocab_size)
    torch.manual_seed(opt.seed)
    try:
        model = models.build(opt.model, **config)
        config = asdict(model.config)
    except ValueError as e:
        stop(e)
    model.to(device).train()
    if compiled:
        model.compile(dynamic=False)                                                # in place: state-dict keys keep their names
    opts = muon.optimizers(model, opt.optimizer, opt.muon_lr, opt.adamw_lr, opt.weight_decay)
    run_model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None) if ranked else model

    # ---- run folder, new or resumed
    start, tokens, last_val, log_rows = 0, 0, -1, []
    if opt.resume:
        run = Path(opt.resume)
        holder = lock(run) if rank == 0 else None
        checkpoint = models.read_checkpoint(run)
        if checkpoint["config"]["data"]["fingerprint"] != data.fingerprint:
            stop(f"{folder} is not the data that {run} was trained on ({checkpoint['config']['data']['path']})")
        try:
            model.load_state_dict(checkpoint["model"])
            for o, state in zip(opts, checkpoint["optimizers"], strict=True):
                o.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as e:
            stop(f"{run}/ckpt.pt does not fit models/{opt.model}.py: {str(e).strip().splitlines()[-1].strip()}")
        set_rng(checkpoint["rng"])
        start, tokens, full_config = checkpoint["step"], checkpoint["tokens"], checkpoint["config"]
        if rank == 0:                                                               # the log goes on from the checkpoint
            text = (run / "log.jsonl").read_text() if (run / "log.jsonl").exists() else ""
            log_rows = [row for row in map(parse_row, text.splitlines()) if row and row["step"] <= start]
            last_val = max((row["step"] for row in log_rows if row["kind"] == "val"), default=-1)
            write_atomically(run / "log.jsonl", lambda f: f.write("".join(json.dumps(r) + "\n" for r in log_rows).encode()))
        if ranked:
            said = [last_val]
            dist.broadcast_object_list(said)
            last_val = said[0]
        del checkpoint
    else:
        run = [str(new_run_folder(opt))] if rank == 0 else [None]
        if ranked:
            dist.broadcast_object_list(run)
        run = Path(run[0])
        holder = lock(run) if rank == 0 else None
        commit, dirty = git_state()
        full_config = {
            "model": opt.model, "model_config": config, "options": {**asdict(opt), "out": str(run), "device": "auto"},
            "tokenizer": data.tokenizer, "data": {"path": str(folder), "fingerprint": data.fingerprint, "meta": data.meta},
            "command": [sys.executable, *sys.argv], "git": {"commit": commit, "dirty": dirty},
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
                         "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None, "ranks": world}}
        if rank == 0:
            (run / "source").mkdir()
            for source in (models.module(opt.model).__file__, __file__, muon.__file__):
                shutil.copy(source, run / "source")
            write_atomically(run / "config.json", lambda f: f.write(json.dumps(full_config, indent=1).encode()))
    tokenizer = data.tokenizer

    # ---- logging
    sink = open(run / "log.jsonl", "a", buffering=1) if rank == 0 else None
    tracker = None
    if opt.wandb and rank == 0:
        try:
            import wandb
        except ImportError:
            stop("--wandb needs the package wandb: pip install wandb")
        tracker = wandb.init(project="nanodepth", name=run.name, config=full_config, resume="allow", id=run.name)

    def log(kind, step, **row):
        if rank == 0:
            sink.write(json.dumps({"kind": kind, "step": step, "tokens": step * opt.batch_tokens, **row}) + "\n")
            if tracker:
                tracker.log({f"{kind}/{k}": v for k, v in row.items() if not isinstance(v, dict)}, step=step)

    def say(*words):
        if rank == 0:
            tqdm.write(" ".join(words))
            sys.stdout.flush()

    def save(step):
        """Checkpoint of `step`. A full disk is reported and leaves the previous checkpoint as it was."""
        if rank != 0:
            return True
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in opts], "step": step, "tokens": step * opt.batch_tokens,
                 "rng": get_rng(), "config": full_config, "tokenizer": tokenizer}
        try:
            write_atomically(run / "ckpt.pt", lambda f: torch.save(state, f))
            return True
        except (OSError, RuntimeError) as e:
            say(f"step {step}: no checkpoint could be written to {run} ({str(e).splitlines()[0]}); the previous one is intact")
            return False

    n_params, n_matrix = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in muon.split_params(model)[0])
    flops = 3 * model.flops_per_token(opt.seq_len)                                  # backward costs twice forward
    peak = peak_flops(device)
    say(f"{opt.model} ({opt.preset}): {n_params:,} parameters, {n_matrix:,} of them in matrices of the blocks ({opt.optimizer}); "
        f"{flops / 1e6:,.1f} MFLOPs per token in training")
    say(f"data {folder}: {data.n_train:,} tokens to train on, {data.n_val:,} to validate, vocabulary {data.vocab_size:,} ({data.tokenizer})")
    say(f"{opt.batch_tokens:,} tokens/step = {micro} seq x {opt.seq_len:,} x {n_micro} micro-steps x {world} ranks; {opt.max_steps:,} steps "
        f"= {opt.max_steps * opt.batch_tokens / 1e6:,.1f}M tokens = {opt.max_steps * n_seq / data.n_windows(opt.seq_len):.2f} epochs")
    say(f"{device}, {opt.dtype}, {'compiled' if compiled else 'eager'}, torch {torch.__version__}; run folder {run}, resume with: "
        f"python train.py --resume {run}")

    # ---- loop
    caught = []

    def on_signal(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)                                       # a second one ends the process at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    bar = tqdm(total=opt.max_steps, initial=start, unit="step", disable=rank != 0 or not sys.stderr.isatty(), dynamic_ncols=True)
    saved, good, pause = start, True, 0.0
    for step in range(start, opt.max_steps + 1):                                    # one extra turn, to evaluate and save at the end
        last = step == opt.max_steps
        if (last or step % opt.eval_every == 0) and step > last_val:
            row = evaluate(model, data, opt, micro, device, autocast)
            if rank == 0:
                with autocast:
                    idx, _ = next(data.val_batches(opt.eval_tokens, min(micro, 4), opt.seq_len))
                    model.eval()
                    row["stats"] = model.stats(idx.to(device))
                    model.train()
            log("val", step, **row)
            bits = "" if row["bpb"] is None else f" | {row['bpb']:.4f} bits/byte"
            say(f"step {step:5d}/{opt.max_steps} | val {row['loss']:.4f} nats | ppl {row['ppl']:.2f}{bits} | in {row['eval_s']:.1f} s")
        if (last or step % (opt.save_every or opt.eval_every) == 0) and step > saved:
            good = save(step)
            saved = step if good else saved
        if last:
            break

        began = time.perf_counter()
        loss = torch.zeros((), device=device)                                       # mean over the whole step, stays on the device
        for i in range(n_micro):
            row = rank * per_rank + i * micro
            idx, targets = (t.to(device, non_blocking=True) for t in data.batch(step, row, row + micro, n_seq, opt.seq_len, opt.seed))
            if ranked:
                run_model.require_backward_grad_sync = i == n_micro - 1             # no_sync on all but the last micro-step
            with autocast:
                logits, micro_loss = run_model(idx, targets)
            (micro_loss / n_micro).backward()
            loss += micro_loss.detach() / n_micro
            if config["z_loss"]:                                                    # logged without it; a row at a time, for memory
                z = sum(one.float().logsumexp(-1).square().mean() for one in logits.detach()) / micro
                loss -= config["z_loss"] * z / n_micro
            del logits
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), opt.grad_clip)
        told = torch.stack((loss / world, torch.tensor(float(caught[0] if caught else 0), device=device)))
        if ranked:
            dist.all_reduce(told)
        loss_value, interrupted, norm_value = *told.tolist(), grad_norm.item()
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            bar.close()
            say(f"step {step + 1}: loss {loss_value}, gradient norm {norm_value}: stopped before the optimizer step; "
                + (f"checkpoint of step {saved} is in {run}" if saved else "there is no checkpoint yet"))
            return 3
        for o in opts:
            for group in o.param_groups:
                group["lr"] = group["peak_lr"] * lr_scale(step, opt)
                if isinstance(o, muon.Muon):
                    group["momentum"] = muon.momentum_at(step, opt.max_steps)
            o.step()
            o.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        ms = (time.perf_counter() - began) * 1000
        speed = opt.batch_tokens / ms * 1000
        mfu = {} if peak is None else {"mfu": speed * flops / peak / world}
        lr = opts[0].param_groups[0]["lr"]
        log("train", step + 1, loss=loss_value, lr=lr, grad_norm=norm_value, ms=ms, tok_s=speed, **mfu)
        bar.update()
        shown = {"loss": f"{loss_value:.4f}", "lr": f"{lr:.2e}", "tok/s": f"{speed:,.0f}", **{k: f"{v:.1%}" for k, v in mfu.items()}}
        bar.set_postfix(shown)
        if bar.disable and (step + 1) % max(1, opt.max_steps // 20) == 0:
            say(f"step {step + 1:5d}/{opt.max_steps} | " + " | ".join(f"{k} {v}" for k, v in shown.items()) + f" | gnorm {norm_value:.2f}")
        if interrupted:
            bar.close()
            good = save(step + 1)
            say(f"interrupted after step {step + 1}" + (f"; resume with: python train.py --resume {run}" if good else ""))
            return 128 + (caught[0] if caught else int(signal.SIGTERM))
    bar.close()
    if not good:
        return 1
    say(f"done: python sample.py {run}; python eval.py {run}")
    return 0


def parse_row(line):
    """One row of log.jsonl, or None for a line cut off by a crash."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def get_rng():
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_rng(state):
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1:])
    except torch.OutOfMemoryError:
        stop("out of memory: halve --micro_batch (the results stay the same, each step takes more micro-steps)")
    except KeyboardInterrupt:
        stop("interrupted before training began", 130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(code)
