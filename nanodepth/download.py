"""Downloads FineWeb-Edu in GPT-2 tokens, shard by shard."""
import http.client
import os
import urllib.request
from pathlib import Path

from tqdm import tqdm

from nanodepth.cli import UserError
from nanodepth.data import read_shard, split_of
from nanodepth.runs import write_atomically

FINEWEB_URL = "https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/"


def download_fineweb_edu(out="data/fineweb-edu", shards=1, base_url=FINEWEB_URL):
    """Downloads train shards 1 ... `shards`, and last the val shard, without which nothing can train on the folder.

    Existing shards are kept. UserError if a download fails.
    """
    if not 1 <= shards <= 99:
        raise UserError(f"--shards {shards}: choose 1 to 99, which is what the dataset has")
    out = Path(os.path.expanduser(out))
    out.mkdir(parents=True, exist_ok=True)
    if other := [p for p in out.iterdir() if split_of(p.name) and not p.name.startswith("finewebedu_")]:
        raise UserError(f"{other[0]} belongs to other data: choose another --out")
    names = [*(f"finewebedu_train_{i:06d}.bin" for i in range(1, shards + 1)), "finewebedu_val_000000.bin"]
    for name in tqdm(names, unit=" shards", disable=None, leave=False):
        if not (out / name).exists():
            fetch_shard(f"{base_url.rstrip('/')}/{name}", out / name)


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
