"""Speed and memory of the models, each beside gpt.py of the same shape, in interleaved steps.

    python bench.py                                               every model, at a shape for two CPU cores
    python bench.py --preset exo-450m --batch 16                  a paper's shape
    python bench.py --models muddformer attnres_block:block_size=8    some models, with options of theirs
    python bench.py --models muddformer --profile trace.json      where one model's step spends its time
    python bench.py --bytes                                       also the bytes that the compiled kernels move
    python bench.py --models sambay --decode 1024 8192 32768      decoding after long contexts, and what the cache holds
    python bench.py --models gpt --preset exo-1b --ranks 1 8 64   memory and communication on so many GPUs, by formula

A training step is forward, backward and optimizer on fixed random tokens. One model and gpt are on the device at a
time; every round runs one step of each, so that a drift of the machine meets both, and a ratio is the median over the
rounds of gpt's time over the model's in the same round. A model that does not fit into memory gets a row that says so.
Columns:
    params, FLOPs   what the idea adds to gpt, counted; costs, costs FLOPs: by the model's costs(), with mixing
    fwd, bwd, opt   milliseconds of one step's parts
    x gpt           forward + backward speed against gpt (+- half the interquartile range); x gpt step: with optimizer
    floor           the best "x gpt" possible: gpt's time, plus the added FLOPs at the measured rate of a large matrix
                    product, plus four passes over each earlier state that the idea reads (read forward, read backward,
                    read and write of its gradient) at the measured bandwidth of a large copy
    GiB             peak of parameters, gradients, optimizer state and activations
    util            FLOPs of the step (backward counted twice) over forward + backward time, as a part of the rate of a
                    large matrix product; MFU: the same over the chip's data sheet, where that is known
    compile, breaks seconds of the first step beyond a usual one; graph breaks
    MiB             with --bytes: what the kernels of forward and backward read and write, by inductor's own count
    decode, first   new tokens per second at batch 1 with the cache; seconds to the first token of a prompt
"""
import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
from statistics import median

CACHE = tempfile.TemporaryDirectory()           # compile times are those of an empty cache, unless the user names one
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", CACHE.name)

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import models  # noqa: E402
from nanodepth import presets, runs, timing  # noqa: E402
from nanodepth.devices import (cast_weights, choose_dtype, find_device, machine_errors, out_of_memory,  # noqa: E402
                               peak_flops, processor)
from nanodepth.cli import Parser, out_file, parse_spec, pick, run_script, user_errors  # noqa: E402
from nanodepth.timing import Row  # noqa: E402

SHAPE = dict(n_layer=12, d_model=384, n_head=6, vocab_size=8192, seq_len=512)       # without a preset
FLAGS = ("n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "vocab_size", "seq_len")


def parse(argv):
    """(arguments, shape of the models). Leaves with one line and code 2 if they are wrong."""
    parser = Parser("bench.py", description=__doc__)
    parser.add_argument("--models", nargs="+", metavar="NAME[:option=value...]",
                        help="[every model; gpt of the same shape is always added, for gpt:option=value the plain one]")
    parser.add_argument("--preset", help="take the shape of a preset (see docs/training.md)")
    for name in FLAGS:
        parser.add_argument(f"--{name}", type=int, help=f"[{SHAPE.get(name, 'as in the model files')}]")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step [4]")
    parser.add_argument("--dtype", default="auto", choices=("fp32", "bf16", "auto"),
                        help="bf16 is autocast; auto: bf16 where the chip has it [auto]")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile [on]")
    parser.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved steps per model [10]")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the decoding prompt [128]")
    parser.add_argument("--new_tokens", type=int, default=128, help="tokens decoded; 0: no decoding [128]")
    parser.add_argument("--decode", type=int, nargs="+", metavar="N",
                        help="only decode --new_tokens after N tokens of context")
    parser.add_argument("--bytes", action="store_true", help="also count the bytes of the compiled kernels")
    parser.add_argument("--json", type=out_file, metavar="FILE", help="write all figures there")
    parser.add_argument("--profile", type=out_file, metavar="FILE",
                        help="only write a torch.profiler trace of one model's step there")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N",
                        help="only print what N ranks hold and send, by formula")
    args = parser.parse_args(argv)
    shape = {**SHAPE, **(presets.find(args.preset) if args.preset is not None else {})}
    shape |= {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    args.seq_len = shape["seq_len"]
    contexts = args.decode or [1]
    shape["max_len"] = max(args.seq_len, max(args.prompt, *contexts) + args.new_tokens)
    if min(args.rounds, args.batch, args.prompt, args.seq_len) < 1:
        parser.error("--rounds, --batch, --prompt and --seq_len must be at least 1")
    if args.new_tokens < 0 or args.new_tokens == 1:
        parser.error("--new_tokens must be 0 or at least 2")
    if args.profile and len(args.models or ()) != 1:
        parser.error("--profile takes one model: add --models NAME")
    if min(contexts) < 1 or args.decode and not args.new_tokens:
        parser.error("--decode needs contexts of at least 1 token each, and --new_tokens")
    if args.json and (args.ranks or args.profile):
        parser.error("--ranks and --profile have no figures for --json: leave it out")
    if args.bytes and not args.compile:
        parser.error("--bytes counts compiled kernels: leave --no-compile out")
    if args.new_tokens and not (args.decode or args.ranks) and args.prompt > args.batch * args.seq_len:
        parser.error(f"--prompt {args.prompt} is longer than the {args.batch} x {args.seq_len} tokens there are")
    if args.ranks and min(args.ranks) < 1:
        parser.error("--ranks must be at least 1 each")
    return args, shape


def shape_of(spec, args, shape):
    """The shape of the gpt to compare with; no weights are made. UserError for a wrong spec."""
    with torch.device("meta"), user_errors():
        row = Row(spec, args, shape)
        if args.decode:
            models.cache_class(row.name)
    return row.shape


def plan(specs, args, shape):
    """{spec of a gpt: [specs to compare with it]}: gpt of each shape that occurs; gpt with options of its own is
    compared with plain gpt. UserError for a wrong spec."""
    standard, groups = shape_of("gpt", args, shape), {}
    for spec in specs:
        own = [f"{key}={value}" for key, value in shape_of(spec, args, shape).items() if value != standard[key]]
        plain = parse_spec(spec)[0] == "gpt"
        groups.setdefault("gpt" if plain else ":".join(["gpt", *own]), []).extend([spec] if own or not plain else [])
    return groups


def fits(work, *words):
    """Whether there is memory enough for work(*words)."""
    try:
        work(*words)
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        return False
    return True


def attempt(spec, args, shape, work, results):
    """work(row) of a new row; results get {"model", "error"} if it does not fit into memory. It leaves the device."""
    row = Row(spec, args, shape)
    try:
        if not fits(work, row):
            results.append({"model": spec, "error": "out of memory"})
    finally:
        row.__dict__.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def in_turns(pair, rounds):
    """Every row of the pair once a round, the other one first each time."""
    return [each for i in range(rounds) for each in (pair if i % 2 else pair[::-1])]


def compare(row, base, args, rates):
    """All figures of a row that has started, beside those of its gpt, from interleaved rounds; row may be that gpt."""
    pair = [base] if row is base else [base, row]
    for each in pair:
        each.times, each.decode_times = [], []
    for each in in_turns(pair, args.rounds):
        each.times.append(each.step())
    for each in pair:
        each.peak = each.peak_bytes()
    if args.new_tokens and hasattr(row.model, "generate"):
        for each in pair:
            each.decode()                                                           # compiles
        for each in in_turns(pair, args.rounds):
            each.decode_times.append(each.decode())
    return result(row, base, args, *rates)


def result(row, base, args, rate, bandwidth):
    """The figures of one row, as JSON has them."""
    tokens, parts = args.batch * args.seq_len, [median(part) * 1000 for part in zip(*row.times)]
    passes, base_passes = [sum(t[:2]) for t in row.times], [sum(t[:2]) for t in base.times]     # forward and backward
    steps, base_steps = [sum(t) for t in row.times], [sum(t) for t in base.times]
    out = {"model": row.label, "against": base.label, "parameters": row.n_params,
           "extra_parameters": row.n_params - base.n_params, "flops_per_token": row.flops,
           "extra_flops": row.flops / base.flops - 1}
    costs = (0, 0, 0) if row is base else row.costs()
    if costs:
        added = 3 * (row.flops - base.flops) * tokens / rate
        added += 4 * costs[2] * tokens * (2 if args.dtype == "bf16" else 4) / bandwidth
        out |= {"costs_parameters": costs[0], "costs_flops": costs[1] / base.flops, "read_per_token": costs[2],
                "floor": median(base_passes) / (median(base_passes) + max(0, added))}
    out |= dict(zip(("forward_ms", "backward_ms", "optimizer_ms"), parts))
    used, peak = 3 * row.flops * tokens / median(passes), peak_flops(row.device)
    out |= {"tokens_per_s": tokens / median(steps), "ratio": timing.ratio(passes, base_passes),
            "step_ratio": timing.ratio(steps, base_steps), "peak_bytes": row.peak, "memory_ratio": row.peak / base.peak,
            "utilisation": used / rate, "mfu": used / peak if peak else None,
            "compile_s": row.first - median(steps) if args.compile else None, "graph_breaks": row.breaks}
    if args.bytes:
        out |= {"kernel_bytes": row.bytes, "extra_kernel_bytes": row.bytes - base.bytes}
    if row.decode_times:
        first, each = zip(*row.decode_times)
        out |= {"first_token_s": median(first), "decode_tokens_per_s": 1 / median(each),
                "decode_ratio": timing.ratio(each, [e for _, e in base.decode_times])}
    return out


def cells(r):
    """One result as {column: text}."""
    def pm(key):
        return "{:.3f} ±{:.3f}".format(*r[key])

    if "error" in r:
        return {"model": f"`{r['model']}`", "params": r["error"]}
    out = {"model": f"`{r['model']}`" + ("" if "gpt" in (r["against"], r["model"]) else f" vs `{r['against']}`"),
           "params": f"{r['extra_parameters']:+,}", "costs": f"{r['costs_parameters']:+,}" if "floor" in r else "-",
           "FLOPs": f"{r['extra_flops']:+.2%}", "costs FLOPs": f"{r['costs_flops']:+.2%}" if "floor" in r else "-",
           "fwd": f"{r['forward_ms']:,.0f}", "bwd": f"{r['backward_ms']:,.0f}", "opt": f"{r['optimizer_ms']:,.0f}",
           "tok/s": f"{r['tokens_per_s']:,.0f}", "x gpt": pm("ratio"),
           "floor": f"{r['floor']:.3f}" if "floor" in r else "-", "x gpt step": pm("step_ratio"),
           "GiB": f"{r['peak_bytes'] / 2 ** 30:.2f}", "GiB x gpt": f"{r['memory_ratio']:.3f}",
           "util": f"{r['utilisation']:.0%}", "MFU": "-" if r["mfu"] is None else f"{r['mfu']:.1%}"}
    if r["compile_s"] is not None:
        out |= {"compile": f"{r['compile_s']:.0f} s", "breaks": str(r["graph_breaks"])}
    if "kernel_bytes" in r:
        out |= {"MiB": f"{r['kernel_bytes'] / 2 ** 20:,.0f}",
                "against gpt": f"{r['extra_kernel_bytes'] / 2 ** 20:+,.0f}"}
    if "decode_ratio" in r:
        out |= {"decode": f"{r['decode_tokens_per_s']:.1f}", "decode x gpt": pm("decode_ratio"),
                "first": f"{r['first_token_s']:.3f}"}
    return out


def table(rows):
    """Rows {column: text} as lines of an aligned Markdown table."""
    columns = list(max(rows, key=len))
    lines = [columns, ["---"] * len(columns), *([row.get(name, "-") for name in columns] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines)]
    lines[1] = ["-" * width for width in widths]
    return ["| " + " | ".join(f"{cell:{w}}" for cell, w in zip(line, widths)) + " |" for line in lines]


def ranks_table(specs, shape, worlds, dtype):
    """The lines of a Markdown table of timing.across() for some models and numbers of ranks."""
    rows = []
    for spec in specs:
        name, given = parse_spec(spec)
        with user_errors(f"{spec}: "), torch.device("meta"):
            model = models.build(name, **pick(models.module(name).Config, {**shape, **given}))
        for world in worlds:
            of_muon = timing.across(model, world, "muon", dtype)
            of_adamw = timing.across(model, world, "adamw", dtype)
            held = {"held per rank, Muon": of_muon["held"], "AdamW": of_adamw["held"],
                    "AdamW, if sharded": of_adamw["held"] / world}
            sent = {"sent per rank and step: gradients": of_muon["gradients"], "Muon's updates": of_muon["updates"]}
            n_params = sum(p.numel() for p in model.parameters())
            rows.append({"model": f"`{spec}`", "parameters": f"{n_params:,}", "ranks": str(world)}
                        | {key: f"{x / 2 ** 30:.1f} GiB" for key, x in held.items()}
                        | {key: f"{x / 2 ** 30:.2f} GiB" for key, x in sent.items()})
    return table(rows)


def decode_after(row, base, args):
    """Decoding of one row beside its gpt after contexts of some lengths, interleaved: a list of figures. The contexts
    are noise in the caches, not read token by token: the time of a step does not depend on the numbers."""
    pair, out = [base] if row is base else [base, row], []
    for context in args.decode:
        torch.compiler.reset()
        caches, steps, seconds = {}, {}, {each: [] for each in pair}
        for each in pair:
            cast_weights(each.model, args.dtype).eval()
            caches[each], held = each.cache(context + args.new_tokens)
            for t in held:
                t.normal_()
            forward = each.model.forward
            steps[each] = torch.compile(forward, fullgraph=True, dynamic=False) if args.compile else forward
            each.decode_after(steps[each], caches[each], context)                   # compiles
        for each in in_turns(pair, args.rounds):
            seconds[each].append(each.decode_after(steps[each], caches[each], context))
        out.append({"model": row.label, "against": base.label, "context": context,
                    "cache_bytes": sum(t.nbytes for t in held), "fixed_bytes": sum(t.nbytes for t in row.cache(0)[1]),
                    "decode_tokens_per_s": 1 / median(seconds[row]),
                    "decode_ratio": timing.ratio(seconds[row], seconds[base])})
    return out


def decode_cells(r):
    return {"model": f"`{r['model']}`", "context": f"{r['context']:,}", "tok/s": f"{r['decode_tokens_per_s']:.1f}",
            "x gpt": "{:.3f} ±{:.3f}".format(*r["decode_ratio"]), "cache, MiB": f"{r['cache_bytes'] / 2 ** 20:,.1f}",
            "of it at any length": f"{r['fixed_bytes'] / 2 ** 20:,.1f}"}


def trace(row, path):
    """A torch.profiler trace of one step of a row that has started, and the table of its operations."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (row.device.type == "cuda")
    with profile(activities=activities, record_shapes=True) as prof:
        row.step()
    prof.export_chrome_trace(str(path))
    by = f"self_{row.device.type}_time_total"
    print(prof.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=60))


def run(groups, args, shape, device, batch):
    """Figures of all rows, each after its gpt, which alone stays on the device meanwhile; and times of optimizers."""
    results, extra = [], {}
    rates = (0, 0) if args.decode else timing.limits(device, torch.bfloat16 if args.dtype == "bf16" else torch.float32)

    def of(row, base):
        if args.decode:
            row.place(device, batch)
            results.extend(decode_after(row, base, args))
        else:
            row.start(device, batch)
            print(f"{row.label}: first step {row.first:.1f} s", file=sys.stderr, flush=True)
            results.append(compare(row, base, args, rates))

    def with_base(base):
        of(base, base)
        if not args.decode and not extra:
            fits(lambda: extra.update(optimizers_ms=timing.optimizer_times(base, args.rounds)))
        for spec in others:
            attempt(spec, args, shape, lambda row: of(row, base), results)

    for spec, others in groups.items():
        attempt(spec, args, shape, with_base, results)
        done = [r["model"] for r in results]
        results += [{"model": other, "error": f"{spec}: out of memory"} for other in others if other not in done]
    if not args.decode:
        extra |= {"matmul_flops_per_s": rates[0], "copy_bytes_per_s": rates[1]}
    return results, extra


@machine_errors("lower --batch or take a smaller shape")
def main(argv):
    args, shape = parse(argv)
    specs = args.models or models.names()
    if args.ranks:
        print("\n".join(ranks_table(specs, shape, args.ranks, args.dtype.replace("auto", "bf16"))))
        return 0
    device = find_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    args.dtype = choose_dtype(device, args.dtype)
    groups = plan(specs, args, shape)
    size = shape["vocab_size"], (args.batch, args.seq_len)
    batch = [torch.randint(*size, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2)]
    if args.bytes:
        timing.count_bytes()
    if args.profile:
        row = Row(specs[0], args, shape)
        row.start(device, batch)
        trace(row, args.profile)
        return 0
    results, extra = run(groups, args, shape, device, batch)
    head = {"date": time.strftime("%Y-%m-%d"), "chip": chip(device), "torch": str(torch.__version__),
            "python": platform.python_version(), "command": ["bench.py", *argv],
            "shape": shape_of(next(iter(groups)), args, shape), "seq_len": args.seq_len, "batch": args.batch,
            "dtype": args.dtype, "compile": args.compile, "rounds": args.rounds, "prompt": args.prompt,
            "new_tokens": args.new_tokens, **extra}
    show(head, results)                                                     # before the file, which may fail
    if args.json:
        figures = head | {"decode" if args.decode else "models": results}
        runs.write_report(args.json, json.dumps(figures, indent=1) + "\n")
    return 0


def show(head, results):
    """Prints the table, with what was measured and where above it and optimizers below."""
    c, compiled = head["shape"], "compiled" if head["compile"] else "eager"
    print(f"{head['date']}, {head['chip']}, torch {head['torch']}, {head['dtype']}, {compiled}; L{c['n_layer']} "
          f"d{c['d_model']} H{c['n_head']} d_ff {c['d_ff']} vocabulary {c['vocab_size']:,}, {head['batch']} x "
          f"{head['seq_len']} tokens per step, {head['rounds']} rounds; "
          f"decoding: {head['new_tokens']} tokens at batch 1.")
    if "matmul_flops_per_s" in head:
        print(f"Large matrix product {head['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s, "
              f"copy {head['copy_bytes_per_s'] / 1e9:.3g} GB/s.")
    print("\n" + "\n".join(table([(decode_cells if "context" in r else cells)(r) for r in results])))
    if "optimizers_ms" in head:
        times = ", ".join(f"{name} {ms:,.1f} ms" for name, ms in head["optimizers_ms"].items())
        print(f"\nOne optimizer step on the matrices of gpt: {times}.")


def chip(device):
    """The name of the GPU, or of the CPU with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    run_script("bench.py", main)
