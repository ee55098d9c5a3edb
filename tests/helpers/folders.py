"""Data folders and files of text, for the tests of data."""
import base64
import gzip
import hashlib
import json
import lzma
import struct

import pytest

from nanodepth.data import Data

EOT = "<|endoftext|>"
DOCS = ["Hello  world, it's 42!\n\n\tx", "naïve 日本語 🙂 \u0301\x00", f"it says {EOT} inside", " \n ", "last\none " * 40]


def shard_bytes(tokens, magic=20240520, version=1, count=None):
    """The format by its description, without numpy: 256 int32, then uint16, little-endian."""
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    return struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}H", *tokens)


def make(folder, train, val=([1, 2, 3],), meta=None):
    """A data folder with these shards (lists of ids). A dict `meta` gets the sha256 of those that it lists."""
    folder.mkdir()
    for split, shards in (("train", train), ("val", val)):
        for i, tokens in enumerate(shards):
            (folder / f"{split}_{i:06d}.bin").write_bytes(shard_bytes(tokens))
    for name, shard in meta["shards"].items() if isinstance(meta, dict) and isinstance(meta["shards"], dict) else ():
        shard["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest() if (folder / name).exists() else ""
    if meta is not None:
        (folder / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta), encoding="utf-8")
    return folder


def meta_of(shards, **changes):
    return {"version": 1, "tokenizer": "byte", "vocab_size": 257, "splits": {}, "source": "test",
            "shards": {k: {"tokens": n, "sha256": ""} for k, n in shards.items()}} | changes


def ranks_file(path, tokens):
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return path


def splits_of(folder):
    data = Data(folder)
    return {split: [t for shard in shards for t in shard.tolist()] for split, shards in data.shards.items()}


def zst(raw):
    """Two frames, as `cat a.zst b.zst` has them."""
    zstandard = pytest.importorskip("zstandard")
    return b"".join(zstandard.compress(part) for part in (raw[:len(raw) // 3], raw[len(raw) // 3:]))


def write_parquet(path, columns):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    return path


def write_docs(path, docs):
    if path.suffix == ".parquet":
        return write_parquet(path, {"id": [*range(len(docs))], "text": docs})
    if ".jsonl" not in path.name:
        raw = f"\n{EOT}\n".join(docs).encode()
    else:
        raw = "".join(json.dumps({"id": i, "text": doc}, ensure_ascii=i % 2 == 0) + "\n"
                      for i, doc in enumerate(docs)).encode()
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress, ".zst": zst}.get(path.suffix, bytes)(raw))
    return path
