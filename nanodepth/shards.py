"""Writes token shards and data folders, in the format that nanodepth/data.py reads."""
import hashlib
import json
from pathlib import Path

import numpy as np

from nanodepth.data import HEADER, MAGIC, VERSION
from nanodepth.runs import write_atomically, write_text


def write_shard(path, tokens) -> str:
    """Writes uint16 tokens (n,) as a shard; returns the sha256 of the file in hex."""
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    raw = header.tobytes() + np.asarray(tokens, "<u2").tobytes()
    write_atomically(Path(path), lambda file: file.write(raw))
    return hashlib.sha256(raw).hexdigest()


class Writer:
    """Collects the tokens of one split and writes them as shards. Keeps up to two in memory until finish_folder().

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


def finish_folder(folder, tokenizer, widths, writers, source):
    """Writes the tokens that the {split: Writer} of a data folder still keep, token_bytes.npy and last, to complete the
    folder, meta.json; returns its dict.
    """
    shards, splits = {}, {}
    for split, writer in writers.items():
        while writer.fill:
            writer.flush()
        shards |= writer.shards
        splits[split] = {"tokens": writer.tokens, "bytes": writer.bytes, "documents": writer.documents}
    meta = {"version": 1, "source": source, "tokenizer": tokenizer, "vocab_size": len(widths), "splits": splits,
            "shards": shards}
    np.save(folder / "token_bytes.npy", widths)
    write_text(folder / "meta.json", json.dumps(meta, indent=1) + "\n")
    return meta
