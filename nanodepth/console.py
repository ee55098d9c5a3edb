"""What a training run says: a progress bar on a terminal, elsewhere a line now and then. And how it hears Ctrl-C."""
import os
import signal
import sys
import time

import torch
from tqdm import tqdm

from muon import split_params
from nanodepth.options import shell

QUIET = 30                                      # seconds that a validation may take without a line


def amount(n):
    """A number of tokens, short: 5,120, 1.5M, 10.0B."""
    if n < 1e6:
        return f"{n:,}"
    return f"{n / 1e6:.1f}M" if n < 1e9 else f"{n / 1e9:.1f}B"


class Console:
    """What the first rank prints; the other ranks are silent.

    signals: numbers of the SIGINTs and SIGTERMs so far. The first asks for an end after the step, or in the middle of a
    validation; the second ends the process at once.
    """

    def __init__(self, run, n_steps):
        self.silent, self.n_steps, self.first, self.began = not run.writes, n_steps, run.start, time.monotonic()
        self.spent = 0.0
        self.terminal, self.signals = not self.silent and sys.stderr.isatty(), []
        self.bar = tqdm(total=n_steps, initial=run.start, unit="step", disable=not self.terminal)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):
        self.signals.append(number)
        signal.signal(number, signal.SIG_DFL)
        if not self.silent:                                                 # print may be in use
            os.write(2, b"\nstopping after this step; again to quit now\n")

    def say(self, text):
        if text and not self.silent:
            try:
                self.bar.write(text)
                sys.stdout.flush()
            except BrokenPipeError:                                         # `| head` has seen enough
                self.silent, sys.stdout = True, open(os.devnull, "w")

    def introduce(self, run, options, model, batches, flops, changed):
        """What is going to be trained, on what and how. flops: per token, there and back; changed: runs.changed()'s."""
        data, ranks, n_tokens = batches.data, batches.ranks, options.max_steps * options.batch_tokens
        n_params = sum(p.numel() for p in model.parameters())
        n_matrix = sum(p.numel() for p in split_params(model)[0])
        size = model.config.vocab_size
        padded = f", padded to {size:,}" if size != data.vocab_size else ""
        self.say(f"{options.model}, preset {options.preset}: {n_params:,} parameters, {n_matrix:,} in "
                 f"matrices of the blocks ({options.optimizer}; the rest adamw); {flops / 1e6:,.1f} MFLOPs/token")
        self.say(f"{data.path}: {data.n_train:,} training tokens, {data.n_val:,} for validation, "
                 f"vocabulary {data.vocab_size:,}{padded}")
        self.say(f"{options.batch_tokens:,} tokens/step = {batches.micro} seq x {options.seq_len:,} x "
                 f"{batches.n_micro} micro-steps x {ranks.world} ranks; {options.max_steps:,} steps = "
                 f"{amount(n_tokens)} tokens = {batches.n_epochs:.2g} epochs")
        how, on_cpu = "compiled" if options.compile else "eager", ranks.device.type == "cpu"
        threads = f" ({torch.get_num_threads()} threads)" if on_cpu else ""
        self.say(f"{ranks.device}{threads}, {options.dtype}, {how}, torch {torch.__version__}; "
                 f"to resume: {shell('train.py', '--resume', run.path)}")
        if options.init_from and not options.resume:
            self.say(f"starting with the weights of {options.init_from}")
        if options.resume:
            self.say(f"going on at step {run.start} of {options.max_steps}" if run.start < options.max_steps else
                     f"{run.path} is finished: it has all its {options.max_steps} steps")
            for old in changed:
                self.say(f"{old} is what the run began with: the file is another now")

    def left(self, seconds, done, total):
        """Elapsed time, and what is left at this pace."""
        form = tqdm.format_interval
        return f"{form(seconds)} elapsed, {form(seconds / done * (total - done))} left"

    def validating(self, batches, total):
        """Yields the batches, of which there are about `total`, and shows how far they are; stops after a signal."""
        began = said = time.monotonic()
        for i, batch in enumerate(tqdm(batches, "validation", total, leave=False, delay=1, disable=not self.terminal)):
            yield batch
            if self.signals:
                return
            if not self.terminal and time.monotonic() - said > QUIET:
                said = time.monotonic()
                self.say(f"validation: {i + 1} of {total} batches | {self.left(said - began, i + 1, total)}")

    def validated(self, step, row):
        """One line about a validation."""
        bits = "" if row["bpb"] is None else f" | {row['bpb']:.4f} bits/byte"
        self.say(f"step {step:5d}/{self.n_steps} | val {row['loss']:.4f} nats | ppl {row['ppl']:.2f}{bits} "
                 f"| {row['eval_tokens']:,} tokens in {row['eval_s']:.1f} s")

    def trained(self, step, row):
        """One step more, with the row of the log about it."""
        texts = {"loss": f"{row['loss']:.4f}", "lr": f"{row['lr']:.2e}", "tok/s": f"{row['tok_s']:,.0f}"}
        if "mfu" in row:
            texts["mfu"] = f"{row['mfu']:.1%}"
        self.spent += row["ms"] / 1000                                      # in steps, not in validations
        self.bar.update()
        self.bar.set_postfix(texts)
        if not self.terminal and (step == self.first + 10 or step % max(1, self.n_steps // 20) == 0):
            left = self.spent / (step - self.first) * (self.n_steps - step)
            self.say(f"step {step:5d}/{self.n_steps} | {' | '.join(f'{name} {x}' for name, x in texts.items())} "
                     f"| {tqdm.format_interval(time.monotonic() - self.began)} elapsed, "
                     f"about {tqdm.format_interval(left)} left")

    def sample(self, model, tokenizer):
        """A text that the model begins by itself; the random numbers of training are not touched."""
        if self.silent:
            return
        model.eval()
        start = torch.full((1, 1), tokenizer.eot_token, device=next(model.parameters()).device)
        generator = torch.Generator(start.device).manual_seed(0)
        length = min(100, model.config.max_len - 1)
        tokens = model.generate(start, length, 0.8, 50, generator, n_vocab=tokenizer.n_vocab)[0, 1:].tolist()
        model.train()
        self.say(f"--- {tokenizer.decode(tokens)}\n---")

    def interrupted(self, step, run):
        """The last words and the exit code after a signal."""
        again = "" if run.save_failed else f"; to resume: {shell('train.py', '--resume', run.path)}"
        self.close(f"interrupted after step {step}{again}")
        return 128 + (self.signals[0] if self.signals else 15)              # another rank's: SIGTERM

    def diverged(self, text, run):
        """The last words and the exit code after a loss that is not finite."""
        self.close(f"{text}; {run.newest()}")
        return 3

    def done(self, run):
        """The last words and the exit code after the last step: 1 if its checkpoint could not be written."""
        self.close("" if run.save_failed else f"done: {shell('sample.py', run.path)}; {shell('eval.py', run.path)}")
        return 1 if run.save_failed else 0

    def close(self, text):
        """Ends the progress bar and says a last thing."""
        self.bar.close()
        self.say(text)
