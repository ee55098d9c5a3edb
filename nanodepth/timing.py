"""What a training step and decoding cost on this machine: times, memory, and the bytes that compiled kernels move."""
import copy
import json
import logging
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles

import torch
import torch._inductor.compile_fx
import torch._inductor.metrics
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import models
import muon
import probes
from nanodepth.devices import autocast, cast_weights, flops_per_token
from nanodepth.cli import UserError, parse_spec, pick, same_shape, user_errors

os.environ.setdefault("KINETO_LOG_LEVEL", "99")                             # torch's profiler says when it starts


class Row:
    """One model under test. args: seq_len, dtype, compile, prompt and new_tokens of bench.py."""

    def __init__(self, spec, args, shape):
        self.label, self.args = spec, args
        self.name, options = parse_spec(spec)
        for key in ("vocab_size", "max_len"):
            if options.get(key, shape[key]) < shape[key]:
                raise UserError(f"{spec}: {key} must be at least {shape[key]:,}, that of the tokens it reads")
        own, base = models.module(self.name).Config, models.module("gpt").Config
        torch.manual_seed(0)
        with user_errors(f"{spec}: "):
            self.model = models.build(self.name, **pick(own, {**shape, **options}))
            asked = {"norm_eps": base.norm_eps, **shape, **options}                 # an eps of its own costs nothing
            self.shape = asdict(base(**same_shape(own, base, asked)))               # of the gpt to compare with
        self.n_params = sum(p.numel() for p in self.model.parameters())
        self.flops = flops_per_token(self.model, args.seq_len)
        self.decode_times, self.decoder = [], None

    def costs(self):
        """What the model adds to gpt by its costs(): (parameters, FLOPs per token, numbers read per token), or None."""
        costs = probes.of(self.name, "costs")
        return costs(self.model.config, self.args.seq_len) if costs and models.baseline(self.name) == "gpt" else None

    def place(self, device, batch):
        """Random weights on the device; batch: idx and targets (B, T)."""
        self.device, (self.idx, self.targets) = device, batch
        with torch.no_grad():
            for p in self.model.parameters():                                       # zeros are quicker to multiply
                p.add_(torch.randn_like(p) * 0.02)
        self.model.to(device).train()
        self.autocast = autocast(device, self.args.dtype)

    def start(self, device, batch):
        """Optimizers, and the first step, which compiles."""
        self.place(device, batch)
        self.optimizers = muon.optimizers(self.model, "muon", 0.005, 0.001, 0.1, None,
                                          torch.bfloat16 if self.args.dtype == "bf16" else None)
        if self.args.compile:
            self.model.compile(dynamic=False)
        counters.clear()
        torch._inductor.metrics.reset()
        self.first = sum(self.step())
        self.breaks = sum(counters["graph_break"].values())
        self.bytes = torch._inductor.metrics.num_bytes_accessed
        self.step()

    def step(self):
        """Seconds of forward, backward, optimizer."""
        marks = [now(self.device)]
        with self.autocast:
            loss = self.model(self.idx, self.targets)[1]
        marks.append(now(self.device))
        loss.backward()
        marks.append(now(self.device))
        for opt in self.optimizers:
            opt.step()
            opt.zero_grad(set_to_none=True)
        marks.append(now(self.device))
        return [b - a for a, b in zip(marks, marks[1:])]

    def peak_bytes(self):
        """Peak of what one step holds: own parameters and optimizer state, and what it allocates beyond them."""
        held = list(self.model.parameters()) + [t for o in self.optimizers for s in o.state.values()
                                                for t in s.values() if torch.is_tensor(t)]
        own = sum(t.numel() * t.element_size() for t in held)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step()
            return own + torch.cuda.max_memory_allocated() - before
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            self.step()
        with tempfile.TemporaryDirectory() as folder:
            prof.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        return own + max(e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]")

    @torch.no_grad()
    def decode(self):
        """(seconds to the first token, seconds per further token), greedy, batch 1."""
        prompt, seconds = self.idx.reshape(1, -1)[:, :self.args.prompt], []
        if self.decoder is None:
            self.decoder = cast_weights(copy.deepcopy(self.model), self.args.dtype).eval()
        for n in (1, self.args.new_tokens):
            begin = now(self.device)
            with self.autocast:
                self.decoder.generate(prompt, n, temperature=0, compile=self.args.compile)
            seconds.append(now(self.device) - begin)
        return seconds[0], (seconds[1] - seconds[0]) / (self.args.new_tokens - 1)

    def cache(self, length):
        """A cache for batch 1, and all tensors in it but the position."""
        with self.autocast:
            cache = models.cache_class(self.name)(self.model, 1, length)
        return cache, tensors_of(cache)

    @torch.no_grad()
    def decode_after(self, step, cache, context):
        """Seconds per token, greedy, batch 1; step: the model's forward, perhaps compiled."""
        token = self.idx[:1, :1]
        cache.pos.fill_(context)
        begin = now(self.device)
        with self.autocast:
            for _ in range(self.args.new_tokens):
                token = step(token, cache=cache)[0][:, -1:].argmax(-1)
        return (now(self.device) - begin) / self.args.new_tokens


def tensors_of(held):
    """All tensors in the lists and objects that a cache holds, but its position ()."""
    if torch.is_tensor(held):
        return [held] if held.ndim else []
    if not isinstance(held, (list, tuple)):
        held = (held if isinstance(held, dict) else getattr(held, "__dict__", {})).values()
    return [t for part in held for t in tensors_of(part)]


def count_bytes():
    """From now on inductor counts the bytes that the kernels of each graph read and write, by their shapes."""
    log = torch._inductor.compile_fx.inductor_metrics_log                           # it counts where this log is on
    log.setLevel(logging.INFO)
    log.propagate, log.handlers = False, [logging.NullHandler()]


def now(device):
    """Seconds, after all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def quickest(device, work):
    """Least seconds of work() over ten repeats."""
    seconds = []
    for _ in range(10):
        begin = now(device)
        work()
        seconds.append(now(device) - begin)
    return min(seconds)


def limits(device, dtype):
    """(FLOP/s of a large matrix product, bytes/s read plus written of a large copy), both measured."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    big = torch.randn(2 ** 28 if device.type == "cuda" else 2 ** 26, device=device)
    to = torch.empty_like(big)
    return 2 * n ** 3 / quickest(device, lambda: a @ b), 2 * big.nbytes / quickest(device, lambda: to.copy_(big))


def optimizer_times(row, rounds):
    """{name: median milliseconds} of one step of some optimizers on copies of a model's matrices."""
    def copies():
        params = [nn.Parameter(p.detach().clone()) for p in muon.split_params(row.model)[0]]
        for p in params:
            p.grad = torch.randn_like(p)
        return params

    under_test = {"muon.py in fp32": muon.Muon(copies(), 0.005, 0.1),
                  "muon.py in bf16": muon.Muon(copies(), 0.005, 0.1, dtype=torch.bfloat16),
                  "torch.optim.Muon (always bf16)": torch.optim.Muon(copies(), 0.005, weight_decay=0.1),
                  "torch.optim.AdamW (fused)": torch.optim.AdamW(copies(), 0.001, weight_decay=0.1, fused=True)}
    seconds = {name: [] for name in under_test}
    for _ in range(rounds + 1):
        for name, opt in under_test.items():
            begin = now(row.device)
            opt.step()
            seconds[name].append(now(row.device) - begin)
    return {name: median(values[1:]) * 1000 for name, values in seconds.items()}


def ratio(ours, base):
    """Median over the rounds of base / ours, and half the interquartile range."""
    values = [b / a for a, b in zip(ours, base)]
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return round(middle, 4), round((high - low) / 2, 4)


def across(model, world, optimizer, dtype):
    """Bytes per rank when train.py runs on `world` ranks (DDP): {"held", "gradients", "updates"}.

    held: fp32 weights, gradients and optimizer state, which last from step to step; activations and the bf16 copies of
    the weights come on top. gradients, updates: sent by each rank in a step, in rings: the all-reduce of the gradients,
    and Muon's all-gather of the largest share of updates in the run's precision.
    """
    shapes = {}
    for p in muon.split_params(model)[0]:
        shapes.setdefault(p.shape, []).append(p.numel())
    order = sum(shapes.values(), [])                                                # shared out in turn, shape by shape
    n, n_muon = sum(p.numel() for p in model.parameters()), sum(order) * (optimizer == "muon")
    share = max(sum(order[r::world]) for r in range(world)) * (optimizer == "muon")
    return {"held": 4 * n + 4 * n + 4 * n_muon + 8 * (n - n_muon), "gradients": 8 * n * (world - 1) // world,
            "updates": (world - 1) * share * (2 if dtype == "bf16" else 4)}
