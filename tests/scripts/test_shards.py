"""Token shards and Data, the loader, against bytes made by hand and naive loops."""
import hashlib
import json
import os
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from folders import make, meta_of, shard_bytes
from nanodepth import data
from nanodepth.cli import UserError
from nanodepth.data import Data, find_folder

pytestmark = pytest.mark.quick
SEQ = 5
TRAIN = [list(range(100, 117)), [200, 201], list(range(400, 405)), list(range(300, 311))]    # 17, 2, 5 and 11 tokens


def rows_of(data, step, start, stop, batch_size, seed=0):
    idx, targets = data.batch(step, start, stop, batch_size, SEQ, seed)
    assert idx.shape == targets.shape == (stop - start, SEQ) and idx.dtype == targets.dtype == torch.int64
    assert torch.equal(idx[:, 1:], targets[:, :-1])
    return [(*a, b[-1]) for a, b in zip(idx.tolist(), targets.tolist())]


def test_an_epoch_visits_each_window_once(tmp_path):
    data = Data(make(tmp_path / "d", TRAIN))
    windows = [tuple(shard[i:i + SEQ + 1]) for shard in TRAIN for i in range(0, len(shard) - SEQ, SEQ)]
    n = data.n_windows(SEQ)
    assert n == len(windows) == 5 and data.n_train == 35 and data.n_val == 3
    stream = [row for step in range(20) for row in rows_of(data, step, 0, 3, 3)]               # batches straddle epochs
    epochs = [stream[i:i + n] for i in range(0, 60, n)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(windows)
    assert len(set(map(tuple, epochs))) > 6 and epochs[0] != epochs[1]
    other = [row for step in range(20) for row in rows_of(data, step, 0, 3, 3, seed=1)]
    assert other != stream and sorted(other) == sorted(stream)
    assert sorted(rows_of(data, 0, 0, 5, 5, seed=-1)) == sorted(windows)
    assert data.n_windows(16) == 1
    with pytest.raises(UserError, match="35 tokens"):
        data.n_windows(17)


def test_batch_is_a_pure_function(tmp_path):
    """In any order of steps, split over ranks and micro-batches, whatever else is drawn; it draws nothing itself."""
    data = Data(make(tmp_path / "d", TRAIN))
    reference = {step: rows_of(data, step, 0, 4, 4) for step in range(12)}
    state = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    for step in random.Random(0).sample(range(12), 12):
        data.batch(step + 7, 0, 2, 2, 3, 99)
        for cuts in ((0, 1, 4), (0, 1, 2, 3, 4)):
            assert sum((rows_of(data, step, a, b, 4) for a, b in zip(cuts, cuts[1:])), []) == reference[step]
    assert torch.equal(state[0], torch.random.get_rng_state()) and state[1] == np.random.get_state()[1].tolist()


def test_order_is_frozen(tmp_path):
    """A resumed run must see the same batches: numpy fixes PCG64's raw stream, and with it the order."""
    data = Data(make(tmp_path / "d", [list(range(21))]))
    assert [row[0] // 2 for row in data.batch(0, 0, 10, 10, 2, seed=1234)[0].tolist()] == [5, 6, 3, 9, 7, 4, 1, 2, 8, 0]


@pytest.mark.parametrize("n_tokens", [None, 1, 6, 18, 19, 1000])
@pytest.mark.parametrize("batch_size, seq_len", [(2, 5), (3, 4), (50, 1), (1, 100)])
def test_val_batches_cover_the_first_targets_once(tmp_path, n_tokens, batch_size, seq_len):
    shards = [list(range(100, 119)), [7], list(range(200, 211))]
    data = Data(make(tmp_path / "d", TRAIN, shards))
    pairs = [pair for shard in shards for pair in zip(shard, shard[1:])][:n_tokens]
    seen, contexts = [], []
    for idx, targets in data.val_batches(n_tokens, batch_size, seq_len):
        assert idx.shape == targets.shape == (batch_size, seq_len) and idx.dtype == targets.dtype == torch.int64
        assert (idx[targets == -1] == 0).all() and (targets >= 0).any()
        for a, b in zip(idx.tolist(), targets.tolist()):
            row = [(x, y) for x, y in zip(a, b) if y != -1]
            assert row == list(zip(a, b))[:len(row)]                     # padding comes last
            seen += row
            contexts.append(len(row))
    assert seen == pairs
    full, contexts = [min(seq_len, n - at) for n in (18, 10) for at in range(0, n, seq_len)], [n for n in contexts if n]
    assert contexts[:-1] == full[:len(contexts) - 1]


def test_foreign_names_and_what_is_no_shard(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    for name, tokens in {"retrieval_train_000002.bin": [3, 4], "retrieval_train_000001.bin": [1, 2],
                         "retrieval_val_000000.bin": [5], "other.bin": [9] * 9}.items():
        (folder / name).write_bytes(shard_bytes(tokens))
    (folder / "train_000009.bin.tmp-1").write_bytes(b"")
    data = Data(folder)
    assert (data.n_train, data.n_val, data.tokenizer, data.vocab_size, data.meta) == (4, 1, "gpt2", 50257, {})
    assert [s.tolist() for s in data.shards["train"]] == [[1, 2], [3, 4]]


def test_fingerprint_follows_the_data(tmp_path):
    """And nothing else: it is a hash of names, numbers and sha256."""
    long = list(range(1000)) * 200
    base, middle = Data(make(tmp_path / "a", [long])).fingerprint, long[:100_000] + [1] + long[100_001:]
    changed = [[1] + long[1:]], [long[:-1] + [1]], [middle], [long[:-1]], [long, [1]]
    assert len({base, *(Data(make(tmp_path / f"c{i}", c)).fingerprint for i, c in enumerate(changed))}) == 6
    names = {"train_000000.bin": 200_000, "val_000000.bin": 3}
    said = "".join(f"{name} {n} {hashlib.sha256((tmp_path / 'a' / name).read_bytes()).hexdigest()}\n"
                   for name, n in names.items())
    assert base == hashlib.sha256(said.encode()).hexdigest()[:16]
    assert base == Data(make(tmp_path / "m", [long], meta=meta_of(names, vocab_size=1000, source="x"))).fingerprint


def entry_of(file):
    """What shards_index.json must say of a shard, naively."""
    raw = file.read_bytes()
    return {"size": len(raw), "mtime_ns": os.stat(file).st_mtime_ns, "sha256": hashlib.sha256(raw).hexdigest(),
            "largest": max(struct.unpack(f"<{len(raw) // 2 - 512}H", raw[1024:]))}


def reads(monkeypatch):
    """A list to which each shard that is read adds its name."""
    names, real = [], data.index_entry
    monkeypatch.setattr(data, "index_entry", lambda path: names.append(path.name) or real(path))
    return names


def test_only_what_was_touched_is_read(tmp_path, monkeypatch):
    """Both with and without a meta.json, and after the index was cut off. What nobody validates on is not read."""
    long, read = [49_999, *(i % 40_000 for i in range(3_000_000))], reads(monkeypatch)     # of several pieces
    counts = {"train_000000.bin": len(long), "train_000001.bin": 2, "val_000000.bin": 3}
    for name, meta in (("with", meta_of(counts, vocab_size=50_000)), ("without", None)):
        folder = make(tmp_path / name, [long, [7, 49_999]], meta=meta)
        index, fingerprint = folder / "shards_index.json", Data(folder, checked=("val",)).fingerprint
        assert read == (["val_000000.bin"] if meta else [*counts])
        assert Data(folder).fingerprint == fingerprint and sorted(read) == [*counts]
        assert json.loads(index.read_bytes()) == {shard: entry_of(folder / shard) for shard in counts}
        for change, again in ((lambda: None, []), (lambda: index.write_bytes(index.read_bytes()[:99]), [*counts]),
                              (lambda: index.write_text("[1]"), [*counts]),
                              (lambda: os.utime(folder / "train_000001.bin"), ["train_000001.bin"])):
            read.clear()
            change()
            assert Data(folder).fingerprint == fingerprint == Data(folder).fingerprint and read == again
            assert json.loads(index.read_bytes()) == {shard: entry_of(folder / shard) for shard in counts}
        read.clear()
    (folder / "train_000000.bin").unlink()                                              # one shard less
    assert Data(folder).n_train == 2 and not read


@pytest.mark.parametrize("indexed", [True, False])
def test_other_content_of_the_right_size(tmp_path, indexed):
    """It is refused, unless it is not checked; without a meta.json the data are others."""
    tokens = [1 + i % 50_000 for i in range(200_000)]
    meta = meta_of({"train_000000.bin": len(tokens), "val_000000.bin": 3}, vocab_size=50_001)
    for folder in (make(tmp_path / "with", [tokens], meta=meta), make(tmp_path / "without", [tokens])):
        before, shard = Data(folder).fingerprint, folder / "train_000000.bin"
        if not indexed:
            (folder / "shards_index.json").unlink()
        raw = shard.read_bytes()
        shard.write_bytes(raw[:101_024] + bytes(200_000) + raw[301_024:])               # half of it is zeros
        os.utime(shard, ns=(0, 0))
        if folder.name == "without":
            assert Data(folder).fingerprint != before
            continue
        for _ in range(2):
            with pytest.raises(UserError, match=f"^{shard}: its content is not what meta.json says"):
                Data(folder)
        assert Data(folder, checked=("val",)).fingerprint == before
        shard.write_bytes(raw)                                                          # copied again
        assert Data(folder).fingerprint == before


def test_the_index_of_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    read = reads(monkeypatch)
    (make(tmp_path / "a", [[1, 2]]) / "shards_index.json").mkdir()                              # stops root, too
    assert Data(tmp_path / "a").fingerprint == Data(tmp_path / "a").fingerprint
    assert read == 2 * ["train_000000.bin", "val_000000.bin"]


def test_many_at_once_make_one_index(tmp_path):
    folder = make(tmp_path / "d", TRAIN)
    with ThreadPoolExecutor(8) as pool:
        assert len({*pool.map(lambda i: i % 9 == 0 and (folder / "shards_index.json").unlink(missing_ok=True)
                              or Data(folder).fingerprint, range(200))}) == 1
    entries = {shard.name: entry_of(shard) for shard in folder.glob("*.bin")}
    assert {p.name for p in folder.iterdir()} == {*entries, "shards_index.json"}
    assert json.loads((folder / "shards_index.json").read_bytes()) == entries


def test_token_bytes_of_a_folder(tmp_path):
    meta = meta_of({"train_000000.bin": 17, "val_000000.bin": 3}, vocab_size=500, tokenizer="own.tiktoken")
    folder = make(tmp_path / "d", TRAIN[:1], meta=meta)
    (folder / "own.tiktoken").write_bytes(b"not ranks")
    assert Data(folder).token_bytes is None and Data(folder).tokenizer == str(folder / "own.tiktoken")
    np.save(folder / "token_bytes.npy", np.arange(500))
    assert Data(folder).token_bytes.tolist() == list(range(500))
    np.save(folder / "token_bytes.npy", np.arange(499))
    with pytest.raises(UserError, match="token_bytes.npy: broken"):
        Data(folder).token_bytes


def test_find_folder(tmp_path, monkeypatch):
    """A folder of texts hides no data of its name; ~ is the home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "data"))
    (tmp_path / "books").mkdir()
    assert find_folder("books") == Path("books")               # "no train shard in it" is said then
    (tmp_path / "data").mkdir()
    made = make(tmp_path / "data" / "books", TRAIN, [[1, 2]])
    assert find_folder("books") == Path("data/books") and find_folder("~/books") == made
    (tmp_path / "books" / "val_000000.bin").write_bytes((made / "val_000000.bin").read_bytes())
    assert find_folder("books") == Path("books")
