"""Text -> token shards: a data folder for train.py.

    python data_prep.py stdlib                                      the running Python's own sources; offline
    python data_prep.py fineweb-edu --shards 10                     public GPT-2 tokens, 100M a shard
    python data_prep.py text FILES... --name X --tokenizer gpt2     own .txt, .md, .jsonl or .parquet; whole folders
    python data_prep.py text FILES... --name X --train_bpe 8192     the same, with a vocabulary of its own
    python data_prep.py mqar                                        synthetic: associative recall

The format is described in nanodepth/shards.py. Text that spells the end-of-text token stays ordinary text.
"""
import contextlib
import hashlib
import os
import platform
import shutil
import sysconfig
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanodepth.devices import machine_errors
from nanodepth.download import complete, fetch_shard
from nanodepth.cli import Parser, UserError, run_script, shell
from nanodepth.runs import folder_atomically
from nanodepth.data import CHUNK, MAX_VOCAB, Data, Writer, finish_folder, read_shard, split_of, write_meta
from nanodepth.texts import KNOWN, documents, text_files
from nanodepth.tokenizers import load_tokenizer, token_bytes, train_bpe

SHARD_TOKENS = 100_000_000
VAL_BYTES = 400_000                     # of text that is to be for validation: about 100,000 GPT-2 tokens
FINEWEB_URL = "https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/"

# ----------------------------------------------------------------------------------------------------- filling a folder


def in_val(key, frac):
    """Whether the document `key` falls to validation: a fixed pseudo-random choice of the fraction `frac`."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < frac * 2**64


def default_val_frac(files):
    """1%, or of files of less than 40 MB (as they are on the disk) as much as makes VAL_BYTES, at most 10%."""
    return min(max(VAL_BYTES / max(sum(map(os.path.getsize, files)), 1), 0.01), 0.1)


def check_free(out):
    """UserError unless there is nothing at `out`, or an empty folder."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if os.path.exists(out):
        raise UserError(f"{out}: exists already: delete it or make another folder with --out")


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
    """Writes shards, token_bytes.npy and meta.json for texts, an iterable of (split, text); returns the last.

    If no document fell to validation, the last val_frac of the train tokens are moved there, as a document of its own.
    """
    encoding = load_tokenizer(tokenizer)
    if tokenizer not in ("gpt2", "byte"):
        if not (folder / "tokenizer.tiktoken").exists():
            shutil.copyfile(tokenizer, folder / "tokenizer.tiktoken")
        tokenizer = "tokenizer.tiktoken"
    widths = token_bytes(encoding)
    writers = {split: Writer(folder, split, shard_tokens, widths) for split in ("train", "val")}
    for split, tokens in encode(texts, encoding):
        writers[split].add(tokens)
    train, val = writers["train"], writers["val"]
    if val.tokens == 0 and val_frac and train.fill > 2:
        n = min(max(round(val_frac * train.tokens), 1), train.fill // 2)
        tail = train.buffer[train.fill - n:train.fill]
        val.add(np.concatenate(([encoding.eot_token], tail)))
        train.fill, train.tokens = train.fill - n, train.tokens - n
        train.bytes -= val.bytes
    for split, writer in writers.items():
        if writer.tokens < 2:
            or_files = " (or --val FILES)" if split == "val" else ""
            raise UserError(f"no text for the {split} split in {source}: give more text{or_files}")
    return finish_folder(folder, tokenizer, widths, writers, source)


# ---------------------------------------------------------------------------------------------------- the kinds of data


def prepare_stdlib(out="data/stdlib", tokenizer="byte") -> dict:
    """The .py sources of the running Python's standard library, without tests, as a data folder; returns its meta.json.

    A folder that is there already is used as it is. UserError without sources or if `out` is something else.
    """
    out = Path(os.path.realpath(out))
    if not os.path.exists(out / "meta.json"):
        check_free(out)
        texts = stdlib_texts()
        source = f"Python {platform.python_version()} standard library, {len(texts)} files"
        shown = tqdm(texts, desc="standard library", unit=" files", disable=None, leave=False)
        try:
            with folder_atomically(out) as tmp:
                fill_folder(tmp, shown, tokenizer, source, 0.05)
        except UserError:
            if not os.path.exists(out / "meta.json"):                   # else another process was first
                raise
    data = Data(out)
    if data.meta["tokenizer"] != (tokenizer if tokenizer in ("gpt2", "byte") else "tokenizer.tiktoken"):
        raise UserError(f"{out}: holds {data.meta['tokenizer']} tokens, not {tokenizer}: "
                        "delete it or choose another --out")
    return data.meta


def stdlib_texts():
    """[(split, text)] of the standard library's .py files, in the order of paths: the same Python, the same list.

    About 5% of the files, chosen by a hash of their path, are for validation. UserError if there are none.
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
        raise UserError(f"{root}: no .py sources of the standard library there: "
                        "prepare text of your own, python data_prep.py text")
    return texts


def prepare_mqar(out, n_tokens=8_000_000) -> dict:
    """Multi-query associative recall as a data folder of "byte" ids; returns its meta.json.

    Examples of 4, 8 or 16 pairs. Each pair is asked for three times, so that more of the tokens can be predicted.
    """
    from nanodepth.harness import MQAR_PAIRS, mqar_example              # here: it imports lm_eval, if that is there
    out = Path(os.path.realpath(out))
    check_free(out)
    with folder_atomically(out) as tmp, tqdm(total=n_tokens + n_tokens // 40, unit=" tokens", unit_scale=True,
                                      desc="associative recall", disable=None, leave=False) as bar:
        encoding = load_tokenizer("byte")
        widths = token_bytes(encoding)
        writers = {split: Writer(tmp, split, SHARD_TOKENS, widths) for split in ("train", "val")}
        for split, amount, seed in (("train", n_tokens, 0), ("val", n_tokens // 40, 1)):
            rng = np.random.default_rng((0, seed))                      # (1, ...) is what eval.py asks
            while writers[split].tokens < amount:
                example = mqar_example(rng, rng.choice(MQAR_PAIRS), encoding.eot_token, n_asked=3)
                writers[split].add(example)
                bar.update(len(example))
        return finish_folder(tmp, "byte", widths, writers, "multi-query associative recall")


def prepare_text(files, out, tokenizer="gpt2", n_vocab=None, val_frac=None, val_files=(), field="text",
                 shard_tokens=SHARD_TOKENS) -> dict:
    """Text files, folders of them or patterns (see nanodepth/texts.py) as a data folder; returns its meta.json.

    n_vocab: learn a vocabulary of that size from the train documents, instead of `tokenizer`. val_files: the validation
    split; without them, a fixed pseudo-random val_frac of the documents (default_val_frac), or if that is none, the end
    of the text. UserError for files that are missing, of another kind, broken, empty or in both splits, and if `out`
    exists.
    """
    out = Path(os.path.realpath(out))
    check_free(out)
    if val_frac is not None and not 0 < val_frac < 1:
        raise UserError(f"--val_frac {val_frac} must lie between 0 and 1")
    if not 2 <= shard_tokens < 2**31:
        raise UserError(f"--shard_tokens {shard_tokens} must lie between 2 and {2**31 - 1}")
    files, val_files = text_files(files), text_files(val_files)
    trained = {*map(os.path.realpath, files)}
    for file in val_files:
        if os.path.realpath(file) in trained:
            raise UserError(f"{file}: is for training and in --val: name it for one of the two")
    val_frac = default_val_frac(files) if val_frac is None else val_frac

    def texts(label):
        for i, text in enumerate(documents(files, field, label)):
            is_val = i > 0 and not val_files and in_val(str(i), val_frac)   # the first one always trains
            yield "val" if is_val else "train", text
        for text in documents(val_files, field, label):
            yield "val", text

    with folder_atomically(out) as tmp:
        if n_vocab is not None:
            tokenizer = str(tmp / "tokenizer.tiktoken")
            train = (text for split, text in texts("learning the vocabulary") if split == "train")
            train_bpe(train, n_vocab, tokenizer)
        names = [Path(file).name.encode(errors="backslashreplace").decode() for file in files + val_files]
        source = ", ".join(names[:8]) + (f" and {len(names) - 8} more files" if len(names) > 8 else "")
        return fill_folder(tmp, texts("encoding"), tokenizer, source, 0 if val_files else val_frac, shard_tokens)


def download_fineweb_edu(out="data/fineweb-edu", shards=1, base_url=FINEWEB_URL) -> dict:
    """Train shards 1 ... `shards` and the val shard of FineWeb-Edu in GPT-2 tokens as a data folder.

    Shards stay `*.part` until all are complete; what is there already is kept, and a partial file is resumed. Returns
    its meta.json. UserError for whatever goes wrong on the way.
    """
    if not 1 <= shards <= 99:
        raise UserError(f"--shards {shards}: the dataset has the train shards 1 to 99")
    out = Path(out)
    names = ["finewebedu_val_000000.bin"] + [f"finewebedu_train_{i:06d}.bin" for i in range(1, shards + 1)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if other := [p for p in out.iterdir() if split_of(p.name) and not p.name.startswith("finewebedu_")]:
            raise UserError(f"{other[0]} is of other data: choose another --out")
        fresh = [name for name in names if not complete(out / name)]
        for name in fresh:
            fetch_shard(base_url.rstrip("/") + "/" + name, out / f"{name}.part")
        for name in fresh:
            os.replace(out / f"{name}.part", out / name)
        try:
            encoding = load_tokenizer("gpt2")
            widths, eot = token_bytes(encoding), encoding.eot_token
        except UserError:                                               # bytes stay unknown
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
        raise UserError(f"{e.filename or out}: {e.strerror or e}") from None
    splits = {k: {"tokens": int(n.sum()), "bytes": None if widths is None else int(n[:len(widths)] @ widths),
                  "documents": int(n[eot])} for k, n in counts.items()}
    return write_meta(out, "gpt2", 50257, widths, splits, recorded, base_url)


# --------------------------------------------------------------------------------------------------------- command line


def parse(argv):
    parser = Parser("data_prep.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="stdlib | text | fineweb-edu | mqar")
    add = lambda name, text: commands.add_parser(name, help=text, description=text)
    p = add("stdlib", "the running Python's standard-library sources, without its tests")
    p.add_argument("--out", default="data/stdlib", help="folder to make (%(default)s)")
    p.add_argument("--tokenizer", default="byte", help="gpt2, byte, or the path of a file of merge ranks (%(default)s)")
    p = add("text", f"own text: {KNOWN}; lines <|endoftext|> separate the documents of a .txt or .md")
    p.add_argument("files", nargs="+", metavar="FILE",
                   help='text files, in this order; of a folder or a pattern such as "*.txt", in the order of paths')
    p.add_argument("--name", help="makes the folder data/NAME")
    p.add_argument("--out", help="folder to make, instead of data/NAME")
    p.add_argument("--tokenizer", help="gpt2 (the default), byte, or the path of a file of merge ranks")
    p.add_argument("--train_bpe", type=int, metavar="N",
                   help="learn a vocabulary of N tokens from the train text instead; needs rustbpe")
    p.add_argument("--val_frac", type=float, help="part of the documents that is for validation (0.01; of less than "
                   "40 MB of files as much as makes 400 kB, but at most 0.1)")
    p.add_argument("--val", nargs="+", default=[], metavar="FILE",
                   help="files, folders or patterns for validation, instead of val_frac")
    p.add_argument("--field", default="text", help="the text's field in .jsonl, column in .parquet (%(default)s)")
    p.add_argument("--shard_tokens", type=int, default=SHARD_TOKENS, help="tokens per shard (%(default)s)")
    p = add("fineweb-edu", "download FineWeb-Edu in GPT-2 tokens, 100M tokens (200 MB) a shard")
    p.add_argument("--shards", type=int, required=True, help="train shards to have, 1 to 99")
    p.add_argument("--out", default="data/fineweb-edu", help="folder to make or to extend (%(default)s)")
    p.add_argument("--url", default=FINEWEB_URL, help="folder of the shards: the hub, or a mirror of it (%(default)s)")
    p = add("mqar", "synthetic: multi-query associative recall, for eval.py --tasks mqar")
    p.add_argument("--out", default="data/mqar", help="folder to make (%(default)s)")
    return parser.parse_args(argv)


def prepare(args):
    """Makes the data folder that was asked for; returns its meta.json."""
    if args.command == "stdlib":
        if os.path.exists(f"{args.out}/meta.json"):
            print(f"{args.out} is there already")
        return prepare_stdlib(args.out, args.tokenizer)
    if args.command == "mqar":
        return prepare_mqar(args.out)
    if args.command == "fineweb-edu":
        return download_fineweb_edu(args.out, args.shards, args.url)
    if bool(args.name) == bool(args.out):
        raise UserError("text needs --name NAME (makes data/NAME) or --out FOLDER, one of them")
    if args.name and (Path(args.name).name != args.name or args.name == ".."):
        raise UserError(f"--name {args.name}: a plain name makes data/NAME; for another place, --out FOLDER")
    if args.tokenizer and args.train_bpe is not None:
        raise UserError(f"--train_bpe {args.train_bpe} learns a tokenizer, --tokenizer {args.tokenizer} names one: "
                        "choose")
    if args.val and args.val_frac is not None:
        raise UserError(f"--val names the texts for validation, --val_frac {args.val_frac} chooses them: choose one")
    args.out = args.out or f"data/{args.name}"
    return prepare_text(args.files, args.out, args.tokenizer or "gpt2", args.train_bpe, args.val_frac, args.val,
                        args.field, args.shard_tokens)


@machine_errors("lower --shard_tokens")
def main(argv):
    args, began = parse(argv), time.perf_counter()
    try:
        meta = prepare(args)
    except KeyboardInterrupt:
        raise UserError("interrupted; nothing half-made is left, and a download goes on when it is run again",
                        code=130) from None
    for split, n in meta["splits"].items():
        per_token = n["bytes"] and n["bytes"] / n["tokens"]
        size = f"{n['bytes']:,} bytes, {per_token:.2f} bytes per token" if n["bytes"] else "bytes unknown"
        print(f"{split:5}  {n['documents']:,} documents, {n['tokens']:,} tokens, {size}")
    print(f"{meta['source']}: {meta['tokenizer']} tokens, vocabulary {meta['vocab_size']:,}, "
          f"{time.perf_counter() - began:.1f} s")
    print(f"next: {shell('train.py', '--data', args.out)}")
    return 0


if __name__ == "__main__":
    run_script("data_prep.py", main)
