"""Speed and memory of the models, each beside gpt.py of the same shape.

    python bench.py                                               every model, at a shape for two CPU cores
    python bench.py --preset exo-450m --batch 16                  a paper's shape
    python bench.py --models muddformer attnres_block:block_size=8    some models, with options
    python bench.py --models sambay --decode 1024 8192 32768      only decoding, after long contexts

In every round the model and its gpt each run one training step on random tokens, so a machine that slows down slows
both. A ratio is gpt's time over the model's in the same round: the median over the rounds, ± half the interquartile
range. A model that does not fit in memory gets a row that says so. The columns:
    params, FLOPs   what the idea adds to gpt; FLOPs count matrix products and attention
    fwd, bwd, opt   milliseconds of forward, backward and optimizer
    x gpt           speed of forward + backward, relative to gpt; x gpt step: with the optimizer
    GiB             peak of parameters, gradients, optimizer state and activations
    MFU             FLOP/s of forward + backward over the peak in the chip's data sheet
    compile, breaks seconds that the first step takes longer than a usual one; number of graph breaks
    decode          new tokens per second at batch 1 after `context` tokens; beside it the size of the cache
"""
import argparse
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from itertools import groupby
from statistics import median

CACHE = tempfile.TemporaryDirectory()           # compile times are for an empty cache, unless the user sets one
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", CACHE.name)

import torch  # noqa: E402

import models  # noqa: E402
from nanodepth import presets, runs, timing  # noqa: E402
from nanodepth.cli import Parser, out_file, out_of_memory, pick, run_script  # noqa: E402
from nanodepth.devices import (  # noqa: E402
    choose_dtype, find_device, in_words, peak_flops, processor)

SHAPE = dict(n_layer=12, d_model=384, n_head=6, vocab_size=8192, seq_len=512)       # without a preset
FLAGS = ("n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "vocab_size", "seq_len")
COLUMNS = (     # of the table: its name, the figure's name in JSON, its format ("±": a ratio and its spread), its unit
    ("params", "extra_parameters", "+,", 1), ("FLOPs", "extra_flops", "+.2%", 1), ("fwd", "forward_ms", ",.0f", 1),
    ("bwd", "backward_ms", ",.0f", 1), ("opt", "optimizer_ms", ",.0f", 1), ("tok/s", "tokens_per_s", ",.0f", 1),
    ("x gpt", "ratio", "±", 1), ("x gpt step", "step_ratio", "±", 1), ("GiB", "peak_bytes", ".2f", 2 ** 30),
    ("GiB x gpt", "memory_ratio", ".3f", 1), ("MFU", "mfu", ".1%", 1), ("compile, s", "compile_s", ".0f", 1),
    ("breaks", "graph_breaks", "d", 1), ("context", "context", ",", 1), ("decode", "decode_tokens_per_s", ".1f", 1),
    ("decode x gpt", "decode_ratio", "±", 1), ("cache, MiB", "cache_bytes", ",.1f", 2 ** 20),
    ("of it at any length", "fixed_bytes", ",.1f", 2 ** 20))


def parse(argv):
    """(arguments, shape of the models). Leaves with one line and code 2 if they are wrong."""
    parser = Parser("bench.py", description=__doc__)
    parser.add_argument("--models", nargs="+", metavar="NAME[:option=value...]",
                        help="[every model; gpt of the same shape is always added, plain gpt beside gpt:option=value]")
    parser.add_argument("--preset", help="use the shape of a preset (see docs/training.md)")
    for name in FLAGS:
        parser.add_argument(f"--{name}", type=int, help=f"[{SHAPE.get(name, 'as in the model files')}]")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step [4]")
    parser.add_argument("--dtype", default="auto", choices=("fp32", "bf16", "auto"),
                        help="bf16 is autocast; auto: bf16 if the chip supports it [auto]")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile [on]")
    parser.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    parser.add_argument("--rounds", type=int, default=10, help="steps per model, taken in turn with its gpt's [10]")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of context before decoding [128]")
    parser.add_argument("--new_tokens", type=int, default=128, help="tokens to decode; 0: no decoding [128]")
    parser.add_argument("--decode", type=int, nargs="+", metavar="N",
                        help="measure only decoding of --new_tokens after N tokens of context")
    parser.add_argument("--json", type=out_file, metavar="FILE", help="write all numbers to this file")
    args = parser.parse_args(argv)
    shape = SHAPE | (presets.find(args.preset) if args.preset is not None else {})
    shape |= {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    args.seq_len, contexts = shape["seq_len"], args.decode or [args.prompt]
    shape["max_len"] = max(args.seq_len, max(contexts) + args.new_tokens)
    if min(args.rounds, args.batch, args.seq_len, *contexts) < 1:
        parser.error("--rounds, --batch, --seq_len, --prompt and --decode must be at least 1")
    if args.new_tokens < (1 if args.decode else 0):
        parser.error("--new_tokens must be at least 0, and with --decode at least 1")
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
           "tokens_per_s": tokens / median(steps), "ratio": timing.ratio(passes, base_passes),
           "step_ratio": timing.ratio(steps, base_steps), "peak_bytes": row.peak, "memory_ratio": row.peak / base.peak,
           "mfu": used / peak if peak else None,
           "compile_s": row.first - median(steps) if args.compile else None, "graph_breaks": row.breaks}


def decoding(row, base, args, context):
    """Numbers of a row's decoding after `context` tokens, beside its gpt."""
    if args.decode:
        torch.compiler.reset()                          # torch compiles one function for a few lengths only
    for each in {base, row}:
        each.prepare_decoding(context)
    seconds, base_seconds = in_turns(row, base, args.rounds, lambda each: each.decode())
    return {"context": context, "decode_tokens_per_s": 1 / median(seconds),
            "decode_ratio": timing.ratio(seconds, base_seconds), "cache_bytes": timing.n_bytes(vars(row.cache)),
            "fixed_bytes": timing.n_bytes(vars(row.new_cache(0)))}


def measure(row, base, args):
    """The results of a row beside its gpt, or one that says that memory ran out. Frees the row, but not a gpt."""
    results = [{"model": row.label, "error": "out of memory"}]
    try:
        row.start()
        if args.decode:
            found = [decoding(row, base, args, context) for context in args.decode]
        else:
            print(f"{row.label}: first step {row.first:.1f} s", file=sys.stderr, flush=True)
            found = [training(row, base, args)]
            if args.new_tokens and row.cache_class:
                found[0] |= decoding(row, base, args, args.prompt)
        results = [{"model": row.label, "against": base.label, **figures} for figures in found]
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
    if row is not base or "error" in results[0]:
        row.free()
    return results


def measure_all(rows, args, shape):
    """The results of all rows, each after its gpt."""
    results = []
    rows = sorted(rows, key=lambda row: row.against)
    for spec, group in groupby(rows, key=lambda row: row.against):
        base = timing.Row(spec, args, shape)
        results += measure(base, base, args)
        for row in group:
            if base.model is None:
                results.append({"model": row.label, "error": f"{spec}: out of memory"})
            elif row.config != base.config:                                         # base has been measured
                results += measure(row, base, args)
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
    rows = [timing.Row(spec, args, shape) for spec in args.models or models.names()]
    size = shape["vocab_size"], (args.batch, args.seq_len)
    args.ids = [torch.randint(*size, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2)]
    results = measure_all(rows, args, shape)
    gpt = models.config("gpt", **pick(models.module("gpt").Config, shape))
    cpu = f"{processor()}, {torch.get_num_threads()} threads"
    head = {"date": time.strftime("%Y-%m-%d"), "torch": str(torch.__version__), "python": platform.python_version(),
            "chip": used if device.type == "cuda" else cpu}
    for name in ("dtype", "compile", "batch", "seq_len", "rounds", "prompt", "new_tokens"):
        head[name] = getattr(args, name)
    print(", ".join(f"{key} {value}" for key, value in {**head, **asdict(gpt)}.items()))
    print("", *table(results), sep="\n")                                    # before writing the file, which may fail
    if args.json:
        figures = {"command": ["bench.py", *argv], **head, "shape": asdict(gpt),
                   "decode" if args.decode else "models": results}
        args.json.write_text(runs.to_json(figures, 1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_script("bench.py", main, "lower --batch or take a smaller shape")
