"""The run folder: makes, locks, logs, saves, resumes and loads it.

    config.json   everything needed to repeat the run, with command, data, git commit and versions
    source/       the code that ran: the model file and what it imports, train.py, muon.py, parts of nanodepth/
    log.jsonl     one object per line: kind (train or val), step, tokens and what was measured
    ckpt.pt       the newest checkpoint
    before_decay/ wsd only: the folder as it was before the learning rate decayed, to train longer from there
"""
import fcntl
import json
import os
import platform
import secrets
import shutil
import sys
import zlib
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path

import numpy as np
import torch

import models
import muon
from nanodepth import ran
from nanodepth.cli import UserError, one_line, pick, run_folder
from nanodepth.data import check_data
from nanodepth.devices import processor, random_state, set_random_state

MAY_CHANGE = ran.FREE - {"seed", "preset", "init_from", "out", "deterministic"} | {"max_steps"}  # of a run that goes on
OF_A_RUN = {"config.json", "source", "log.jsonl", "tokenizer.tiktoken"}             # written before a checkpoint


def write_atomically(path, write):
    """Calls write(file) on a temporary file, which then replaces path, so that path is complete at all times."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def to_json(x, indent=None):
    """Strict JSON of dicts, lists and numbers, with null for numbers that are not finite."""
    return json.dumps(json.loads(json.dumps(x), parse_constant=lambda name: None), indent=indent) + "\n"


def write_text(path, text):
    """write_atomically() for a text."""
    write_atomically(path, lambda f: f.write(text.encode()))


@contextmanager
def folder_atomically(out):
    """A temporary sibling of `out`. If the block succeeds, it becomes `out`, else it is deleted."""
    temporary = out.with_name(f"{out.name[:50]}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, out)                                           # fails if `out` is not empty
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------- reading


def read_config(run_dir):
    """The config.json of a run folder with a checkpoint. UserError if missing, broken, or of an older model file."""
    path = Path(run_dir) / "ckpt.pt"
    if not os.path.isfile(path):
        raise UserError(f"{path} does not exist: {run_dir} is neither a run that has saved a checkpoint nor a folder "
                        "made by convert.py")
    try:
        config = json.loads(path.with_name("config.json").read_bytes())
        if lacks := {"model", "model_config", "options", "data", "tokenizer"} - config.keys():
            raise KeyError(min(lacks))
    except (ValueError, KeyError, AttributeError) as e:
        raise UserError(f"{run_dir}/config.json is not that of a run ({type(e).__name__}: {one_line(e)})") from None
    name = config["model"]
    if gone := set(config["model_config"]) - {f.name for f in fields(models.module(name).Config)}:
        raise UserError(f"{run_dir} was trained with an older {models.path(name)}, which had "
                        f"{', '.join(sorted(gone))}: that file is in {run_dir}/source")
    return config


def read_checkpoint(run_dir):
    """{"model", "optimizers", "random", "step"} of a run folder and its "config". UserError if they cannot be read."""
    config, path = read_config(run_dir), Path(run_dir) / "ckpt.pt"
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return checkpoint | {"model": checkpoint["model"], "step": checkpoint["step"], "config": config}
    except Exception as e:  # torch raises many kinds: truncated zip, foreign file, pickled code
        raise UserError(f"{path} is not a readable checkpoint of train.py ({type(e).__name__}: {one_line(e)[:80]}): "
                        "restore it from a copy, or train again with another --out") from None


def load(run_dir, device="cpu"):
    """(model in eval mode, config with the step) of a run folder. UserError if its checkpoint is missing or broken."""
    checkpoint = read_checkpoint(run_dir)
    config, step = checkpoint["config"], checkpoint["step"]
    model, now = models.build(config["model"], **config["model_config"]), models.module(config["model"])
    take_weights(model, checkpoint, f"{models.path(config['model'])} as it is today (see {run_dir}/source)", run_dir)
    for file in changed(config, ran.digests(ran.closure([now]))):
        print(f"{file}, as imported, differs from the copy in {run_dir}/source", file=sys.stderr)
    if step < config["options"].get("max_steps", step):                     # still in training, or interrupted
        print(f"{run_dir} is at step {step} of {config['options']['max_steps']}", file=sys.stderr)
    return model.to(device).eval(), config | {"step": step}


def code_of_training(options):
    """ran.code() of the run that this process trains. Its script is train.py, or a copy of it."""
    return ran.code(models.module(options.model), sys.modules.get(type(options).__module__))


def changed(config, code):
    """[file]: those of this ran.code() which are not what the run was trained with, or last resumed with."""
    return [file for file, now in code.items() if config.get("code", code).get(file, "none").split()[-1] != now]


def take_weights(model, checkpoint, what, run_dir):
    """Loads the weights of a checkpoint into the model. UserError if they do not fit; what: the model in words."""
    try:
        model.load_state_dict(checkpoint["model"])
    except (KeyError, TypeError, AttributeError, RuntimeError) as e:
        raise UserError(f"the weights of {run_dir} do not fit {what}: {one_line(e)[:200]}") from None
    saved, first = checkpoint["model"], {}
    for name, weight in model.state_dict().items():                         # one parameter may have two names
        other = first.setdefault(weight.data_ptr() if weight.numel() else name, name)
        if name != other and not torch.allclose(saved[name], saved[other], rtol=0, atol=0, equal_nan=True):
            raise UserError(f"the weights of {run_dir} do not fit {what}: {name} is the same parameter as {other}, "
                            "which has other numbers there")


def own_state(optimizer, saved):
    """The saved state of an optimizer with the settings that it has now. ValueError if it trains other parameters."""
    own = optimizer.state_dict()
    old, new = ({name: i for group in state["param_groups"] for name, i in zip(group["names"], group["params"])}
                for state in (saved, own))
    if old.keys() != new.keys():
        raise ValueError(f"{min(old.keys() ^ new.keys())} is trained by another optimizer, or not at all")
    state = {i: {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in saved["state"][old[name]].items()}
             for name, i in new.items() if old[name] in saved["state"]}     # copies: a new checkpoint replaces the file
    return {"state": state, "param_groups": own["param_groups"]}


def log_rows(path, last):
    """The rows of log.jsonl up to the step `last`. Skips broken lines, since a crash may have cut off the last one."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            if row["kind"] and row["step"] <= last:
                rows.append(row)
        except (ValueError, KeyError, TypeError):
            pass
    return rows


# -------------------------------------------------------------------------------------------- going on with a run


def earlier(asked):
    """The config.json of the run that --resume or --init_from (of `asked`) names, or {}. --resume auto becomes a run
    folder, or None. UserError for a run that cannot be used so.
    """
    asked.out = asked.out and os.path.expanduser(asked.out)                 # bash leaves --out=~/x as it is
    if asked.resume == "auto":
        if asked.out is None:
            raise UserError("--resume auto needs --out: the folder to continue, or to begin")
        asked.resume = asked.out if os.path.isfile(Path(asked.out, "ckpt.pt")) else None
    asked.resume, asked.init_from = (path and run_folder(path) for path in (asked.resume, asked.init_from))
    if not (source := asked.resume or asked.init_from):
        return {}
    config = read_config(source)
    if asked.resume and "converted" in config:
        raise UserError(f"{source} has converted weights and no optimizers: start a new run with --init_from {source}")
    return config


def check_flags(flags, run_dir, defaults):
    """UserError if a flag contradicts the options that the resumed run has. Takes out --dtype auto."""
    if flags.get("dtype") == "auto":                                        # it was chosen when the run began
        del flags["dtype"]
    both, Config = {**defaults, **flags}, models.module(defaults["model"]).Config
    both |= vars(models.config(defaults["model"], **pick(Config, both)))    # where none stands for another value
    for key, value in flags.items():
        if key not in MAY_CHANGE and both[key] != defaults.get(key):
            raise UserError(f"--{key} {value} contradicts the run in {run_dir}, which has {defaults.get(key)}: "
                            "leave it out")


def check_length(options, max_steps, step):
    """UserError if a run of max_steps steps cannot continue from this one with options.max_steps."""
    run, falls = options.resume, min(map(muon.constant_until, (options, replace(options, max_steps=max_steps))))
    if step > falls:
        why = ("a cosine schedule has one length" if falls < 0 else
               f"rate or momentum of the shorter run fall from step {falls} on")
        raise UserError(f"--max_steps {options.max_steps}: {run} is at step {step} of {max_steps}, and {why}: resume a "
                        f"copy of {run}/before_decay, if that is early enough, or start a new run with "
                        f"--init_from {run}")


# --------------------------------------------------------------------------------------------------------- the folder


def new_folder(options):
    """Makes the run folder. A default name gets the next free number; --out may exist if it holds no checkpoint."""
    numbered = (f"runs/{options.model}-{options.preset}{'' if i == 1 else f'-{i}'}" for i in range(1, 10 ** 6))
    for path in map(Path, numbered if options.out is None else [options.out]):
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if options.out is not None:
                left_over(path)
                return path


def left_over(path):
    """What a run without a checkpoint has left in this folder. UserError if anything else is in it."""
    found = {file.name for file in path.iterdir()} - {".lock"}
    if "ckpt.pt" in found:
        raise UserError(f"{path} exists: choose another --out, or go on with --resume {path}")
    if others := found - OF_A_RUN - {"ckpt.pt.tmp", "config.json.tmp"}:
        raise UserError(f"{path} exists and has {min(others)} in it, which no run writes: choose another --out")
    return found


def lock(path):
    """Locks the folder until this process ends in any way; returns the open file. UserError if another holds it."""
    handle = open(path / ".lock", "w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path} is in use by another process") from None
    except OSError as e:                                                    # some network file systems have no locks
        print(f"{path} cannot be locked ({e.strerror}): make sure that no other process uses it", file=sys.stderr)
    return handle


class Run:
    """A run in training, and its folder. Every rank has a Run, but only the first rank locks the folder and writes.

    path; config, as in config.json; options, model, optimizers, ranks; start: the first step; saved, evaluated: the
    steps of the newest checkpoint and of the newest validation before `start`, or -1; save_failed: whether writing the
    latest checkpoint failed; edited: the files of code that have changed since it last trained.
    """

    def __init__(self, path, config, options, model, optimizers, ranks):
        self.path, self.config, self.options, self.ranks, self.writes = path, config, options, ranks, ranks.rank == 0
        self.model, self.optimizers, self.edited = model, optimizers, []
        self.start, self.saved, self.evaluated, self.save_failed, self.wandb = 0, -1, -1, False, None
        self.lock, self.place = (lock(path), path.stat()) if self.writes else (None, None)

    @classmethod
    def new(cls, options, asked, model, optimizers, data, ranks):
        """Makes the folder with config.json, the tokenizer and the source files that ran. UserError if it exists.

        asked: the options without what this machine has offered for some of them.
        """
        path = ranks.share(new_folder(options) if ranks.rank == 0 else None)
        versions = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
        config = {
            "model": options.model, "model_config": asdict(model.config),
            "options": {**asdict(asked), "out": str(path)},
            "defaults": {f.name: f.default for part in (options, model.config) for f in fields(part)},
            "code": code_of_training(options), "began": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            "parameters": sum(p.numel() for p in model.parameters()),
            "begins_with": ran.checksum(model) if options.init_from else None,
            "tokenizer": data.tokenizer, "n_vocab": data.vocab_size,
            "data": {**data.place(), "fingerprint": data.fingerprint, "meta": data.meta},
            "command": [sys.executable, *sys.argv], "git": ran.git_state(), "ranks": ranks.world, "versions": versions,
            "gpu": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else None,
            "cpu": processor(), "id": os.urandom(4).hex()}
        run = cls(path, config, options, model, optimizers, ranks)
        if run.writes:
            for old in left_over(path):                                     # we hold the lock now
                shutil.rmtree(path / old) if (path / old).is_dir() else (path / old).unlink()
            ran.copy(config["code"], path / "source")
            if data.tokenizer not in ("gpt2", "byte"):
                shutil.copy(data.tokenizer, path / "tokenizer.tiktoken")
            write_text(path / "config.json", json.dumps(config, indent=1))
            run.open_log()
        return run

    @classmethod
    def resume(cls, options, flags, model, optimizers, data, ranks):
        """Continues a run from its checkpoint: loads the model, the optimizers and the random state, and cuts the log
        off there. flags: those of the command line, which config.json then records. If the checkpoint does not fit,
        a UserError, and no file changes.
        """
        path = Path(options.resume)
        run, code = cls(path, None, options, model, optimizers, ranks), code_of_training(options)
        ranks.share(None)                                                   # wait until the folder is locked
        checkpoint = read_checkpoint(path)                                  # which no other process replaces now
        run.config = config = checkpoint["config"]
        step, run.edited = checkpoint["step"], changed(config, code)
        if options.max_steps != config["options"]["max_steps"]:
            check_length(options, config["options"]["max_steps"], step)
        check_data(data, path, config)
        take_weights(model, checkpoint, f"{models.path(options.model)} as it is today (see {path}/source)", path)
        try:
            for optimizer, state in zip(optimizers, checkpoint["optimizers"], strict=True):
                optimizer.load_state_dict(own_state(optimizer, state))
            if ranks.rank < len(checkpoint["random"]):                      # else a new rank, which has its own seed
                set_random_state(checkpoint["random"][ranks.rank], ranks.device)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{path}/ckpt.pt does not fit train.py and muon.py as they are today (see {path}/source): "
                            f"{type(e).__name__}: {one_line(e)}") from None
        run.start = run.saved = step
        config["options"] |= {name: x for name, x in vars(options).items() if name in flags and name != "resume"}
        if "data" in flags:                                                 # eval.py looks there
            config["data"] |= data.place()
        if step < options.max_steps:                                        # what runs from now on
            config["code"] |= {file: f"{config['code'].get(file, 'none')}, from step {step} {code[file]}"
                               for file in run.edited}
            if (before := config["versions"]["torch"].split()[-1]) != torch.__version__:
                ranks.say(f"torch {torch.__version__}: up to step {step} it was {before}")
                config["versions"]["torch"] += f", from step {step} {torch.__version__}"
            ran.copy(run.edited if run.writes else (), path / "source" / f"from-step-{step}")
        if run.writes:
            write_text(path / "config.json", json.dumps(config, indent=1))
            rows = log_rows(path / "log.jsonl", step)
            run.evaluated = max((row["step"] for row in rows if row["kind"] == "val" and row["loss"] is not None),
                                default=-1)                                 # one that diverged ends with code 3 again
            write_text(path / "log.jsonl", "".join(map(to_json, rows)))
            run.open_log()
        run.evaluated = ranks.share(run.evaluated)
        return run

    def open_log(self):
        """From now on log() writes to log.jsonl; also to Weights & Biases, if the options say so."""
        self.file = open(self.path / "log.jsonl", "a", buffering=1)
        if self.options.wandb:                                              # a copied folder is a new run there
            import wandb
            self.wandb = wandb.init(project="nanodepth", name=self.path.name, config=self.config, resume="allow",
                                    id=f"{self.config['id']}-{zlib.crc32(self.path.name.encode()):08x}")

    def log(self, kind, step, **row):
        """Adds a row to the log: kind, step, tokens so far, and the given numbers."""
        if self.writes:
            self.file.write(to_json({"kind": kind, "step": step, "tokens": step * self.options.batch_tokens, **row}))
        if self.wandb:
            self.wandb.log({f"{kind}/{name}": x for name, x in row.items()}, step=step)

    def save(self, step):
        """Writes the checkpoint of `step`, unless it exists. Returns None, or one line if that fails (full disk)."""
        if step == self.saved:
            return None
        state = {"model": self.model.state_dict(), "optimizers": [x.state_dict() for x in self.optimizers],
                 "random": self.ranks.gather(random_state()), "step": step}
        why = None
        try:
            if self.writes and not os.path.samestat(self.path.stat(), self.place):
                raise FileNotFoundError                                     # it was moved: this is another run's
            if self.writes:
                write_atomically(self.path / "ckpt.pt", lambda f: torch.save(state, f))
        except FileNotFoundError:
            why = f"{self.path} was moved or deleted"
        except (OSError, RuntimeError) as e:
            why = f"is the disk full? {one_line(e)}"
        why = self.ranks.share(why)                                         # so that all ranks go on alike
        self.save_failed = why is not None
        if why:
            return f"step {step}: the checkpoint could not be written ({why}); {self.newest()}"
        self.saved = step

    def keep_before_decay(self):
        """Makes before_decay/, a copy of the run folder as it is now. Returns None, or one line if that fails.

        Replaces one of an earlier step, when the run was shorter, unless somebody has continued from there.
        """
        kept = self.path / "before_decay"
        for left in self.path.glob("before_decay.tmp-*") if self.writes else ():            # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        if not self.writes or self.save_failed or (kept / ".lock").exists():
            return None
        try:
            with folder_atomically(kept) as temporary:
                for name in OF_A_RUN:
                    if (old := self.path / name).exists():
                        (shutil.copytree if old.is_dir() else shutil.copy)(old, temporary / name)
                try:
                    os.link(self.path / "ckpt.pt", temporary / "ckpt.pt")   # the next save leaves this one as it is
                except OSError:                                             # some file systems have no hard links
                    shutil.copy(self.path / "ckpt.pt", temporary / "ckpt.pt")
                shutil.rmtree(kept, ignore_errors=True)
        except OSError as e:
            return f"{kept} could not be made ({one_line(e)}): this run cannot be made longer"

    def newest(self):
        """Which checkpoint exists, in words."""
        return f"{self.path}/ckpt.pt is of step {self.saved}" if self.saved >= 0 else "there is no checkpoint"
