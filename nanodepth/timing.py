"""Measures training steps and decoding on this machine: time and memory."""
import copy
import gc
import json
import os
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import models
import muon
from nanodepth.cli import Parser, UserError, add_options, pick, user_errors
from nanodepth.devices import autocast, cast_weights, compile_model, flops_per_token

os.environ.setdefault("KINETO_LOG_LEVEL", "99")                             # torch's profiler prints no start message


def parse_spec(spec):
    """"name:option=value:..." -> (name, {option: value}). UserError for an unknown model or option."""
    name, *words = spec.split(":")
    parser = Parser(add_help=False)
    add_options(parser, name, models.module(name).Config, {})
    try:
        return name, vars(parser.parse_args([f"--{word}" for word in words]))
    except UserError as e:
        raise UserError(f"{spec}: {e}") from None


def same_shape(Config, base, asked):
    """{field: value} for `base`, another model's Config: the value asked for, else Config's default, else base's."""
    return {f.name: asked.get(f.name, getattr(Config, f.name, f.default)) for f in fields(base)}


class Row:
    """One model to measure, on the device from start() to free(). against: the spec of the gpt to compare it with.

    args: those of bench.py, with the device and with ids: (idx, targets), each (B, T).
    """

    def __init__(self, spec, args, shape):
        self.label, self.args, self.model, self.decoder = spec, args, None, None
        self.name, options = parse_spec(spec)
        for key in ("vocab_size", "max_len"):
            if options.get(key, shape[key]) < shape[key]:
                raise UserError(f"{spec}: {key} must be at least {shape[key]:,} for the tokens it reads")
        file, gpt = models.module(self.name), models.module("gpt").Config
        asked = {"norm_eps": gpt.norm_eps, **shape, **options}                      # another eps costs nothing
        with user_errors(f"{spec}: "):
            self.config = models.config(self.name, **pick(file.Config, {**shape, **options}))
            plain, same = asdict(gpt(**pick(gpt, shape))), asdict(gpt(**same_shape(file.Config, gpt, asked)))
            self.cache_class = models.cache_class(self.name) if args.decode else getattr(file, "Cache", None)
        with torch.device("meta"):
            model = file.Model(self.config)
        differences = [f"{key}={value}" for key, value in same.items() if value != plain[key]]
        self.against = "gpt" if self.name == "gpt" else ":".join(["gpt", *differences])
        self.n_params = sum(p.numel() for p in model.parameters())
        self.flops = flops_per_token(model, args.seq_len)
        self.autocast = autocast(args.device, args.dtype)

    def start(self):
        """Puts the model on the device. For training, one step compiles it, and another measures peak memory."""
        torch.manual_seed(0)
        self.model = models.module(self.name).Model(self.config)
        with torch.no_grad():
            for p in self.model.parameters():                                       # zeros would multiply faster
                p.add_(torch.randn_like(p) * 0.02)
        self.model.to(self.args.device).train()
        if self.args.decode:
            return
        self.optimizers = muon.optimizers(self.model, SimpleNamespace(
            optimizer="muon", muon_lr=0.005, adamw_lr=0.001, mix_lr=None, weight_decay=0.1, second_moment=None,
            dtype=self.args.dtype))
        if self.args.compile:
            compile_model(self.model)
        counters.clear()
        self.first = sum(self.step())
        graphs = 0 if hasattr(self.model, "compiled_parts") else counters["stats"]["unique_graphs"]
        self.breaks = max(sum(counters["graph_break"].values()), graphs - 1)        # not all breaks are counted there
        self.peak = self.peak_bytes()

    def free(self):
        """Takes everything off the device."""
        self.model = self.optimizers = self.decoder = self.cache = self.forward = None
        gc.collect()
        if self.args.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self):
        """Takes a training step -> seconds of forward, backward, optimizer."""
        begin = now(self.args.device)
        with self.autocast:
            loss = self.model(*self.args.ids)[1]
        forward = now(self.args.device)
        loss.backward()
        backward = now(self.args.device)
        for opt in self.optimizers:
            opt.step()
            opt.zero_grad(set_to_none=True)
        return forward - begin, backward - forward, now(self.args.device) - backward

    def peak_bytes(self):
        """Peak memory of one step: this model's parameters and optimizer state, and what the step allocates."""
        own = n_bytes([list(self.model.parameters()), *(opt.state for opt in self.optimizers)])
        if self.args.device.type == "cuda":
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

    def prepare_decoding(self, context):
        """Makes a cache with `context` tokens and room for the new ones, batch 1; decodes once, to compile.

        The context is noise, which the model has not read: the time of a step does not depend on the numbers.
        """
        if self.decoder is None:                                                    # a copy: gpt still trains
            self.decoder = cast_weights(copy.deepcopy(self.model), self.args.dtype).eval()
        self.context, self.cache = context, self.new_cache(context + self.args.new_tokens)
        for t in tensors(vars(self.cache)):
            t.normal_()
        forward = self.decoder.forward
        self.forward = torch.compile(forward, fullgraph=True, dynamic=False) if self.args.compile else forward
        self.decode()

    def new_cache(self, length):
        with self.autocast:
            return self.cache_class(self.decoder, 1, length)

    @torch.no_grad()
    def decode(self):
        """Decodes greedily after the context -> seconds per new token."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.args.device)
        self.cache.pos.fill_(self.context)
        begin = now(self.args.device)
        with self.autocast:
            for _ in range(self.args.new_tokens):
                token = self.forward(token, cache=self.cache)[0][:, -1:].argmax(-1)
        return (now(self.args.device) - begin) / self.args.new_tokens


def tensors(held):
    """All tensors in lists and dictionaries, except scalars such as a cache's position."""
    return [t for t in tree_leaves(held) if torch.is_tensor(t) and t.ndim]


def n_bytes(held):
    return sum(t.nbytes for t in tensors(held))


def now(device):
    """The time in seconds, after all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def ratio(ours, base):
    """Median over the rounds of base / ours, and half the interquartile range."""
    values = [b / a for a, b in zip(ours, base)]
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return round(middle, 4), round((high - low) / 2, 4)
