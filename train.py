"""Trains one model of models/ on token shards.

    python train.py                                             the tiny preset: minutes on a laptop, offline
    python train.py --model exoformer --preset exo-450m         a paper's run on one GPU
    torchrun --standalone --nproc_per_node 8 train.py --model muddformer --preset mudd-1.4b
    python train.py --resume runs/exoformer-exo-450m            go on after an interruption
    python train.py --init_from runs/A --data mine              fine-tune: a new run from the weights of another
    python train.py --model satformer --help                    every option, the model's own included
"""
import math
import time
from dataclasses import dataclass
from functools import partial

import torch

import data_prep
import models
import muon
from nanodepth import command, record, runs, scoring
from nanodepth.console import Console
from nanodepth.devices import (Ranks, autocast, choose_dtype, flops_per_token, leave_together, machine_errors,
                               peak_bytes, peak_flops, set_threads)
from nanodepth.options import UserError, check_types, run_script, user_errors
from nanodepth.shards import Batches, Data, check_tokens
from nanodepth.tokenizers import load_tokenizer


@dataclass
class Options:
    model: str = "gpt"              # a file of models/
    preset: str = "tiny"            # a named group of options, see nanodepth/presets.py; flags win over it
    data: str = "stdlib"            # a folder made by data_prep.py, or its name under data/
    out: str | None = None          # run folder; none: runs/MODEL-PRESET, numbered if that exists
    resume: str | None = None       # run folder to go on with; its options hold
    init_from: str | None = None    # run folder, or one of convert.py, whose model and weights a new run starts with
    seed: int = 0                   # of the initial weights and of the order of the data
    device: str = "auto"            # auto (cuda, else cpu) or a torch device
    dtype: str = "auto"             # bf16 (autocast over fp32 weights) | fp32 | auto (bf16 where the chip has it)
    compile: bool | None = None     # torch.compile; none: on cuda only
    threads: int | None = None      # of a CPU; none: one per core, fewer on a busy machine
    deterministic: bool = False     # the same bits in every run, for exact resuming on cuda; slower
    max_steps: int = 1000           # optimizer steps
    batch_tokens: int = 8192        # tokens per optimizer step, over all ranks
    seq_len: int = 1024             # tokens per sequence
    micro_batch: int | None = None  # sequences per forward and rank: memory, not results; none: 32,768 tokens or fewer
    optimizer: str = "muon"         # muon (matrices of the blocks; AdamW for the rest) | adamw
    muon_lr: float = 0.02           # peak rate of Muon
    adamw_lr: float = 0.004         # peak rate of AdamW: embeddings, head, norms; under --optimizer adamw also matrices
    mix_lr: float | None = None     # peak rate of AdamW for what mixes across layers, see muon.py; none: adamw_lr
    weight_decay: float = 0.1       # on the matrices only; cautious under Muon
    second_moment: float | None = None  # Muon: rate of the row/column normalisation (ExoFormer: 0.95); none: off
    schedule: str = "wsd"           # wsd (constant, then a linear decay) | cosine; both after linear warm-up
    final_lr_frac: float = 0.1      # rate at the end, as a part of the peak
    warmup_steps: int = 100         # steps of warm-up
    decay_frac: float = 0.2         # part of the steps in wsd's final decay
    grad_clip: float = 1.0          # largest gradient norm
    eval_every: int = 250           # steps between validations; also at step 0 and at the end
    eval_tokens: int = 1048576      # tokens of the validation split that are scored, the same ones each time
    final_eval_tokens: int | None = None    # tokens that are scored after the last step; none: eval_tokens
    save_every: int | None = None   # steps between checkpoints; none: eval_every
    sample_every: int | None = None # steps between samples of text, at validations; none: no samples
    wandb: bool = False             # also log to Weights & Biases (pip install wandb)
    tensorboard: bool = False       # also log to TensorBoard, in the run folder (pip install tensorboard)

    def __post_init__(self):
        check_types(Options, vars(self))
        for name in ("max_steps batch_tokens seq_len micro_batch muon_lr adamw_lr mix_lr grad_clip eval_every "
                     "eval_tokens final_eval_tokens save_every sample_every threads").split():
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name} must be positive, not {getattr(self, name)}")
        for name, allowed in dict(optimizer="muon adamw", schedule="wsd cosine", dtype="auto bf16 fp32").items():
            if getattr(self, name) not in allowed.split():
                raise ValueError(f"--{name} must be one of {allowed}, not {getattr(self, name)!r}")
        limits = dict(decay_frac=1, final_lr_frac=1, second_moment=1, warmup_steps=self.max_steps, weight_decay=10 ** 9,
                      threads=1024, seed=2 ** 63 - 1)
        for name, most in limits.items():
            if not 0 <= (getattr(self, name) or 0) <= most:
                raise ValueError(f"--{name} must lie between 0 and {most:,}, not {getattr(self, name)}")


def parse(argv):
    return command.parse(argv, Options, __doc__, constant_until)


def lr_scale(step, options):
    """The rate of optimizer step `step` (from 0) as a part of the peak."""
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    if options.schedule == "cosine":
        done = (step - options.warmup_steps) / max(1, options.max_steps - options.warmup_steps)
        return (1 + options.final_lr_frac) / 2 + (1 - options.final_lr_frac) / 2 * math.cos(math.pi * done)
    n_decay = round(options.decay_frac * options.max_steps)
    decayed = max(0, step + 1 - (options.max_steps - n_decay)) / max(1, n_decay)
    return 1.0 - (1 - options.final_lr_frac) * decayed


def constant_until(options):
    """The steps after which nothing of a wsd run's end has begun, so that it may become longer; else -1."""
    n_momentum = muon.momentum_span(options.max_steps) if options.optimizer == "muon" else 0
    n_last = max(n_momentum, round(options.decay_frac * options.max_steps))
    return options.max_steps - n_last if options.schedule == "wsd" else -1


def find_ranks(options):
    """This process among the ranks; sets what the options leave to the device."""
    ranks = Ranks(options.device, options.deterministic)
    if ranks.device.type == "cpu":
        options.threads = set_threads(options.threads)
    options.dtype = choose_dtype(ranks.device, options.dtype)
    if options.compile is None:
        options.compile = ranks.device.type == "cuda"
    return ranks


def build_model(options, config, flags, data, device):
    """The model for training, with room for the data's vocabulary; its weights initial or those of --init_from."""
    if "vocab_size" in flags and config["vocab_size"] < data.vocab_size:
        raise UserError(f"--vocab_size {config['vocab_size']} is smaller than that of the data, {data.vocab_size}")
    config["vocab_size"] = max(config.get("vocab_size", 0), data.vocab_size)
    if not (options.resume or options.init_from):           # a GPU multiplies rows of whole 128 bytes faster
        config["vocab_size"] = 64 * math.ceil(config["vocab_size"] / 64)
    torch.manual_seed(options.seed)
    with user_errors(f"{options.model}: "), machine_errors("the model alone does not fit: take a smaller one"):
        model = models.build(options.model, **config)
    if options.seq_len > model.config.max_len:
        raise UserError(f"--seq_len {options.seq_len} is longer than the model's max_len: "
                        f"add --max_len {options.seq_len}")
    if options.init_from and not options.resume:
        check_tokens(data, options.init_from, runs.read_checkpoint(options.init_from)["config"])
        runs.take_weights(model, options.init_from)
    model.to(device).train()
    if options.compile:
        torch._dynamo.config.optimize_ddp = False                           # DDP would cut the graph into many
        model.compile(dynamic=False)                                        # in place: state-dict keys keep their names
    return model


def train_step(step, model, optimizers, batches, options, ranks, signals):
    """Batch, accumulate, clip, step -> loss in nats per token and gradient norm, over all ranks; whether a signal came.
    The loss is what is optimised, with the model's own penalties. If it is not finite, the step is not taken.
    """
    loss = torch.zeros((), device=ranks.device)                             # stays on the device until the step is done
    for i, (idx, targets) in enumerate(batches.train(step)):
        if ranks.parallel:
            model.require_backward_grad_sync = i == batches.n_micro - 1     # average gradients once a step
        with autocast(ranks.device, options.dtype):
            micro_loss = model(idx, targets)[1] / batches.n_micro
        micro_loss.backward()
        loss += micro_loss.detach()
        del micro_loss                                                      # and its graph, before the next is built
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
    signalled = torch.tensor(float(len(signals)), device=ranks.device)
    loss, grad_norm, signalled = (ranks.sum(torch.stack((loss, grad_norm, signalled))) / ranks.world).tolist()
    if math.isfinite(loss + grad_norm):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * lr_scale(step, options)
                if "momentum" in group:                                     # Muon's
                    group["momentum"] = muon.momentum_at(step, options.max_steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not ranks.parallel)             # several ranks: kept in DDP's buckets
    return loss, grad_norm, signalled > 0


def validate(step, model, batches, options, ranks, console):
    """Scores of the validation split and learned quantities of the mechanism: a row of the log. None after a signal."""
    last = step == options.max_steps
    n_tokens = options.final_eval_tokens if last and options.final_eval_tokens else options.eval_tokens
    began, context = time.perf_counter(), autocast(ranks.device, options.dtype)
    watched = console.validating(batches.val(n_tokens), batches.n_val(n_tokens))
    row = scoring.evaluate(model, watched, batches.token_bytes, context, ranks.sum)
    if ranks.sum(torch.tensor(float(len(console.signals)), device=ranks.device)):
        return None
    row |= {"eval_s": time.perf_counter() - began, "peak_bytes": peak_bytes(ranks.device)}
    if ranks.rank == 0:
        with context:
            row["stats"] = record.stats(options.model, model, batches.sample())
            console.validated(step, row)
            if options.sample_every and (last or step % options.sample_every == 0) and math.isfinite(row["loss"]):
                console.sample(model, load_tokenizer(batches.data.tokenizer))
    return row


@machine_errors("halve --micro_batch (same results, in more micro-steps), or --batch_tokens, or take a smaller model")
def main(argv):
    """Returns the exit code: 0; 1 if the last checkpoint was not written; 3 if a loss is not finite; 128 + signal."""
    options, config, flags = parse(argv)
    trackers = runs.trackers(options)
    ranks = find_ranks(options)
    folder = data_prep.train_folder(options.data, ranks.rank == 0, options.resume)
    ranks.wait()                                                            # the first rank makes the default data
    data = Data(folder)
    model = build_model(options, config, flags, data, ranks.device)
    batches = Batches(data, options, ranks, model)
    with user_errors(f"models/{options.model}.py: "):
        optimizers = muon.optimizers(
            model, options.optimizer, options.muon_lr, options.adamw_lr, options.weight_decay, options.second_moment,
            torch.bfloat16 if options.dtype == "bf16" else None, options.mix_lr)
    wrapped = ranks.wrap(model)
    sources = models.module(options.model).__file__, __file__, muon.__file__
    if options.resume:
        run = runs.Run.resume(options, flags, model, data, ranks, partial(muon.set_states, optimizers, model))
    else:
        run = runs.Run.new(options, model, data, ranks, sources)
    run.open_log(**trackers)
    console = Console(run, options.max_steps)
    flops, peak = 3 * flops_per_token(model, options.seq_len), peak_flops(ranks.device)    # backward: twice forward
    console.introduce(run, options, model, batches, flops, runs.changed(run.path, sources))

    def save(step):
        if step > run.saved:
            console.say(run.save(step, model, muon.get_states(optimizers, model)))

    def stop(step):
        save(step)
        return console.interrupted(step, run)

    before_decay = constant_until(options)
    for step in range(run.start, options.max_steps + 1):                    # the last turn validates and saves
        last = step == options.max_steps
        if (last or step % options.eval_every == 0) and step > run.evaluated:
            row = validate(step, model, batches, options, ranks, console)
            if row is None:
                return stop(step)
            run.log("val", step, **row)
            if not math.isfinite(row["loss"]):
                return console.diverged(f"step {step}: the validation loss is {row['loss']}: stopped", run)
        if last or step % (options.save_every or options.eval_every) == 0 or step == before_decay:
            save(step)
        if step == before_decay:
            console.say(run.keep_before_decay())
        if last:
            break
        began = time.perf_counter()
        loss, grad_norm, signalled = train_step(step, wrapped, optimizers, batches, options, ranks, console.signals)
        if not math.isfinite(loss + grad_norm):
            return console.diverged(f"step {step + 1}: loss {loss}, gradient norm {grad_norm}: stopped before the "
                                    "optimizer step", run)
        seconds = time.perf_counter() - began
        speed, lr = options.batch_tokens / seconds, optimizers[0].param_groups[0]["lr"]
        row = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "ms": seconds * 1000, "tok_s": speed}
        row |= {"mfu": speed * flops / (peak * ranks.world)} if peak else {}
        run.log("train", step + 1, **row)
        console.trained(step + 1, row)
        if signalled:
            return stop(step + 1)
    return console.done(run)


if __name__ == "__main__":
    run_script("train.py", lambda argv: leave_together(main(argv)))
