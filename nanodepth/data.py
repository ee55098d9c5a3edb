"""Data: token shards, the folders they are in, and the batches of a training step.

A data folder holds shards `train_000000.bin ...`, `val_000000.bin ...`, `meta.json` (tokenizer, counts, sha256 of each
shard, source) and `token_bytes.npy`. A shard is a header of 256 int32, then uint16 tokens, all little-endian (the
format of llm.c and modded-nanogpt). Each document starts with the end-of-text token. `shards_index.json` keeps the
sha256 and the largest token of the shards, so that a shard is read again only after something has touched it.
"""
import hashlib
import json
import os
import re
import sys
import tempfile
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from nanodepth.cli import UserError

HEADER = 256                            # int32 numbers before the tokens: [0] magic, [1] version, [2] tokens, zeros
MAGIC, VERSION = 20240520, 1


def read_shard(path) -> np.memmap:
    """The tokens of a shard, uint16 (n_tokens,), memory-mapped. UserError unless the file is complete."""
    with open(path, "rb") as f:
        start, size = f.read(4 * HEADER), os.fstat(f.fileno()).st_size
    magic, version, n = np.frombuffer(start.ljust(12, b"\0")[:12], "<i4").tolist()
    if size < 4 * HEADER or (magic, version) != (MAGIC, VERSION) or n < 1:
        raise UserError(f"{path}: not a token shard: {size:,} bytes that start with {magic}, {version}, {n} instead of "
                        f"{MAGIC}, {VERSION} and a number of tokens: prepare it with data_prep.py")
    if size != 4 * HEADER + 2 * n:
        raise UserError(f"{path}: header says {n:,} tokens, file holds {size / 2 - 2 * HEADER:,.15g}: prepare the "
                        "folder again, or delete this file and download it again")
    return np.memmap(path, "<u2", "r", offset=4 * HEADER, shape=(n,))


def index_entry(path):
    """What shards_index.json says of a shard: {"size", "mtime_ns", "sha256" (of the file), "largest" (token id)}."""
    with open(path, "rb") as f:
        now, digest, largest = os.fstat(f.fileno()), hashlib.sha256(f.read(4 * HEADER)), 0
        while piece := f.read(2**22):
            digest.update(piece)
            largest = max(largest, int(np.frombuffer(piece, "<u2").max()))
    return {"size": now.st_size, "mtime_ns": now.st_mtime_ns, "sha256": digest.hexdigest(), "largest": largest}


def index(folder, names, needed):
    """{name: index_entry()} of at least the `needed` shards among `names`. Reads only those that were touched.

    It is kept in the folder's shards_index.json. If that cannot be written, all are read each time.
    """
    file, known, now = folder / "shards_index.json", {}, {name: os.stat(folder / name) for name in names}
    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):            # there is none, or it is broken
        known = {name: x for name, x in json.loads(file.read_bytes()).items() if name in now
                 and (x["size"], x["mtime_ns"]) == (now[name].st_size, now[name].st_mtime_ns)}
    new = [name for name in needed if name not in known]
    if (size := sum(now[name].st_size for name in new)) > 10**9:
        print(f"{folder}: reading {size / 1e9:.1f} GB of shards, which are new here or were touched", file=sys.stderr)
    known |= {name: index_entry(folder / name) for name in new}
    if new:
        with suppress(OSError), tempfile.TemporaryDirectory(dir=folder) as own:     # other processes may write now, too
            Path(own, file.name).write_text(json.dumps(known, indent=1))
            os.replace(Path(own, file.name), file)
    return known


def split_of(name):
    """`train` or `val` if that is a word in a shard's file name, else None."""
    found = re.search(r"(?<![a-z])(train|val)(?![a-z]).*\.bin$", name)
    return found and found[1]


class Data:
    """A folder of shards, memory-mapped. Without a meta.json, the shards count as public ones with GPT-2 tokens.

    Attributes: path, meta (dict), tokenizer (for load_tokenizer), vocab_size, n_train and n_val (tokens), token_bytes,
    fingerprint (hex, of the shards' names and content). UserError for a folder that is missing, unfinished or without
    the shards in its meta.json, and for `checked` splits with other content than it says or ids beyond the vocabulary.
    """

    def __init__(self, path, checked=("train", "val")):
        self.path = path = Path(path)
        if not os.path.isdir(path):
            what = "a file, and not a" if os.path.exists(path) else "no such"
            raise UserError(f"{path}: {what} data folder: make it with python data_prep.py (stdlib, fineweb-edu or "
                            "text), or name another folder with --data")
        self.read_meta()
        shards = {p.name: read_shard(p) for p in sorted(path.iterdir()) if split_of(p.name)}
        recorded, sizes = self.recorded, {name: len(tokens) for name, tokens in shards.items()}
        if self.meta and sizes != {name: shard["tokens"] for name, shard in recorded.items()}:
            raise UserError(f"{path}: its shards are not those that its meta.json lists: prepare the folder again")
        self.shards = {split: [tokens for name, tokens in shards.items() if split_of(name) == split]
                       for split in ("train", "val")}                                   # uint16 (n_tokens,) each
        for split, found in self.shards.items():
            if not found:
                raise UserError(f"{path}: no {split} shard in the folder, a .bin file with {split} as a word of "
                                "its name: prepare it with python data_prep.py")
        self.n_train, self.n_val = (sum(map(len, self.shards[split])) for split in ("train", "val"))
        needed = [name for name in shards if not recorded or split_of(name) in checked]
        known = index(path, shards, needed)
        for name in needed:
            if recorded and known[name]["sha256"] != recorded[name]["sha256"]:
                raise UserError(f"{path / name}: its content is not what meta.json says (sha256): prepare the folder "
                                "again, or copy or download this file again")
            if (largest := known[name]["largest"]) >= self.vocab_size:
                raise UserError(f"{path / name}: token id {largest} is beyond the vocabulary of {self.vocab_size:,} "
                                f"({self.tokenizer}): another tokenizer made it")
        content = "".join(f"{name} {n} {(recorded or known)[name]['sha256']}\n" for name, n in sizes.items())
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]

    def read_meta(self):
        """Sets meta, recorded, tokenizer and vocab_size from meta.json, or to GPT-2's without one."""
        file = self.path / "meta.json"
        if not file.exists() and (self.path / "token_bytes.npy").exists():
            raise UserError(f"{file} is missing: prepare the folder again")
        try:
            self.meta = json.loads(file.read_bytes()) if file.exists() else {}
            here = self.meta if file.exists() else {"tokenizer": "gpt2", "vocab_size": 50257, "shards": {}}
            self.tokenizer, self.vocab_size = here["tokenizer"], here["vocab_size"]
            self.recorded = {name: {key: x[key] for key in ("tokens", "sha256")} for name, x in here["shards"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{file}: broken ({type(e).__name__}: {e}): prepare the folder again") from None
        if self.tokenizer not in ("gpt2", "byte"):
            self.tokenizer = str(self.path / self.tokenizer)
            if not os.path.isfile(self.tokenizer):
                raise UserError(f"{self.tokenizer} is missing: prepare the folder again")

    def place(self):
        """Where the data are, for a run's config.json."""
        return {"path": str(self.path), "absolute": str(self.path.resolve())}

    @cached_property
    def token_bytes(self):
        """int64 (vocab_size,): bytes of text per token id, or None if the tokenizer cannot be loaded."""
        file = self.path / "token_bytes.npy"
        try:
            if file.exists():
                return np.load(file, allow_pickle=False)[np.arange(self.vocab_size)].astype(np.int64)
            from nanodepth.tokenizers import load_tokenizer, token_bytes
            return token_bytes(load_tokenizer(self.tokenizer))
        except UserError:
            return None
        except Exception as e:                                              # numpy raises many kinds
            raise UserError(f"{file}: broken ({e}): delete it, then it is made again from the tokenizer") from None

    def n_windows(self, seq_len: int) -> int:
        """Number of train windows. They lie side by side in each shard; one more token is the target of the last."""
        n = sum((len(tokens) - 1) // seq_len for tokens in self.shards["train"])
        if n == 0:
            raise UserError(f"{self.path}: no train shard is longer than --seq_len {seq_len} (the split has "
                            f"{self.n_train:,} tokens): use shorter sequences or more text")
        return n

    def batch(self, step: int, start: int, stop: int, batch_size: int, seq_len: int, seed: int):
        """Rows start ... stop of the batch_size sequences of `step`: idx and targets, int64 (stop - start, seq_len).

        On the CPU; a pure function of the data and the arguments. Row `row` of step `step` is sequence
        step * batch_size + row of an endless series of epochs. Each epoch visits all windows once, in its own order.
        """
        n = self.n_windows(seq_len)
        first = np.cumsum([0] + [(len(t) - 1) // seq_len for t in self.shards["train"]])    # first window of each shard
        rows = range(step * batch_size + start, step * batch_size + stop)
        out = np.empty((len(rows), seq_len + 1), np.int64)
        for i, row in enumerate(rows):
            window = window_order(seed, row // n, n)[row % n]
            shard = int(np.searchsorted(first, window, side="right")) - 1
            at = int(window - first[shard]) * seq_len
            out[i] = self.shards["train"][shard][at:at + seq_len + 1]
        out = torch.from_numpy(out)
        return out[:, :-1].contiguous(), out[:, 1:].contiguous()

    def val_batches(self, n_tokens, batch_size: int, seq_len: int):
        """Yields idx and targets, int64 (batch_size, seq_len): the first n_tokens targets of the validation split, each
        once, in order (None or too many: all). Windows stay within a shard. Padding has idx 0, target -1.
        """
        left = sum(len(tokens) - 1 for tokens in self.shards["val"])
        left = left if n_tokens is None else min(left, n_tokens)
        if left < 1:
            raise UserError(f"{self.path}: nothing to validate on: {self.n_val:,} tokens in the split, "
                            f"{n_tokens} asked for")
        idx, targets, row = np.zeros((batch_size, seq_len), np.int64), np.full((batch_size, seq_len), -1), 0
        for tokens in self.shards["val"]:
            for at in range(0, len(tokens) - 1, seq_len):
                n = min(seq_len, len(tokens) - 1 - at, left)
                if n == 0:
                    break
                idx[row, :n], targets[row, :n] = tokens[at:at + n], tokens[at + 1:at + n + 1]
                row, left = row + 1, left - n
                if row == batch_size or left == 0:
                    yield torch.from_numpy(idx), torch.from_numpy(targets)
                    idx, targets, row = np.zeros_like(idx), np.full_like(targets, -1), 0


@lru_cache(maxsize=2)                                                       # 2: a batch may reach into the next epoch
def window_order(seed, epoch, n):
    """A random order of n windows, from a generator's raw bits, so it is the same in every version of numpy."""
    return np.argsort(np.random.PCG64([seed % 2**64, epoch]).random_raw(n), kind="stable")


class Batches:
    """How the batch of each optimizer step is split over ranks and micro-steps; only memory and speed depend on it.

    n_seq: sequences per step; micro: sequences per forward pass of one rank; n_micro: forward passes per step and rank.
    Without --micro_batch a pass has up to 32,768 tokens, or the model's micro_tokens, halved until parameters x tokens
    are at most 2^44: 32,768 up to 0.5B parameters, 8,192 up to 2.1B. UserError for numbers that do not divide.
    """

    def __init__(self, data, options, ranks, model):
        self.data, self.options, self.ranks = data, options, ranks
        self.n_seq, rest = divmod(options.batch_tokens, options.seq_len)
        if rest or self.n_seq % ranks.world:
            raise UserError(f"--batch_tokens {options.batch_tokens:,} must be a multiple of "
                            f"seq_len x ranks = {options.seq_len} x {ranks.world}")
        self.per_rank = self.n_seq // ranks.world
        n_tokens, n_params = getattr(model, "micro_tokens", 32768), sum(p.numel() for p in model.parameters())
        while n_params * n_tokens > 2 ** 44:
            n_tokens //= 2
        largest = min(self.per_rank, max(1, n_tokens // options.seq_len))
        self.micro = options.micro_batch or max(n for n in range(1, largest + 1) if self.per_rank % n == 0)
        if self.per_rank % self.micro:
            raise UserError(f"--micro_batch {self.micro} must divide the {self.per_rank} sequences "
                            "that a rank has per step")
        self.n_micro = self.per_rank // self.micro
        self.token_bytes = data.token_bytes
        self.n_epochs = options.max_steps * self.n_seq / data.n_windows(options.seq_len)

    def train(self, step):
        """Yields this rank's micro-batches of a step, on its device: idx and targets, int64 (micro, seq_len)."""
        first, device = self.ranks.rank * self.per_rank, self.ranks.device
        for start in range(first, first + self.per_rank, self.micro):
            pair = self.data.batch(step, start, start + self.micro, self.n_seq, self.options.seq_len, self.options.seed)
            pinned = (t.pin_memory() if device.type == "cuda" else t for t in pair)         # copied while the GPU works
            yield (t.to(device, non_blocking=True) for t in pinned)

    def val(self, n_tokens):
        """This rank's batches of the first n_tokens of the validation split."""
        batches = self.data.val_batches(n_tokens, self.micro, self.options.seq_len)
        return islice(batches, self.ranks.rank, None, self.ranks.world)

    def sample(self):
        """A few validation sequences, for the model's stats: idx (up to 4, seq_len), on the device."""
        batches = self.data.val_batches(None, min(self.micro, 4), self.options.seq_len)
        return next(batches)[0].to(self.ranks.device)


def find_folder(name):
    """The data folder `name`: a path, or else a name under data/."""
    path, ours = Path(os.path.expanduser(name)), Path("data", name)
    return ours if ours.is_dir() and not any(path.glob("*.bin")) else path


def trained_folder(trained):
    """The data folder of a run's config.json: the path that was given, or else where that was."""
    return Path(trained["path"] if os.path.isdir(trained["path"]) else trained.get("absolute", trained["path"]))


def run_data(run, config, name=None) -> Data:
    """The data folder `name`, or else the data that the run folder with this config was trained on.

    UserError if the data are missing, have changed, or have other tokens than the run.
    """
    if not name and not config["data"]["path"]:
        raise UserError(f"{run} was not trained here: name the data with --data")
    data = Data(find_folder(name) if name else trained_folder(config["data"]), checked=("val",))
    if not name:
        check_data(data, run, config)
    check_tokens(data, run, config)
    return data


def check_data(data, run, config):
    """UserError if the data are not those that the run folder with this config was trained on."""
    if data.fingerprint != config["data"]["fingerprint"]:
        raise UserError(f"{data.path} is not the data that {run} was trained on ({config['data']['path']}), or has "
                        "changed since: name the original with --data")


def check_tokens(data, run, config):
    """UserError if the data have other tokens than the run folder with this config."""
    own, other = Path(run) / "tokenizer.tiktoken", Path(data.tokenizer)               # files, unless it is gpt2 or byte
    same = data.tokenizer == config["tokenizer"]
    if own.exists() and other.is_file():
        same = own.read_bytes() == other.read_bytes()
    if not same or data.vocab_size > config["model_config"].get("vocab_size", data.vocab_size):
        name = own if own.exists() else config["tokenizer"]
        how = "" if name == "tokenizer.json" else f": prepare the text with --tokenizer {name}"
        raise UserError(f"{data.path} has other tokens ({data.tokenizer}) than {run} was trained on "
                        f"({config['tokenizer']}){how}")
