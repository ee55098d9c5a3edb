"""How fast are whole training steps of our models on one GPU, beside nanoGPT and hyper-connection-factory?

    python results/bench/peers.py --nanogpt ../nanoGPT --factory ../hyper-connection-factory
    python results/bench/peers.py --tiny            tiny shapes, also on a CPU: a test of this script

A step is eight micro-steps of 32 x 1,024 random tokens, gradient clipping, optimizer and zero_grad, in bf16 autocast.
All models have the shape of our preset gpt2-124m, tied embeddings and no QK norm. The peers' models come unchanged from
clones. Each model is compiled and optimized as in its own train.py, with AdamW; gpt+muon uses Muon. Each is a process,
and two of them compile at a time. Then, in each of six rounds, gpt and these take turns on the GPU: one step that is
not timed, and three steps, whose median counts. The table has medians over the rounds and, as spread, half the
interquartile range. x_gpt is relative to gpt in the same rounds. first_step_s counts from the start of the process; it
is empty if an earlier call compiled the model. MFU counts FLOPs as nanoGPT does. The script ends before --minutes are
over, with code 124 if work is left. Call it again to go on: it skips what the file --csv has.
"""
import csv
import os
import sys
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[2:0:-1]]
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "runs/inductor")       # bench's would be empty at the next call
import bench  # noqa: E402
import models  # noqa: E402
import muon  # noqa: E402
from compare import markdown  # noqa: E402
from nanodepth import presets  # noqa: E402
from nanodepth.cli import Parser, pick, run_script  # noqa: E402
from nanodepth.devices import (  # noqa: E402
    autocast, choose_dtype, compile_model, find_device, peak_bytes, peak_flops)

CONTESTANTS = """gpt+muon nanoGPT factory/prenorm denseformer muddformer factory/muddformer hyperconnections factory/hc
    attnres factory/attnres attnres_block:block_size=8 nuresformer mhc factory/mhc""".split()          # beside gpt
TOGETHER, ROUNDS, STEPS = 2, 6, 3
TINY = dict(n_layer=2, d_model=64, n_head=2, d_ff=None, vocab_size=512, max_len=64, seq_len=64)


def make(name, args):
    """(model of a contestant, its optimizers, what to call in a step)."""
    device, shape, (code, _, key) = args.device, args.shape, name.partition("/")
    if code not in args.peers:
        spec, _, kind = name.partition("+")
        ours, options = bench.parse_spec(spec)
        config = {**pick(models.module(ours).Config, shape), "qk_norm": False, **options}
        model, options = models.build(ours, **config).to(device), SimpleNamespace(
            optimizer=kind or "adamw", muon_lr=0.005, adamw_lr=0.001, mix_lr=None, weight_decay=0.1, second_moment=None,
            dtype=args.dtype)
        if not args.tiny:
            compile_model(model)
        return model, muon.optimizers(model, options), model
    sys.path.append(args.peers[code])
    torch.set_float32_matmul_precision("high")                              # both peers allow TF32
    V, L, H, C, T = (shape[field] for field in ("vocab_size", "n_layer", "n_head", "d_model", "seq_len"))
    if code == "nanoGPT":
        from model import GPT, GPTConfig
        model = GPT(GPTConfig(T, V, L, H, C, bias=False)).to(device)
        optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    else:
        from hcfactory import GPT, ModelConfig
        model = GPT(ModelConfig(V, L, H, C, max_seq_len=T, connection=key)).to(device)      # 4 streams by default
        named = [(0.1 * (p.ndim > 1 and not n.startswith("connection.")), p) for n, p in model.named_parameters()]
        groups = [dict(params=[p for decay, p in named if decay == some], weight_decay=some) for some in (0.1, 0)]
        optimizer = torch.optim.AdamW(groups, lr=1.5e-3, betas=(0.9, 0.95), fused=device.type == "cuda")
    return model, [optimizer], model if args.tiny else torch.compile(model)


def compete(name, args, pipe, began):
    """A contestant's process: takes as many timed steps as the pipe asks for, after one that is not timed."""
    sys.stdout, device = sys.stderr, args.device
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], name.replace("/", "-")).resolve()
    os.environ["TORCHINDUCTOR_CACHE_DIR"], cold = str(cache), not cache.exists()
    model, optimizers, run = make(name, args)
    ids = torch.randint(args.shape["vocab_size"], args.batch, device=device)

    def step():
        begin = bench.now(device)
        for idx, targets in ids:
            with autocast(device, args.dtype):
                loss = run(idx, targets)[1] / len(ids)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return bench.now(device) - begin

    row, steps = {"model": name, "parameters": sum(p.numel() for p in model.parameters())}, 0
    with suppress(EOFError):                                                # until the parent closes the pipe
        while True:
            seconds = [step() for _ in range(1 + steps)][1:]                # the first one compiles, or gets memory
            row.setdefault("first_step_s", round(time.time() - began, 1) if cold else "")
            torch.cuda.empty_cache()                                        # the memory is the others' now
            pipe.send((row | {"peak_gib": round(peak_bytes(device) / 2 ** 30, 2)}, median(seconds or [0])))
            steps = pipe.recv()


def hear(pipe, until):
    """(row of the table so far, median seconds per step) of a contestant; None if it failed or is late."""
    with suppress(EOFError, OSError):
        return pipe.recv() if pipe.poll(max(0, until - time.time())) else None


def main(argv):
    began, parser = time.time(), Parser("peers.py", description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    for name, default in dict(nanogpt="", factory="", csv="peers.csv", minutes=9).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"[{default}]")
    args = parser.parse_args(argv)
    args.peers, args.device = {"nanoGPT": args.nanogpt, "factory": args.factory}, find_device()
    args.dtype, args.shape = choose_dtype(args.device, "auto"), presets.find("gpt2-124m") | (TINY if args.tiny else {})
    args.batch = micro, _, B, T = (2, 2, 4, 64) if args.tiny else (8, 2, 32, 1024)            # 2: tokens and targets
    Path(args.csv).touch()                                                  # fails now if it cannot be written
    rows, failed = {row["model"]: row for row in csv.DictReader(open(args.csv))}, []
    waiting = [name for name in CONTESTANTS if name not in rows and args.peers.get(name.split("/")[0], True)]
    compiled_by, end = began + 48 * args.minutes, began + 60 * args.minutes - 10
    while waiting and time.time() < compiled_by:
        group, waiting = ["gpt", *waiting[:TOGETHER]], waiting[TOGETHER:]
        pipes = {}
        for name in group:
            pipes[name], theirs = get_context("spawn").Pipe()
            get_context("spawn").Process(target=compete, args=(name, args, theirs, time.time()), daemon=True).start()
            theirs.close()
        turns = {name: [hear(pipe, compiled_by)] for name, pipe in pipes.items()}
        for name in group * ROUNDS:
            if None not in turns[name]:
                pipes[name].send(STEPS)
                turns[name].append(hear(pipes[name], end))
        for name in (name for name in group if name not in rows):
            if None in turns[name] + turns["gpt"]:
                failed.append(name)
                continue
            rows[name], seconds, base = turns[name][-1][0], *([took for _, took in turns[x][1:]] for x in (name, "gpt"))
            for key, work in dict(tokens_per_s=[micro * B * T] * ROUNDS, x_gpt=base).items():
                rows[name][key], rows[name][f"{key}_spread"] = (f"{x:.6g}" for x in bench.ratio(seconds, work))
            flops = 6 * rows[name]["parameters"] + 12 * args.shape["n_layer"] * args.shape["d_model"] * T
            used = flops * micro * B * T / median(seconds)
            rows[name]["mfu"] = f"{used / (peak_flops(args.device) or float('inf')):.4f}"
        for pipe in pipes.values():
            pipe.close()                                                    # its process ends
        with open(args.csv, "w", newline="") as file:
            csv.writer(file).writerows([*list(rows.values())[:1], *(row.values() for row in rows.values())])
    head, *lines = list(csv.reader(open(args.csv))) or [[]]
    print(markdown(head, lines))
    if left := failed + waiting:
        print(f"not measured, because they or gpt failed or took too long: {', '.join(dict.fromkeys(left))}")
    return 124 if left and time.time() > compiled_by else bool(left)


if __name__ == "__main__":
    run_script("peers.py", main)
