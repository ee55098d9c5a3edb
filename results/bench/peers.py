"""How fast are whole training steps of our models on one GPU, beside nanoGPT and hyper-connection-factory?

    python results/bench/peers.py --nanogpt ../nanoGPT --factory ../hyper-connection-factory
    python results/bench/peers.py --factory ../hyper-connection-factory --models muddformer factory/muddformer
    python results/bench/peers.py --tiny            tiny shapes, also on a CPU: a test of this script

A step is eight micro-steps of 32 x 1,024 tokens (forward and backward), gradient clipping, optimizer and zero_grad, with
torch.compile and bf16 autocast. All models have the shape of our preset gpt2-124m, tied embeddings and no QK norm. We
compile and optimize ours as train.py does. The peers' models are imported unchanged from clones of karpathy/nanoGPT and
wdlctc/hyper-connection-factory, and are compiled and optimized as in their train.py. All use AdamW, gpt+muon Muon. The
tokens are random, and we add noise to the initial weights, since zeros would multiply faster.

Each contestant is a process. A few compile at a time (--side), then wait. In each round the contestants of a group, and
gpt in every group, get the GPU one after another: for a step that is not timed, and --steps steps whose median is the
round's time. The table shows medians over the rounds, ± half the interquartile range. "x gpt" is the speed relative to
gpt in the same rounds. "First step" is the time from the start of the process, without compiled code from earlier calls.
Memory is the peak of tensors. The script stops after --minutes, with exit code 124 if work is left. Call it again to go
on: it skips what the CSV file has. Beside that file is a log for each contestant.
"""
import argparse
import csv
import gc
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import models  # noqa: E402
import muon  # noqa: E402
import probes  # noqa: E402
from nanodepth import presets, timing  # noqa: E402
from nanodepth.cli import Parser, pick, run_script  # noqa: E402
from nanodepth.devices import autocast, choose_dtype, find_device, flops_per_token, peak_bytes, peak_flops  # noqa: E402

CONTESTANTS = [         # a group is three neighbours, so an idea of ours is measured in the same rounds as the peer's
    "gpt+muon", "nanoGPT", "factory/prenorm", "muddformer", "factory/muddformer", "denseformer",
    "hyperconnections", "factory/hc", "nuresformer", "attnres", "factory/attnres", "attnres_block:block_size=8",
    "mhc", "factory/mhc"]
STREAMS = {"hc": dict(n=4, dynamic=True), "mhc": dict(n=4)}
TINY = dict(n_layer=2, d_model=64, n_head=2, d_ff=None, vocab_size=512, max_len=64, seq_len=64)


def recipe(name, args):
    """(function that builds a contestant, function that makes its optimizers, function that compiles it)."""
    shape, device = args.shape, args.device
    same = {key: shape[key] for key in ("vocab_size", "n_layer", "n_head")}
    if name == "nanoGPT" or name.startswith("factory/"):
        torch.set_float32_matmul_precision("high")                          # their train.py allows TF32
    if name == "nanoGPT":
        sys.path.append(args.nanogpt)
        from model import GPT, GPTConfig
        config = GPTConfig(**same, n_embd=shape["d_model"], block_size=shape["seq_len"], bias=False)
        make = lambda model: [model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)]  # noqa: E731
        return lambda: GPT(config), make, torch.compile
    if name.startswith("factory/"):
        sys.path.append(args.factory)
        from hcfactory import GPT, ModelConfig
        key = name.removeprefix("factory/")
        config = ModelConfig(**same, d_model=shape["d_model"], max_seq_len=shape["seq_len"], connection=key,
                             connection_kwargs=STREAMS.get(key, {}))
        return lambda: GPT(config), lambda model: factory_adamw(model, device), torch.compile
    spec, _, kind = name.partition("+")
    ours, options = timing.parse_spec(spec)
    config = {**pick(models.module(ours).Config, shape), "qk_norm": False, **options}
    dtype = torch.bfloat16 if args.dtype == "bf16" else None
    return (lambda: models.build(ours, **config),
            lambda model: muon.optimizers(model, kind or "adamw", 0.005, 0.001, 0.1, dtype=dtype),
            lambda model: probes.compile_model(ours, model) or model)


def factory_adamw(model, device):
    """AdamW with the groups and the rate that the factory's recipe has at this shape."""
    body, mixing = {True: [], False: []}, []
    for name, p in model.named_parameters():
        (mixing if name.startswith("connection.") else body[p.ndim >= 2]).append(p)
    groups = [dict(params=p, weight_decay=wd) for p, wd in ((body[True], 0.1), (body[False], 0.0), (mixing, 0.0)) if p]
    return [torch.optim.AdamW(groups, lr=1.5e-3, betas=(0.9, 0.95), fused=device.type == "cuda")]


class WithTargets(nn.Module):
    """A model for flops_per_token, which calls it without targets: nanoGPT would skip most of its head."""

    def __init__(self, build):
        super().__init__()
        self.config, self.model = build, build()

    def forward(self, idx):
        return self.model(idx, idx)


def compete(name, args):
    """A contestant's process. Compiles, then takes as many timed steps as each line of stdin says; answers in JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                                                           # what models print goes to the log
    device, (build, optimize, compiled) = args.device, recipe(name, args)
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    model.to(device).train()
    optimizers, run = optimize(model), model if args.tiny else compiled(model)
    ids = torch.randint(args.shape["vocab_size"], args.batch, device=device)

    def step():
        begin = timing.now(device)
        for idx, targets in ids:
            with autocast(device, args.dtype):
                loss = run(idx, targets)[1] / len(ids)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return timing.now(device) - begin

    def answer(**figures):                      # keeps weights and the optimizer's state: the GPU has room for others
        gc.collect()
        torch.cuda.empty_cache()
        print(json.dumps(figures), file=answers, flush=True)

    step()
    answer()
    with torch.device("meta"):
        flops = flops_per_token(WithTargets(build), args.shape["seq_len"])
    figures = dict(parameters=sum(p.numel() for p in model.parameters()), flops_per_token=flops)
    for line in sys.stdin:
        step()                                                              # gets memory again
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = median(step() for _ in range(int(line)))
        answer(seconds=seconds, peak_bytes=peak_bytes(device), **figures)


class Process:
    """A contestant's process, as its parent sees it. answer: the last one; seconds: of a step, in each round."""

    def __init__(self, name, args, argv):
        self.name, self.seconds, self.answer, folder = name, [], None, re.sub(r"\W+", "-", name)
        cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/peers"), folder)
        self.cold, self.began = not cache.exists(), time.perf_counter()
        cache.mkdir(parents=True, exist_ok=True)
        self.log = args.csv.with_suffix(f".{folder}.log")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *argv, "--contestant", name], stdin=subprocess.PIPE, text=True,
                stdout=subprocess.PIPE, stderr=log, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)})

