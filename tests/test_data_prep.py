"""data_prep.py against bytes made by hand, naive implementations and a local web server. Offline."""
import base64
import fcntl
import gzip
import hashlib
import http.server
import json
import lzma
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import data_prep  # noqa: E402
from forked import within  # noqa: E402
from nanodepth import shards, tokenizers  # noqa: E402
from nanodepth.options import UserError  # noqa: E402
from nanodepth.shards import Data  # noqa: E402
from nanodepth.texts import documents, text_files  # noqa: E402

EOT = "<|endoftext|>"
DOCS = ["Hello  world, it's 42!\n\n\tx", "naïve 日本語 🙂 \u0301\x00", f"it says {EOT} inside", " \n ", "last\none " * 40]


def shard_bytes(tokens, magic=20240520, version=1, count=None):
    """The format by its description, without numpy: 256 int32, then uint16, little-endian."""
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    return struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}H", *tokens)


def make(folder, train, val=([1, 2, 3],), meta=None):
    """A data folder with these shards (lists of ids)."""
    folder.mkdir()
    for split, shards in (("train", train), ("val", val)):
        for i, tokens in enumerate(shards):
            (folder / f"{split}_{i:06d}.bin").write_bytes(shard_bytes(tokens))
    if meta is not None:
        (folder / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    return folder


def meta_of(shards, **changes):
    return {"version": 1, "tokenizer": "byte", "vocab_size": 257, "splits": {}, "source": "test",
            "shards": {k: {"tokens": n, "sha256": "0" * 64} for k, n in shards.items()}} | changes


def main(monkeypatch, capsys, folder, *args):
    """The command line within this process: exit code, stdout, stderr."""
    monkeypatch.chdir(folder)
    return within("data_prep.py", data_prep.main, *args), *capsys.readouterr()


def cli(*args, cwd, **env):
    """The same as a process of its own."""
    env = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
           "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([sys.executable, ROOT / "data_prep.py", *map(str, args)], cwd=cwd, env=env,
                          capture_output=True, text=True)


# --------------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, list])
def test_shard_bytes_and_round_trip(tmp_path, dtype):
    tokens = [0, 1, 255, 256, 50256, 65535]
    digest = shards.write_shard(tmp_path / "a.bin", tokens if dtype is list else np.array(tokens, dtype))
    raw = (tmp_path / "a.bin").read_bytes()
    assert raw == shard_bytes(tokens)
    assert digest == hashlib.sha256(raw).hexdigest()
    back = shards.read_shard(tmp_path / "a.bin")
    assert isinstance(back, np.memmap) and back.dtype == np.uint16 and back.tolist() == tokens
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("raw, words", [
    (b"", "not a token shard: 0 bytes"),
    (b"x" * 1000, "not a token shard: 1000 bytes"),
    (shard_bytes([1, 2], magic=20240521), "starts with 20240521"),
    (shard_bytes([1, 2], version=2), "version 2"),
    (shard_bytes([1, 2], count=1_000_000), "header says 1,000,000 tokens, file holds 2: prepare the folder again"),
    (shard_bytes([1, 2, 3], count=2), "header says 2 tokens, file holds 3:"),
    (shard_bytes([1, 2]) + b"!", "header says 2 tokens, file holds 2.5:"),
    (shard_bytes([]), "0 tokens"),
    (shard_bytes([1], count=-5), "-5 tokens"),
    (None, "No such file"),
])
def test_bad_shards(tmp_path, raw, words):
    path = tmp_path / "train_000000.bin"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(UserError, match=re.escape(words)) as e:
        shards.read_shard(path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_truncated_shards_say_what_to_do(tmp_path):
    """Own shards can be prepared again; public ones, which have other names, downloaded."""
    for name, words in (("val_000003.bin", "prepare the folder again"), ("fineweb_val_000000.bin", "download it again"),
                        ("finewebedu_train_000001.bin.part", "download it again")):
        (tmp_path / name).write_bytes(shard_bytes([1, 2, 3], count=4))
        with pytest.raises(UserError, match=f"{name}: header says 4 tokens, file holds 3: {words}$"):
            shards.read_shard(tmp_path / name)


@pytest.mark.parametrize("tokens", [[65536], [-1]])
def test_ids_that_do_not_fit_are_not_written(tmp_path, tokens):
    with pytest.raises(UserError):
        shards.write_shard(tmp_path / "a.bin", tokens)
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------- tokenizers


def ranks_file(path, tokens):
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return path


@pytest.fixture(params=["byte", "file", "gpt2"])
def tokenizer(request, tmp_path):
    if request.param == "file":
        singles = [bytes([i]) for i in range(255, -1, -1)]              # not in the order of bytes
        return tokenizers.load_tokenizer(ranks_file(tmp_path / "my.tiktoken", singles + [b"la", b"st", b"last", b" w"]))
    try:
        return tokenizers.load_tokenizer(request.param)
    except UserError as e:
        pytest.skip(str(e))


def test_tokenizers_give_back_the_text(tokenizer):
    rng = random.Random(0)
    random_text = "".join(chr(rng.choice([rng.randrange(0xd800), rng.randrange(0xe000, 0x110000), rng.randrange(128)]))
                          for _ in range(3000))
    widths = tokenizers.token_bytes(tokenizer)
    assert widths.shape == (tokenizer.n_vocab,) and widths.dtype == np.int64 and widths[tokenizer.eot_token] == 0
    for text in [*DOCS, random_text]:
        ids = tokenizer.encode_ordinary(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot_token not in ids
        assert widths[ids].sum() == len(text.encode())


def test_token_ids(tmp_path):
    byte = tokenizers.load_tokenizer("byte")
    assert byte.encode_ordinary("é\r\n\x00") == list("é\r\n\x00".encode())
    assert (byte.eot_token, byte.n_vocab) == (256, 257)
    file = tokenizers.load_tokenizer(ranks_file(tmp_path / "r", [bytes([i]) for i in range(256)]
                                                + [b"ab", b"abab", b"b a"]))
    assert (file.eot_token, file.n_vocab) == (259, 260)
    assert file.encode_ordinary("ababab") == [257, 256]
    assert file.encode_ordinary("b a") == [98, 32, 97]                   # a word does not join with the one before


@pytest.mark.parametrize("tokens, words", [
    ([bytes([i]) for i in range(256) if i != 7], "no rank for the byte 7"),
    ([bytes([i]) for i in range(256)] + [b"a"], "ranks"),
    ([bytes([i]) for i in range(256)] + [struct.pack(">I", i) for i in range(65280)], "uint16"),
])
def test_bad_rank_files(tmp_path, tokens, words):
    with pytest.raises(UserError, match=words):
        tokenizers.load_tokenizer(ranks_file(tmp_path / "r", tokens))


def test_rank_file_that_is_none(tmp_path):
    (tmp_path / "r").write_bytes(b"YQ== 0\nhello\n")
    with pytest.raises(UserError, match="r:2: not a merge rank"):
        tokenizers.load_tokenizer(tmp_path / "r")


def test_train_bpe(tmp_path):
    pytest.importorskip("rustbpe")
    texts = DOCS * 3 + ["the cat sat on the mat, the rat sat on the cat. " * 5]
    tokenizers.train_bpe(iter(texts), 300, tmp_path / "t")
    mine = tokenizers.load_tokenizer(tmp_path / "t")
    assert mine.n_vocab == 300 and mine.eot_token == 299
    import rustbpe
    other = rustbpe.Tokenizer()
    other.train_from_iterator(iter(texts), 299,
                              pattern=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    for text in texts:
        assert mine.decode(mine.encode_ordinary(text)) == text
        assert mine.encode_ordinary(text) == other.encode(text)
    assert len(mine.encode_ordinary(texts[-1])) < len(texts[-1]) / 3     # it has learned
    for n in (256, 65537):
        with pytest.raises(UserError, match=str(n)):
            tokenizers.train_bpe(iter(texts), n, tmp_path / "u")
    with pytest.raises(UserError, match="so little text"):
        tokenizers.train_bpe(iter(["abc"]), 5000, tmp_path / "u")
    assert not (tmp_path / "u").exists()


# --------------------------------------------------------------------------------------------------------------- loader

SEQ = 5
TRAIN = [list(range(100, 117)), [200, 201], list(range(400, 405)), list(range(300, 311))]    # 17, 2, 5 and 11 tokens


def brute_windows():
    """Every window by hand: within a shard, side by side, SEQ inputs plus one."""
    return [tuple(shard[i:i + SEQ + 1]) for shard in TRAIN for i in range(0, len(shard), SEQ)
            if len(shard[i:i + SEQ + 1]) == SEQ + 1]


def rows_of(data, step, start, stop, batch_size, seed=0):
    idx, targets = data.batch(step, start, stop, batch_size, SEQ, seed)
    assert idx.shape == targets.shape == (stop - start, SEQ) and idx.dtype == targets.dtype == torch.int64
    assert torch.equal(idx[:, 1:], targets[:, :-1])
    return [(*a, b[-1]) for a, b in zip(idx.tolist(), targets.tolist())]


def test_an_epoch_visits_each_window_once(tmp_path):
    data = Data(make(tmp_path / "d", TRAIN))
    windows = brute_windows()
    n = data.n_windows(SEQ)
    assert n == len(windows) == 5 and data.n_train == 35 and data.n_val == 3
    stream = [row for step in range(20) for row in rows_of(data, step, 0, 3, 3)]               # batches straddle epochs
    epochs = [stream[i:i + n] for i in range(0, 60, n)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(windows)
    assert len(set(map(tuple, epochs))) > 6 and epochs[0] != epochs[1]
    other = [row for step in range(20) for row in rows_of(data, step, 0, 3, 3, seed=1)]
    assert other != stream and sorted(other) == sorted(stream)


def test_batch_is_a_pure_function(tmp_path):
    folder = make(tmp_path / "d", TRAIN)
    data = Data(folder)
    reference = {step: rows_of(data, step, 0, 4, 4) for step in range(12)}
    # in any order, on a new object
    for step in random.Random(0).sample(range(12), 12):
        np.random.seed(step)
        torch.manual_seed(step)
        data.batch(step + 7, 0, 2, 2, 3, 99)
        assert rows_of(data, step, 0, 4, 4) == reference[step] == rows_of(Data(folder), step, 0, 4, 4)
        for cuts in ((0, 1, 4), (0, 2, 3, 4), (0, 1, 2, 3, 4)):          # ranks and micro-batches
            assert sum((rows_of(data, step, a, b, 4) for a, b in zip(cuts, cuts[1:])), []) == reference[step]
    state = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    data.batch(3, 0, 4, 4, SEQ, 0)
    assert torch.equal(state[0], torch.random.get_rng_state()) and state[1] == np.random.get_state()[1].tolist()


def test_order_is_frozen(tmp_path):
    """A resumed run must see the same batches: numpy fixes PCG64's raw stream, and with it the order."""
    data = Data(make(tmp_path / "d", [list(range(21))]))
    assert [row[0] // 2 for row in data.batch(0, 0, 10, 10, 2, seed=1234)[0].tolist()] == [5, 6, 3, 9, 7, 4, 1, 2, 8, 0]


def test_negative_seed_and_short_split(tmp_path):
    data = Data(make(tmp_path / "d", TRAIN))
    assert sorted(rows_of(data, 0, 0, 5, 5, seed=-1)) == sorted(brute_windows())
    assert data.n_windows(16) == 1
    with pytest.raises(UserError, match="35 tokens"):
        data.n_windows(17)


@pytest.mark.parametrize("n_tokens", [None, 1, 5, 6, 17, 18, 19, 27, 1000])
@pytest.mark.parametrize("batch_size, seq_len", [(1, 5), (2, 5), (3, 4), (50, 1), (1, 100)])
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
    full = [min(seq_len, n - at) for n in (18, 10) for at in range(0, n, seq_len)]
    assert [n for n in contexts if n][:-1] == full[:len([n for n in contexts if n]) - 1]


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
    long = list(range(1000)) * 200
    base = Data(make(tmp_path / "a", [long])).fingerprint
    assert base == Data(make(tmp_path / "b", [long])).fingerprint and re.fullmatch("[0-9a-f]{16}", base)
    changed = [[1] + long[1:]], [long[:-1] + [1]], [long[:-1]], [long, [1]]
    assert len({base, *(Data(make(tmp_path / f"c{i}", c)).fingerprint for i, c in enumerate(changed))}) == 5
    names = {"train_000000.bin": len(long), "val_000000.bin": 3}
    with_meta = [Data(make(tmp_path / f"m{i}", [[0] * len(long)], meta=m)).fingerprint for i, m in enumerate(
        [meta_of(names), meta_of(names) | {"source": "x"},
         meta_of(names) | {"shards": {k: {"tokens": n, "sha256": "1"} for k, n in names.items()}}])]
    assert with_meta[0] == with_meta[1] != with_meta[2]


def test_token_bytes_of_a_folder(tmp_path):
    shards = {f"train_{i:06d}.bin": len(t) for i, t in enumerate(TRAIN)} | {"val_000000.bin": 3}
    folder = make(tmp_path / "d", TRAIN, meta=meta_of(shards, vocab_size=500, tokenizer="own.tiktoken"))
    with pytest.raises(UserError, match="'own.tiktoken' is no file of the folder"):
        Data(folder)
    (folder / "own.tiktoken").write_text("not ranks")
    data = Data(folder)
    assert data.token_bytes is None and data.tokenizer == str(folder / "own.tiktoken")
    np.save(folder / "token_bytes.npy", np.arange(500))
    assert Data(folder).token_bytes.tolist() == list(range(500))
    for wrong in (np.arange(499), np.arange(500) - 1, np.arange(500) / 2):
        np.save(folder / "token_bytes.npy", wrong)
        with pytest.raises(UserError, match="token_bytes.npy"):
            Data(folder).token_bytes


def test_ids_beyond_the_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK", 8)                           # the bad id lies in a later chunk
    good = [256] * 30
    bad = good[:21] + [257] + good[22:]
    names = {"train_000000.bin": 30, "train_000001.bin": 30, "val_000000.bin": 3}
    folder = make(tmp_path / "d", [good, bad], meta=meta_of(names))
    with pytest.raises(UserError, match="train_000001.bin: token id 257 at position 21 .* 257"):
        Data(folder)
    with pytest.raises(UserError, match="50257"):
        Data(make(tmp_path / "e", TRAIN, [[50257]]))
    assert Data(folder, checked=("val",)).n_train == 60               # not read for what only validates


def test_a_folder_of_texts_hides_no_data_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    assert shards.find_folder("books") == Path("books")               # "no train shard in it" is said then
    (tmp_path / "data").mkdir()
    made = make(tmp_path / "data" / "books", TRAIN, [[1, 2]])
    assert shards.find_folder("books") == Path("data/books")
    (tmp_path / "books" / "val_000000.bin").write_bytes((made / "val_000000.bin").read_bytes())
    assert shards.find_folder("books") == Path("books")


@pytest.mark.parametrize("meta, words", [
    ("{", "meta.json: broken"), ("[]", "meta.json: broken"), ("{}", "meta.json: broken"), ("\xff", "meta.json: broken"),
    (meta_of({"train_000000.bin": 4, "val_000000.bin": 3}, vocab_size="257"), "meta.json: broken"),
    (meta_of({"train_000000.bin": 4, "val_000000.bin": 3}, vocab_size=70000), "meta.json: broken"),
    (meta_of({}) | {"shards": ["train_000000.bin"]}, "meta.json: broken"),
    (meta_of({"train_000000.bin": "4", "val_000000.bin": 3}), "meta.json: broken"),
    (meta_of({"train_000000.bin": 4, "val_000000.bin": 3}, tokenizer="../own.tiktoken"), "no file of the folder"),
    (meta_of({"train_000000.bin": 4, "train_000001.bin": 4, "val_000000.bin": 3}),
     "train_000001.bin: is in meta.json but not in the folder"),
    (meta_of({"train_000000.bin": 4}), "val_000000.bin: is in the folder but not in meta.json"),
    (meta_of({"train_000000.bin": 5, "val_000000.bin": 3}), "meta.json says 5 tokens, the shard holds 4"),
])
def test_bad_meta(tmp_path, meta, words):
    folder = make(tmp_path / "d", [[1, 2, 3, 4]], meta=meta)
    if meta == "\xff":
        (folder / "meta.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match=words) as e:
        Data(folder)
    assert "\n" not in str(e.value)


def test_bad_folders(tmp_path):
    for build, words in [(lambda: tmp_path / "none", "no such data folder.*python data_prep.py"),
                         (lambda: make(tmp_path / "a", []), "no train shard"),
                         (lambda: make(tmp_path / "b", TRAIN, []), "no val shard")]:
        with pytest.raises(UserError, match=words):
            Data(build())
    (make(tmp_path / "c", TRAIN) / "x_train_000007.bin.part").write_bytes(b"")
    with pytest.raises(UserError, match="unfinished download"):
        Data(tmp_path / "c")


# ---------------------------------------------------------------------------------------------------------- preparation


def expected(docs, prepared):
    """Tokens of both splits, naively: end-of-text and bytes, with the documents split as in `prepared`."""
    streams = {"train": [], "val": []}
    for doc in docs:
        ids = [256, *doc.encode()]
        split = next(s for s in streams if prepared[s][len(streams[s]):len(streams[s]) + len(ids)] == ids)
        streams[split] += ids
    return streams


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


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz", "a.txt.xz", "a.jsonl.xz", "a.md",
                                  "a.md.gz", "a.md.xz", "a.txt.zst", "a.jsonl.zst", "a.md.zst", "a.parquet"])
def test_text_against_a_naive_reference(tmp_path, name):
    docs = [f"{i} {doc}" for i in range(12) for doc in DOCS]
    meta = data_prep.prepare_text([write_docs(tmp_path / name, docs)], tmp_path / "out", "byte", val_frac=0.2,
                                  shard_tokens=1000)
    prepared = splits_of(tmp_path / "out")
    assert prepared == expected(docs, prepared)
    assert 3 <= prepared["val"].count(256) <= 25
    assert prepared["train"].count(256) + prepared["val"].count(256) == len(docs)
    for split, ids in prepared.items():
        assert meta["splits"][split] == {"tokens": len(ids), "documents": ids.count(256),
                                         "bytes": len(ids) - ids.count(256)}
    for shard, entry in meta["shards"].items():
        raw = (tmp_path / "out" / shard).read_bytes()
        assert entry == {"tokens": (len(raw) - 1024) // 2, "sha256": hashlib.sha256(raw).hexdigest()}
    full = [n["tokens"] for shard, n in sorted(meta["shards"].items()) if shard.startswith("train")]
    assert len(full) > 2 and set(full[:-1]) == {1000}
    assert json.loads((tmp_path / "out/meta.json").read_text()) == meta and meta["source"] == name
    assert np.load(tmp_path / "out/token_bytes.npy").tolist() == [1] * 256 + [0]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "out"])


def test_documents_of_a_text_file(tmp_path):
    def docs(raw, name="a.txt"):
        (tmp_path / name).write_bytes(raw)
        return list(documents([tmp_path / name]))

    assert docs(b"a\n\nb\n") == ["a\n\nb\n"]                              # no separator: the file as it is
    assert docs(b"a\n<|endoftext|>\nb\n<|endoftext|>\n") == ["a", "b"]
    inside = b"a\n <|endoftext|>\n<|endoftext|>b"
    assert docs(b"<|endoftext|>\n\n<|endoftext|>\n" + inside) == [inside.decode()]
    assert docs(b"a\r\n<|endoftext|>\r\nb\r\n") == ["a", "b\r\n"]
    assert docs(b"\xef\xbb\xbfa\x0bb\x85c".replace(b"\x85", "\u2028".encode())) == ["a\x0bb\u2028c"]
    assert docs(b'{"text": "x\\ud83d y"}\n\n{"text": ""}\n{"text": "<|endoftext|>"}', "a.jsonl") == ["x? y", EOT]


def test_folders_and_patterns(tmp_path, monkeypatch):
    """Against a list by hand: the files of a folder or a pattern are sorted, hidden and foreign ones left out."""
    monkeypatch.chdir(tmp_path)
    for name in ("b/z.txt", "b/a/x.md", "b/a-/y.jsonl", "b/B.TXT", "b/.hidden.txt", "b/.git/c.txt", "b/page.html",
                 "c/2.txt", "c/10.txt", "c/1.md", "[1].txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps({"text": name}) if ".jsonl" in name else name)
    os.symlink("nowhere", "b/dangling.txt")
    below = ["b/B.TXT", "b/a-/y.jsonl", "b/a/x.md", "b/z.txt"]
    for paths, files in ((["b"], below), (["c/*.txt", "b"], ["c/10.txt", "c/2.txt", *below]),
                         (["[1].txt"], ["[1].txt"]), (["c/[12].*"], ["c/1.md", "c/2.txt"]),
                         (["[bc]"], [*below, "c/1.md", "c/10.txt", "c/2.txt"]), (["**/?.md"], ["b/a/x.md", "c/1.md"]),
                         (["c/2.txt", "c/1.md"], ["c/2.txt", "c/1.md"])):
        assert text_files(paths) == files
        assert list(documents(text_files(paths))) == files
    meta = data_prep.prepare_text(["b"], "out", "byte", val_files=["c/*.txt"])
    text = {k: tokenizers.load_tokenizer("byte").decode(v) for k, v in splits_of("out").items()}
    assert text == {"train": EOT + EOT.join(below), "val": f"{EOT}c/10.txt{EOT}c/2.txt"}
    assert meta["source"] == "B.TXT, y.jsonl, x.md, z.txt, 10.txt, 2.txt"


def test_zst_without_a_line_break_in_sight(tmp_path, monkeypatch):
    """Lines across frames and reads; a frame that is cut anywhere is an error, one that nothing follows is not."""
    rng = random.Random(0)
    text = "".join(chr(rng.randrange(32, 127)) for _ in range(100_000))
    lines = [text[:70_000], "", text[70_000:], "end"]
    raw = zst("\n".join(lines).encode())
    assert len(raw) > 4 * 2**14
    (tmp_path / "a.txt.zst").write_bytes(raw)
    assert list(documents([tmp_path / "a.txt.zst"])) == ["\n".join(lines)]
    second = len(zst("\n".join(lines).encode()[:len("\n".join(lines)) // 3]))
    for cut in (1, 5, 20_000, second + 1, len(raw) - 1):
        (tmp_path / "a.txt.zst").write_bytes(raw[:cut])
        with pytest.raises(UserError, match="a.txt.zst: broken or truncated archive") as e:
            list(documents([tmp_path / "a.txt.zst"]))
        assert "\n" not in str(e.value)
    with open(tmp_path / "a.txt.zst", "wb") as f:
        f.write(raw[:-50] + b"#" * 50)
    with pytest.raises(UserError, match="a.txt.zst: broken or truncated archive"):
        list(documents([tmp_path / "a.txt.zst"]))


def test_columns_of_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    file = write_parquet(tmp_path / "a.parquet", {
        "id": [1, 2, 3], "body": ["a\n<|endoftext|>\nb", None, ""], "raw": [b"x", b"y", b"z"],
        "tag": pyarrow.array(["x", "y", "x"]).dictionary_encode(), "parts": [["x"], [], ["y"]]})
    assert list(documents([file], "body")) == ["a\n<|endoftext|>\nb"] and list(documents([file], "tag")) == [*"xyx"]
    for field, words in (("text", "no column 'text', but 'id', 'body', 'raw', 'tag', 'parts': name the --field"),
                         ("id", "the column 'id' holds int64 and no text"),
                         ("raw", "the column 'raw' holds binary and no text"),
                         ("parts", "the column 'parts' holds list<")):
        with pytest.raises(UserError, match=f"a.parquet: {words}"):
            list(documents([file], field))
    raw = write_parquet(tmp_path / "b.parquet", {"text": [doc * 50 for doc in DOCS]}).read_bytes()
    for broken in (b"", b"PAR1", raw[:-1], raw[:len(raw) // 2], raw[:4] + b"#" * 30 + raw[34:], b"{}\n" * 9):
        (tmp_path / "b.parquet").write_bytes(broken)
        with pytest.raises(UserError, match="b.parquet: broken or truncated") as e:
            list(documents([tmp_path / "b.parquet"]))
        assert "\n" not in str(e.value)


def test_parquet_is_read_in_pieces(tmp_path, monkeypatch):
    """A document of a file of one row group is there before the rows far behind it are."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"text": [f"{i} {'x' * 9}" for i in range(5000)]}), tmp_path / "a.parquet")
    read, real = [], parquet.ParquetFile.iter_batches

    def counted(self, *args, **kwargs):
        for rows in real(self, *args, **kwargs):
            read.append(rows.num_rows)
            yield rows
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    texts = documents([tmp_path / "a.parquet"])
    assert next(texts) == "0 xxxxxxxxx" and sum(read) <= 1000
    assert len([*texts]) == 4999 and sum(read) == 5000


@pytest.mark.parametrize("name, package", [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")])
def test_packages_that_are_missing(tmp_path, monkeypatch, capsys, name, package):
    (tmp_path / name).write_bytes(b"x")
    for module in (package, "compression"):
        monkeypatch.setitem(sys.modules, module, None)
    code, _, err = main(monkeypatch, capsys, tmp_path, "text", name, "--name", "x", "--tokenizer", "byte")
    assert code == 2 and err == f"data_prep.py: error: {name} needs the package {package}: pip install {package}\n"
    assert not list(tmp_path.glob("data/*"))


def test_how_much_is_for_validation(tmp_path):
    """1% of much text, 400 kB of less, 10% of little; an explicit fraction is kept. Sizes are those on the disk."""
    for size, frac in ((0, 0.1), (10**6, 0.1), (4 * 10**6, 0.1), (8 * 10**6, 0.05), (4 * 10**7, 0.01), (10**12, 0.01)):
        for i in (1, 2):
            with open(tmp_path / f"{i}.txt", "wb") as f:
                f.truncate(size // 2)
        assert data_prep.default_val_frac([tmp_path / "1.txt", tmp_path / "2.txt"]) == frac
    docs = [f"{i} " + "x" * 3000 for i in range(400)]
    write_docs(tmp_path / "a.txt", docs)
    shares = {}
    for name, frac in (("default", {}), ("tenth", {"val_frac": 0.1}), ("hundredth", {"val_frac": 0.01})):
        data_prep.prepare_text([tmp_path / "a.txt"], tmp_path / name, "byte", **frac)
        shares[name] = splits_of(tmp_path / name)["val"]
    assert shares["default"] == shares["tenth"] and 20 <= shares["tenth"].count(256) <= 60
    assert 1 <= shares["hundredth"].count(256) <= 12
    (tmp_path / "one.txt").write_text("abcdefghij" * 1000)                # a single document: its end
    data_prep.prepare_text([tmp_path / "one.txt"], tmp_path / "one", "byte")
    assert Data(tmp_path / "one").n_val == 1001


def test_the_choice_of_documents_is_frozen():
    assert [i for i in range(60) if data_prep.in_val(str(i), 0.1)] == [9, 39, 49, 51, 55]


def test_val_when_no_document_falls_to_it(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(999))
    (tmp_path / "a.txt").write_text(text)
    data_prep.prepare_text([tmp_path / "a.txt"], tmp_path / "out", "byte", val_frac=0.1, shard_tokens=300)
    ids = [256, *text.encode()]
    assert splits_of(tmp_path / "out") == {"train": ids[:900], "val": [256, *ids[900:]]}


def test_the_first_document_always_trains(tmp_path):
    data_prep.prepare_text([write_docs(tmp_path / "a.txt", ["a", "b", "c"])], tmp_path / "out", "byte",
                           val_frac=0.999999)
    assert splits_of(tmp_path / "out") == {"train": [256, 97], "val": [256, 98, 256, 99]}


def test_val_files_and_ranks_file(tmp_path):
    ranks = ranks_file(tmp_path / "my", [bytes([i]) for i in range(256)] + [b"ab"])
    (tmp_path / "a.txt").write_text("abba")
    (tmp_path / "b.jsonl").write_text('{"body": "bab"}\n')
    (tmp_path / "c.jsonl").write_text('{"body": "b"}\n')
    (tmp_path / "d.jsonl").write_text('{"body": "b"}\n')
    data_prep.prepare_text([tmp_path / "d.jsonl"], tmp_path / "out", ranks,
                           val_files=[tmp_path / "b.jsonl", tmp_path / "c.jsonl"], field="body")
    assert splits_of(tmp_path / "out") == {"train": [257, 98], "val": [257, 98, 256, 257, 98]}
    ranks.unlink()                                                       # the folder has its own copy
    data = Data(tmp_path / "out")
    assert data.tokenizer == str(tmp_path / "out/tokenizer.tiktoken") and data.vocab_size == 258
    assert tokenizers.load_tokenizer(data.tokenizer).decode([256, 98]) == "abb"
    assert data.token_bytes[[97, 256, 257]].tolist() == [1, 2, 0]


def test_train_bpe_option(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rustbpe")
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 40 + f"\n{EOT}\nnothing like it: zzzzzzzz")
    (tmp_path / "b.txt").write_text("the mat. " * 9)
    code, out, err = main(monkeypatch, capsys, tmp_path, "text", "a.txt", "--name", "x", "--train_bpe", 262, "--val",
                          "b.txt")
    assert code == 0 and "python train.py --data data/x" in out, err
    data = Data(tmp_path / "data/x")
    tokenizer = tokenizers.load_tokenizer(data.tokenizer)
    ids = data.shards["train"][0].tolist()
    assert data.vocab_size == 262
    assert tokenizer.decode(ids) == EOT + (tmp_path / "a.txt").read_text().replace(f"\n{EOT}\n", EOT)
    assert max(ids) == ids[0] == 261 == tokenizer.eot_token


def test_stdlib(tmp_path, monkeypatch, capsys):
    run = cli("stdlib", "--out", "one", cwd=tmp_path, PYTHONHASHSEED="1")
    assert run.returncode == 0, run.stderr
    meta = data_prep.prepare_stdlib(tmp_path / "two")
    assert json.loads((tmp_path / "one/meta.json").read_text()) == meta and meta["tokenizer"] == "byte"
    assert meta["source"].startswith("Python " + sys.version.split()[0])
    text = {k: tokenizers.load_tokenizer("byte").decode(v) for k, v in splits_of(tmp_path / "two").items()}
    for module in (textwrap, gzip, http.server):                              # whole files are there, in one split
        assert sum(EOT + Path(module.__file__).read_text() + EOT in t + EOT for t in text.values()) == 1
    assert 0.01 < len(text["val"]) / len(text["train"]) < 0.15
    before = (tmp_path / "two/meta.json").stat().st_mtime_ns
    assert data_prep.prepare_stdlib(tmp_path / "two") == meta
    assert (tmp_path / "two/meta.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="delete it or choose another --out"):
        data_prep.prepare_stdlib(tmp_path / "two", "gpt2")
    code, out, _ = main(monkeypatch, capsys, tmp_path, "stdlib", "--out", "one")
    assert code == 0 and "there already" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


@pytest.fixture
def little_stdlib(tmp_path, monkeypatch):
    """A standard library of 40 small files and some that must not be read."""
    lib = tmp_path / "lib"
    for i in range(40):
        (lib / f"p{i % 3}").mkdir(parents=True, exist_ok=True)
        (lib / f"p{i % 3}" / f"m{i}.py").write_text(f"x = {i}\n")
    for folder in ("test", "p0/tests", "site-packages/a", "encodings", "pydoc_data", "idlelib/idle_test",
                   "__pycache__"):
        (lib / folder).mkdir(parents=True)
        (lib / folder / "bad.py").write_text("BAD")
    (lib / "latin.py").write_bytes(b"# \xe9 BAD")
    (lib / "empty.py").write_bytes(b"")
    (lib / "data.txt").write_text("BAD")
    monkeypatch.setattr(data_prep.sysconfig, "get_paths", lambda: {"stdlib": str(lib)})
    return tmp_path / "out"


def test_stdlib_walk(little_stdlib):
    meta = data_prep.prepare_stdlib(little_stdlib)
    text = {k: tokenizers.load_tokenizer("byte").decode(v).split(EOT)[1:] for k, v in splits_of(little_stdlib).items()}
    assert sorted(text["train"] + text["val"]) == sorted(f"x = {i}\n" for i in range(40)) and text["val"]
    paths = sorted(f"p{i % 3}/m{i}.py" for i in range(40))
    every = [f"x = {re.search('m(.*).py', p)[1]}\n" for p in paths]
    assert text["train"] == [line for line in every if line not in text["val"]]
    assert "40 files" in meta["source"]


def test_stdlib_race(little_stdlib, monkeypatch):
    """Another process finishes the same folder first: its folder is used, ours is removed."""
    real, winner = data_prep.fill_folder, []

    def slow(*args, **kwargs):
        if not winner:
            winner.append(True)
            winner.append(data_prep.prepare_stdlib(little_stdlib) | {"source": "winner"})
            (little_stdlib / "meta.json").write_text(json.dumps(winner[1]))
        return real(*args, **kwargs)
    monkeypatch.setattr(data_prep, "fill_folder", slow)
    assert data_prep.prepare_stdlib(little_stdlib) == winner[1]
    assert not [p for p in little_stdlib.parent.iterdir() if "tmp" in p.name]


def test_kill_leaves_no_half_made_folder(tmp_path):
    (tmp_path / "a.txt").write_text("some words here\n<|endoftext|>\n" * 600_000)
    process = subprocess.Popen([sys.executable, ROOT / "data_prep.py", "text", "a.txt", "--name", "x", "--tokenizer",
                                "byte", "--shard_tokens", "50000"],
                               cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("data/x.tmp-*/train_000002.bin")):
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (tmp_path / "data/x").exists()


@pytest.mark.parametrize("command", ["text a.txt --out x --tokenizer byte", "mqar --out x", "stdlib --out x"])
def test_full_disk(tmp_path, monkeypatch, capsys, command):
    """A file that cannot grow as the disk is full: one line that names the folder, and nothing is left."""
    (tmp_path / "a.txt").write_text("some words here\n" * 10_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, limits[1]))
    try:
        code, out, err = main(monkeypatch, capsys, tmp_path, *command.split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, out, err) == (2, "", f"data_prep.py: error: {tmp_path / 'x'}: File too large\n")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_file_names_that_are_no_text(tmp_path, monkeypatch, capsys):
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("some words here\n" * 10)
    code, out, err = main(monkeypatch, capsys, tmp_path, "text", ".", "--name", "x", "--tokenizer", "byte")
    assert code == 0 and "\\udcff.txt: byte tokens" in out and Data(tmp_path / "data/x").n_val > 0, err


def test_ctrl_c(tmp_path):
    (tmp_path / "a.txt").write_text("some words here\n<|endoftext|>\n" * 600_000)
    process = subprocess.Popen([sys.executable, ROOT / "data_prep.py", "text", "a.txt", "--name", "x", "--tokenizer",
                                "byte", "--shard_tokens", "50000"],
                               cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("data/x.tmp-*/train_000002.bin")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and err.count("\n") == 1 and "interrupted" in err
    assert not list((tmp_path / "data").iterdir())


# ------------------------------------------------------------------------------------------------------------- download


def train_shard(i):
    return shard_bytes([50256, *range(i, i + 3000)])


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves self.server.files: `cut` sends only that many bytes, `slow` 64 KiB at a time; `ranges` can be off."""

    def do_GET(self):
        server, name = self.server, self.path.rpartition("/")[2]
        server.log.append((name, self.headers.get("Range")))
        if name not in server.files:
            return self.send_error(404)
        raw, start = server.files[name], 0
        if server.ranges and (wish := self.headers.get("Range")):
            start = int(re.fullmatch(r"bytes=(\d+)-", wish)[1])
            if start >= len(raw):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(raw) - 1}/{len(raw)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(raw) - start))
        self.end_headers()
        if server.slow:
            for at in range(start, len(raw), 2**16):
                self.wfile.write(raw[at:at + 2**16])
                time.sleep(0.02)
            return
        self.wfile.write(raw[start:start + server.cut] if server.cut and name.endswith("000002.bin") else raw[start:])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")              # the GPT-2 vocabulary is out of reach, at once
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files = {f"finewebedu_train_{i:06d}.bin": train_shard(i) for i in (1, 2, 3)}
    server.files["finewebedu_val_000000.bin"] = shard_bytes([50256, 5, 6])
    server.log, server.cut, server.slow, server.ranges = [], None, False, True
    server.url = f"http://127.0.0.1:{server.server_port}/some/folder"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_download(tmp_path, server):
    meta = data_prep.download_fineweb_edu(tmp_path / "fw", 2, server.url)
    names = ["finewebedu_train_000001.bin", "finewebedu_train_000002.bin", "finewebedu_val_000000.bin"]
    assert sorted(meta["shards"]) == names and not list(tmp_path.glob("fw/*.part"))
    for name in names:
        assert (tmp_path / "fw" / name).read_bytes() == server.files[name]
        assert meta["shards"][name]["sha256"] == hashlib.sha256(server.files[name]).hexdigest()
    data = Data(tmp_path / "fw")
    assert (data.tokenizer, data.vocab_size, data.n_train, data.n_val) == ("gpt2", 50257, 6002, 3)
    assert meta["splits"]["train"]["tokens"] == 6002 and meta["splits"]["train"]["documents"] == 2
    server.log.clear()
    # one shard more
    assert len(data_prep.download_fineweb_edu(tmp_path / "fw", 3, server.url + "/")["shards"]) == 4
    assert [name for name, _ in server.log] == ["finewebedu_train_000003.bin"]
    # from a folder
    meta = data_prep.download_fineweb_edu(tmp_path / "copy", 2, (tmp_path / "fw").as_uri())
    assert sorted(meta["shards"]) == names


@pytest.mark.parametrize("ranges", [True, False])
def test_download_interrupted_and_resumed(tmp_path, server, ranges):
    server.cut, server.ranges = 2000, ranges
    with pytest.raises(UserError, match="000002.bin: connection ended early, 2,000 bytes") as e:
        data_prep.download_fineweb_edu(tmp_path / "fw", 2, server.url)
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="unfinished download"):
        Data(tmp_path / "fw")
    server.cut = None
    server.log.clear()
    data_prep.download_fineweb_edu(tmp_path / "fw", 2, server.url)
    assert server.log == [("finewebedu_train_000002.bin", "bytes=2000-")]
    assert (tmp_path / "fw/finewebedu_train_000002.bin").read_bytes() == train_shard(2)
    assert Data(tmp_path / "fw").n_train == 6002


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_download_killed_and_resumed(tmp_path, server, number, code):
    """The process is killed in the middle of a shard; the next one continues from what is on the disk."""
    name, server.slow = "finewebedu_train_000001.bin", True
    server.files = server.files | {name: shard_bytes([50256, *range(50000)] * 40)}                      # 4 MB
    words = [sys.executable, ROOT / "data_prep.py", "fineweb-edu", "--shards", "1", "--url", server.url, "--out", "fw"]
    part = tmp_path / f"fw/{name}.part"
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not part.exists() or part.stat().st_size < 2**20:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    assert "Traceback" not in process.communicate()[1] and process.returncode == code
    have = part.stat().st_size
    assert not list(tmp_path.glob("fw/*.bin")) and 2**20 <= have < len(server.files[name])
    server.slow = False
    server.log.clear()
    meta = data_prep.download_fineweb_edu(tmp_path / "fw", 1, server.url)
    assert server.log == [(name, f"bytes={have}-")]
    for name in meta["shards"]:
        assert (tmp_path / "fw" / name).read_bytes() == server.files[name]


def test_two_downloads_into_one_folder(tmp_path, server):
    (tmp_path / "fw").mkdir()
    with open(tmp_path / "fw/finewebedu_val_000000.bin.part", "wb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process"):
            data_prep.download_fineweb_edu(tmp_path / "fw", 1, server.url)


@pytest.mark.parametrize("raw, words", [
    (None, "404"), (b"<html>no</html>", "not a token shard"), (shard_bytes([1, 2], magic=7) * 2, "starts with 7"),
    (shard_bytes([1, 2, 3], count=2), "header says 2 tokens, file holds 3"),
])
def test_download_errors(tmp_path, server, monkeypatch, capsys, raw, words):
    name = "finewebedu_train_000001.bin"
    val = "finewebedu_val_000000.bin"
    server.files = server.files | {name: raw} if raw else {val: server.files[val]}
    code, _, err = main(monkeypatch, capsys, tmp_path, "fineweb-edu", "--shards", 1, "--url", server.url, "--out", "fw")
    assert code == 2 and words in err and name in err and err.count("\n") == 1, err
    server.files = server.files | {name: train_shard(1)}                 # corrected: the same command works
    assert len(data_prep.download_fineweb_edu(tmp_path / "fw", 1, server.url)["shards"]) == 2


# ------------------------------------------------------------------------------------------------------------------ CLI


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with bad input of many kinds."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "ok.txt").write_text("fine text\n")
    (desk / "empty.txt").write_text("")
    (desk / "latin.txt").write_bytes(b"line one\nline two\ncaf\xe9\n")
    (desk / "bad.jsonl").write_text('{"text": "a"}\n\n{"text": "b"\n')
    (desk / "nofield.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    (desk / "list.jsonl").write_text('["text"]\n')
    (desk / "deep.jsonl").write_text("[" * 200_000 + "\n")
    (desk / "number.jsonl").write_text('{"text": 5}\n')
    (desk / "page.html").write_text("x")
    (desk / "cut.txt.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    (desk / "cut.txt.xz").write_bytes(lzma.compress(b"x" * 1000)[:-9])
    (desk / "plain.txt.gz").write_text("x")
    (desk / "a.parquet.gz").write_bytes(b"x")
    os.mkfifo(desk / "pipe.txt")
    os.symlink("/proc/self/mem", desk / "io.txt")                       # opens, and cannot be read
    (desk / "books/deep").mkdir(parents=True)
    (desk / "books/deep/b.txt").write_text("a book\n")
    (desk / "data/taken").mkdir(parents=True)
    (desk / "data/taken/meta.json").write_text("{}")
    (desk / "file").write_text("x")
    (desk / "other").mkdir()
    (desk / "other/train_000000.bin").write_bytes(shard_bytes([256, 5, 6]))
    return desk


@pytest.mark.parametrize("args, words", [
    ("", "required"),
    ("nonsense", "nonsense"),
    ("stdlib --nonsense 1", "--nonsense"),
    ("stdlib --out file", "file: exists already"),
    ("stdlib --tokenizer nope --out x", "'nope'"),
    ("text ok.txt --name x --tokenizer gpt2", "TIKTOKEN_CACHE_DIR"),
    ("text ok.txt", "--name"),
    ("text ok.txt --name taken --tokenizer byte", "make another folder with --out"),
    ("text ok.txt --name x --tokenizer byte --train_bpe 300", "--train_bpe 300"),
    ("text ok.txt --name x --train_bpe 9", "a vocabulary of 9 "),
    ("text ok.txt --name x --vocab_size 300", "did you mean --train_bpe?"),
    ("text ok.txt --name x --tokenizer byte --val_frac 2", "--val_frac 2.0"),
    ("text ok.txt --name x --tokenizer byte --val_frac many", "--val_frac"),
    ("text ok.txt --name x --tokenizer byte --shard_tokens 0", "--shard_tokens 0"),
    ("text ok.txt missing.txt --name x --tokenizer byte", "missing.txt: no such file"),
    ("text ok.txt data --name x --tokenizer byte", "data: no text in this folder: .txt, .md, .jsonl (plain"),
    ("text ok.txt --val data --name x --tokenizer byte", "data: no text in this folder"),
    ("text nowhere/*.txt --name x --tokenizer byte", "nowhere/*.txt: no such file or folder"),
    ("text ok.txt --val *.csv --name x --tokenizer byte", "*.csv: no such file or folder"),
    ("text p*.html --name x --tokenizer byte", "page.html: unknown kind of file"),
    ("text a.parquet.gz --name x --tokenizer byte", "a.parquet.gz: unknown kind of file"),
    ("text pipe.txt --name x --tokenizer byte", "pipe.txt: not a file"),
    ("text ok.txt ./ok.txt --name x --tokenizer byte", "./ok.txt: given twice"),
    ("text ok.txt o*.txt --name x --tokenizer byte", "ok.txt: given twice"),
    ("text books books/deep --name x --tokenizer byte", "books/deep/b.txt: given twice"),
    ("text books --val books/deep/b.txt --name x --tokenizer byte", "books/deep/b.txt: is for training and in --val"),
    ("text ok.txt --name x --out x --tokenizer byte", "one of them"),
    ("text ok.txt --name ../x --tokenizer byte", "--name ../x: a plain name"),
    ("text ok.txt --name a/x --tokenizer byte", "--name a/x: a plain name"),
    ("text ok.txt --name .. --tokenizer byte", "--name ..: a plain name"),
    ("text ok.txt --name . --tokenizer byte", "--name .: a plain name"),
    ("text io.txt --name x --tokenizer byte", "io.txt: Input/output error"),
    ("text ok.txt --val books --val_frac 0.1 --name x --tokenizer byte", "--val_frac 0.1 chooses them: choose one"),
    ("text page.html --name x --tokenizer byte", "page.html: unknown kind of file"),
    ("text empty.txt --name x --tokenizer byte", "no text for the train split in empty.txt"),
    ("text ok.txt --val empty.txt --name x --tokenizer byte", "no text for the val split"),
    ("text latin.txt --name x --tokenizer byte", "latin.txt:3: not UTF-8 text (byte 0xe9)"),
    ("text bad.jsonl --name x --tokenizer byte", "bad.jsonl:3: "),
    ("text nofield.jsonl --name x --tokenizer byte", "nofield.jsonl:2: "),
    ("text list.jsonl --name x --tokenizer byte", "list.jsonl:1: "),
    ("text deep.jsonl --name x --tokenizer byte", "deep.jsonl:1: "),
    ("text number.jsonl --name x --tokenizer byte", "number.jsonl:1: "),
    ("text cut.txt.gz --name x --tokenizer byte", "cut.txt.gz: broken or truncated"),
    ("text cut.txt.xz --name x --tokenizer byte", "cut.txt.xz: broken or truncated"),
    ("text plain.txt.gz --name x --tokenizer byte", "plain.txt.gz: broken or truncated"),
    ("text ok.txt --out file/x --tokenizer byte", "file"),
    ("text ok.txt --out /proc/x --tokenizer byte", "error: /proc/x: No such file or directory"),
    ("fineweb-edu", "--shards"),
    ("fineweb-edu --shards 100", "--shards 100"),
    ("fineweb-edu --shards 1 --url http://127.0.0.1:9 --out y", "download failed"),
    ("fineweb-edu --shards 1 --url nonsense --out y", "nonsense"),
    ("fineweb-edu --shards 1 --out file", "file"),
    ("fineweb-edu --shards 1 --out other", "other/train_000000.bin is of other data: choose another --out"),
])
def test_user_mistakes_are_one_line(desk, args, words, monkeypatch, capsys):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(desk / "cache"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    tokenizers.tiktoken.registry.ENCODINGS.pop("gpt2", None)
    code, out, err = main(monkeypatch, capsys, desk, *args.split())
    assert (code, out) == (2, "")
    assert err.startswith("data_prep.py: error: ") and err.count("\n") == 1 and words in err, err
    assert not (desk / "x").exists() and not (desk / "data/x").exists() and not list(desk.glob("**/*.tmp-*"))


@pytest.mark.parametrize("args", ["stdlib --nonsense", "text nowhere.txt --name x", "text --help"])
def test_exit_codes_of_the_process(tmp_path, args):
    run = cli(*args.split(), cwd=tmp_path)
    if "--help" in args:
        assert run.returncode == 0 and "usage" in run.stdout and not run.stderr
    else:
        assert run.returncode == 2 and run.stderr.count("\n") == 1 and not run.stdout
