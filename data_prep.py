"""Text -> token shards: the tokenizers, the shard format, its writer, reader and loader.

    python data_prep.py stdlib                                      the running Python's own sources; offline
    python data_prep.py fineweb-edu --shards 10                     public GPT-2 tokens, 100M a shard
    python data_prep.py text FILES... --name X --tokenizer gpt2     own .txt or .jsonl, plain, .gz or .xz
    python data_prep.py text FILES... --name X --train_bpe 8192     the same, with a vocabulary of its own
    python data_prep.py mqar                                        synthetic: associative recall

A data folder holds shards `train_000000.bin ...`, `val_000000.bin ...`, `meta.json` (tokenizer, counts, sha256 of each
shard, source) and `token_bytes.npy`. A shard is a header of 256 int32 and then uint16 tokens, all little-endian (the format
of llm.c and modded-nanogpt). Each document starts with the end-of-text token; text that spells it stays ordinary text.
"""
import argparse
import base64
import contextlib
import fcntl
import gzip
import hashlib
import http.client
import json
import lzma
import os
import platform
import re
import secrets
import shutil
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken
import torch
from tqdm import tqdm

import models

HEADER = 256                            # int32 numbers before the tokens: [0] magic, [1] version, [2] token count, zeros
MAGIC, VERSION = 20240520, 1
EOT = "<|endoftext|>"
MAX_VOCAB = 2**16                       # tokens are uint16
SHARD_TOKENS = 100_000_000
CHUNK = 2**22                           # tokens, or characters, that are looked at in one go
FINEWEB_URL = "https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/"
# GPT-2's pattern: contractions, words, numbers, punctuation, white space; a leading space goes with the word
SPLIT_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class DataError(ValueError):
    """Data or tokenizer that the user must mend; the message is one line: what is wrong, the value seen, what to do."""


# ----------------------------------------------------------------------------------------------------------------- shards


def write_shard(path, tokens) -> str:
    """Writes tokens (n,), ids below 65,536, as a shard; returns the sha256 of the file in hex.

    At any moment `path` is absent, the old file or the complete new one. Raises DataError for ids that do not fit.
    """
    path, tokens = Path(path), np.asarray(tokens)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < MAX_VOCAB:
        raise DataError(f"{path}: token ids {tokens.min()} to {tokens.max()} do not fit in a shard: 0 to {MAX_VOCAB - 1} do")
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    digest = hashlib.sha256()
    tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(tmp, "wb") as f:
            for part in (header, np.ascontiguousarray(tokens, "<u2")):
                f.write(part.data)
                digest.update(part.data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
    return digest.hexdigest()


def read_shard(path) -> np.memmap:
    """The tokens of a shard, uint16 (n_tokens,), mapped rather than read. Raises DataError unless the file is complete."""
    try:
        with open(path, "rb") as f:
            start, size = f.read(4 * HEADER), os.fstat(f.fileno()).st_size
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}") from None
    if size < 4 * HEADER:
        raise DataError(f"{path}: not a token shard: {size} bytes, the header alone takes {4 * HEADER:,}")
    magic, version, n = np.frombuffer(start, "<i4")[:3].tolist()
    if magic != MAGIC:
        raise DataError(f"{path}: not a token shard: starts with {magic} instead of {MAGIC}: prepare it with data_prep.py")
    if version != VERSION:
        raise DataError(f"{path}: token shard of version {version}, only version {VERSION} is known: prepare it again")
    if size != 4 * HEADER + 2 * n or n < 1:
        raise DataError(f"{path}: header says {n:,} tokens, file holds {size / 2 - 2 * HEADER:,.15g}: "
                        "download it again" if n > 0 else f"{path}: header says {n:,} tokens: prepare it again")
    return np.memmap(path, "<u2", "r", offset=4 * HEADER, shape=(n,))


# ------------------------------------------------------------------------------------------------------------- tokenizers


def load_tokenizer(name) -> tiktoken.Encoding:
    """The tokenizer `gpt2`, `byte` (ids are byte values, 256 ends a text), or that of a file of merge ranks.

    The file has a line `BASE64 RANK` per token (tiktoken's format); its end-of-text id is the number of ranks, and it
    splits text like GPT-2. Raises DataError for a missing or broken file, and for gpt2 when its vocabulary is out of reach.
    """
    name = str(name)
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as e:                              # requests' errors are OSErrors; ValueError: wrong hash
            raise DataError(f"tokenizer gpt2 needs its vocabulary once from the network ({type(e).__name__}): connect once, or set "
                            "TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer byte") from None
    if name == "byte":
        ranks, pattern = {bytes([i]): i for i in range(256)}, "(?s:.)"
        return tiktoken.Encoding("byte", pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: 256})
    try:
        lines = Path(name).read_bytes().splitlines()
    except OSError as e:
        raise DataError(f"tokenizer {name!r}: {e.strerror}: use gpt2, byte, or the path of a file of merge ranks") from None
    ranks = {}
    for i, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise DataError(f"{name}:{i}: not a merge rank: {line[:40]!r}: a line is a base64 token, a space, its rank") from None
    if sorted(ranks.values()) != list(range(len(lines))):
        raise DataError(f"{name}: the ranks of its {len(lines):,} lines are not 0 to {len(lines) - 1:,}, each once")
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise DataError(f"{name}: no rank for the byte {missing[0]} ({len(missing)} of 256 are missing): some text has no tokens")
    if len(ranks) >= MAX_VOCAB:
        raise DataError(f"{name}: {len(ranks):,} ranks and end-of-text do not fit in uint16 tokens: at most {MAX_VOCAB - 1:,}")
    return tiktoken.Encoding(Path(name).stem, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={EOT: len(ranks)})


def run_tokenizer(run, config) -> tiktoken.Encoding:
    """The tokenizer of a run folder with this config: its own file if it has one, else gpt2 or byte.

    tokenizer.json, in folders that convert.py made, is read by the package tokenizers. Raises DataError.
    """
    for name, load in (("tokenizer.tiktoken", load_tokenizer), ("tokenizer.json", JsonTokenizer)):
        if (Path(run) / name).is_file():
            return load(Path(run) / name)
    return load_tokenizer(config["tokenizer"])


class JsonTokenizer:
    """A tokenizer.json of Hugging Face with the four members of a tiktoken.Encoding that we use."""

    def __init__(self, path):
        try:
            import tokenizers
        except ImportError:
            raise DataError(f"{path} needs the package tokenizers: pip install tokenizers") from None
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:                                          # it raises bare Exceptions
            raise DataError(f"{path}: not a tokenizer.json: {e}") from None
        self.n_vocab = self.inner.get_vocab_size()
        found = [self.inner.token_to_id(name) for name in (EOT, "<|end_of_text|>", "</s>")]
        if all(i is None for i in found):
            raise DataError(f"{path}: no end-of-text token ({EOT}, <|end_of_text|> or </s>)")
        self.eot_token = next(i for i in found if i is not None)

    def encode_ordinary(self, text):
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, tokens):
        return self.inner.decode(tokens, skip_special_tokens=False)


def token_bytes(tokenizer) -> np.ndarray:
    """int64 (n_vocab,): bytes of text that each token stands for; 0 for end-of-text and for unused ids."""
    widths = np.zeros(tokenizer.n_vocab, np.int64)
    for token in tokenizer.token_byte_values():
        widths[tokenizer.encode_single_token(token)] = len(token)
    return widths


def train_bpe(texts, n_vocab: int, path):
    """Learns n_vocab - 1 merge ranks (end-of-text is the last id) from an iterable of str and writes them to `path`.

    Raises DataError without the optional package rustbpe, for n_vocab outside 257 ... 65,536, and for too little text.
    """
    if not 257 <= n_vocab <= MAX_VOCAB:
        raise DataError(f"a vocabulary of {n_vocab} is not possible: 256 bytes and end-of-text make 257, uint16 ends at {MAX_VOCAB}")
    try:
        import rustbpe
    except ImportError:
        raise DataError("learning a vocabulary needs the package rustbpe: pip install rustbpe") from None
    learner = rustbpe.Tokenizer()
    learner.train_from_iterator(texts, n_vocab - 1, pattern=SPLIT_PATTERN)
    ranks = sorted(learner.get_mergeable_ranks(), key=lambda pair: pair[1])
    if len(ranks) < n_vocab - 1:
        raise DataError(f"a vocabulary of {n_vocab:,} cannot be learnt from so little text: at most {len(ranks) + 1:,}")
    Path(path).write_bytes(b"".join(base64.b64encode(bytes(token)) + b" %d\n" % rank for token, rank in ranks))


# ----------------------------------------------------------------------------------------------------------------- loader


def split_of(name):
    """`train` or `val`, whichever is a word of a shard's file name, or None."""
    found = re.search(r"(?<![a-z])(train|val)(?![a-z]).*\.bin$", name)
    return found and found[1]


class Data:
    """A folder of shards, memory-mapped. Without meta.json the shards are taken for public ones with GPT-2 tokens.

    Attributes: path, meta (dict), tokenizer (for load_tokenizer), vocab_size, n_train and n_val (tokens), token_bytes,
    fingerprint (hex; changes with the data). With meta.json its list of shards is the data, and must be what the folder has.
    Raises DataError for a missing or unfinished folder, a missing, foreign or truncated shard, and (with check_ids, which
    reads every shard once) for token ids beyond the vocabulary.
    """

    def __init__(self, path, check_ids: bool = True):
        self.path = path = Path(path)
        if not os.path.isdir(path):
            raise DataError(f"{path}: no such data folder: make it with python data_prep.py (stdlib, fineweb-edu or text)")
        self.meta = self.read_meta()
        recorded = self.meta.get("shards")
        found = sorted(p.name for p in path.iterdir() if split_of(p.name))
        if recorded is None and list(path.glob("*.part")):
            raise DataError(f"{path}: unfinished download: run python data_prep.py fineweb-edu again, it goes on where it stopped")
        if recorded is not None and (lost := sorted(set(recorded) ^ set(found))):
            what = "is in meta.json but not in the folder" if lost[0] in recorded else "is in the folder but not in meta.json"
            raise DataError(f"{path}/{lost[0]}: {what}: restore what was prepared, or prepare the folder again")
        digest = hashlib.sha256()
        self.shards = {"train": [], "val": []}                                          # uint16 (n_tokens,) each
        for name in found:
            tokens = read_shard(path / name)
            if recorded and recorded[name]["tokens"] != len(tokens):
                raise DataError(f"{path / name}: meta.json says {recorded[name]['tokens']:,} tokens, the shard holds {len(tokens):,}: "
                                "prepare the folder again")
            if check_ids:
                self.check_ids(name, tokens)
            ends = tokens[:2**15].tobytes() + tokens[-2**15:].tobytes()                 # 64 KiB each
            sha256 = recorded[name]["sha256"] if recorded else hashlib.sha256(ends).hexdigest()
            digest.update(f"{name} {len(tokens)} {sha256}\n".encode())
            self.shards[split_of(name)].append(tokens)
        for split, shards in self.shards.items():
            if not shards:
                raise DataError(f"{path}: no {split} shard (*{split}*.bin) in the folder: prepare it with python data_prep.py")
        self.n_train, self.n_val = (sum(map(len, self.shards[split])) for split in ("train", "val"))
        self.fingerprint = digest.hexdigest()[:16]
        self.orders = {}                                                                # of the epochs of the latest batch

    def read_meta(self):
        """meta.json as a dict, or {} without one; sets tokenizer and vocab_size."""
        file, meta = self.path / "meta.json", {}
        if file.exists():
            try:
                meta = json.loads(file.read_text())
                typed = all(type(shard["tokens"]) is int and type(shard["sha256"]) is str for shard in meta["shards"].values())
                typed = typed and type(meta["tokenizer"]) is str and type(meta["vocab_size"]) is int
                if not (typed and 0 < meta["vocab_size"] <= MAX_VOCAB and all(map(split_of, meta["shards"]))):
                    raise ValueError("tokenizer, vocab_size or shards are not as data_prep.py writes them")
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
                raise DataError(f"{file}: broken ({type(e).__name__}: {e}): prepare the folder again") from None
        self.tokenizer, self.vocab_size = meta.get("tokenizer", "gpt2"), meta.get("vocab_size", 50257)
        if self.tokenizer not in ("gpt2", "byte"):
            ranks = self.path / self.tokenizer
            if ranks.name != self.tokenizer or not ranks.is_file():
                raise DataError(f"{file}: its tokenizer {self.tokenizer!r} is no file of the folder: prepare the folder again")
            self.tokenizer = str(ranks)
        return meta

    def check_ids(self, name, tokens):
        for i in range(0, len(tokens), CHUNK) if self.vocab_size < MAX_VOCAB else ():
            chunk = tokens[i:i + CHUNK]
            if chunk.max() >= self.vocab_size:
                at = int(np.argmax(chunk >= self.vocab_size))
                raise DataError(f"{self.path / name}: token id {chunk[at]} at position {i + at:,} is beyond the vocabulary of "
                                f"{self.vocab_size:,} ({self.tokenizer}): the shard belongs to another tokenizer")

    @cached_property
    def token_bytes(self):
        """int64 (vocab_size,): bytes of text per token id, or None where the tokenizer cannot be loaded."""
        file = self.path / "token_bytes.npy"
        try:
            widths = np.load(file, allow_pickle=False) if file.exists() else token_bytes(load_tokenizer(self.tokenizer))
        except DataError:
            return None
        except Exception:                                                   # numpy raises many kinds for a broken header
            widths = None
        if not isinstance(widths, np.ndarray) or widths.dtype.kind not in "iu" or widths.min() < 0:
            raise DataError(f"{file}: not readable as an array of numbers: delete it, it is made again from the tokenizer")
        if widths.shape != (self.vocab_size,):
            raise DataError(f"{file}: {widths.shape} lengths for a vocabulary of {self.vocab_size:,}: prepare the folder again")
        return widths.astype(np.int64)

    def n_windows(self, seq_len: int) -> int:
        """Windows in the train split: side by side inside each shard, seq_len inputs and one more token for the last target."""
        n = sum((len(tokens) - 1) // seq_len for tokens in self.shards["train"])
        if n == 0:
            raise DataError(f"{self.path}: no train shard is longer than --seq_len {seq_len} (the split has {self.n_train:,} tokens): "
                            "use shorter sequences or more text")
        return n

    def batch(self, step: int, start: int, stop: int, batch_size: int, seq_len: int, seed: int):
        """Rows start ... stop of the batch_size sequences of `step`: idx and targets, int64 (stop - start, seq_len), on the CPU.

        A pure function of the data and the arguments. Row `row` of step `step` is sequence step * batch_size + row of an
        endless series of epochs, each of which visits every window once, in an order of its own.
        """
        n = self.n_windows(seq_len)
        first = np.cumsum([0] + [(len(tokens) - 1) // seq_len for tokens in self.shards["train"]])   # first window of each shard
        rows = range(step * batch_size + start, step * batch_size + stop)
        wanted = {(seed, row // n, n) for row in rows}
        # argsort of the generator's raw bits: unlike Generator.permutation, the same in every version of numpy
        self.orders = {key: self.orders[key] if key in self.orders else
                       np.argsort(np.random.PCG64([key[0] % 2**64, key[1]]).random_raw(n), kind="stable") for key in wanted}
        out = np.empty((len(rows), seq_len + 1), np.int64)
        for i, row in enumerate(rows):
            window = self.orders[seed, row // n, n][row % n]
            shard = int(np.searchsorted(first, window, side="right")) - 1
            at = int(window - first[shard]) * seq_len
            out[i] = self.shards["train"][shard][at:at + seq_len + 1]
        out = torch.from_numpy(out)
        return out[:, :-1].contiguous(), out[:, 1:].contiguous()

    def val_batches(self, n_tokens, batch_size: int, seq_len: int):
        """Yields idx and targets, int64 (batch_size, seq_len): the first n_tokens targets of the validation split, each once, in
        order (None, or more than there are: all). Windows do not cross shards; what is left over has idx 0 and target -1.
        """
        left = sum(len(tokens) - 1 for tokens in self.shards["val"])
        left = left if n_tokens is None else min(left, n_tokens)
        if left < 1:
            raise DataError(f"{self.path}: nothing to validate on: {self.n_val:,} tokens in the split, {n_tokens} asked for")
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


def run_data(run, config, path=None) -> Data:
    """The data at `path`, or else those that the run folder with this config was trained on.

    Raises DataError if they are not there, not the same any more, or not in the tokens of the run.
    """
    trained = config["data"]
    if not path and not trained["path"]:
        raise DataError(f"{run} was not trained here: name the data with --data")
    data = Data(path or trained["path"])
    if not path and data.fingerprint != trained["fingerprint"]:
        raise DataError(f"{trained['path']} is not what {run} was trained on any more: name the data with --data")
    own, other = Path(run) / "tokenizer.tiktoken", Path(data.tokenizer)                 # files, unless it is gpt2 or byte
    same = own.read_bytes() == other.read_bytes() if own.exists() and other.is_file() else data.tokenizer == config["tokenizer"]
    if not same or data.vocab_size > config["model_config"].get("vocab_size", data.vocab_size):
        raise DataError(f"{data.path} has other tokens ({data.tokenizer}) than {run} was trained on ({config['tokenizer']})")
    return data


# ------------------------------------------------------------------------------------------------------------ preparation


def in_val(key, frac):
    """Whether the document `key` falls to validation: a fixed pseudo-random choice of the fraction `frac`."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < frac * 2**64


def check_free(out):
    if os.path.exists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out}: exists already: delete it or choose another --name or --out")


@contextlib.contextmanager
def new_folder(out):
    """A temporary sibling of `out` that becomes `out` when the block ends well and vanishes when it does not."""
    tmp = out.with_name(f"{out.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tmp.mkdir()
        yield tmp
        os.rename(tmp, out)                                             # refuses an `out` that has something in it
    except OSError as e:
        raise DataError(f"{e.filename2 or e.filename or out}: {e.strerror or e}") from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def documents(files, field="text", label="reading"):
    """Yields the text of each document of .txt and .jsonl files, either one plain, .gz or .xz, in order.

    .txt: UTF-8; lines that hold only <|endoftext|> separate documents, and the line break before one belongs to it.
    .jsonl: an object a line, its text in `field`. Empty documents are left out. Raises DataError naming file and line.
    """
    def text_of(raw, file, line):
        try:
            return raw.decode()
        except UnicodeDecodeError as e:
            line += raw[:e.start].count(b"\n")
            raise DataError(f"{file}:{line}: not UTF-8 text (byte 0x{raw[e.start]:02x}): convert it") from None

    total = sum(os.path.getsize(file) for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc=label, disable=None, leave=False) as bar:
        for file in files:
            with open(file, "rb") as disk:
                unpack = {".gz": gzip.open, ".xz": lzma.open}.get(Path(file).suffix, lambda f: f)
                before, begin, lines = bar.n, 1, []
                try:
                    for i, line in enumerate(unpack(disk), 1):
                        if i % 64 == 0:
                            bar.update(disk.tell() - bar.n + before)
                        if ".jsonl" in Path(file).suffixes:
                            if line.strip():
                                line = text_of(line.removeprefix(b"\xef\xbb\xbf"), file, i)
                                try:
                                    text = json.loads(line)[field].encode("utf-8", "replace").decode()  # half a surrogate pair is no text
                                except (ValueError, KeyError, TypeError, AttributeError) as e:
                                    raise DataError(f"{file}:{i}: not a JSON object with text in the field {field!r} "
                                                    f"({type(e).__name__}): mend the line or name the --field") from None
                                if text:
                                    yield text
                        elif line.rstrip(b"\r\n") == EOT.encode():
                            raw = b"".join(lines).removesuffix(b"\n").removesuffix(b"\r")
                            if raw:
                                yield text_of(raw, file, begin)
                            begin, lines = i + 1, []
                        else:
                            lines.append(line if i > 1 else line.removeprefix(b"\xef\xbb\xbf"))
                except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as e:
                    raise DataError(f"{file}: broken or truncated archive ({e})") from None
                if lines:
                    yield text_of(b"".join(lines), file, begin)
                bar.update(disk.tell() - bar.n + before)


class Writer:
    """Gathers the tokens of one split and writes them as shards. Keeps back the last one to two shards until close()."""

    def __init__(self, folder, split, shard_tokens):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.buffer, self.fill = np.empty(2 * shard_tokens, np.uint16), 0
        self.tokens, self.documents, self.shards = 0, 0, {}

    def add(self, tokens):
        self.tokens, self.documents = self.tokens + len(tokens), self.documents + 1
        while len(tokens):
            n = min(len(tokens), len(self.buffer) - self.fill)
            self.buffer[self.fill:self.fill + n] = tokens[:n]
            self.fill, tokens = self.fill + n, tokens[n:]
            if self.fill == len(self.buffer):
                self.flush()

    def flush(self):
        n = min(self.fill, self.shard_tokens)
        name = f"{self.split}_{len(self.shards):06d}.bin"
        self.shards[name] = {"tokens": n, "sha256": write_shard(self.folder / name, self.buffer[:n])}
        self.buffer[:self.fill - n], self.fill = self.buffer[n:self.fill].copy(), self.fill - n


def encode(texts, encoding):
    """(split, text) -> (split, end-of-text and the tokens of text), in order, on all cores, few documents at a time."""
    def tokens_of(text):                                                # tiktoken releases the GIL
        return np.concatenate(([encoding.eot_token], encoding.encode_to_numpy(text, disallowed_special=())))

    n_threads, pending = os.cpu_count(), deque()
    with ThreadPoolExecutor(n_threads) as pool:
        for split, text in texts:
            pending.append((split, pool.submit(tokens_of, text)))
            if len(pending) > 8 * n_threads:
                split, tokens = pending.popleft()
                yield split, tokens.result()
        for split, tokens in pending:
            yield split, tokens.result()


def fill_folder(folder, texts, tokenizer, source, val_frac, shard_tokens=SHARD_TOKENS):
    """Writes shards, token_bytes.npy and meta.json for texts, an iterable of (split, text); returns the contents of meta.json.

    If no document fell to validation, the last val_frac of the train tokens are moved there, as a document of its own.
    """
    encoding = load_tokenizer(tokenizer)
    if tokenizer not in ("gpt2", "byte"):
        if not (folder / "tokenizer.tiktoken").exists():
            shutil.copyfile(tokenizer, folder / "tokenizer.tiktoken")
        tokenizer = "tokenizer.tiktoken"
    widths = token_bytes(encoding)
    writers = {split: Writer(folder, split, shard_tokens) for split in ("train", "val")}
    n_bytes = dict.fromkeys(writers, 0)

    for split, tokens in encode(texts, encoding):
        writers[split].add(tokens)
        n_bytes[split] += int(widths[tokens].sum())
    train, val = writers["train"], writers["val"]
    if val.tokens == 0 and val_frac and train.fill > 2:
        n = min(max(round(val_frac * train.tokens), 1), train.fill // 2)
        tail = train.buffer[train.fill - n:train.fill]
        val.add(np.concatenate(([encoding.eot_token], tail)))
        train.fill, train.tokens = train.fill - n, train.tokens - n
        n_bytes["val"] = int(widths[tail].sum())
        n_bytes["train"] -= n_bytes["val"]
    for split, writer in writers.items():
        if writer.tokens < 2:
            raise DataError(f"no text for the {split} split in {source}: give more text" + (" (or --val FILES)" if split == "val" else ""))
        while writer.fill:
            writer.flush()
    splits = {k: {"tokens": w.tokens, "bytes": n_bytes[k], "documents": w.documents} for k, w in writers.items()}
    return write_meta(folder, tokenizer, encoding.n_vocab, widths, splits, train.shards | val.shards, source)


def write_meta(folder, tokenizer, vocab_size, widths, splits, shards, source):
    meta = {"version": 1, "source": source, "tokenizer": tokenizer, "vocab_size": vocab_size, "splits": splits, "shards": shards}
    if widths is not None:
        np.save(folder / "token_bytes.npy", widths)
    with open(folder / "meta.json.tmp", "w") as f:
        f.write(json.dumps(meta, indent=1) + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(folder / "meta.json.tmp", folder / "meta.json")
    return meta


def prepare_stdlib(out="data/stdlib", tokenizer="byte") -> dict:
    """The .py sources of the running Python's standard library, without tests, as a data folder; returns its meta.json.

    About 5% of the files, chosen by a hash of their path, are for validation. The same Python gives the same shards. A folder
    that is there already is used as it is. Raises DataError without sources or if `out` is something else.
    """
    out = Path(os.path.realpath(out))
    if not os.path.exists(out / "meta.json"):
        check_free(out)
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
        names = []
        for folder, below, files in os.walk(root):
            below[:] = [d for d in below if d not in skip and not d.startswith("config-")]      # config-*: of this machine
            names += [(Path(folder) / f).relative_to(root).as_posix() for f in files
                      if f.endswith(".py") and not f.startswith("_sysconfigdata")]
        texts = []
        for name in sorted(names):
            with contextlib.suppress(UnicodeDecodeError, FileNotFoundError):                    # a dangling link is no file
                texts.append(("val" if in_val(name, 0.05) else "train", (root / name).read_bytes().decode()))
        texts = [(split, text) for split, text in texts if text]
        if not texts:
            raise DataError(f"{root}: no .py sources of the standard library there: prepare text of your own, python data_prep.py text")
        source = f"Python {platform.python_version()} standard library, {len(texts)} files"
        try:
            with new_folder(out) as tmp:
                fill_folder(tmp, tqdm(texts, desc="standard library", unit=" files", disable=None, leave=False), tokenizer, source, 0.05)
        except DataError:
            if not os.path.exists(out / "meta.json"):                                           # else another process was first
                raise
    data = Data(out)
    if data.meta["tokenizer"] != (tokenizer if tokenizer in ("gpt2", "byte") else "tokenizer.tiktoken"):
        raise DataError(f"{out}: holds {data.meta['tokenizer']} tokens, not {tokenizer}: delete it or choose another --out")
    return data.meta


def mqar_example(rng, n_pairs, eot, n_asked=1):
    """int64 (1 + 2 n_pairs (1 + n_asked),): end-of-text, n pairs of a key and a value, then all pairs again, n_asked times reordered.

    A key is one of the ids 0 ... 127, all different; a value one of 128 ... 255. From the second round on a value follows from its key.
    """
    pairs = np.stack((rng.permutation(128)[:n_pairs], rng.integers(128, 256, n_pairs)), axis=1)
    return np.concatenate(([eot], pairs.ravel(), *(rng.permutation(pairs).ravel() for _ in range(n_asked))))


def prepare_mqar(out, n_tokens=8_000_000) -> dict:
    """Multi-query associative recall as a data folder of "byte" ids: examples of 4, 8 or 16 pairs, each asked for three times, so
    that more of the tokens can be foretold. Returns its meta.json."""
    out = Path(os.path.realpath(out))
    check_free(out)
    with new_folder(out) as tmp:
        encoding, writers = load_tokenizer("byte"), {split: Writer(tmp, split, SHARD_TOKENS) for split in ("train", "val")}
        for split, amount, seed in (("train", n_tokens, 0), ("val", n_tokens // 40, 1)):
            rng = np.random.default_rng((0, seed))
            while writers[split].tokens < amount:
                writers[split].add(mqar_example(rng, rng.choice((4, 8, 16)), encoding.eot_token, n_asked=3))
            while writers[split].fill:
                writers[split].flush()
        splits = {split: {"tokens": w.tokens, "bytes": w.tokens - w.documents, "documents": w.documents} for split, w in writers.items()}
        return write_meta(tmp, "byte", encoding.n_vocab, token_bytes(encoding), splits, writers["train"].shards | writers["val"].shards,
                          "multi-query associative recall")


def prepare_text(files, out, tokenizer="gpt2", n_vocab=None, val_frac=0.01, val_files=(), field="text", shard_tokens=SHARD_TOKENS) -> dict:
    """Text files (see documents()) as a data folder; returns its meta.json.

    n_vocab: learn a vocabulary of that size from the train documents, instead of `tokenizer`. val_files: the validation split;
    without them, a fixed pseudo-random val_frac of the documents, or if that is none, the end of the text.
    Raises DataError for files that are missing, of another kind, broken or empty, and if `out` exists.
    """
    files, val_files, out = [*map(str, files)], [*map(str, val_files)], Path(os.path.realpath(out))
    check_free(out)
    if not 0 < val_frac < 1:
        raise DataError(f"--val_frac {val_frac} must lie between 0 and 1")
    if not 2 <= shard_tokens < 2**31:
        raise DataError(f"--shard_tokens {shard_tokens} must lie between 2 and {2**31 - 1}")
    for file in files + val_files:
        if not re.search(r"\.(txt|jsonl)(\.gz|\.xz)?$", file):
            raise DataError(f"{file}: unknown kind of file: .txt and .jsonl are read, either one plain, .gz or .xz")
        if not os.path.isfile(file):
            raise DataError(f"{file}: {'not a file' if os.path.exists(file) else 'no such file'}")

    def texts(label):
        for i, text in enumerate(documents(files, field, label)):
            yield "val" if i and not val_files and in_val(str(i), val_frac) else "train", text  # the first one always trains
        for text in documents(val_files, field, label):
            yield "val", text

    with new_folder(out) as tmp:
        if n_vocab is not None:
            tokenizer = str(tmp / "tokenizer.tiktoken")
            train_bpe((text for split, text in texts("learning the vocabulary") if split == "train"), n_vocab, tokenizer)
        names = [Path(file).name for file in files + val_files]
        source = ", ".join(names[:8]) + (f" and {len(names) - 8} more files" if len(names) > 8 else "")
        return fill_folder(tmp, texts("encoding"), tokenizer, source, 0 if val_files else val_frac, shard_tokens)


def download_fineweb_edu(out="data/fineweb-edu", shards=1, base_url=FINEWEB_URL) -> dict:
    """Train shards 1 ... `shards` and the val shard of FineWeb-Edu in GPT-2 tokens as a data folder; returns its meta.json.

    Shards stay `*.part` until all are complete; what is there already is kept, and a partial file is resumed. Raises
    DataError for whatever goes wrong on the way.
    """
    if not 1 <= shards <= 99:
        raise DataError(f"--shards {shards}: the dataset has the train shards 1 to 99")
    out = Path(out)
    names = ["finewebedu_val_000000.bin"] + [f"finewebedu_train_{i:06d}.bin" for i in range(1, shards + 1)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        fresh = [name for name in names if not complete(out / name)]
        for name in fresh:
            fetch_shard(base_url.rstrip("/") + "/" + name, out / f"{name}.part")
        for name in fresh:
            os.replace(out / f"{name}.part", out / name)
        try:
            encoding = load_tokenizer("gpt2")
            widths, eot = token_bytes(encoding), encoding.eot_token
        except DataError:                                               # bytes stay unknown
            widths, eot = None, 50256
        names = sorted({p.name for p in out.iterdir() if split_of(p.name)})
        counts, recorded = {split: np.zeros(MAX_VOCAB, np.int64) for split in ("train", "val")}, {}
        for name in tqdm(names, desc="checking", unit=" shards", disable=None, leave=False):
            tokens = read_shard(out / name)
            with open(out / name, "rb") as f:
                digest = hashlib.sha256()
                while chunk := f.read(2 * CHUNK):
                    digest.update(chunk)
            for i in range(0, len(tokens), CHUNK):
                counts[split_of(name)] += np.bincount(tokens[i:i + CHUNK], minlength=MAX_VOCAB)
            recorded[name] = {"tokens": len(tokens), "sha256": digest.hexdigest()}
    except OSError as e:
        raise DataError(f"{e.filename or out}: {e.strerror or e}") from None
    splits = {k: {"tokens": int(n.sum()), "bytes": None if widths is None else int(n[:len(widths)] @ widths),
                  "documents": int(n[eot])} for k, n in counts.items()}
    return write_meta(out, "gpt2", 50257, widths, splits, recorded, base_url)


def complete(path):
    try:
        return read_shard(path) is not None
    except DataError:
        return False


def fetch_shard(url, part):
    """Downloads a shard to the file `part`, from where an earlier download stopped. Raises DataError in one line."""
    with open(part, "ab") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{part}: another process is downloading it: wait for that one") from None
        if complete(part):
            return
        try:
            request = urllib.request.Request(url, headers={"Range": f"bytes={f.tell()}-"} if f.tell() else {})
            with urllib.request.urlopen(request, timeout=60) as reply:
                if reply.status != 206:                                 # the server sends the whole file
                    f.truncate(0)
                have, todo = f.tell() if reply.status == 206 else 0, reply.length or 0
                with tqdm(total=have + todo, initial=have, desc=part.stem, unit="B", unit_scale=True, disable=None, leave=False) as bar:
                    while chunk := reply.read(2**20):
                        f.write(chunk)
                        bar.update(len(chunk))
            f.flush()
            os.fsync(f.fileno())
        except urllib.error.HTTPError as e:
            if e.code == 416:                                           # nothing after what we have, and that is no shard
                f.truncate(0)
                raise DataError(f"{url}: the partial file {part} does not belong to it, and was emptied: run it again") from None
            raise DataError(f"{url}: the server says {e.code} {e.reason}: check --url and --shards") from None
        except (OSError, http.client.HTTPException, ValueError) as e:
            reason = getattr(e, "reason", None) or e
            raise DataError(f"{url}: download failed ({reason}): run it again, it goes on where it stopped") from None
    size = part.stat().st_size
    try:
        read_shard(part)
    except DataError as e:
        start = np.fromfile(part, "<i4", 3)
        if len(start) == 3 and start[0] == MAGIC and size < 4 * HEADER + 2 * int(start[2]):
            raise DataError(f"{url}: connection ended early, {size:,} bytes are here: run it again, it goes on where it stopped") from None
        part.unlink()                                                   # nothing to go on from
        raise DataError(f"{url}: {str(e).removeprefix(f'{part}: ')}") from None


# -------------------------------------------------------------------------------------------------------------------- CLI


def main():
    parser = models.Parser("data_prep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="stdlib | text | fineweb-edu | mqar")
    add = lambda name, text: commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    p = add("stdlib", "the running Python's standard-library sources, without its tests")
    p.add_argument("--out", default="data/stdlib", help="folder to make (%(default)s)")
    p.add_argument("--tokenizer", default="byte", help="gpt2, byte, or the path of a file of merge ranks (%(default)s)")
    p = add("text", "own text: .txt (lines <|endoftext|> separate documents) or .jsonl; plain, .gz or .xz")
    p.add_argument("files", nargs="+", metavar="FILE", help="text files, in this order")
    p.add_argument("--name", help="makes the folder data/NAME")
    p.add_argument("--out", help="folder to make, instead of data/NAME")
    p.add_argument("--tokenizer", help="gpt2 (the default), byte, or the path of a file of merge ranks")
    p.add_argument("--train_bpe", type=int, metavar="N", help="learn a vocabulary of N tokens from the train text instead; needs rustbpe")
    p.add_argument("--val_frac", type=float, default=0.01, help="part of the documents that is for validation (%(default)s)")
    p.add_argument("--val", nargs="+", default=[], metavar="FILE", help="files for validation, instead of val_frac")
    p.add_argument("--field", default="text", help="the text's field in .jsonl (%(default)s)")
    p.add_argument("--shard_tokens", type=int, default=SHARD_TOKENS, help="tokens per shard (%(default)s)")
    p = add("fineweb-edu", "download FineWeb-Edu in GPT-2 tokens, 100M tokens (200 MB) a shard")
    p.add_argument("--shards", type=int, required=True, help="train shards to have, 1 to 99")
    p.add_argument("--out", default="data/fineweb-edu", help="folder to make or to extend (%(default)s)")
    p.add_argument("--url", default=FINEWEB_URL, help="folder of the shards: the hub, or a mirror of it (%(default)s)")
    p = add("mqar", "synthetic: multi-query associative recall, for eval.py --tasks mqar")
    p.add_argument("--out", default="data/mqar", help="folder to make (%(default)s)")
    args = parser.parse_args()
    began = time.perf_counter()
    try:
        if args.command == "stdlib":
            if os.path.exists(f"{args.out}/meta.json"):
                print(f"{args.out} is there already")
            meta = prepare_stdlib(args.out, args.tokenizer)
        elif args.command == "mqar":
            meta = prepare_mqar(args.out)
        elif args.command == "fineweb-edu":
            meta = download_fineweb_edu(args.out, args.shards, args.url)
        else:
            if not (args.name or args.out):
                raise DataError("text needs --name NAME (makes data/NAME) or --out FOLDER")
            if args.tokenizer and args.train_bpe is not None:
                raise DataError(f"--train_bpe {args.train_bpe} learns a tokenizer, --tokenizer {args.tokenizer} names one: choose")
            args.out = args.out or f"data/{args.name}"
            meta = prepare_text(args.files, args.out, args.tokenizer or "gpt2", args.train_bpe, args.val_frac, args.val, args.field,
                                args.shard_tokens)
    except DataError as e:
        print(f"data_prep.py: error: {models.escaped(e)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("data_prep.py: interrupted; nothing half-made is left, and a download goes on when it is run again", file=sys.stderr)
        return 130
    for split, n in meta["splits"].items():
        size = f"{n['bytes']:,} bytes, {n['bytes'] / n['tokens']:.2f} bytes per token" if n["bytes"] else "bytes unknown"
        print(f"{split:5}  {n['documents']:,} documents, {n['tokens']:,} tokens, {size}")
    print(f"{meta['source']}: {meta['tokenizer']} tokens, vocabulary {meta['vocab_size']:,}, {time.perf_counter() - began:.1f} s")
    print(f"next: python train.py --data {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
