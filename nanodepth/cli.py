"""The command line: turns its arguments into fields of dataclasses, and reports each mistake in one line."""
import argparse
import difflib
import errno
import inspect
import os
import re
import shlex
import signal
import sys
import typing
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

from tqdm import tqdm

import models
from models import UserError, user_errors  # noqa: F401

ELSEWHERE = {  # what nanoGPT, nanochat and transformers call our flags
    "muon_lr --adamw_lr": "lr learning_rate", "d_model": "n_embd hidden_size", "d_model --n_head": "head_dim",
    "n_layer": "num_hidden_layers depth", "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads",
    "d_ff": "intermediate_size", "max_len": "max_position_embeddings", "seq_len": "block_size max_seq_len",
    "batch_tokens --micro_batch": "batch_size total_batch_size device_batch_size per_device_train_batch_size "
                                  "gradient_accumulation_steps",
    "max_steps": "max_iters num_iterations epochs num_train_epochs", "eval_every": "eval_interval eval_steps",
    "schedule": "lr_scheduler_type decay_lr", "final_lr_frac": "min_lr", "warmup_steps": "warmup_iters",
    "eval_tokens": "eval_iters", "save_every": "save_steps", "grad_clip": "max_grad_norm", "out": "out_dir output_dir",
    "data": "dataset", "wandb": "wandb_log report_to", "init_from": "model_name_or_path", "train_bpe": "vocab_size",
    "resume": "resume_from_checkpoint", "dtype": "bf16 fp16", "prompt": "start", "n": "num_samples",
    "max_new_tokens": "max_length"}


def run_script(script, main, memory="use a smaller model, or fewer tokens at a time"):
    """Exits with the code that main(arguments) returns. memory: advice for the user if memory runs out."""
    for stream in (sys.stdout, sys.stderr):                     # escapes characters that the terminal lacks
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            sys.exit(main(sys.argv[1:]))
        finally:
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as e:
        if isinstance(e, OSError):                              # if stdout is full or closed, Python would flush again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(exit_code(script, e, memory))


def exit_code(script, error, memory=""):
    """The exit code for an error. One that the user can fix becomes one line on stderr; a bug is raised again."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):                                  # `| head` closed the pipe
        return 128 + signal.SIGPIPE
    known = error if isinstance(error, UserError) else of_the_machine(error, memory)
    if known is None:
        raise error
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    line = str(known).replace("\n", "\\n").replace("\r", "\\r")               # as in the name of a file
    print(f"{script}: {'error: ' if known.code == 2 else ''}{rank}{line}", file=sys.stderr, flush=True)
    return known.code


def of_the_machine(error, memory):
    """The UserError for an error of memory, disk, files, packages or other processes; None for any other error."""
    text, full = str(error), (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    disk = next((e for e in (error, error.__context__) if getattr(e, "errno", None) in full), None)
    if out_of_memory(error):
        return UserError(f"out of memory: {memory}")
    if disk:
        return UserError(f"{disk.strerror}: stopped; free some space and run it again (train.py: with --resume if "
                         "there is a checkpoint)", code=1)
    if isinstance(error, OSError) and error.filename:
        return UserError(f"{error.filename2 or error.filename}: {error.strerror}")
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0]                                  # if it is there, it is a typo: a bug
        return None if sys.modules.get(package) else UserError(
            f"this needs a package that is missing: pip install {package}")
    if type(error).__name__.startswith("Dist") or "/gloo/" in text:         # torch.distributed's errors
        return UserError(f"another process has died, so this one stopped: go on with --resume ({one_line(error)})", 1)
    if type(error).__module__.startswith("wandb"):
        return UserError(f"--wandb: {one_line(error)}")


def out_of_memory(error):
    """Whether this exception means that the memory of the GPU or of the CPU is full."""
    said = "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory"
    return type(error).__name__ in ("OutOfMemoryError", "MemoryError") or any(words in str(error) for words in said)


def one_line(error):
    """The first line of an exception's message, and the second if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 or not lines[0].endswith(":") else f"{lines[0]} {lines[1]}"


def shell(script, *words):
    """The command that runs a script with these arguments; train.py under torchrun if this process is."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1") if script == "train.py" else "1"
    start = ["python"] if ranks == "1" else ["torchrun", "--standalone", "--nproc_per_node", ranks]
    return shlex.join([*start, script, *map(str, words)])


def run_folder(path):
    """The path of a run folder, also for its ckpt.pt."""
    path = Path(os.path.expanduser(path))
    return str(path.parent if path.name == "ckpt.pt" and os.path.isfile(path) else path)


def progress(*given, **how):
    """A bar on stderr, as tqdm's. Where that is no terminal it is shown after a minute, and then once a minute."""
    pace = {} if sys.stderr.isatty() else dict.fromkeys(("delay", "mininterval", "maxinterval"), 60)
    return tqdm(*given, leave=False, **pace, **how)


@contextmanager
def signals(after="this step"):
    """A list that gets the number of a signal which asks this process to stop. A second Ctrl-C ends it at once.

    after: what will be finished first, for the message.
    """
    got = []

    def on_signal(number, frame):
        got.append(number)
        if number == signal.SIGINT:                             # torchrun and shells repeat the others
            signal.signal(number, signal.SIG_DFL)
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):                             # the terminal may be gone
                again = "; Ctrl-C again quits now" if number == signal.SIGINT else ""
                os.write(2, f"\nstopping after {after}{again}\n".encode())

    stops = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
    before = {number: signal.signal(number, on_signal) for number in stops
              if signal.getsignal(number) != signal.SIG_IGN}    # SIGHUP is ignored under nohup
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def out_file(path):
    """The Path of an output file. ArgumentTypeError now, before the work, if it cannot be written."""
    if Path(path).is_dir() or not Path(path).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: it is a folder, or its folder does not exist")
    return Path(path)


class Parser(argparse.ArgumentParser):
    """Reports a mistake in the flags in one line, with exit code 2. For an unknown flag it suggests the nearest."""

    def __init__(self, prog=None, **settings):
        super().__init__(prog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def error(self, message):
        raise UserError(message)

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return parsed
        commands = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        parsers = [self, *(command.choices[getattr(parsed, command.dest)] for command in commands)]
        flags = [flag for parser in parsers for action in parser._actions for flag in action.option_strings]
        known, asked = [flag[2:] for flag in flags if flag[:2] == "--"], unknown[0].split("=")[0].lstrip("-")
        ours = next((names.split(" --") for names, words in ELSEWHERE.items()
                     if asked.replace("-", "_") in words.split()), [])
        near = [flag for flag in ours if flag in known] or difflib.get_close_matches(asked, known, 1, 0.65)
        advice = f"did you mean {' or '.join(f'--{flag}' for flag in near)}?" if near else "see --help"
        self.error(f"unknown argument {unknown[0]}: {advice}")


def add_options(parser, title, cls, defaults):
    """Adds one flag per field of the dataclass `cls`. The comment after a field is the help of its flag.

    Flags that are not given are missing from the parsed namespace. defaults: shown instead of the fields' own. A bool
    is --x, --x true, --x=false or --no-x.
    """
    group = parser.add_argument_group(title)
    notes = dict(re.findall(r"^    (\w+): .*? # (.*)$", inspect.getsource(cls), re.M))
    types = typing.get_type_hints(cls)
    for f in fields(cls):
        (kind,), default = models.kinds(types[f.name]), defaults.get(f.name, f.default)
        shown = str(default).lower() if default is None or kind is bool else default
        text = f"{notes.get(f.name, '')} [{shown}]".replace("%", "%%")
        how = dict(nargs="?", const=True) if kind is bool else {}
        group.add_argument(f"--{f.name}", type=reader(types[f.name]), default=argparse.SUPPRESS, help=text,
                           metavar={int: "N", float: "X", bool: "true|false"}.get(kind, f.name.upper()), **how)
        if kind is bool:
            group.add_argument(f"--no-{f.name}", dest=f.name, action="store_const", const=False,
                               default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def reader(hint):
    """A function that turns a word into a value of this type (or type | None). ValueError if it cannot."""
    kind, = models.kinds(hint)

    def read(word):
        if word.lower() == "none" and hint is not kind:
            return None
        if kind is bool and word.lower() not in ("true", "false"):
            raise ValueError(word)
        return word.lower() == "true" if kind is bool else kind(word)

    read.__name__ = kind.__name__                                           # for argparse's messages
    return read


def pick(cls, values):
    """The items of `values` that are fields of the dataclass `cls`."""
    return {f.name: values[f.name] for f in fields(cls) if f.name in values}
