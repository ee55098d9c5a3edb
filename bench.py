"""Speed and memory of the models, side by side in one interleaved run, against gpt.py of the same shape.

    python bench.py                                               every model, at a shape for two CPU cores
    python bench.py --preset exo-450m --batch 16                  a paper's shape
    python bench.py --models muddformer attnres:block_size=8      some models, with options of theirs
    python bench.py --models muddformer --profile trace.json      where one model's step spends its time
    python bench.py --models sambay --decode 1024 8192 32768      decoding after long contexts, and what the cache holds
    python bench.py --models gpt --preset exo-1b --ranks 1 8 64   memory and communication on so many GPUs, by formula

A training step is forward, backward and optimizer on fixed random tokens; every round runs one step of every model, so
that a drift of the machine meets all of them, and a ratio is the median over the rounds of gpt's time over the model's
in the same round. The table is Markdown. Its columns:
    params, FLOPs   what the idea adds to gpt, counted; "paper": by the papers' formulas, which also count mixing
    fwd, bwd, opt   milliseconds of one step's parts
    x gpt           forward + backward speed against gpt (+- half the interquartile range); "step": with the optimizer
    floor           the best "x gpt" possible: gpt's time, plus the added FLOPs at the measured rate of a large matrix
                    product, plus reading each earlier state once per layer, forward and backward, at the measured
                    bandwidth of a large copy
    GiB             peak of parameters, gradients, optimizer state and activations
    util            FLOPs of the step (backward counted twice) over forward + backward time, as a part of the rate of a
                    large matrix product; MFU: the same over the chip's data sheet, where that is known
    compile, breaks seconds of the first step beyond a usual one; graph breaks
    decode, first   new tokens per second at batch 1 with the cache; seconds to the first token of a prompt
"""
import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median, quantiles

CACHE = tempfile.TemporaryDirectory()           # compile times are those of an empty cache, unless the user names one
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", CACHE.name)

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import models  # noqa: E402
import muon  # noqa: E402
from nanodepth.devices import find_device, flops_per_token, out_of_memory, peak_flops  # noqa: E402
from nanodepth.options import Parser, one_line, parse_spec, same_shape  # noqa: E402
from nanodepth.presets import PRESETS  # noqa: E402

SHAPE = dict(n_layer=12, d_model=384, n_head=6, vocab_size=8192, seq_len=512)       # without a preset
FLAGS = ("n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "vocab_size", "seq_len")
VARIANTS = ("exoformer:mixing=dynamic", "attnres:block_size=8")                     # beside every model as it is


def theory(model, T=None, base=None):
    """What the papers' formulas say that a mechanism adds: (parameters, forward FLOPs per token, numbers read per token).

    FLOPs include the mixing of vectors, which the flop counter does not see. Read: each earlier state, once per layer that
    mixes it; the newest one, which gpt reads too, does not count; of dape the maps of T keys that it makes of the scores.
    T: tokens of context, max_len if not given, where FLOPs depend on it. base: Config of the gpt compared with, for models
    with another MLP; with QK norm and the same d_ff, if not given. None for a model without formulas here.
    """
    c, name = model.config, type(model).__module__.rpartition(".")[2]
    d, L, kv = c.d_model, c.n_layer, c.n_kv_head * c.d_head
    if name == "resformer":             # lambda1 v_1 + lambda2 v_n
        n = c.last_k
        return {"learnable": 2 * n, "plus": 2 * n + 1}.get(c.value_mix, 0), 3 * kv * n, kv * n
    if name == "satformer":             # a gate per head, v_n + alpha v_1
        n = c.last_k
        return n * d * c.n_kv_head, n * (2 * d * c.n_kv_head + 2 * kv), n * kv
    if name == "exoformer":             # anchors once; two lambdas per stream; gamma
        width = [d if s in "qg" else kv for s in c.mix_streams]
        lambdas = {"elementwise": sum(width), "headwise": sum(width) // c.d_head, "scalar": len(width)}[c.granularity]
        external, dynamic, n = c.anchor == "external", c.mixing == "dynamic", L - (c.anchor != "external")
        gamma = 16 * d + 32 * len(width)
        params = external * d * sum(width) + len(c.norm_streams) * c.d_head + n * (2 * lambdas + dynamic * (gamma + 2 * len(width)))
        return params, external * 2 * d * sum(width) + n * (3 * sum(width) + dynamic * 2 * gamma), n * sum(width)
    if name == "muddformer":            # weights, then C aggregates of S sources
        sizes = [(len(a.streams), len(a.sources)) for a in model.aggregate.values()]
        weights = sum(d * C * S + (C * S) ** 2 for C, S in sizes) * c.dynamic
        norms = sum(p.numel() for key, p in model.named_parameters() if key.split(".")[-2].endswith(("k_in_norm", "v_in_norm", "pre_norm", "post_norm")))
        return weights + sum(C * S for C, S in sizes) + norms, 2 * weights + sum(2 * C * S * d for C, S in sizes), sum(S - 1 for _, S in sizes) * d
    if name == "attnres":               # norm, dot product and weighted sum over S sources per reader
        sizes = [1 + i // c.block_size + (i % c.block_size > 0) for i in range(2 * L + 1)]
        return 2 * L * d, sum(6 * S * d for S in sizes[1:]), sum(S - 1 for S in sizes) * d
    if name == "denseformer":           # weighted sums of S sources
        sizes = [len(a.sources) for a in model.average.values()]
        return sum(sizes), sum(2 * S * d for S in sizes), sum(S - 1 for S in sizes) * d
    if name == "geonorm":               # three inner products and two sums of scaled vectors, for a plain sum
        flops = {"geodesic": 10 * d, "unprojected": 11 * d}.get(c.update, 0)
        return 2 * L * (flops > 0), 2 * L * flops, 0
    if name == "kern":                  # idle experts, router, gamma; the weighted sum of the outputs of k experts
        idle = 3 * d * (c.d_ff // c.top_k) * (c.n_expert - c.top_k)
        return L * (idle + d * c.n_expert + (c.router == "kern")), L * (2 * d * c.n_expert + 2 * d * c.top_k), 0
    if name == "sas":                   # maps of q, k, v; S d_sim / d_head times the scores, S times their use; aggregation
        S, D, E, T = c.n_sim, c.d_head, c.d_sim, T or c.max_len
        attention = 2 * T * (S * c.n_head * (E + D) - 2 * d)
        if c.simulation == "projection":
            maps = S * (c.n_head + c.n_kv_head) * D * E
            return L * (maps + S * c.n_head + 2 * c.qk_norm * (E - D)), L * (2 * maps + attention + 2 * S * d), 0
        convs = [S * (S + 1) * N * N * c.kernel for N in (c.n_head, c.n_kv_head, c.n_kv_head)]
        biases = 2 * S * (c.n_head + 2 * c.n_kv_head) + 4 * E
        params = sum(convs) + 2 * (D + E) * E + biases + 2 * c.qk_norm * (E - D)
        products = D * sum(convs) + S * (c.n_head + c.n_kv_head) * (D + E) * E
        return L * params, L * (2 * products + attention + S * d), 0
    if name == "hyperconnections":      # the maps have n entries in H_pre, n in H_post, n^2 in H_res where there is one
        n, K, constrained = c.n_streams, 2 * L, c.connection in ("manifold", "identity")
        mixing = K if not constrained else (c.connection == "manifold" and n > 1) * (K - 2)
        entries = K * 2 * n + mixing * n * n
        params = entries * (n * d + 1) + K * 2 + mixing if constrained else entries + (c.connection == "dynamic") * K * (d * (n + 2) + 2)
        weights = 2 * d * entries * {"static": 0, "dynamic": 1}.get(c.connection, n)
        return params, weights + 2 * d * entries, 2 * K * (n - 1) * d           # all streams but gpt's one, read and written
    if name in ("gpt3", "pythia", "muddpythia"):        # biases, two matrices for three in the MLPs, no QK norm
        f, qk_norm = (base.d_ff, base.qk_norm) if base else (c.d_ff, True)
        F = sum(block.mlp.w_up.out_features for block in model.blocks)
        params = L * (5 * d + 2 * kv - 2 * c.d_head * qk_norm) + F + d + d * (2 * F - 3 * L * f) + (name == "gpt3") * c.max_len * d
        flops, sizes = 2 * d * (2 * F - 3 * L * f), []
        if name == "muddpythia":        # and those of muddformer; its norms have biases
            sizes = [(len(a.streams), len(a.sources)) for a in model.aggregate.values()]
            weights = sum(d * C * S + (C * S) ** 2 for C, S in sizes)
            params, flops = params + weights + sum(C * S for C, S in sizes) + 4 * d * (L - 1), flops + 2 * weights
        return params, flops + sum(2 * C * S * d for C, S in sizes), sum(S - 1 for _, S in sizes) * d
    if name == "dape":                  # two convolutions, or one along the heads, over T keys; scores, U and P + D are read
        H, T, bias, biased = c.n_head, T or c.max_len, 2 * c.n_head * (c.position == "kerple"), c.position in ("kerple", "alibi")
        if not c.kernel:
            return L * bias, 0, L * T * H * biased
        if c.conv == "heads":
            return L * (c.kernel + bias), L * 2 * T * H * c.kernel, L * T * 2 * H
        channels = H * (1 + biased) + H
        return L * ((channels * c.kernel + 1) * c.width + bias), L * 2 * T * c.width * c.kernel * channels, L * T * (2 * H + c.width)
    if name == "sambay":                # other mixers in place of attention; conv, scan, skip and gate of Mamba
        E, N, T = c.d_inner, c.d_state, T or c.max_len
        cross = 2 * d * d + d * {"none": 0, "elementwise": d, "headwise": c.n_head}[c.gate]
        full, mamba = cross + 2 * d * kv, 3 * d * E + 2 * E * -(-d // 16) + 2 * E * N
        matrices = {"mamba": mamba, "window": full, "full": full, "gmu": 2 * d * E + E * E * (c.gmu == "sigmoid"), "cross": cross}
        vectors = {"mamba": E * (N + c.d_conv + 3), "window": 2 * c.d_head * c.qk_norm, "full": 2 * c.d_head * c.qk_norm,
                   "cross": c.d_head * c.qk_norm, "gmu": 0}
        keys = {"window": min(c.window, T), "full": T, "cross": T, "mamba": 0, "gmu": 0}
        mixing = {"mamba": E * (7 * N + 2 * c.d_conv + 3), "gmu": E * (1 + (c.gmu == "sigmoid"))}
        params = sum(matrices[m] + vectors[m] for m in c.mixers) - L * (full + vectors["full"])
        flops = sum(2 * matrices[m] + 4 * d * keys[m] + mixing.get(m, 0) for m in c.mixers) - L * (2 * full + 4 * d * T)
        return params, flops, c.mixers.count("gmu") * E


class Row:
    """One model under test."""

    def __init__(self, spec, args, shape):
        self.label, (self.name, options) = spec, parse_spec(spec)
        known = {f.name for f in fields(models.module(self.name).Config)}
        config = {key: value for key, value in {**shape, **options}.items() if key in known}
        torch.manual_seed(0)
        try:
            self.args, self.model = args, models.build(self.name, **config)
            own, base = (models.module(name).Config for name in (self.name, "gpt"))
            self.shape = asdict(base(**same_shape(own, base, {**shape, **options})))     # of the gpt to compare with
        except ValueError as e:
            raise ValueError(f"{spec}: {e}") from None
        self.n_params = sum(p.numel() for p in self.model.parameters())
        self.flops = flops_per_token(self.model, args.seq_len)
        self.times, self.decode_times = [], []

    def place(self, device, shared):
        """Random weights on the device."""
        self.device, (self.idx, self.targets) = device, shared
        with torch.no_grad():
            for p in self.model.parameters():                                       # zeros are quicker to multiply
                p.add_(torch.randn_like(p) * 0.02)
        self.model.to(device).train()
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.args.dtype == "bf16")

    def start(self, device, shared):
        """Optimizers, and the first step, which compiles."""
        self.place(device, shared)
        self.optimizers = muon.optimizers(self.model, "muon", 0.005, 0.001, 0.1, None,
                                          torch.bfloat16 if self.args.dtype == "bf16" else None)
        if self.args.compile:
            self.model.compile(dynamic=False)
        counters.clear()
        self.first = sum(self.step())
        self.breaks = sum(counters["graph_break"].values())
        self.step()

    def step(self):
        """Seconds of forward, backward, optimizer."""
        marks = [self.now()]
        with self.autocast:
            loss = self.model(self.idx, self.targets)[1]
        marks.append(self.now())
        loss.backward()
        marks.append(self.now())
        for opt in self.optimizers:
            opt.step()
            opt.zero_grad(set_to_none=True)
        marks.append(self.now())
        return [b - a for a, b in zip(marks, marks[1:])]

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

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
        prompt, seconds = self.idx[:1, :self.args.prompt], []
        self.model.eval()
        for n in (1, self.args.new_tokens):
            begin = self.now()
            with self.autocast:
                self.model.generate(prompt, n, temperature=0, compile=self.args.compile)
            seconds.append(self.now() - begin)
        self.model.train()
        return seconds[0], (seconds[1] - seconds[0]) / (self.args.new_tokens - 1)

    def cache(self, length):
        """A cache for batch 1, and all tensors in it but the position."""
        with self.autocast:
            cache = models.module(self.name).Cache(self.model, 1, length)
        return cache, [t for held in vars(cache).values() if isinstance(held, list) for t in held]

    @torch.no_grad()
    def decode_after(self, step, cache, context):
        """Seconds per token, greedy, batch 1; step: the model's forward, perhaps compiled."""
        token = self.idx[:1, :1]
        cache.pos.fill_(context)
        begin = self.now()
        with self.autocast:
            for _ in range(self.args.new_tokens):
                token = step(token, cache=cache)[0][:, -1:].argmax(-1)
        return (self.now() - begin) / self.args.new_tokens


def quickest(device, work, repeats=10):
    """Least seconds of work() over some repeats."""
    seconds = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def limits(device, dtype):
    """(FLOP/s of a large matrix product, bytes/s read plus written of a large copy), both measured."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    big = torch.randn(2 ** 28 if device.type == "cuda" else 2 ** 26, device=device)
    to = torch.empty_like(big)
    return 2 * n ** 3 / quickest(device, lambda: a @ b), 2 * big.nbytes / quickest(device, lambda: to.copy_(big))


def optimizer_times(row, rounds):
    """{name: median milliseconds} of one step of three optimizers on copies of a model's matrices."""
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
    for i in range(rounds + 1):
        for name, opt in under_test.items():
            begin = row.now()
            opt.step()
            if i:
                seconds[name].append(row.now() - begin)
            else:
                row.now()
    return {name: median(values) * 1000 for name, values in seconds.items()}


def ratio(ours, base):
    """Median over the rounds of base / ours, and half the interquartile range."""
    values = [b / a for a, b in zip(ours, base)]
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return round(middle, 4), round((high - low) / 2, 4)


def result(row, base, args, rate, bandwidth):
    """All figures of one row, as JSON has them."""
    tokens, parts = args.batch * args.seq_len, [median(part) * 1000 for part in zip(*row.times)]
    pairs = [(r.times, [sum(t[:2]) for t in r.times], [sum(t) for t in r.times]) for r in (row, base)]
    formula = theory(row.model, args.seq_len, base.model.config) if row is not base else (0, 0, 0)
    out = {"model": row.label, "against": base.label, "parameters": row.n_params, "extra_parameters": row.n_params - base.n_params,
           "flops_per_token": row.flops, "extra_flops": row.flops / base.flops - 1}
    base_seconds = median(pairs[1][1])
    if formula:
        seconds = 3 * (row.flops - base.flops) * tokens / rate
        seconds += 2 * formula[2] * tokens * (2 if args.dtype == "bf16" else 4) / bandwidth
        out |= {"paper_extra_parameters": formula[0], "paper_extra_flops": formula[1] / base.flops,
                "read_per_token": formula[2], "floor": base_seconds / (base_seconds + max(0, seconds))}
    out |= dict(zip(("forward_ms", "backward_ms", "optimizer_ms"), parts))
    seconds = median(pairs[0][1])
    peak = peak_flops(row.device)
    out |= {"tokens_per_s": tokens / median(pairs[0][2]), "ratio": ratio(pairs[0][1], pairs[1][1]), "step_ratio": ratio(pairs[0][2], pairs[1][2]),
            "peak_bytes": row.peak, "memory_ratio": row.peak / base.peak, "utilisation": 3 * row.flops * tokens / seconds / rate,
            "mfu": 3 * row.flops * tokens / seconds / peak if peak else None,
            "compile_s": row.first - median(pairs[0][2]) if args.compile else None, "graph_breaks": row.breaks}
    if args.new_tokens > 1:
        first, each = zip(*row.decode_times)
        out |= {"first_token_s": median(first), "decode_tokens_per_s": 1 / median(each),
                "decode_ratio": ratio(each, [e for _, e in base.decode_times])}
    return out


def table(results, args):
    """The results as lines of an aligned Markdown table."""
    def pm(pair):
        return f"{pair[0]:.3f} ±{pair[1]:.3f}"

    lines = [["model", "params", "paper", "FLOPs", "paper", "fwd", "bwd", "opt", "tok/s", "x gpt", "floor", "x gpt step", "GiB", "x gpt",
              "util", "MFU", "compile", "breaks", "decode", "x gpt", "first"]]
    for r in results:
        formula, compiled = "floor" in r, r["compile_s"] is not None
        lines.append([
            f"`{r['model']}`" + ("" if "gpt" in (r["against"], r["model"]) else f" vs `{r['against']}`"),
            f"{r['extra_parameters']:+,}", f"{r['paper_extra_parameters']:+,}" if formula else "-",
            f"{r['extra_flops']:+.2%}", f"{r['paper_extra_flops']:+.2%}" if formula else "-",
            *(f"{r[part]:,.0f}" for part in ("forward_ms", "backward_ms", "optimizer_ms")), f"{r['tokens_per_s']:,.0f}",
            pm(r["ratio"]), f"{r['floor']:.3f}" if formula else "-", pm(r["step_ratio"]),
            f"{r['peak_bytes'] / 2 ** 30:.2f}", f"{r['memory_ratio']:.3f}", f"{r['utilisation']:.0%}",
            "-" if r["mfu"] is None else f"{r['mfu']:.1%}", f"{r['compile_s']:.0f} s" if compiled else "-",
            str(r["graph_breaks"]) if compiled else "-",
            *((f"{r['decode_tokens_per_s']:.1f}", pm(r["decode_ratio"]), f"{r['first_token_s']:.3f}") if "decode_ratio" in r else "---")])
    lines.insert(1, ["-" * max(3, len(h)) for h in lines[0]])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["| " + " | ".join(f"{cell:{w}}" for cell, w in zip(line, widths)) + " |" for line in lines]


def across(model, world, optimizer, dtype):
    """Bytes per rank when train.py runs on `world` ranks (DDP): {"held", "gradients", "updates"}.

    held: fp32 weights, gradients and optimizer state, which last from step to step; activations and the bf16 copies of the
    weights come on top. gradients, updates: sent by each rank in a step, in rings: the all-reduce of the gradients, and
    Muon's all-gather of the largest share of updates in the run's precision.
    """
    shapes = {}
    for p in muon.split_params(model)[0]:
        shapes.setdefault(p.shape, []).append(p.numel())
    dealt = sum(shapes.values(), [])                                                # to the ranks in turn, shape by shape
    n, n_muon = sum(p.numel() for p in model.parameters()), sum(dealt) * (optimizer == "muon")
    share = max(sum(dealt[r::world]) for r in range(world)) * (optimizer == "muon")
    return {"held": 4 * n + 4 * n + 4 * n_muon + 8 * (n - n_muon), "gradients": 8 * n * (world - 1) // world,
            "updates": (world - 1) * share * (2 if dtype == "bf16" else 4)}


def ranks_table(specs, shape, worlds, dtype):
    """The lines of a Markdown table of across() for some models and numbers of ranks."""
    lines = ["| model | parameters | ranks | held per rank, Muon | AdamW | AdamW, if sharded | sent per rank and step: gradients | Muon's updates |",
             "|---|---|---|---|---|---|---|---|"]
    for spec in specs:
        name, options = parse_spec(spec)
        known = {f.name for f in fields(models.module(name).Config)}
        with torch.device("meta"):
            model = models.build(name, **{key: value for key, value in {**shape, **options}.items() if key in known})
        for world in worlds:
            of_muon, of_adamw = (across(model, world, optimizer, dtype) for optimizer in ("muon", "adamw"))
            held = (of_muon["held"], of_adamw["held"], of_adamw["held"] / world)
            sent = (of_muon["gradients"], of_muon["updates"])
            lines.append(f"| `{spec}` | {sum(p.numel() for p in model.parameters()):,} | {world} | "
                         + " | ".join([f"{x / 2 ** 30:.1f} GiB" for x in held] + [f"{x / 2 ** 30:.2f} GiB" for x in sent]) + " |")
    return lines


def decode_table(rows, args, note):
    """Decoding after contexts of some lengths, interleaved: the lines of a Markdown table, and its figures. The contexts are
    noise in the caches, not read token by token: the time of a step does not depend on the numbers."""
    out, lines = [], ["| model | context | tok/s | x gpt | cache, MiB | of it at any length |", "|---|---|---|---|---|---|"]
    for context in args.decode:
        torch.compiler.reset()
        caches, steps, seconds = {}, {}, {row: [] for row in rows}
        for row in rows:
            row.model.eval()
            caches[row], held = row.cache(context + args.new_tokens)
            for t in held:
                t.normal_()
            steps[row] = torch.compile(row.model.forward, fullgraph=True, dynamic=False) if args.compile else row.model.forward
            row.decode_after(steps[row], caches[row], context)                      # compiles
            out.append({"model": row.label, "against": row.base.label, "context": context, "cache_bytes": sum(t.nbytes for t in held),
                        "fixed_bytes": sum(t.nbytes for t in row.cache(0)[1])})
        for r in range(args.rounds):
            turn = r % len(rows)
            for row in rows[turn:] + rows[:turn]:
                seconds[row].append(row.decode_after(steps[row], caches[row], context))
        for row, found in zip(rows, out[-len(rows):]):
            found |= {"decode_tokens_per_s": 1 / median(seconds[row]), "decode_ratio": ratio(seconds[row], seconds[row.base])}
            middle, spread = found["decode_ratio"]
            lines.append(f"| `{row.label}` | {context:,} | {found['decode_tokens_per_s']:.1f} | {middle:.3f} ±{spread:.3f} | "
                         f"{found['cache_bytes'] / 2 ** 20:,.1f} | {found['fixed_bytes'] / 2 ** 20:,.1f} |")
        note(f"context {context:,} timed")
    return lines, out


def main(argv):
    parser = Parser("bench.py", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME[:option=value...]",
                        help=f"[every model, {', '.join(VARIANTS)}; gpt of the same shape is always added]")
    parser.add_argument("--preset", help="take the shape of a preset (see README)")
    for name in FLAGS:
        parser.add_argument(f"--{name}", type=int, help=f"[{SHAPE.get(name, 'as in the model files')}]")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step [4]")
    parser.add_argument("--dtype", default="auto", help="fp32 | bf16 (autocast) | auto: bf16 on cuda, fp32 else [auto]")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile [on]")
    parser.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved steps per model [10]")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the decoding prompt [128]")
    parser.add_argument("--new_tokens", type=int, default=128, help="tokens decoded; 0: no decoding [128]")
    parser.add_argument("--decode", type=int, nargs="+", metavar="N", help="only decode --new_tokens after N tokens of context")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--profile", metavar="FILE", help="only write a torch.profiler trace of one model's step there")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="only print what N ranks hold and send, by formula")
    args = parser.parse_args(argv)
    if args.preset is not None and args.preset not in PRESETS:
        parser.error(f"no preset {args.preset!r}: choose from {', '.join(PRESETS)}")
    if args.dtype not in ("fp32", "bf16", "auto"):
        parser.error(f"--dtype must be fp32, bf16 or auto, not {args.dtype!r}")
    if args.rounds < 1 or args.batch < 1 or args.prompt < 1 or args.new_tokens < 0 or args.new_tokens == 1:
        parser.error("--rounds, --batch and --prompt must be at least 1, --new_tokens 0 or at least 2")
    if args.profile and len(args.models or ()) != 1:
        parser.error("--profile takes one model: add --models NAME")
    for path in filter(None, (args.json, args.profile)):
        try:
            if Path(path).is_dir() or not Path(path).resolve().parent.is_dir():
                parser.error(f"{path} cannot be written: it is a folder, or its folder does not exist")
        except OSError as e:
            parser.error(f"{path} cannot be written: {e.strerror}")

    shape = {**SHAPE, **PRESETS[args.preset]} if args.preset else dict(SHAPE)
    shape |= {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    args.seq_len = shape["seq_len"]
    if args.seq_len < 1:
        parser.error("--seq_len must be at least 1")
    if args.decode and (min(args.decode) < 1 or not args.new_tokens):
        parser.error("--decode needs contexts of at least 1 token each, and --new_tokens")
    shape["max_len"] = max(args.seq_len, args.prompt + args.new_tokens, *(n + args.new_tokens for n in args.decode or ()))
    if args.prompt > args.batch * args.seq_len:
        parser.error(f"--prompt {args.prompt} is longer than the {args.batch} x {args.seq_len} tokens there are")
    specs = args.models or (*models.names(), *VARIANTS)
    if args.ranks and min(args.ranks) < 1:
        parser.error("--ranks must be at least 1 each")
    try:
        if args.ranks:
            print("\n".join(ranks_table(specs, shape, args.ranks, args.dtype.replace("auto", "bf16"))))
            return 0
        device = find_device(args.device)
        rows = [Row(spec, args, shape) for spec in specs]
        bases = []
        for row in rows:                                                            # gpt of each shape that occurs
            row.base = next((r for r in bases + rows if r.name == "gpt" and r.shape == row.shape), None)
            if row.base is None:
                standard = Row("gpt", args, shape).shape
                own = [f"{key}={value}" for key, value in row.shape.items() if value != standard[key]]
                row.base = Row(":".join(["gpt", *own]), args, shape)
                bases.append(row.base)
    except ValueError as e:
        parser.error(one_line(e))
    for base in bases:
        base.base = base
    if not args.profile:                                                            # baselines first, variants together
        rows = sorted(rows + bases, key=lambda row: (row.base is not row, models.names().index(row.name)))
    if args.dtype == "auto":
        args.dtype = "bf16" if device.type == "cuda" else "fp32"

    if device.type == "cuda":
        torch.cuda.set_device(device)
    shared = [torch.randint(shape["vocab_size"], (args.batch, args.seq_len), generator=torch.Generator().manual_seed(i)).to(device)
              for i in range(2)]

    def note(text):
        print(text, file=sys.stderr, flush=True)

    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads"
    head = {"date": time.strftime("%Y-%m-%d"), "chip": chip, "torch": str(torch.__version__), "python": platform.python_version(),
            "command": ["bench.py", *argv], "shape": rows[0].base.shape, "seq_len": args.seq_len, "batch": args.batch, "dtype": args.dtype,
            "compile": args.compile, "rounds": args.rounds, "prompt": args.prompt, "new_tokens": args.new_tokens}
    c = head["shape"]
    title = (f"{head['date']}, {chip}, torch {head['torch']}, {args.dtype}, {'compiled' if args.compile else 'eager'}; L{c['n_layer']} "
             f"d{c['d_model']} H{c['n_head']} d_ff {c['d_ff']} vocabulary {c['vocab_size']:,}, ")

    def write(figures):
        if args.json:
            try:
                Path(args.json).write_text(json.dumps(head | figures, indent=1) + "\n")
            except OSError as e:
                parser.error(f"--json {args.json} could not be written: {e.strerror}")
        return 0

    if args.decode:
        for row in rows:
            row.place(device, shared)
        lines, figures = decode_table(rows, args, note)
        print(f"{title}{args.new_tokens} tokens at batch 1, {args.rounds} rounds.\n")
        print("\n".join(lines))
        return write({"decode": figures})
    for row in rows:
        row.start(device, shared)
        note(f"{row.label}: first step {row.first:.1f} s")
    if args.profile:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        with profile(activities=activities, record_shapes=True) as prof:
            row.step()
        prof.export_chrome_trace(args.profile)
        print(prof.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=20, max_name_column_width=60))
        return 0
    for r in range(args.rounds):
        turn = r % len(rows)
        for row in rows[turn:] + rows[:turn]:
            row.times.append(row.step())
    note("training steps timed")
    for row in rows:
        row.peak = row.peak_bytes()
    if args.new_tokens:
        for row in rows:
            row.decode()                                                            # compiles
        note("decoding compiled")
        for r in range(args.rounds):
            turn = r % len(rows)
            for row in rows[turn:] + rows[:turn]:
                row.decode_times.append(row.decode())
    rate, bandwidth = limits(device, torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    results = [result(row, row.base, args, rate, bandwidth) for row in rows]
    optimizers = optimizer_times(rows[0].base, args.rounds)
    head |= {"matmul_flops_per_s": rate, "copy_bytes_per_s": bandwidth, "optimizers_ms": optimizers}
    print(f"{title}{args.batch} x {args.seq_len} tokens per step, {args.rounds} rounds.")
    print(f"Decoding: {args.prompt} + {args.new_tokens} tokens. Large matrix product {rate / 1e12:.3g} TFLOP/s, copy {bandwidth / 1e9:.3g} GB/s.\n")
    print("\n".join(table(results, args)))
    print(f"\nOne optimizer step on the matrices of `{rows[0].base.label}`: "
          + ", ".join(f"{name} {ms:,.1f} ms" for name, ms in optimizers.items()) + ".")
    return write({"models": results})


def cpu_name():
    found = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return found[0] if found else platform.processor()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except (RuntimeError, MemoryError) as e:
        if out_of_memory(e):
            print("bench.py: error: out of memory: lower --batch, or name fewer --models", file=sys.stderr)
            sys.exit(2)
        raise
