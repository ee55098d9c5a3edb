"""data_prep.py against naive implementations, and its mistakes of a user. Offline."""
import gzip
import hashlib
import http.server
import json
import lzma
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import data_prep
from folders import DOCS, EOT, ROOT, main, ranks_file, shard_bytes, splits_of, write_docs
from nanodepth import tokenizers
from nanodepth.cli import UserError
from nanodepth.data import Data


def expected(docs, prepared):
    """Tokens of both splits, naively: end-of-text and bytes, with the documents split as in `prepared`."""
    streams = {"train": [], "val": []}
    for doc in docs:
        ids = [256, *doc.encode()]
        split = next(s for s in streams if prepared[s][len(streams[s]):len(streams[s]) + len(ids)] == ids)
        streams[split] += ids
    return streams


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.md.gz", "a.jsonl.gz", "a.txt.xz", "a.jsonl.zst", "a.parquet"])
def test_text_against_a_naive_reference(tmp_path, name):
    docs = [f"{i} {doc}" for i in range(80) for doc in DOCS]             # more than are encoded in one go
    meta = data_prep.prepare_text([write_docs(tmp_path / name, docs)], tmp_path / "out", "byte", val_frac=0.2,
                                  shard_tokens=1000)
    prepared = splits_of(tmp_path / "out")
    assert prepared == expected(docs, prepared)
    assert 40 <= prepared["val"].count(256) <= 120
    assert prepared["train"].count(256) + prepared["val"].count(256) == len(docs)
    for split, ids in prepared.items():
        assert meta["splits"][split] == {"tokens": len(ids), "documents": ids.count(256),
                                         "bytes": len(ids) - ids.count(256)}
    for shard, entry in meta["shards"].items():
        raw = (tmp_path / "out" / shard).read_bytes()
        assert entry == {"tokens": (len(raw) - 1024) // 2, "sha256": hashlib.sha256(raw).hexdigest()}
    *full, _ = [n["tokens"] for shard, n in sorted(meta["shards"].items()) if shard.startswith("train")]
    assert len(full) > 1 and set(full) == {1000}
    assert json.loads((tmp_path / "out/meta.json").read_bytes()) == meta and meta["source"] == name
    assert np.load(tmp_path / "out/token_bytes.npy").tolist() == [1] * 256 + [0]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "out"])


def test_how_much_is_for_validation(tmp_path):
    """1% of much text, 400 kB of less, 10% of little. Sizes are those on the disk."""
    for size, frac in ((0, 0.1), (10**6, 0.1), (4 * 10**6, 0.1), (8 * 10**6, 0.05), (4 * 10**7, 0.01), (10**12, 0.01)):
        for i in (1, 2):
            with open(tmp_path / f"{i}.txt", "wb") as f:
                f.truncate(size // 2)
        assert data_prep.default_val_frac([tmp_path / "1.txt", tmp_path / "2.txt"]) == frac
    file, shares = write_docs(tmp_path / "a.txt", [f"{i} " + "x" * 300 for i in range(400)]), {}
    for frac in (None, 0.1, 0.01):
        data_prep.prepare_text([file], tmp_path / str(frac), "byte", val_frac=frac)
        shares[frac] = splits_of(tmp_path / str(frac))["val"].count(256)
    assert 20 <= shares[None] == shares[0.1] <= 60 and 1 <= shares[0.01] <= 12


def test_the_choice_of_documents_is_frozen():
    assert [i for i in range(60) if data_prep.in_val(str(i), 0.1)] == [9, 39, 49, 51, 55]


def test_val_when_no_document_falls_to_it(tmp_path):
    """It is the end of the text; and the first document always trains."""
    text = "".join(chr(97 + i % 26) for i in range(999))
    meta = data_prep.prepare_text([write_docs(tmp_path / "a.txt", [text])], tmp_path / "out", "byte", val_frac=0.1,
                                  shard_tokens=300)
    ids = [256, *text.encode()]
    assert splits_of(tmp_path / "out") == {"train": ids[:900], "val": [256, *ids[900:]]}
    assert {split: n["bytes"] for split, n in meta["splits"].items()} == {"train": 899, "val": 100}
    data_prep.prepare_text([write_docs(tmp_path / "b.txt", [*"abc"])], tmp_path / "b", "byte", val_frac=0.999999)
    assert splits_of(tmp_path / "b") == {"train": [256, 97], "val": [256, 98, 256, 99]}


def test_val_files_and_ranks_file(tmp_path):
    ranks = ranks_file(tmp_path / "my", [bytes([i]) for i in range(256)] + [b"ab"])
    for name, text in (("b", "bab"), ("c", "b"), ("d", "b")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": text}), encoding="utf-8")
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
    docs = "the cat sat on the mat. " * 40, "x" + " " * 1_000_100 + "y", "nothing like it: zzzzzzzz"
    write_docs(tmp_path / "a.txt", docs)
    write_docs(tmp_path / "b.txt", ["the mat. " * 9])
    code, out, err = main(monkeypatch, capsys, tmp_path, "text", "a.txt", "--name", "x", "--train_bpe", 262, "--val",
                          "b.txt")
    assert code == 0 and "python train.py --data data/x" in out, err
    data = Data(tmp_path / "data/x")
    tokenizer, ids = tokenizers.load_tokenizer(data.tokenizer), data.shards["train"][0].tolist()
    assert data.vocab_size == 262 and tokenizer.decode(ids) == "".join(EOT + doc for doc in docs)
    assert max(ids) == ids[0] == 261 == tokenizer.eot_token


def test_home(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    write_docs(tmp_path / "home/a.txt", DOCS)
    ranks_file(tmp_path / "home/ranks", [bytes([i]) for i in range(256)])
    code, _, err = main(monkeypatch, capsys, tmp_path, "text", "~/a.txt", "--out", "~/x", "--tokenizer", "~/ranks")
    assert code == 0 and Data(tmp_path / "home/x").vocab_size == 257, err
    assert [p.name for p in tmp_path.iterdir()] == ["home"]


def test_stdlib(tmp_path, monkeypatch, capsys):
    meta = data_prep.prepare_stdlib(tmp_path / "one")
    assert json.loads((tmp_path / "one/meta.json").read_bytes()) == meta and meta["tokenizer"] == "byte"
    assert meta["source"].startswith("Python " + sys.version.split()[0])
    text = {k: tokenizers.load_tokenizer("byte").decode(v) for k, v in splits_of(tmp_path / "one").items()}
    for module in (textwrap, gzip, http.server):                              # whole files are there, in one split
        assert sum(EOT + Path(module.__file__).read_text("utf-8") + EOT in t + EOT for t in text.values()) == 1
    assert 0.01 < len(text["val"]) / len(text["train"]) < 0.15
    before = (tmp_path / "one/meta.json").stat().st_mtime_ns
    code, out, _ = main(monkeypatch, capsys, tmp_path, "stdlib", "--out", "one")
    assert code == 0 and "there already" in out and (tmp_path / "one/meta.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="delete it or choose another --out"):
        data_prep.prepare_stdlib(tmp_path / "one", "gpt2")


@pytest.fixture
def little_stdlib(tmp_path, monkeypatch):
    """A standard library of 40 small files and some that must not be read."""
    lib = tmp_path / "lib"
    for i in range(40):
        (lib / f"p{i % 3}").mkdir(parents=True, exist_ok=True)
        (lib / f"p{i % 3}" / f"m{i}.py").write_bytes(b"x = %d\n" % i)
    for folder in ("test", "p0/tests", "site-packages/a", "encodings", "pydoc_data", "idlelib/idle_test",
                   "__pycache__"):
        (lib / folder).mkdir(parents=True)
        (lib / folder / "bad.py").write_bytes(b"BAD")
    for name, raw in (("latin.py", b"# \xe9 BAD"), ("empty.py", b""), ("data.txt", b"BAD")):
        (lib / name).write_bytes(raw)
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
            (little_stdlib / "meta.json").write_bytes(json.dumps(winner[1]).encode())
        return real(*args, **kwargs)
    monkeypatch.setattr(data_prep, "fill_folder", slow)
    assert data_prep.prepare_stdlib(little_stdlib) == winner[1]
    assert not [p for p in little_stdlib.parent.iterdir() if "tmp" in p.name]


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_no_half_made_folder(tmp_path, number, code):
    write_docs(tmp_path / "a.txt", ["some words here"] * 600_000)
    process = subprocess.Popen([sys.executable, ROOT / "data_prep.py", "text", "a.txt", "--name", "x", "--tokenizer",
                                "byte", "--shard_tokens", "50000"],
                               cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not list(tmp_path.glob("data/x.tmp-*/train_000002.bin")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    assert process.communicate()[1] == b"" and process.returncode == code
    assert not (tmp_path / "data/x").exists() and (code < 0 or not list((tmp_path / "data").iterdir()))


@pytest.mark.parametrize("command", ["text a.txt --out x --tokenizer byte", "mqar --out x"])
def test_full_disk(tmp_path, monkeypatch, capsys, command):
    """A file that cannot grow as the disk is full: one line that names the folder, and nothing is left."""
    write_docs(tmp_path / "a.txt", ["some words here"] * 1000)
    monkeypatch.setattr(data_prep.prepare_mqar, "__defaults__", (20_000,))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, limits[1]))
    try:
        code, out, err = main(monkeypatch, capsys, tmp_path, *command.split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, out, err) == (2, "", f"data_prep.py: error: {tmp_path / 'x'}: File too large\n")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with bad input of many kinds."""
    desk = tmp_path_factory.mktemp("desk")
    for name, raw in {"ok.txt": b"fine text\n", "empty.txt": b"", "latin.txt": b"line one\nline two\ncaf\xe9\n",
                      "bad.jsonl": b'{"text": "a"}\n\n{"text": "b"\n', "cut.txt.xz": lzma.compress(b"x" * 1000)[:-9],
                      "a.parquet.gz": b"x", "page.html": b"x", "file": b"x"}.items():
        (desk / name).write_bytes(raw)
    os.symlink("/proc/self/mem", desk / "io.txt")                       # opens, and cannot be read
    for folder in ("books/deep", "data/taken", "other"):
        (desk / folder).mkdir(parents=True)
    (desk / "books/deep/b.txt").write_bytes(b"a book\n")
    (desk / "data/taken/meta.json").write_bytes(b"{}")
    (desk / "other/train_000000.bin").write_bytes(shard_bytes([256, 5, 6]))
    return desk


@pytest.mark.parametrize("args, words", [
    ("", "required"),
    ("nonsense", "nonsense"),
    ("stdlib --out file", "file: exists already"),
    ("stdlib --tokenizer nope --out x", "'nope'"),
    ("text ok.txt --name x --tokenizer gpt2", "TIKTOKEN_CACHE_DIR"),
    ("text ok.txt", "one of the arguments --name --out is required"),
    ("text ok.txt --name x --out x", "--out: not allowed with argument --name"),
    ("text ok.txt --name taken --tokenizer byte", "make another folder with --out"),
    ("text ok.txt --name x --tokenizer byte --train_bpe 300", "--train_bpe: not allowed with argument --tokenizer"),
    ("text ok.txt --val books --val_frac 0.1 --name x", "--val_frac: not allowed with argument --val"),
    ("text ok.txt --name x --train_bpe 9", "a vocabulary of 9 "),
    ("text ok.txt --name x --vocab_size 300", "did you mean --train_bpe?"),
    ("text ok.txt --name x --tokenizer byte --val_frac 2", "--val_frac 2.0"),
    ("text ok.txt --name x --tokenizer byte --shard_tokens 0", "--shard_tokens 0"),
    ("text ok.txt missing.txt --name x --tokenizer byte", "missing.txt: no such file"),
    ("text ok.txt --val data --name x --tokenizer byte", "data: no text in this folder: .txt, .md, .jsonl (plain"),
    ("text p*.html --name x --tokenizer byte", "page.html: not a text file: .txt, .md, .jsonl (plain"),
    ("text a.parquet.gz --name x --tokenizer byte", "a.parquet.gz: not a text file"),
    ("text books books/deep --name x --tokenizer byte", "books/deep/b.txt: given twice"),
    ("text books --val books/deep/b.txt --name x --tokenizer byte", "books/deep/b.txt: is for training and in --val"),
    ("text io.txt --name x --tokenizer byte", "io.txt: Input/output error"),
    ("text empty.txt --name x --tokenizer byte", "no text for the train split in empty.txt"),
    ("text ok.txt --val empty.txt --name x --tokenizer byte", "no text for the val split"),
    ("text latin.txt --name x --tokenizer byte", "latin.txt:3: not UTF-8 text (byte 0xe9)"),
    ("text bad.jsonl --name x --tokenizer byte", "bad.jsonl:3: "),
    ("text cut.txt.xz --name x --tokenizer byte", "cut.txt.xz: broken or truncated"),
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


def test_the_process(tmp_path, scripts):
    """Exit codes, and a file whose name is no text."""
    (tmp_path / os.fsdecode(b"\xff.txt")).write_bytes(b"some words here\n" * 10)
    for words, code, said in (("stdlib --nonsense", 2, ""), ("text nowhere.txt --name x", 2, ""),
                              ("text --help", 0, "usage"),
                              ("text . --name x --tokenizer byte", 0, "\\udcff.txt: byte tokens")):
        done = scripts.run("data_prep.py", *words.split(), cwd=tmp_path)
        assert done.returncode == code and said in done.stdout and done.stderr.count("\n") == (code == 2), done.stderr
