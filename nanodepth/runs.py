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
import random
import secrets
import shutil
import subprocess
import sys
import zlib
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path

import numpy as np
import torch

import models
from nanodepth import ran
from nanodepth.cli import UserError, one_line
from nanodepth.data import check_data
from nanodepth.devices import processor

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


def read_checkpoint(run_dir):
    """The checkpoint of a run folder as plain tensors and builtins. UserError if it is missing or broken."""
    path = Path(run_dir) / "ckpt.pt"
    if not os.path.isfile(path):
        raise UserError(f"{path} does not exist: {run_dir} is neither a run that has saved a checkpoint nor a folder "
                        "made by convert.py")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        config = dict(checkpoint)["config"]
        for part, keys in ((checkpoint, "model optimizers step tokens tokenizer"), (config["data"], "path"),
                           (config, "model model_config tokenizer"), (config["options"], "preset seq_len dtype")):
            for key in keys.split():
                part[key]
    except Exception as e:  # torch raises many kinds: truncated zip, foreign file, pickled code
        raise UserError(f"{path} is not a readable checkpoint of train.py ({type(e).__name__}: {one_line(e)[:80]}): "
                        "restore it from a copy, or train again with another --out") from None
    return checkpoint


def load(run_dir, device="cpu"):
    """(model in eval mode, config with the step) of a run folder. UserError if its checkpoint is missing or broken."""
    checkpoint = read_checkpoint(run_dir)
    config = checkpoint["config"]
    check_options(run_dir, config)
    model, now = models.build(config["model"], **config["model_config"]), models.module(config["model"])
    take_weights(model, checkpoint, f"{models.path(config['model'])} as it is today (see {run_dir}/source)", run_dir)
    for file in changed(run_dir, config, ran.code(now)):
        if not file.startswith("models/"):                                  # others do not change what a model computes
            continue
        if ran.digest((ran.ROOT / file).read_bytes()) == config["code"][file]:
            raise UserError(f"{file} has been edited since Python imported it, and {run_dir} was trained with the new "
                            "text: start Python (the notebook) again")
        print(f"{file} has changed since {run_dir} began, which has a copy: {run_dir}/source", file=sys.stderr)
    step, last = checkpoint["step"], config["options"].get("max_steps")
    if last and step < last:                                                # still in training, or interrupted
        print(f"{run_dir} is at step {step} of {last}", file=sys.stderr)
    return model.to(device).eval(), config | {"step": step}


def check_options(run_dir, config):
    """UserError if the model's file no longer has an option that the run was trained with."""
    name = config["model"]
    if gone := set(config["model_config"]) - {f.name for f in fields(models.module(name).Config)}:
        raise UserError(f"{run_dir} was trained with an older {models.path(name)}, which had "
                        f"{', '.join(sorted(gone))}: that file is in {run_dir}/source")


def changed(run_dir, config, code):
    """[file]: those of this ran.code() which are not what the run was trained with, or last resumed with."""
    if "code" not in config:                                                # an older run has copies side by side
        kept = {file: Path(run_dir) / "source" / Path(file).name for file in code}
        config["code"] = {file: ran.digest(copy.read_bytes()) for file, copy in kept.items() if copy.exists()}
    return [file for file, now in code.items() if config["code"].get(file, now).split()[-1] != now]


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
    """The state of an optimizer as saved, by the names of its parameters, with the settings that it has now. ValueError
    if it trains other parameters.
    """
    own = optimizer.state_dict()
    old, new = ({name: i for group in state["param_groups"] for name, i in zip(group.get("names", group["params"]),
                                                                               group["params"])}
                for state in (saved, own))
    if "names" not in saved["param_groups"][0]:                             # an older run: by position
        old = dict(zip(new, old.values(), strict=True))
    if old.keys() != new.keys():
        raise ValueError(f"{min(old.keys() ^ new.keys())} is trained by another optimizer, or not at all")
    state = {i: {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in saved["state"][old[name]].items()}
             for name, i in new.items() if old[name] in saved["state"]}     # copies: a new checkpoint replaces the file
    return {"state": state, "param_groups": own["param_groups"]}


def random_state():
    """The state of this process's random generators: torch's, Python's and numpy's."""
    kind, keys, *rest = np.random.get_state()
    return {"torch": torch.get_rng_state(), "python": random.getstate(),
            "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None}


def set_random_state(state, device):
    """Sets what random_state() returned."""
    kind, keys, *rest = state["numpy"]
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"])


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
    if others := found - OF_A_RUN - {"ckpt.pt.tmp"}:
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


def git_state():
    """{"commit", "dirty"} of the repository that this file is in; None without git."""
    def git(*words):
        done = subprocess.run(("git", *words), cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return None


class Run:
    """The folder of a run in training. Every rank has a Run, but only the first rank locks and writes.

    path; config, as in config.json; start: the first step; saved: the step of the newest checkpoint; evaluated: the
    step of the newest validation before `start`; both -1 if there is none; save_failed: whether writing the latest
    checkpoint failed; edited: the files of code that have changed since it last trained.
    """

    def __init__(self, path, options, ranks, config):
        self.path, self.batch_tokens, self.config = path, options.batch_tokens, config
        self.ranks, self.writes, self.edited = ranks, ranks.rank == 0, []
        self.start, self.saved, self.evaluated, self.save_failed, self.wandb = 0, -1, -1, False, None
        self.lock = lock(path) if self.writes else None

    @classmethod
    def new(cls, options, model, data, ranks):
        """Makes the folder with config.json, the tokenizer and the source files that ran. UserError if it exists."""
        path = ranks.share(new_folder(options) if ranks.rank == 0 else None)
        versions = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
        run = cls(path, options, ranks, {
            "model": options.model, "model_config": asdict(model.config),
            "options": {**asdict(options), "out": str(path)}, "defaults": ran.defaults(options, model.config),
            "code": ran.code(models.module(options.model)), "began": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokenizer": data.tokenizer, "n_vocab": data.vocab_size,
            "data": {**data.place(), "fingerprint": data.fingerprint, "meta": data.meta},
            "command": [sys.executable, *sys.argv], "git": git_state(), "ranks": ranks.world, "versions": versions,
            "gpu": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else None,
            "cpu": processor(), "id": os.urandom(4).hex()})
        if run.writes:
            for old in left_over(path):                                     # we hold the lock now
                shutil.rmtree(path / old) if (path / old).is_dir() else (path / old).unlink()
            ran.copy(run.config["code"], path / "source")
            if data.tokenizer not in ("gpt2", "byte"):
                shutil.copy(data.tokenizer, path / "tokenizer.tiktoken")
            write_text(path / "config.json", json.dumps(run.config, indent=1))
            run.open_log(options)
        return run

    @classmethod
    def resume(cls, options, given, model, data, ranks, optimizers):
        """Continues a run from its checkpoint: loads the model, the optimizers and the random state, and cuts the log
        off there. given: flags of the command line, which config.json then records. If the checkpoint does not fit,
        a UserError, and no file changes.
        """
        path = Path(options.resume)
        checkpoint = read_checkpoint(path)
        config, step = checkpoint["config"], checkpoint["step"]
        run, code = cls(path, options, ranks, config), ran.code(models.module(options.model))
        run.edited = changed(path, config, code)
        check_data(data, path, config)
        take_weights(model, checkpoint, f"{models.path(options.model)} as it is today (see {path}/source)", path)
        try:
            for optimizer, state in zip(optimizers, checkpoint["optimizers"], strict=True):
                optimizer.load_state_dict(own_state(optimizer, state))
            if "random" not in checkpoint:                                  # an older run
                torch.set_rng_state(checkpoint["rng"])
            elif ranks.rank < len(checkpoint["random"]):                    # else a new rank, which has its own seed
                set_random_state(checkpoint["random"][ranks.rank], ranks.device)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{path}/ckpt.pt does not fit train.py and muon.py as they are today (see {path}/source): "
                            f"{one_line(e)}") from None
        run.start = run.saved = step
        config["options"] |= {name: x for name, x in vars(options).items() if name in given and name != "resume"}
        if "data" in given:                                                 # eval.py looks there
            config["data"] |= data.place()
        if step < options.max_steps:                                        # what runs from now on
            config["code"] |= {file: f"{config['code'][file]}, from step {step} {code[file]}" for file in run.edited}
            if config["versions"]["torch"].split()[-1] != torch.__version__:
                config["versions"]["torch"] += f", from step {step} {torch.__version__}"
            ran.copy(run.edited if run.writes else (), path / "source" / f"from-step-{step}")
        if run.writes:
            write_text(path / "config.json", json.dumps(config, indent=1))
            rows = log_rows(path / "log.jsonl", step)
            run.evaluated = max((row["step"] for row in rows if row["kind"] == "val"), default=-1)
            write_text(path / "log.jsonl", "".join(map(to_json, rows)))
            run.open_log(options)
        # now, since a plain --resume after a crash takes the options from the checkpoint
        if given.keys() != {"resume"} and (failed := run.save(step, model, optimizers)):
            print(failed, file=sys.stderr)
        run.evaluated = ranks.share(run.evaluated)
        return run

    def open_log(self, options):
        """From now on log() writes to log.jsonl; also to Weights & Biases, if the options say so."""
        self.file = open(self.path / "log.jsonl", "a", buffering=1)
        if options.wandb:                                                   # a copied folder is a new run there
            import wandb
            self.wandb = wandb.init(project="nanodepth", name=self.path.name, config=self.config, resume="allow",
                                    id=f"{self.config['id']}-{zlib.crc32(self.path.name.encode()):08x}")

    def log(self, kind, step, **row):
        """Adds a row to the log: kind, step, tokens so far, and the given numbers."""
        if self.writes:
            self.file.write(to_json({"kind": kind, "step": step, "tokens": step * self.batch_tokens, **row}))
        if self.wandb:
            self.wandb.log({f"{kind}/{name}": x for name, x in row.items()}, step=step)

    def save(self, step, model, optimizers):
        """Writes the checkpoint of `step`. Returns None, or one line if that fails (full disk)."""
        state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                 "random": self.ranks.gather(random_state()), "step": step, "tokens": step * self.batch_tokens,
                 "config": self.config, "tokenizer": self.config["tokenizer"]}
        try:
            if self.writes:
                write_atomically(self.path / "ckpt.pt", lambda f: torch.save(state, f))
        except (OSError, RuntimeError) as e:
            self.save_failed = True
            why = f"is the disk full? {one_line(e)}" if self.path.is_dir() else f"{self.path} was moved or deleted"
            return f"step {step}: the checkpoint could not be written ({why}); {self.newest()}"
        self.saved, self.save_failed = step, False

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
