"""Turns text into token shards: makes a data folder for train.py.

    python data_prep.py stdlib                                      the source of the running Python; offline
    python data_prep.py fineweb-edu --shards 10                     public GPT-2 tokens, 100M a shard
    python data_prep.py text FILES... --name X --tokenizer gpt2     your .txt, .md, .jsonl or .parquet; whole folders
    python data_prep.py text FILES... --name X --train_bpe 8192     the same, with a vocabulary learned from it

nanodepth/data.py describes the format. Text that spells the end-of-text token stays ordinary text.
"""
import contextlib
import hashlib
import http.client
import json
import os
import platform
import shutil
import sysconfig
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from nanodepth.cli import Parser, UserError, progress, run_script, shell, signals
from nanodepth.data import HEADER, MAGIC, VERSION, Data, index, read_shard, split_of
from nanodepth.runs import folder_atomically, write_atomically, write_text
from nanodepth.texts import KNOWN, documents, text_files
from nanodepth.tokenizers import load_tokenizer, token_bytes, train_bpe

SHARD_TOKENS = 100_000_000
FINEWEB_URL = "https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/"

# ----------------------------------------------------------------------------------------------------- filling a folder


def write_shard(path, tokens) -> str:
    """Writes uint16 tokens (n,) as a shard; returns the sha256 of the file in hex."""
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    raw = header.tobytes() + np.asarray(tokens, "<u2").tobytes()
    write_atomically(Path(path), lambda file: file.write(raw))
    return hashlib.sha256(raw).hexdigest()


class Writer:
    """Collects the tokens of one split and writes them as shards. Keeps up to two in memory until the end.

    widths: bytes of each token, from tokenizers.token_bytes().
    """

    def __init__(self, folder, split, shard_tokens, widths):
        self.folder, self.split, self.shard_tokens, self.widths = folder, split, shard_tokens, widths
        self.buffer, self.fill = np.empty(2 * shard_tokens, np.uint16), 0
        self.tokens, self.bytes, self.documents, self.shards = 0, 0, 0, {}

    def add(self, tokens):
        """Adds a document."""
        self.tokens += len(tokens)
        self.bytes += int(self.widths[tokens].sum())
        self.documents += 1
        while len(tokens):
            n = min(len(tokens), len(self.buffer) - self.fill)
            self.buffer[self.fill:self.fill + n] = tokens[:n]
            self.fill, tokens = self.fill + n, tokens[n:]
            if self.fill == len(self.buffer):
                self.flush()

    def take_back(self, n):
        """Removes the last n tokens, which are not written yet, and returns them."""
        self.fill -= n
        tail = self.buffer[self.fill:self.fill + n].copy()
        self.tokens, self.bytes = self.tokens - n, self.bytes - int(self.widths[tail].sum())
        return tail

    def flush(self):
        n = min(self.fill, self.shard_tokens)
        name = f"{self.split}_{len(self.shards):06d}.bin"
        self.shards[name] = {"tokens": n, "sha256": write_shard(self.folder / name, self.buffer[:n])}
        self.buffer[:self.fill - n], self.fill = self.buffer[n:self.fill].copy(), self.fill - n


def new_folder(out):
    """`with new_folder(out) as tmp`: what is made in tmp moves to `out` at the end. UserError if `out` is taken."""
    out = Path(os.path.realpath(os.path.expanduser(out)))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already: delete it or make another folder with --out")
    return folder_atomically(out)


def in_val(key, frac):
    """Whether the document with this text (or name) is for validation: a fixed pseudo-random choice of a fraction."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < frac * 2**64


def fill_folder(folder, texts, tokenizer, source, val_frac, shard_tokens=SHARD_TOKENS):
    """Writes shards, token_bytes.npy and meta.json for texts, an iterable of (split, text); returns meta.json's dict.

    If no document is for validation, the last val_frac of the train tokens move there, as a document of their own.
    Ctrl-C or another signal to stop raises SystemExit once the documents in hand are done.
    """
    encoding = load_tokenizer(tokenizer)
    widths = token_bytes(encoding)
    np.save(folder / "token_bytes.npy", widths)             # with it, Data misses meta.json until that is there
    writers = {split: Writer(folder, split, shard_tokens, widths) for split in ("train", "val")}

    def encoded(pair):
        split, text = pair
        return split, np.array([encoding.eot_token, *encoding.encode_ordinary(text)], np.uint16)

    texts = iter(texts)
    with signals("these documents") as stops, ThreadPoolExecutor() as pool:     # tiktoken releases the GIL
        while not stops and (some := list(islice(texts, 100))):
            for split, tokens in pool.map(encoded, some):
                writers[split].add(tokens)
    if stops:               # raised at once, inside the pool's code, it can leave a lock taken for which the pool waits
        raise SystemExit(128 + stops[0])
    train, val = writers["train"], writers["val"]
    if val_frac and train.fill > 1 and not val.tokens:
        n = min(max(round(val_frac * train.tokens), 1), train.fill // 2)
        val.add(np.concatenate(([encoding.eot_token], train.take_back(n))))
        print(f"validation: no document was chosen, so it is the last {n:,} tokens of the text, even if they repeat "
              "earlier text")
    if tokenizer not in ("gpt2", "byte"):
        if not (folder / "tokenizer.tiktoken").exists():
            shutil.copyfile(os.path.expanduser(tokenizer), folder / "tokenizer.tiktoken")
        tokenizer = "tokenizer.tiktoken"
    meta = {"version": 1, "source": source, "tokenizer": tokenizer, "vocab_size": len(widths), "splits": {},
            "shards": {}}
    for split, writer in writers.items():
        if writer.tokens < 2:
            raise UserError(f"no text for the {split} split in {source}: give more text, or files to --val")
        while writer.fill:
            writer.flush()
        meta["shards"] |= writer.shards
        meta["splits"][split] = {"tokens": writer.tokens, "bytes": writer.bytes, "documents": writer.documents}
    write_text(folder / "meta.json", json.dumps(meta, indent=1) + "\n")        # completes the folder
    return meta


# ---------------------------------------------------------------------------------------------------- the kinds of data


def prepare_stdlib(out="data/stdlib") -> dict:
    """The .py sources of the running Python's standard library, without tests, as "byte" ids; returns their meta.json.

    An existing folder is used as it is.
    """
    try:
        with new_folder(out) as tmp:
            texts = stdlib_texts()
            source = f"Python {platform.python_version()} standard library, {len(texts)} files"
            fill_folder(tmp, texts, "byte", source, 0.05)
    except (UserError, OSError):
        if not Path(os.path.expanduser(out), "meta.json").exists():
            raise
        print(f"{out} is there already")                                # or another process has just made it
    return Data(os.path.expanduser(out)).meta


def stdlib_texts():
    """[(split, text)] of the standard library's .py files, sorted by path: the same Python gives the same list.

    About 5% of the files, chosen by a hash of their path, are for validation.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
    names, texts = [], []
    for folder, below, files in os.walk(root):
        below[:] = [d for d in below if d not in skip and not d.startswith("config-")]      # config-*: of this machine
        names += [(Path(folder) / f).relative_to(root).as_posix() for f in files
                  if f.endswith(".py") and not f.startswith("_sysconfigdata")]
    for name in sorted(names):
        with contextlib.suppress(UnicodeDecodeError, FileNotFoundError):                    # a dangling link is no file
            if text := (root / name).read_bytes().decode():
                texts.append(("val" if in_val(name, 0.05) else "train", text))
    if not texts:
        raise UserError(f"{root}: no Python sources here: prepare your own text with python data_prep.py text")
    return texts


def prepare_text(files, out, tokenizer="gpt2", n_vocab=None, val_frac=None, val_files=(), field="text",
                 shard_tokens=SHARD_TOKENS) -> dict:
    """Text files, folders of them or patterns (see nanodepth/texts.py) as a data folder; returns its meta.json.

    n_vocab: learn a vocabulary of that size from the train documents, instead of `tokenizer`. val_files: the validation
    split; without them, a fixed pseudo-random val_frac of the documents, or the end of the text if that chooses none.
    Equal documents are in the same split. Prints how many documents of val_files are also in `files`.
    """
    if val_frac is not None and not 0 < val_frac < 1:
        raise UserError(f"--val_frac {val_frac} must lie between 0 and 1")
    if not 2 <= shard_tokens < 2**31:
        raise UserError(f"--shard_tokens {shard_tokens} must lie between 2 and {2**31 - 1}")
    files, val_files = text_files(files), text_files(val_files)
    if both := {*map(os.path.realpath, files)} & {*map(os.path.realpath, val_files)}:
        raise UserError(f"{min(both)}: is for training and in --val: give it to only one of the two")
    if val_frac is None:                # 400 kB, about 100,000 GPT-2 tokens, but at least 1% of the bytes, at most 10%
        val_frac = min(max(400_000 / max(sum(map(os.path.getsize, files)), 1), 0.01), 0.1)

    def texts(label):
        held_out, copied, first = Counter(), set(), None
        for text in documents(val_files, field, label):
            held_out[hash(text)] += 1
            yield "val", text
        for text in documents(files, field, label):
            first = first or text                                           # always trains, and so do its copies
            if hash(text) in held_out:
                copied.add(hash(text))
            yield "val" if not val_files and text != first and in_val(text, val_frac) else "train", text
        if held_out:
            print(f"{label}: {sum(held_out[key] for key in copied):,} of the {held_out.total():,} validation documents "
                  "are also in the training text")

    with new_folder(out) as tmp:
        if n_vocab is not None:
            tokenizer = str(tmp / "tokenizer.tiktoken")
            train = (text for split, text in texts("learning the vocabulary") if split == "train")
            train_bpe(train, n_vocab, tokenizer)
        names = [os.path.basename(file) for file in files + val_files]
        source = ", ".join(names[:8]) + (f" and {len(names) - 8} more files" if len(names) > 8 else "")
        return fill_folder(tmp, texts("encoding"), tokenizer, source, 0 if val_files else val_frac, shard_tokens)


def download_fineweb_edu(out, shards, base_url=FINEWEB_URL):
    """Downloads train shards 1 ... `shards`, and last the val shard, without which nothing can train on the folder.

    Existing shards are kept. Then makes meta.json and token_bytes.npy. UserError if a download fails, or if a shard is
    cut off, or no longer what an older meta.json says.
    """
    if not 1 <= shards <= 99:
        raise UserError(f"--shards {shards}: choose 1 to 99, which is what the dataset has")
    out = Path(os.path.expanduser(out))
    out.mkdir(parents=True, exist_ok=True)
    if other := [p for p in out.iterdir() if split_of(p.name) and not p.name.startswith("finewebedu_")]:
        raise UserError(f"{other[0]} belongs to other data: choose another --out")
    recorded = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):     # none yet, or it is broken
        recorded = {name: x["sha256"] for name, x in json.loads((out / "meta.json").read_bytes())["shards"].items()}
    names = [*(f"finewebedu_train_{i:06d}.bin" for i in range(1, shards + 1)), "finewebedu_val_000000.bin"]
    for name in progress(names, unit=" shards"):
        if not (out / name).exists():
            fetch_shard(f"{base_url.rstrip('/')}/{name}", out / name)
    sizes = {p.name: len(read_shard(p)) for p in sorted(out.iterdir()) if split_of(p.name)}
    known = index(out, sizes, sizes)
    shards = {name: {"tokens": n, "sha256": known[name]["sha256"]} for name, n in sizes.items()}
    if changed := [name for name, shard in shards.items() if shard["sha256"] != recorded.get(name, shard["sha256"])]:
        raise UserError(f"{out / changed[0]}: its content is not what meta.json says (sha256): delete it and run this "
                        "again, to download it again")
    meta = {"version": 1, "source": base_url, "tokenizer": "gpt2", "vocab_size": 50257, "splits": {}, "shards": shards}
    write_text(out / "meta.json", json.dumps(meta, indent=1))
    try:                                                                # so that training needs no network
        widths = token_bytes(load_tokenizer("gpt2"))
        write_atomically(out / "token_bytes.npy", lambda file: np.save(file, widths))
    except UserError as e:
        print(f"bits per byte wait for the lengths of the tokens: {e}")


def fetch_shard(url, path):
    """Downloads a shard (200 MB, in memory). UserError if that fails."""
    def write(file):
        file.write(raw)
        file.flush()
        read_shard(file.name)                                           # UserError if it is none

    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            raw = reply.read()
    except (OSError, http.client.HTTPException, ValueError) as e:       # also if the connection ends early
        raise UserError(f"{url}: download failed ({e}): check --url and --shards, or run it again") from None
    write_atomically(path, write)


# --------------------------------------------------------------------------------------------------------- command line


def parse(argv):
    """The function to call, and its arguments by name."""
    parser = Parser("data_prep.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="stdlib | text | fineweb-edu")

    def add(name, function, text):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        if name != "text":
            command.add_argument("--out", default=f"data/{name}", help="folder to make (%(default)s)")
        return command

    add("stdlib", prepare_stdlib, "source of the running Python's standard library, without its tests, as bytes")
    p = add("fineweb-edu", download_fineweb_edu, "FineWeb-Edu in GPT-2 tokens, 100M tokens (200 MB) a shard")
    p.add_argument("--shards", type=int, required=True, help="number of train shards, 1 to 99; those in --out are kept")
    p.add_argument("--url", dest="base_url", default=FINEWEB_URL,
                   help="folder of the shards: the hub, or a mirror of it (%(default)s)")
    p = add("text", prepare_text, f"your text: {KNOWN}; in a .txt or .md, lines <|endoftext|> separate documents")
    p.add_argument("files", nargs="+", metavar="FILE",
                   help='text files, folders or patterns ("*.txt"), in this order; inside each, sorted by path')
    place = p.add_mutually_exclusive_group(required=True)
    place.add_argument("--name", dest="out", type="data/{}".format, metavar="NAME", help="makes the folder data/NAME")
    place.add_argument("--out", help="folder to make, instead of data/NAME")
    tokens = p.add_mutually_exclusive_group()
    tokens.add_argument("--tokenizer", default="gpt2",
                        help="gpt2, byte, or the path of a file of merge ranks (%(default)s)")
    tokens.add_argument("--train_bpe", dest="n_vocab", type=int, metavar="N",
                        help="learn a vocabulary of N tokens from the train text instead; needs rustbpe")
    val = p.add_mutually_exclusive_group()
    val.add_argument("--val_frac", type=float, help="fraction of the documents for validation (0.01; with less than "
                     "40 MB of files, what makes 400 kB, but at most 0.1)")
    val.add_argument("--val", dest="val_files", nargs="+", default=[], metavar="FILE",
                     help="files, folders or patterns for validation, instead of --val_frac")
    p.add_argument("--field", default="text", help="field of the text in .jsonl and .parquet (%(default)s)")
    p.add_argument("--shard_tokens", type=int, default=SHARD_TOKENS, help="tokens per shard (%(default)s)")
    args = vars(parser.parse_args(argv))
    del args["command"]
    return args.pop("function"), args


def main(argv):
    prepare, args = parse(argv)
    began = time.perf_counter()
    prepare(**args)
    data = Data(os.path.expanduser(args["out"]))                        # makes its shards_index.json
    for split, n in data.meta.get("splits", {}).items():
        print(f"{split:5}  {n['documents']:,} documents, {n['tokens']:,} tokens, {n['bytes']:,} bytes, "
              f"{n['bytes'] / n['tokens']:.2f} bytes per token")
    print(f"{data.path}: {data.n_train:,} training tokens, {data.n_val:,} for validation, {data.tokenizer} tokens, "
          f"vocabulary {data.vocab_size:,}, {time.perf_counter() - began:.1f} s")
    print(f"next: {shell('train.py', '--data', args['out'])}")
    return 0


if __name__ == "__main__":
    run_script("data_prep.py", main, "lower --shard_tokens")
