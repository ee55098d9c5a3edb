"""Speed and memory of the models, each beside gpt.py of the same shape.

    python bench.py                                               every model, at a shape for two CPU cores
    python bench.py --preset exo-450m --batch 16                  a paper's shape
    python bench.py --models muddformer attnres_block:block_size=8    some models, with options

In every round the model and its gpt each run one training step on random tokens, so a machine that slows down slows
both. A ratio is gpt's time over the model's in the same round: the median over the rounds, ± half the interquartile
range. A model that does not fit in memory gets a row that says so. The columns:
    params, FLOPs   what the idea adds to gpt; FLOPs count matrix products and attention
    fwd, bwd, opt   milliseconds of forward, backward and Muon with AdamW; tok/s: tokens per second of all three
    x gpt           speed of forward + backward, relative to gpt; x gpt step: with the optimizer
    GiB             peak of parameters, gradients, optimizer state and activations; GiB x gpt: relative to gpt
    MFU             FLOP/s of forward + backward over the peak in the chip's data sheet
    compile         seconds that the first step takes longer than a usual one
"""
import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace

CACHE = tempfile.TemporaryDirectory()           # compile times are for an empty cache, unless the user sets one
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", CACHE.name)
os.environ.setdefault("KINETO_LOG_LEVEL", "99")             # torch's profiler prints no start message

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import models  # noqa: E402
import muon  # noqa: E402
from nanodepth import presets, runs  # noqa: E402
from nanodepth.cli import (  # noqa: E402
    Parser, UserError, add_options, out_file, out_of_memory, pick, run_script, user_errors)
from nanodepth.devices import (  # noqa: E402
    autocast, choose_dtype, compile_model, find_device, flops_per_token, in_words, peak_flops, processor)

SHAPE = dict(n_layer=12, d_model=384, n_head=6, vocab_size=8192, seq_len=512)       # without a preset
FLAGS = ("n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "vocab_size", "seq_len")
COLUMNS = (     # of the table: its name, the figure's name in JSON, its format ("±": a ratio and its spread), its unit
    ("params", "extra_parameters", "+,", 1), ("FLOPs", "extra_flops", "+.2%", 1), ("fwd", "forward_ms", ",.0f", 1),
    ("bwd", "backward_ms", ",.0f", 1), ("opt", "optimizer_ms", ",.0f", 1), ("tok/s", "tokens_per_s", ",.0f", 1),
    ("x gpt", "ratio", "±", 1), ("x gpt step", "step_ratio", "±", 1), ("GiB", "peak_bytes", ".2f", 2 ** 30),
    ("GiB x gpt", "memory_ratio", ".3f", 1), ("MFU", "mfu", ".1%", 1), ("compile, s", "compile_s", ".0f", 1))


# --------------------------------------------------------------------------------------------------- models to measure


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
        self.label, self.args, self.model = spec, args, None
        self.name, options = parse_spec(spec)
        file, gpt = models.module(self.name), models.module("gpt").Config
        asked = {"norm_eps": gpt.norm_eps, **shape, **options}                      # another eps costs nothing
        with user_errors(f"{spec}: "):
            self.config = models.config(self.name, **pick(file.Config, {**shape, **options}))
            plain, same = asdict(gpt(**pick(gpt, shape))), asdict(gpt(**same_shape(file.Config, gpt, asked)))
        with torch.device("meta"):
            model = file.Model(self.config)
        differences = [f"{key}={value}" for key, value in same.items() if value != plain[key]]
        self.against = "gpt" if self.name == "gpt" else ":".join(["gpt", *differences])
        self.n_params = sum(p.numel() for p in model.parameters())
        self.flops = flops_per_token(model, args.seq_len)
        self.autocast = autocast(args.device, args.dtype)

    def start(self):
        """Puts the model on the device. One step compiles it, and another measures peak memory."""
        torch.manual_seed(0)
        self.model = models.module(self.name).Model(self.config)
        with torch.no_grad():
            for p in self.model.parameters():                                       # zeros would multiply faster
                p.add_(torch.randn_like(p) * 0.02)
        self.model.to(self.args.device).train()
        self.optimizers = muon.optimizers(self.model, SimpleNamespace(
            optimizer="muon", muon_lr=0.005, adamw_lr=0.001, mix_lr=None, weight_decay=0.1, second_moment=None,
            dtype=self.args.dtype))
        if self.args.compile:
            compile_model(self.model)
        self.first = sum(self.step())
        self.peak = self.peak_bytes()

    def free(self):
        """Takes everything off the device."""
        self.model = self.optimizers = None
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


def n_bytes(held):
    """Bytes of all tensors in lists and dictionaries."""
    return sum(t.nbytes for t in tree_leaves(held) if torch.is_tensor(t))


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


# --------------------------------------------------------------------------------------------------------- the table


def parse(argv):
    """(arguments, shape of the models). Leaves with one line and code 2 if they are wrong."""
    parser = Parser("bench.py", description=__doc__)
    parser.add_argument("--models", nargs="+", metavar="NAME[:option=value...]",
                        help="[every model; gpt of the same shape is always added, plain gpt beside gpt:option=value]")
    parser.add_argument("--preset", help="use the shape of a preset (see docs/training.md)")
    for name in FLAGS:
        parser.add_argument(f"--{name}", type=int, help=f"[the preset's, or {SHAPE.get(name, 'as in the files')}]")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step [4]")
    parser.add_argument("--dtype", default="auto", choices=("fp32", "bf16", "auto"),
                        help="bf16 is autocast; auto: bf16 if the chip supports it [auto]")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile [on]")
    parser.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    parser.add_argument("--rounds", type=int, default=10, help="steps per model, taken in turn with its gpt's [10]")
    parser.add_argument("--json", type=out_file, metavar="FILE", help="write all numbers to this file")
    args = parser.parse_args(argv)
    shape = SHAPE | (presets.find(args.preset) if args.preset is not None else {})
    shape |= {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    args.seq_len = shape["max_len"] = shape["seq_len"]
    if min(args.rounds, args.batch, args.seq_len) < 1:
        parser.error("--rounds, --batch and --seq_len must be at least 1")
    return args, shape


def in_turns(row, base, rounds, work):
    """[work(row) of every round], [work(base) of every round]. They take turns in going first; row may be base."""
    found = {row: [], base: []}
    for i in range(rounds):
        for each in found if i % 2 else reversed(found):
            found[each].append(work(each))
    return found[row], found[base]


def training(row, base, args):
    """Numbers of a row's training steps, beside its gpt."""
    times, base_times = in_turns(row, base, args.rounds, lambda each: each.step())
    passes, base_passes = ([sum(t[:2]) for t in each] for each in (times, base_times))      # forward and backward
    steps, base_steps = ([sum(t) for t in each] for each in (times, base_times))
    tokens = args.batch * args.seq_len
    used, peak = 3 * row.flops * tokens / median(passes), peak_flops(args.device)
    return {"parameters": row.n_params, "extra_parameters": row.n_params - base.n_params,
           "flops_per_token": row.flops, "extra_flops": row.flops / base.flops - 1,
           **{f"{part}_ms": 1000 * median(t) for part, t in zip(("forward", "backward", "optimizer"), zip(*times))},
           "tokens_per_s": tokens / median(steps), "ratio": ratio(passes, base_passes),
           "step_ratio": ratio(steps, base_steps), "peak_bytes": row.peak, "memory_ratio": row.peak / base.peak,
           "mfu": used / peak if peak else None,
           "compile_s": row.first - median(steps) if args.compile else None}


def measure(row, base, args):
    """The result of a row beside its gpt, or one that says that memory ran out. Frees the row, but not a gpt."""
    result = {"model": row.label, "error": "out of memory"}
    try:
        row.start()
        print(f"{row.label}: first step {row.first:.1f} s", file=sys.stderr, flush=True)
        result = {"model": row.label, "against": base.label, **training(row, base, args)}
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
    if row is not base or "error" in result:
        row.free()
    return result


def measure_all(rows, args, shape):
    """The results of all rows, each after its gpt."""
    results = []
    rows = sorted(rows, key=lambda row: row.against)
    for spec, group in groupby(rows, key=lambda row: row.against):
        base = Row(spec, args, shape)
        results.append(measure(base, base, args))
        for row in group:
            if base.model is None:
                results.append({"model": row.label, "error": f"{spec}: out of memory"})
            elif row.config != base.config:                                         # base has been measured
                results.append(measure(row, base, args))
        base.free()
    if all("error" in result for result in results):
        raise MemoryError
    return results


def table(results):
    """The results as lines of an aligned Markdown table, with the columns that any of them fills."""
    def cell(value, form, unit):
        if value is None:
            return "-"
        if form == "±":
            return "{:.3f} ±{:.3f}".format(*value)
        return format(value / unit if unit > 1 else value, form)

    columns = [column for column in COLUMNS if any(r.get(column[1]) is not None for r in results)]
    lines = [["model", *(name for name, *_ in columns)]]
    for r in results:
        cells = [cell(r.get(key), form, unit) for _, key, form, unit in columns]
        if "error" in r:
            cells[0] = r["error"]
        beside = "" if r.get("against", "gpt") == "gpt" else f" vs `{r['against']}`"
        lines.append([f"`{r['model']}`{beside}", *cells])
    widths = [max(3, *map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return ["| " + " | ".join(f"{cell:{w}}" for cell, w in zip(line, widths)) + " |" for line in lines]


def main(argv):
    args, shape = parse(argv)
    device = args.device = find_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    args.dtype, used = choose_dtype(device, args.dtype), in_words(device)       # before we use its memory
    rows = [Row(spec, args, shape) for spec in args.models or models.names()]
    size = shape["vocab_size"], (args.batch, args.seq_len)
    args.ids = [torch.randint(*size, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2)]
    results = measure_all(rows, args, shape)
    gpt = models.config("gpt", **pick(models.module("gpt").Config, shape))
    cpu = f"{processor()}, {torch.get_num_threads()} threads"
    head = {"date": time.strftime("%Y-%m-%d"), "torch": str(torch.__version__), "python": platform.python_version(),
            "chip": used if device.type == "cuda" else cpu}
    for name in ("dtype", "compile", "batch", "seq_len", "rounds"):
        head[name] = getattr(args, name)
    print(", ".join(f"{key} {value}" for key, value in {**head, **asdict(gpt)}.items()))
    print("", *table(results), sep="\n")                                    # before writing the file, which may fail
    if args.json:
        figures = {"command": ["bench.py", *argv], **head, "shape": asdict(gpt), "models": results}
        args.json.write_text(runs.to_json(figures, 1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_script("bench.py", main, "lower --batch or take a smaller shape")
