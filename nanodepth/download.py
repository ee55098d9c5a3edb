"""Downloads FineWeb-Edu in GPT-2 tokens, shard by shard. An interrupted download continues where it stopped."""
import hashlib
import http.client
import os
import urllib.request
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanodepth.cli import UserError
from nanodepth.data import MAX_VOCAB, read_shard, split_of
from nanodepth.shards import write_meta
from nanodepth.tokenizers import load_tokenizer, token_bytes

FINEWEB_URL = "https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/"
EOT = 50256                             # GPT-2's end-of-text token, its last id
AGAIN = "run it again, it continues where it stopped"


def download_fineweb_edu(out="data/fineweb-edu", shards=1, base_url=FINEWEB_URL) -> dict:
    """Downloads train shards 1 ... `shards` and the val shard to a data folder; returns the dict in its meta.json.

    Shards are named `*.part` until all are complete. Existing shards are kept. UserError if a download fails.
    """
    if not 1 <= shards <= 99:
        raise UserError(f"--shards {shards}: the dataset has the train shards 1 to 99")
    out = Path(os.path.expanduser(out))
    out.mkdir(parents=True, exist_ok=True)
    if other := [p for p in out.iterdir() if split_of(p.name) and not p.name.startswith("finewebedu_")]:
        raise UserError(f"{other[0]} belongs to other data: choose another --out")
    names = ["finewebedu_val_000000.bin", *(f"finewebedu_train_{i:06d}.bin" for i in range(1, shards + 1))]
    fresh = {name: out / f"{name}.part" for name in names if not complete(out / name)}
    for name, part in fresh.items():
        fetch_shard(f"{base_url.rstrip('/')}/{name}", part)
    for name, part in fresh.items():
        os.replace(part, out / name)
    return describe(out, base_url)


def describe(out, source):
    """Writes the meta.json of the public shards in a folder; returns its dict."""
    try:
        widths = token_bytes(load_tokenizer("gpt2"))
    except UserError:                                                   # offline: the bytes of text stay unknown
        widths = None
    counts, recorded = {"train": 0, "val": 0}, {}                       # counts of each token id
    names = sorted(p.name for p in out.iterdir() if split_of(p.name))
    for name in tqdm(names, desc="checking", unit=" shards", disable=None, leave=False):
        tokens = read_shard(out / name)
        parts = np.array_split(tokens, 32)                              # bincount copies to int64
        counts[split_of(name)] += sum(np.bincount(part, minlength=MAX_VOCAB) for part in parts)
        recorded[name] = {"tokens": len(tokens), "sha256": hashlib.sha256((out / name).read_bytes()).hexdigest()}
    splits = {split: {"tokens": int(n.sum()), "bytes": None if widths is None else int(n[:len(widths)] @ widths),
                      "documents": int(n[EOT])} for split, n in counts.items()}
    return write_meta(out, "gpt2", EOT + 1, widths, splits, recorded, source)


def complete(path):
    """Whether the shard is there and complete."""
    try:
        return read_shard(path) is not None
    except (UserError, FileNotFoundError):
        return False


def fetch_shard(url, part):
    """Downloads a shard to the file `part`, or continues an earlier download. UserError if that fails."""
    if complete(part):
        return
    have = part.stat().st_size if part.exists() else 0
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=60) as reply:
            have = have if reply.status == 206 else 0                   # else the server sends the whole file
            size = have + int(reply.headers["Content-Length"] or 0)
            with open(part, "ab" if have else "wb") as f, tqdm(
                    total=size, initial=have, desc=part.stem, unit="B", unit_scale=True, disable=None,
                    leave=False) as bar:
                while chunk := reply.read(2**20):
                    bar.update(f.write(chunk))
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise UserError(f"{url}: download failed ({e}): check --url and --shards, or {AGAIN}") from None
    if part.stat().st_size < size:
        raise UserError(f"{url}: connection ended early, {part.stat().st_size:,} bytes are here: {AGAIN}")
    if not complete(part):
        part.unlink()                                                   # nothing to continue from
        raise UserError(f"{url}: not a token shard: check --url")
