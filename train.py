"""Trains one model of models/ on token shards.

    python train.py                                             the tiny preset: minutes on a laptop, offline
    python train.py --model exoformer --preset exo-450m         a paper's run on one GPU
    torchrun --standalone --nproc_per_node 8 train.py --model muddformer --preset mudd-1.4b
    python train.py --resume runs/exoformer-exo-450m            go on after an interruption
    python train.py --model satformer --help                    every option, the model's own included
"""
import argparse
import difflib
import errno
import fcntl
import inspect
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import typing
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import data_prep
import models
import muon
from nanodepth import record
from nanodepth.devices import flops_per_token

# ------------------------------------------------------------------------------------------------------------ options


@dataclass
class Options:
    model: str = "gpt"              # a file of models/
    preset: str = "tiny"            # a named group of options, see models/__init__.py; flags win over it
    data: str = "stdlib"            # a folder made by data_prep.py, or its name under data/
    out: str | None = None          # run folder; none: runs/MODEL-PRESET, numbered if that exists
    resume: str | None = None       # run folder to go on with; its options hold
    seed: int = 0                   # of the initial weights and of the order of the data
    device: str = "auto"            # auto (cuda, else cpu) or a torch device
    dtype: str = "auto"             # bf16 (autocast over fp32 weights) | fp32 | auto (bf16 where the chip has it)
    compile: bool | None = None     # torch.compile; none: on cuda only
    max_steps: int = 1000           # optimizer steps
    batch_tokens: int = 8192        # tokens per optimizer step, over all ranks
    seq_len: int = 1024             # tokens per sequence
    micro_batch: int | None = None  # sequences per forward and rank: memory, not results; none: up to 32,768 tokens
    optimizer: str = "muon"         # muon (matrices of the blocks; AdamW for the rest) | adamw
    muon_lr: float = 0.02           # peak rate of Muon
    adamw_lr: float = 0.004         # peak rate of AdamW: embeddings, head, norms; of all under --optimizer adamw
    mix_lr: float | None = None     # peak rate of AdamW for what mixes across layers (muon.py says what); none: adamw_lr
    weight_decay: float = 0.1       # on the matrices only; cautious under Muon
    second_moment: float | None = None  # Muon: rate of the row/column normalisation (0.95 in ExoFormer's code); none: off
    schedule: str = "wsd"           # wsd (constant, then linear to 10%) | cosine (to 10%); both after linear warm-up
    warmup_steps: int = 100         # steps of warm-up
    decay_frac: float = 0.2         # part of the steps in wsd's final decay
    grad_clip: float = 1.0          # largest gradient norm
    eval_every: int = 250           # steps between validations; also at step 0 and at the end
    eval_tokens: int = 1048576      # tokens of the validation split that are scored, the same ones each time
    save_every: int | None = None   # steps between checkpoints; none: eval_every
    wandb: bool = False             # also log to Weights & Biases (pip install wandb)

    def __post_init__(self):
        models.check_types(Options, vars(self))
        for name in ("max_steps", "batch_tokens", "seq_len", "micro_batch", "muon_lr", "adamw_lr", "mix_lr", "grad_clip", "eval_every",
                     "eval_tokens", "save_every"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name} must be positive, not {getattr(self, name)}")
        for name, allowed in dict(optimizer="muon adamw", schedule="wsd cosine", dtype="auto bf16 fp32").items():
            if getattr(self, name) not in allowed.split():
                raise ValueError(f"--{name} must be one of {allowed}, not {getattr(self, name)!r}")
        for name, most in dict(decay_frac=1, warmup_steps=self.max_steps, weight_decay=1e9, seed=2 ** 63 - 1).items():
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"--{name} must lie between 0 and {most:,}, not {getattr(self, name)}")


MAY_CHANGE = {"resume", "data", "device", "compile", "micro_batch", "save_every", "wandb"}     # on resume


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
            group.add_argument(f"--{f.name}", type=convert, default=argparse.SUPPRESS, metavar=kind.__name__, help=text)


def parse(argv):
    """(Options, dict of the model's Config fields, dict of the flags as given). Leaves with one line if they are wrong."""
    first = models.Parser(prog="train.py", add_help=False, allow_abbrev=False)
    for name in ("model", "preset", "resume"):
        first.add_argument(f"--{name}")
    asked = first.parse_known_args(argv)[0]
    parser = models.Parser("train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    try:
        old = models.read_checkpoint(asked.resume)["config"] if asked.resume else {"options": {}, "model_config": {}}
        name = asked.model or old["options"].get("model", Options.model)
        if "converted" in old:
            raise ValueError(f"{asked.resume} holds converted weights, which cannot be resumed")
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
            parser.error(f"--{key} {value} contradicts the run in {asked.resume}, which has {base.get(key)}: leave it out")
    chosen = {**base, **flags}
    if "warmup_steps" not in flags:                                         # the preset's, or all there is of a few steps
        chosen["warmup_steps"] = min(chosen["warmup_steps"], chosen["max_steps"])
    opt = {f.name: chosen[f.name] for f in fields(Options) if f.name in chosen}
    config = {f.name: chosen[f.name] for f in fields(config_class) if f.name in chosen}
    try:
        return Options(**opt), config, flags
    except ValueError as e:
        parser.error(str(e))


# ---------------------------------------------------------------------------------------------------- small functions


def stop(message, code=2):
    """Ends the process with one line on stderr."""
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    print(f"train.py: {'error: ' if code == 2 else ''}{rank}{models.escaped(message)}", file=sys.stderr, flush=True)
    sys.exit(code)


def lr_scale(step, opt):
    """The rate of optimizer step `step` (from 0) as a part of the peak."""
    if step < opt.warmup_steps:
        return (step + 1) / opt.warmup_steps
    if opt.schedule == "cosine":
        return 0.55 + 0.45 * math.cos(math.pi * (step - opt.warmup_steps) / max(1, opt.max_steps - opt.warmup_steps))
    n_decay = round(opt.decay_frac * opt.max_steps)
    return 1.0 - 0.9 * max(0, step + 1 - (opt.max_steps - n_decay)) / max(1, n_decay)


def new_run_folder(opt):
    """Makes the run folder: --out must not exist, a default name gets the next free number."""
    numbered = (f"runs/{opt.model}-{opt.preset}{'' if i == 1 else f'-{i}'}" for i in range(1, 10 ** 6))
    for name in [opt.out] if opt.out else numbered:
        try:
            os.makedirs(name)
            return Path(name)
        except FileExistsError:
            pass
        except OSError as e:
            stop(f"--out {name} cannot be made: {e.strerror}")
    stop(f"{opt.out} exists: choose another --out, or go on with --resume {opt.out}")


def lock(run):
    """Holds the run folder until this process ends, however it ends; returns the open file."""
    try:
        handle = open(run / ".lock", "w")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stop(f"{run} is in use by another process")
    except OSError as e:
        stop(f"{run} cannot be written to: {e.strerror}")
    return handle


def git_state():
    """{"commit", "dirty"} of the folder this file is in; None where there is no git."""
    def git(*words):
        done = subprocess.run(("git", *words), cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def peak_bytes(device):
    """Most memory held so far: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def kept_rows(path, step):
    """The rows of log.jsonl up to a step; a line that is not one, cut off by a crash for instance, is dropped."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            rows += [row] if row["kind"] and row["step"] <= step else []
        except (ValueError, KeyError, TypeError):
            pass
    return rows


# --------------------------------------------------------------------------------------------------------------- main


def main(argv):
    opt, config, flags = parse(argv)
    if opt.wandb:
        try:
            import wandb
        except ImportError:
            stop("--wandb needs the package wandb: pip install wandb")

    # ---- ranks, device, precision
    world, rank, ranked = 1, 0, "RANK" in os.environ                        # ranked: started by torchrun
    lost = [name for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if ranked and name not in os.environ]
    if lost:
        stop(f"RANK is set in the environment but {lost[0]} is not: start many processes with torchrun, or one without RANK")
    wants_cuda = opt.device == "auto" and torch.cuda.is_available() or opt.device.startswith("cuda")
    try:
        device = models.find_device(f"cuda:{os.environ['LOCAL_RANK']}" if ranked and wants_cuda else opt.device)
    except ValueError as e:
        stop(e)
    if ranked:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        world, rank = dist.get_world_size(), dist.get_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if opt.dtype == "auto":
        opt.dtype = "bf16" if models.has_bf16(device) else "fp32"
    if opt.compile is None:
        opt.compile = device.type == "cuda"
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=opt.dtype == "bf16")

    # ---- data
    folder = Path(opt.data) if Path(opt.data).is_dir() else Path("data") / opt.data
    if rank == 0 and opt.data == "stdlib" and not folder.exists():
        print("preparing data/stdlib, the Python standard library's own source text (once)", flush=True)
        data_prep.prepare_stdlib(folder)
    if ranked:
        dist.barrier()
    data = data_prep.Data(folder)
    n_windows, token_bytes = data.n_windows(opt.seq_len), data.token_bytes

    # ---- batch: so many sequences per step, split over ranks and micro-steps
    n_seq, rest = divmod(opt.batch_tokens, opt.seq_len)
    if rest or n_seq % world:
        stop(f"--batch_tokens {opt.batch_tokens:,} must be a multiple of seq_len x ranks = {opt.seq_len} x {world}")
    per_rank = n_seq // world
    fitting = [m for m in range(1, min(per_rank, max(1, 32768 // opt.seq_len)) + 1) if per_rank % m == 0]
    micro = opt.micro_batch or fitting[-1]
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
    except ValueError as e:
        stop(f"{opt.model}: {e}")
    config = asdict(model.config)
    if opt.seq_len > config["max_len"]:
        stop(f"--seq_len {opt.seq_len} is longer than the model's max_len: add --max_len {opt.seq_len}")
    model.to(device).train()
    if opt.compile:
        model.compile(dynamic=False)                                        # in place: state-dict keys keep their names
    opts = muon.optimizers(model, opt.optimizer, opt.muon_lr, opt.adamw_lr, opt.weight_decay,
                           opt.second_moment, torch.bfloat16 if opt.dtype == "bf16" else None, opt.mix_lr)
    run_model = model
    if ranked:
        run_model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None,
                                            broadcast_buffers=False, gradient_as_bucket_view=True)  # one copy of gradients

    # ---- run folder, new or resumed
    start, evaluated, saved, holder = 0, -1, -1, None                       # steps of the last ones; holder keeps the lock
    if opt.resume:
        run = Path(opt.resume)
        holder = lock(run) if rank == 0 else None
        checkpoint = models.read_checkpoint(run)
        run_config = checkpoint["config"]
        if run_config["data"]["fingerprint"] != data.fingerprint:
            stop(f"{folder} is not the data that {run} was trained on ({run_config['data']['path']})")
        start = saved = checkpoint["step"]
        if not 0 <= start <= opt.max_steps or checkpoint["tokens"] != start * opt.batch_tokens:
            stop(f"{run}/ckpt.pt: {checkpoint['tokens']} tokens at step {start} do not fit its {opt.max_steps} steps of {opt.batch_tokens}")
        try:
            model.load_state_dict(checkpoint["model"])
            for o, saved_state in zip(opts, checkpoint["optimizers"], strict=True):
                muon.set_state(o, model, saved_state["state"], start)
            torch.set_rng_state(checkpoint["rng"])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as e:
            stop(f"{run}/ckpt.pt does not fit models/{opt.model}.py: {models.one_line(e)}")
        if rank == 0:                                                       # the log goes on from the checkpoint
            rows = kept_rows(run / "log.jsonl", start)
            evaluated = max((row["step"] for row in rows if row["kind"] == "val"), default=-1)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            models.write_atomically(run / "log.jsonl", lambda f: f.write(text.encode()))
        del checkpoint
    else:
        run = new_run_folder(opt) if rank == 0 else None
    said = [run, evaluated]
    if ranked:
        dist.broadcast_object_list(said)
    run, evaluated = said
    if not opt.resume:
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        run_config = {
            "model": opt.model, "model_config": config, "options": {**asdict(opt), "out": str(run)},
            "tokenizer": data.tokenizer, "data": {"path": str(folder), "fingerprint": data.fingerprint, "meta": data.meta},
            "command": [sys.executable, *sys.argv], "git": git_state(), "gpu": gpu, "ranks": world, "id": os.urandom(4).hex(),
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}}
        if rank == 0:
            holder = lock(run)
            (run / "source").mkdir()
            for source in (models.module(opt.model).__file__, __file__, muon.__file__):
                shutil.copy(source, run / "source")
            if data.tokenizer not in ("gpt2", "byte"):
                shutil.copy(data.tokenizer, run / "tokenizer.tiktoken")
            models.write_atomically(run / "config.json", lambda f: f.write(json.dumps(run_config, indent=1).encode()))

    # ---- logging and checkpoints, by the first rank
    tracker, sink = None, open(run / "log.jsonl", "a", buffering=1) if rank == 0 else None
    if opt.wandb and rank == 0:
        tracker = wandb.init(project="nanodepth", name=run.name, config=run_config, resume="allow", id=run_config["id"])

    def log(kind, step, **row):
        if rank == 0:
            sink.write(json.dumps({"kind": kind, "step": step, "tokens": step * opt.batch_tokens, **row}) + "\n")
            if tracker:
                tracker.log({f"{kind}/{name}": x for name, x in row.items()}, step=step)

    def say(text):
        if rank == 0:
            bar.write(text)
            sys.stdout.flush()

    def kept():
        return f"{run}/ckpt.pt is of step {saved}" if saved >= 0 else "there is no checkpoint"

    def save(step):
        """Whether the checkpoint of `step` could be written; if not (full disk), the previous one stays as it was."""
        try:
            if rank == 0:
                state = {"model": model.state_dict(), "step": step,
                         "optimizers": [{"state": muon.get_state(o, model)} for o in opts],
                         "tokens": step * opt.batch_tokens, "rng": torch.get_rng_state(), "config": run_config,
                         "tokenizer": data.tokenizer}
                models.write_atomically(run / "ckpt.pt", lambda f: torch.save(state, f))
            return True
        except (OSError, RuntimeError) as e:
            say(f"step {step}: the checkpoint could not be written (is the disk full? {models.one_line(e)}); {kept()}")
            return False

    bar = tqdm(total=opt.max_steps, initial=start, unit="step", disable=rank > 0 or not sys.stderr.isatty())
    n_params, n_matrix = (sum(p.numel() for p in some) for some in (model.parameters(), muon.split_params(model)[0]))
    flops, peak = 3 * flops_per_token(model, opt.seq_len), models.peak_flops(device)    # backward costs twice forward
    say(f"{opt.model}, preset {opt.preset}: {n_params:,} parameters, {n_matrix:,} of them in matrices of the blocks "
        f"({opt.optimizer}, the rest adamw); {flops / 1e6:,.1f} MFLOPs per token")
    say(f"{folder}: {data.n_train:,} training tokens, {data.n_val:,} for validation, vocabulary {data.vocab_size:,}")
    say(f"{opt.batch_tokens:,} tokens/step = {micro} seq x {opt.seq_len:,} x {n_micro} micro-steps x {world} ranks; "
        f"{opt.max_steps:,} steps = {opt.max_steps * opt.batch_tokens / 1e6:,.1f}M tokens "
        f"= {opt.max_steps * n_seq / n_windows:.2f} epochs")
    say(f"{device}, {opt.dtype}, {'compiled' if opt.compile else 'eager'}, torch {torch.__version__}; "
        f"to resume: python train.py --resume {run}")

    # ---- loop
    caught = []

    def on_signal(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)                               # a second one ends the process at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    good = True
    for step in range(start, opt.max_steps + 1):                            # the extra turn evaluates and saves
        last = step == opt.max_steps
        if (last or step % opt.eval_every == 0) and step > evaluated:
            began = time.perf_counter()
            mine = islice(data.val_batches(opt.eval_tokens, micro, opt.seq_len), rank, None, world)
            row = models.evaluate(model, mine, token_bytes, autocast, dist.all_reduce if ranked else None)
            row |= {"eval_s": time.perf_counter() - began, "peak_bytes": peak_bytes(device)}
            if rank == 0:
                with autocast:
                    row["stats"] = record.stats(opt.model, model, next(data.val_batches(None, min(micro, 4), opt.seq_len))[0].to(device))
            log("val", step, **row)
            bits = "" if row["bpb"] is None else f" | {row['bpb']:.4f} bits/byte"
            say(f"step {step:5d}/{opt.max_steps} | val {row['loss']:.4f} nats | ppl {row['ppl']:.2f}{bits} "
                f"| {row['eval_tokens']:,} tokens in {row['eval_s']:.1f} s")
            if not math.isfinite(row["loss"]):
                bar.close()
                say(f"step {step}: the validation loss is {row['loss']}: stopped; {kept()}")
                return 3
        if (last or step % (opt.save_every or opt.eval_every) == 0) and step > saved:
            good = save(step)
            saved = step if good else saved
        if last:
            break

        began = time.perf_counter()
        loss = torch.zeros((), device=device)                               # mean over the step, stays on the device
        for i in range(n_micro):
            row = rank * per_rank + i * micro
            idx, targets = data.batch(step, row, row + micro, n_seq, opt.seq_len, opt.seed)
            if ranked:
                run_model.require_backward_grad_sync = i == n_micro - 1     # average gradients once a step
            with autocast:
                logits, micro_loss = run_model(idx.to(device, non_blocking=True), targets.to(device, non_blocking=True))
            (micro_loss / n_micro).backward()
            loss += micro_loss.detach() / n_micro
            if config["z_loss"]:                                            # logged without it; row by row, for memory
                z = sum(x.float().logsumexp(-1).square().mean() for x in logits.detach()) / micro
                loss -= config["z_loss"] * z / n_micro
            if hasattr(model, "added"):                                     # and without what else a model adds (kern.py)
                loss -= model.added / n_micro
            del logits, micro_loss
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), opt.grad_clip)
        told = torch.stack((loss / world, grad_norm / world, torch.tensor(float(sum(caught)), device=device)))
        if ranked:
            dist.all_reduce(told)
        loss_value, norm_value, signals = told.tolist()
        if not math.isfinite(loss_value + norm_value):
            bar.close()
            say(f"step {step + 1}: loss {loss_value}, gradient norm {norm_value}: stopped before the optimizer step; {kept()}")
            return 3
        for o in opts:
            for group in o.param_groups:
                group["lr"] = group["peak_lr"] * lr_scale(step, opt)
                if isinstance(o, muon.Muon):
                    group["momentum"] = muon.momentum_at(step, opt.max_steps)
            o.step()
            o.zero_grad(set_to_none=not ranked)                             # of several ranks: they live in DDP's buckets
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds, lr = time.perf_counter() - began, opts[0].param_groups[0]["lr"]
        speed = opt.batch_tokens / seconds
        mfu = {} if peak is None else {"mfu": speed * flops / (peak * world)}
        log("train", step + 1, loss=loss_value, lr=lr, grad_norm=norm_value, ms=seconds * 1000, tok_s=speed, **mfu)
        shown = {"loss": f"{loss_value:.4f}", "lr": f"{lr:.2e}", "tok/s": f"{speed:,.0f}"}
        shown |= {name: f"{x:.1%}" for name, x in mfu.items()}
        bar.update()
        bar.set_postfix(shown)
        if bar.disable and (step + 1) % max(1, opt.max_steps // 20) == 0:
            say(f"step {step + 1:5d}/{opt.max_steps} | " + " | ".join(f"{name} {x}" for name, x in shown.items()))
        if signals:
            bar.close()
            good = save(step + 1)
            say(f"interrupted after step {step + 1}" + (f"; to resume: python train.py --resume {run}" if good else ""))
            return 128 + (caught[0] if caught else int(signal.SIGTERM))
    bar.close()
    if good:
        say(f"done: python sample.py {run}; python eval.py {run}")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except data_prep.DataError as e:
        stop(e)
    except KeyboardInterrupt:
        stop("interrupted before training began", 130)
    except (RuntimeError, OSError, MemoryError) as e:
        if models.out_of_memory(e):
            stop("out of memory: halve --micro_batch (same results, in more micro-steps), or --batch_tokens, or take a smaller model")
        if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            stop(f"{e.strerror}: stopped; free some space, and go on with --resume if there is a checkpoint", 1)
        if isinstance(e, OSError) and e.filename:
            stop(f"{e.filename}: {e.strerror}")
        if isinstance(e, dist.DistError) or "/gloo/" in str(e):
            stop(f"another rank is gone: stopped; go on with --resume ({models.one_line(e)})", 1)
        raise
    if dist.is_initialized():       # leave together, and at once: tearing gloo down beside a rank that is done can abort
        dist.barrier()
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
