"""Trains one model of models/ on token shards.

    python train.py                                             the tiny preset: minutes on a laptop, offline
    python train.py --model exoformer --preset exo-450m         a paper's run on one GPU
    torchrun --standalone --nproc_per_node 8 train.py --model muddformer --preset mudd-1.4b
    python train.py --resume runs/exoformer-exo-450m            continue after an interruption
    python train.py --resume auto --out runs/A ...              continue runs/A if it has begun: for requeued jobs
    python train.py --init_from runs/A --data notes             fine-tune: a new run with the weights of runs/A
    python train.py --model satformer --help                    every option, including the model's own
"""
import math
import os
import signal
import time
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from itertools import takewhile

os.environ.setdefault("OMP_WAIT_POLICY", "passive")     # before torch: spinning threads stall on a busy machine

import nanodepth  # noqa: F401                          # before torch: keeps the text of our files, as they run now
import torch

import models
import muon
import probes
from nanodepth import presets, runs, scoring
from nanodepth.cli import Parser, UserError, add_options, pick, run_script, shell, signals, user_errors
from nanodepth.data import Batches, Data, check_tokens, find_folder, trained_folder
from nanodepth.devices import (
    Ranks, autocast, choose_dtype, compile_model, flops_per_token, in_words, leave_together, peak_bytes, peak_flops,
    seed_generators)


@dataclass
class Options:                      # the preset changes some of these values: --help shows those that a run gets
    model: str = "gpt"              # name of a file in models/ or models/more/
    preset: str = "tiny"            # named group of options, see nanodepth/presets.py; flags override it
    data: str = "stdlib"            # folder made by data_prep.py, or its name under data/
    out: str | None = None          # run folder; none: runs/MODEL-PRESET, with a number if that exists
    resume: str | None = None       # run folder to continue, with the options it has; auto: --out, if it has begun
    init_from: str | None = None    # run folder (also convert.py's) whose model and weights the new run starts from
    seed: int = 0                   # seed of the initial weights and of the data order
    device: str = "auto"            # auto (cuda, else cpu) or a torch device
    dtype: str = "auto"             # bf16 (autocast over fp32 weights) | fp32 | auto (bf16 if the chip supports it)
    compile: bool | None = None     # use torch.compile; none: only on cuda
    threads: int | None = None      # CPU threads; none: torch's choice, OMP_NUM_THREADS or one per core
    deterministic: bool = False     # every run gives the same bits, so resuming is exact on cuda; slower
    max_steps: int = 1000           # optimizer steps
    batch_tokens: int = 8192        # tokens per optimizer step, over all ranks
    seq_len: int = 1024             # tokens per sequence
    micro_batch: int | None = None  # sequences per forward pass and rank: speed, memory only; none: up to 32,768 tokens
    optimizer: str = "muon"         # muon (for the blocks' matrices, AdamW for the rest) | adamw; yours: see muon.py
    muon_lr: float = 0.02           # Muon's peak learning rate
    adamw_lr: float = 0.004         # AdamW's peak learning rate (embeddings, head, norms; without Muon also matrices)
    mix_lr: float | None = None     # AdamW's peak learning rate for mixing parameters, see muon.py; none: adamw_lr
    weight_decay: float = 0.1       # of the matrices; Muon's is cautious: only where the update points there too
    second_moment: float | None = None  # Muon: decay rate of NorMuon's second moment (ExoFormer: 0.95); none: off
    schedule: str = "wsd"           # wsd (constant, then a linear decay) | cosine; both after the warm-up
    final_lr_frac: float = 0.1      # final learning rate as a fraction of the peak
    warmup_steps: int = 100         # steps of linear warm-up
    decay_frac: float = 0.2         # fraction of the steps in wsd's final decay
    grad_clip: float = 1.0          # gradients with a larger norm are scaled down to it
    eval_every: int = 250           # steps between validations; also at step 0 and at the end
    eval_tokens: int = 1048576      # validation tokens to score, the same ones each time
    final_eval_tokens: int | None = None    # validation tokens to score after the last step; none: eval_tokens
    save_every: int | None = None   # steps between checkpoints; none: eval_every
    wandb: bool = False             # also log to Weights & Biases (pip install wandb)

    def __post_init__(self):
        models.check_types(Options, vars(self))
        choices = dict(optimizer=" ".join(muon.OPTIMIZERS), schedule="wsd cosine", dtype="auto bf16 fp32")
        most = dict(decay_frac=1, final_lr_frac=1, second_moment=1, warmup_steps=10 ** 9, weight_decay=10 ** 9,
                    seed=2 ** 63 - 1, threads=2 ** 31 - 1)                  # these may be 0, other numbers may not
        for name, value in vars(self).items():
            if name in choices and value not in choices[name].split():
                raise UserError(f"--{name} must be one of {choices[name]}, not {value!r}")
            if name in most and value is not None and not 0 <= value <= most[name]:
                raise UserError(f"--{name} must lie between 0 and {most[name]:,}, not {value}")
            own = value == getattr(Options, name)                           # of an option of your own it may be 0
            if name not in most and type(value) in (int, float) and not (own or 0 < value < math.inf):
                raise UserError(f"--{name} must be positive, not {value}")
        if self.warmup_steps > self.max_steps:
            raise UserError(f"--max_steps {self.max_steps} is shorter than the warm-up, --warmup_steps "
                            f"{self.warmup_steps}")


# ---------------------------------------------------------------------------------------------------- the command line


def parse(argv):
    """(Options, dict of the model's Config fields, dict of the flags as given). UserError for a mistake.

    Flags override the resumed or initial run, or else the preset; these override the defaults.
    """
    first = Parser("train.py", add_help=False)
    for name in ("model", "preset", "resume", "init_from", "out"):
        first.add_argument(f"--{name}")
    asked = first.parse_known_args(argv)[0]
    for name, word in vars(asked).items():
        if word == "":
            raise UserError(f"--{name} is empty: give a name, or leave it out")
    old = runs.earlier(asked)
    preset = old["options"] if asked.resume else presets.find(asked.preset or Options.preset)
    model = asked.model or old.get("model", Options.model)
    defaults = {"model": model, **preset, **old.get("model_config", {})}
    config_class = models.module(model).Config
    for name in {f.name for f in fields(config_class)} & vars(Options).keys():
        raise UserError(f"models/{model}.py: Config.{name} is an option of train.py too: rename it")
    parser = Parser("train.py", description=__doc__, epilog=f"models: {', '.join(models.names())}\n"
                                                            f"presets: {', '.join(presets.PRESETS)}")
    add_options(parser, "training", Options, defaults)
    add_options(parser, f"model {model}", config_class, {"vocab_size": "the data's, padded to 64 x n", **defaults})
    flags = vars(parser.parse_args(argv))
    if asked.resume and flags["resume"] == "auto":                          # --out has named the run
        del flags["out"]
    flags |= {name: vars(asked)[name] for name in ("resume", "init_from", "out") if name in flags}
    if asked.resume:
        runs.check_flags(flags, asked.resume, defaults)
    chosen, config = pick(Options, {**defaults, **flags}), pick(config_class, {**defaults, **flags})
    if not asked.resume and "warmup_steps" not in flags:                    # the preset's, but at most all steps
        chosen["warmup_steps"] = min(chosen.get(name, getattr(Options, name)) for name in ("warmup_steps", "max_steps"))
    if asked.resume and "data" not in flags:
        chosen["data"] = str(trained_folder(old["data"]))
    return Options(**chosen), config, flags


# ------------------------------------------------------------------------------------------------------------- the run


def lr_scale(step, options):
    """The learning rate of optimizer step `step` (from 0) as a fraction of the peak."""
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    if options.schedule == "cosine":
        done = (step - options.warmup_steps) / max(1, options.max_steps - options.warmup_steps)
        return (1 + options.final_lr_frac) / 2 + (1 - options.final_lr_frac) / 2 * math.cos(math.pi * done)
    n_decay = round(options.decay_frac * options.max_steps)
    decayed = max(0, step + 1 - (options.max_steps - n_decay)) / max(1, n_decay)
    return 1.0 - (1 - options.final_lr_frac) * decayed


def open_data(options, ranks):
    """The Data of --data. The first run makes the default data."""
    folder = find_folder(options.data)
    if options.data == "stdlib" and not folder.exists() and ranks.rank == 0:
        from data_prep import prepare_stdlib
        ranks.say("preparing data/stdlib, the Python standard library's own source text (once)")
        prepare_stdlib()
    data = Data(find_folder(options.data)) if ranks.rank == 0 else None
    ranks.share(None)                               # the others wait while the first makes the data and reads new ones
    return data or Data(find_folder(options.data))


def build_model(options, config, flags, data, device):
    """The model for training, with at least the data's vocabulary, and initial weights or those of --init_from."""
    if "vocab_size" in flags and config["vocab_size"] < data.vocab_size:
        raise UserError(f"--vocab_size {config['vocab_size']} is smaller than that of the data, {data.vocab_size}")
    config["vocab_size"] = max(config.get("vocab_size", 0), data.vocab_size)
    if not (options.resume or options.init_from or "vocab_size" in flags):      # a GPU multiplies such rows faster
        config["vocab_size"] = 64 * math.ceil(config["vocab_size"] / 64)
    seed_generators(options.seed)
    model = models.build(options.model, **config)
    if options.seq_len > model.config.max_len:
        raise UserError(f"--seq_len {options.seq_len} is longer than the model's max_len: "
                        f"add --max_len {options.seq_len}")
    if options.init_from and not options.resume:
        checkpoint = runs.read_checkpoint(options.init_from)
        check_tokens(data, options.init_from, checkpoint["config"])
        runs.take_weights(model, checkpoint, "the model: leave out --model and options of its shape", options.init_from)
    model.to(device).train()
    if options.compile:
        torch._dynamo.config.optimize_ddp = False                           # else DDP splits the graph
        compile_model(model)
    return model


def main(argv):
    """Returns the exit code: 0; 1 if the last checkpoint was not written; 3 if a loss is not finite; 128 + signal."""
    options, config, flags = parse(argv)
    if options.wandb:
        import wandb  # noqa: F401  (if it is missing, fail now)
    ranks = Ranks(options.device, options.deterministic)
    options.dtype, place = choose_dtype(ranks.device, options.dtype), in_words(ranks.device)
    asked = replace(options)                                            # for config.json: this machine decides the rest
    if ranks.device.type == "cpu":
        torch.set_num_threads(options.threads or torch.get_num_threads())
        options.threads = torch.get_num_threads()
    if options.compile is None:
        options.compile = ranks.device.type == "cuda"

    data = open_data(options, ranks)
    model = build_model(options, config, flags, data, ranks.device)
    seed_generators(options.seed + ranks.rank)              # every rank has the same weights, but its own dropout
    batches = Batches(data, options, ranks, model)
    with user_errors(f"models/{options.model}.py: "):
        optimizers = muon.optimizers(model, options)
    flops = 3 * flops_per_token(model, options.seq_len)                     # backward costs twice forward
    run = (runs.Run.resume(options, flags, model, optimizers, data, ranks) if options.resume else
           runs.Run.new(options, asked, model, optimizers, data, ranks))

    n_params, size = sum(p.numel() for p in model.parameters()), model.config.vocab_size
    ranks.say(f"{options.model}, preset {options.preset}: {n_params:,} parameters; {flops / 1e6:,.1f} MFLOPs/token; "
              f"{place}{f' ({options.threads} threads)' if options.threads else ''}, {options.dtype}, "
              f"{'compiled' if options.compile else 'eager'}, torch {torch.__version__}")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            n, names = sum(p.numel() for p in group["params"]), group["names"]
            ranks.say(f"{type(optimizer).__name__}, peak rate {group['peak_lr']:g}, weight decay "
                      f"{group.get('weight_decay', 0):g}: {n:,} parameters, {names[0]} to {names[-1]}")
    ranks.say(f"{data.path}: {data.n_train:,} training tokens, {data.n_val:,} for validation, vocabulary "
              f"{data.vocab_size:,}{f', padded to {size:,}' if size != data.vocab_size else ''}; "
              f"{options.max_steps:,} steps = {batches.n_epochs:.2g} epochs")
    ranks.say(f"{options.batch_tokens:,} tokens/step = {batches.micro} seq x {options.seq_len:,} x {batches.n_micro} "
              f"micro-steps x {ranks.world} ranks; to resume: {shell('train.py', '--resume', run.path)}")
    if run.edited:
        ranks.say(f"{', '.join(run.edited)}: changed since the run began, which has a copy: {run.path}/source")
    if options.resume:
        ranks.say(f"going on at step {run.start} of {options.max_steps}" if run.start < options.max_steps else
                  f"{run.path} is finished: it has all its {options.max_steps} steps")
    elif options.init_from:
        ranks.say(f"starting with the weights of {options.init_from}, and so with its shape")
    if options.compile:
        ranks.say("compiling: the first validation and the first step take longer, up to some minutes")
    with signals() as stops:
        code, text = train(run, batches, flops, stops)
    ranks.say(text)
    return code


def validate(run, batches, step, stops):
    """A row of the log: scores on the validation split, and stats of the mechanism. None after a signal."""
    options, model, ranks = run.options, run.model, run.ranks
    last, context = step == options.max_steps, autocast(ranks.device, options.dtype)
    since = said = time.perf_counter()

    def go_on(batch):
        nonlocal said
        if (now := time.perf_counter()) - said > 60:
            said = now
            ranks.say(f"step {step:5d}/{options.max_steps} | still validating, for {now - since:.0f} s")
        return not stops

    n_tokens = options.final_eval_tokens if last and options.final_eval_tokens else options.eval_tokens
    model.eval()                                                            # no dropout; cross-entropy alone
    scored = takewhile(go_on, batches.val(n_tokens))
    row = scoring.evaluate(model, scored, batches.token_bytes, context, ranks.sum)
    if ranks.sum(torch.tensor(float(len(stops)), device=ranks.device)):
        return None
    row |= {"eval_s": time.perf_counter() - since, "peak_bytes": peak_bytes(ranks.device)}
    bits = "" if row["bpb"] is None else f" | {row['bpb']:.4f} bits/byte"
    ranks.say(f"step {step:5d}/{options.max_steps} | val {row['loss']:.4f} nats | ppl {row['ppl']:.2f}{bits} "
              f"| {row['eval_tokens']:,} tokens in {row['eval_s']:.1f} s")
    if ranks.rank == 0:
        with context:
            row["stats"] = probes.stats(options.model, model, batches.sample())
    model.train()
    return row


def train(run, batches, flops, stops):
    """The loop -> (exit code, closing message). Losses are in nats per token, over all ranks."""
    options, model, ranks = run.options, run.model, run.ranks
    wrapped, context = ranks.wrap(model), autocast(ranks.device, options.dtype)
    peak, before_decay = peak_flops(ranks.device), muon.constant_until(options)        # then the rate falls; or -1
    began = said = time.perf_counter()                      # began: set again after the first step, which compiles

    def stop(step):
        ranks.say(run.save(step))
        again = "" if run.save_failed else f"; to resume: {shell('train.py', '--resume', run.path)}"
        code = 128 + (stops or [signal.SIGTERM])[0]                         # the default: another rank got it
        return code, f"interrupted after step {step}{again}"

    for step in range(run.start, options.max_steps + 1):            # save, validate, train; at the end the first two
        last = step == options.max_steps
        if last or step % (options.save_every or options.eval_every) == 0 or step == before_decay:
            ranks.say(run.save(step))
        if step == before_decay:
            ranks.say(run.keep_before_decay())
        if (last or step % options.eval_every == 0) and step > run.evaluated:
            row = validate(run, batches, step, stops)
            if row is None:
                return stop(step)
            run.log("val", step, **row)
            if not math.isfinite(row["loss"]):
                return 3, f"step {step}: the validation loss is {row['loss']}: stopped; {run.newest()}"
        if last:
            break

        since, loss = time.perf_counter(), torch.zeros((), device=ranks.device)     # on the GPU: nothing waits for it
        for i, (idx, targets) in enumerate(batches.train(step)):
            if ranks.parallel:
                wrapped.require_backward_grad_sync = i == batches.n_micro - 1       # average gradients once a step
            with context:
                micro_loss = wrapped(idx, targets)[1] / batches.n_micro             # with the model's own penalties
            micro_loss.backward()
            loss += micro_loss.detach()
            if step == run.start and i == 0:
                models.check_gradients(options.model, model)
            if (now := time.perf_counter()) - max(said, since) > 60:
                said = now
                ranks.say(f"step {step + 1:5d}/{options.max_steps} | {i + 1} of {batches.n_micro} micro-steps")
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
        stopped = torch.tensor(float(len(stops)), device=ranks.device)
        loss, grad_norm, stopped = (ranks.sum(torch.stack((loss, grad_norm, stopped))) / ranks.world).tolist()
        if not math.isfinite(loss + grad_norm):
            return 3, (f"step {step + 1}: loss {loss}, gradient norm {grad_norm}: stopped before the optimizer step; "
                       f"{run.newest()}")
        muon.set_step(run.optimizers, step, lr_scale(step, options), options)
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not ranks.parallel)                     # several ranks: kept for DDP

        now, lr, n_done = time.perf_counter(), run.optimizers[0].param_groups[0]["lr"], step + 1 - run.start
        seconds, began = now - since, now if n_done == 1 else began
        row = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "ms": seconds * 1000,
               "tok_s": options.batch_tokens / seconds}
        row |= {"mfu": row["tok_s"] * flops / (peak * ranks.world)} if peak else {}
        run.log("train", step + 1, **row)
        if now - said >= min(60, (now - began) / 5) or step + 1 == options.max_steps:       # at first every step
            said, mfu = now, f" | mfu {row['mfu']:.1%}" if peak else ""
            left = (now - began) / max(1, n_done - 1) * (options.max_steps - step - 1)      # with validations, saving
            ranks.say(f"step {step + 1:5d}/{options.max_steps} | loss {loss:.4f} | lr {lr:.2e} "
                      f"| tok/s {row['tok_s']:,.0f}{mfu} | {peak_bytes(ranks.device) / 2 ** 30:.1f} GiB"
                      + (f" | about {timedelta(seconds=int(left))} left" if n_done > 1 else ""))
        if stopped:
            return stop(step + 1)
    return (1, "the last checkpoint could not be written, see above") if run.save_failed else (
        0, f"done: {shell('sample.py', run.path)}; {shell('eval.py', run.path)}")


if __name__ == "__main__":
    run_script("train.py", lambda argv: leave_together(main(argv)),
               "halve --micro_batch (same results, in more micro-steps), or --batch_tokens, or take a smaller model")
