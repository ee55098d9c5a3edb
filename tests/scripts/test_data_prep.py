"""data_prep.py against naive implementations. Offline."""
import hashlib
import json
import os
import signal
import sys

import numpy as np
import pytest

import data_prep
from folders import DOCS, EOT, ranks_file, splits_of, write_docs
from nanodepth import tokenizers
from nanodepth.data import Data
from small import finish, start, wait_until


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.md.gz", "a.jsonl.gz", "a.txt.xz", "a.jsonl.zst", "a.parquet"])
def test_text_against_a_naive_reference(tmp_path, name):
    docs = [f"{i} {doc}" for i in range(80) for doc in DOCS]             # more than are encoded in one go
    meta = data_prep.prepare_text([write_docs(tmp_path / name, docs)], tmp_path / "out", "byte", val_frac=0.2,
                                  shard_tokens=1000)
    prepared, streams = splits_of(tmp_path / "out"), {"train": [], "val": []}
    for doc in docs:                                        # naively: end-of-text and bytes, each in its split
        ids = [256, *doc.encode()]
        split = next(s for s in streams if prepared[s][len(streams[s]):len(streams[s]) + len(ids)] == ids)
        streams[split] += ids
    assert prepared == streams
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


@pytest.mark.parametrize("size, frac", [(0, 0.1), (4e6, 0.1), (8e6, 0.05), (4e7, 0.01), (1e12, 0.01)])
def test_how_much_is_for_validation(tmp_path, monkeypatch, size, frac):
    """1% of much text, 400 kB of less, 10% of little, by the size on the disk; always the same documents."""
    assert [i for i in range(60) if data_prep.in_val(str(i), 0.1)] == [9, 39, 49, 51, 55]
    docs = [f"text {i}" for i in range(400)]
    file = write_docs(tmp_path / "a.txt", docs)
    monkeypatch.setattr(os.path, "getsize", lambda path: size)
    data_prep.prepare_text([file], tmp_path / "out", "byte")
    text = tokenizers.load_tokenizer("byte").decode(splits_of(tmp_path / "out")["val"])
    assert text.split(EOT)[1:] == [doc for doc in docs if data_prep.in_val(doc, frac)]


@pytest.mark.parametrize("frac", [0.1, 0.999])
def test_copies_of_a_document_are_in_one_split(tmp_path, capsys, frac):
    """The same documents in two files, also the first one, which always trains."""
    docs = [f"text {i}" for i in range(400)]
    files = [write_docs(tmp_path / name, docs) for name in ("a.jsonl", "a.jsonl.gz")]
    data_prep.prepare_text(files, tmp_path / "out", "byte", val_frac=frac)
    texts = {split: tokenizers.load_tokenizer("byte").decode(ids).split(EOT)[1:]
             for split, ids in splits_of(tmp_path / "out").items()}
    assert sorted(texts["train"] + texts["val"]) == sorted(2 * docs) and docs[0] in texts["train"]
    assert texts["val"] and not [text for text in texts["val"] if text in texts["train"]]


def test_val_when_no_document_falls_to_it(tmp_path, capsys):
    """It is the end of the text."""
    text = "".join(chr(97 + i % 26) for i in range(999))
    meta = data_prep.prepare_text([write_docs(tmp_path / "a.txt", [text])], tmp_path / "out", "byte", val_frac=0.1,
                                  shard_tokens=300)
    ids = [256, *text.encode()]
    assert splits_of(tmp_path / "out") == {"train": ids[:900], "val": [256, *ids[900:]]}
    assert {split: n["bytes"] for split, n in meta["splits"].items()} == {"train": 899, "val": 100}
    assert capsys.readouterr().out.startswith("validation: no document was chosen, so it is the last 100 tokens of")


def test_val_files_a_field_and_a_ranks_file_from_home(tmp_path, monkeypatch, capsys):
    """Documents of --val that also train are counted."""
    ranks = ranks_file(tmp_path / "my", [bytes([i]) for i in range(256)] + [b"ab"])
    for name, text in (("b", "bab"), ("c", "b"), ("d", "b"), ("e", "b")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": text}), encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    words = "text ~/d.jsonl --out ~/out --tokenizer ~/my --val ~/b.jsonl ~/c.jsonl ~/e.jsonl --field body"
    assert data_prep.main(words.split()) == 0
    assert "encoding: 2 of the 3 validation documents are also in the training text\n" in capsys.readouterr().out
    index = json.loads((tmp_path / "out/shards_index.json").read_bytes())       # so that no start reads the shards
    assert {name: entry["sha256"] for name, entry in index.items()} == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in tmp_path.glob("out/*.bin")}
    assert splits_of(tmp_path / "out") == {"train": [257, 98], "val": [257, 98, 256, 257, 98, 257, 98]}
    ranks.unlink()                                                       # the folder has its own copy
    data = Data(tmp_path / "out")
    assert data.tokenizer == str(tmp_path / "out/tokenizer.tiktoken") and data.vocab_size == 258
    assert tokenizers.load_tokenizer(data.tokenizer).decode([256, 98]) == "abb"
    assert data.token_bytes[[97, 256, 257]].tolist() == [1, 2, 0]


def test_train_bpe_option(tmp_path, scripts):
    """The vocabulary is that of the train documents."""
    pytest.importorskip("rustbpe")
    docs = "the cat sat on the mat. " * 40, "nothing like it: zzzzzzzz"
    write_docs(tmp_path / "a.txt", docs)
    write_docs(tmp_path / "b.txt", ["qq " * 999])
    done = scripts.run("data_prep.py", *"text a.txt --name x --train_bpe 262 --val b.txt".split(), cwd=tmp_path)
    assert done.returncode == 0 and "python train.py --data data/x" in done.stdout, done.stderr
    data = Data(tmp_path / "data/x")
    tokenizer, ids = tokenizers.load_tokenizer(data.tokenizer), data.shards["train"][0].tolist()
    assert data.vocab_size == 262 and tokenizer.decode(ids) == "".join(EOT + doc for doc in docs)
    assert max(ids) == ids[0] == 261 == tokenizer.eot_token and b"qq" not in tokenizer.token_byte_values()


def test_stdlib_walk(tmp_path, monkeypatch, capsys):
    """40 small files and some that must not be read, by hand. A folder that is there, or that another process has
    finished while we worked, is used as it is."""
    lib = tmp_path / "lib"
    files = {f"p{i % 3}/m{i}.py": f"x = {i}\n" for i in range(40)}
    for name, text in (files | {"latin.py": "# é BAD", "empty.py": "", "data.txt": "BAD"} | {
            f"{folder}/bad.py": "BAD" for folder in ("test", "p0/tests", "site-packages/a", "encodings", "pydoc_data",
                                                     "idlelib/idle_test", "__pycache__")}).items():
        (lib / name).parent.mkdir(parents=True, exist_ok=True)
        (lib / name).write_text(text, encoding="latin-1")
    monkeypatch.setattr(data_prep.sysconfig, "get_paths", lambda: {"stdlib": str(lib)})
    real, made = data_prep.fill_folder, []

    def slow(*args, **kwargs):
        if not made:
            made.append("by the other process")
            made.append(data_prep.prepare_stdlib(tmp_path / "out"))
        return real(*args, **kwargs) | {"source": "the slower one"}
    monkeypatch.setattr(data_prep, "fill_folder", slow)
    assert data_prep.prepare_stdlib(tmp_path / "out") == made[1] and made[1]["tokenizer"] == "byte"
    assert made[1]["source"].startswith("Python " + sys.version.split()[0]) and "40 files" in made[1]["source"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lib", "out"] and "there already" in capsys.readouterr().out
    split = {k: tokenizers.load_tokenizer("byte").decode(v).split(EOT)[1:]
             for k, v in splits_of(tmp_path / "out").items()}
    assert split == {k: [files[f] for f in sorted(files) if data_prep.in_val(f, 0.05) == (k == "val")] for k in split}
    before = (tmp_path / "out/meta.json").stat().st_mtime_ns
    assert data_prep.main(["stdlib", "--out", str(tmp_path / "out")]) == 0
    assert "there already" in capsys.readouterr().out and (tmp_path / "out/meta.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("number, code, said", [
    (signal.SIGKILL, -9, ""), (signal.SIGTERM, 143, "\nstopping after these documents\n"),
    (signal.SIGINT, 130, "\nstopping after these documents; Ctrl-C again quits now\n")])
def test_no_half_made_folder(tmp_path, number, code, said):
    write_docs(tmp_path / "a.txt", ["some words here"] * 600_000)
    words = "text a.txt --name x --tokenizer byte --shard_tokens 50000"
    process = start("data_prep.py", *words.split(), cwd=tmp_path)
    wait_until(lambda: list(tmp_path.glob("data/x.tmp-*/train_000002.bin")), process)
    process.send_signal(number)
    assert finish(process, code)[1] == said
    assert not (tmp_path / "data/x").exists() and (code < 0 or not list((tmp_path / "data").iterdir()))
    assert all((left / "token_bytes.npy").exists() for left in tmp_path.glob("data/*"))    # so it is no public data


def test_a_file_whose_name_is_no_text(tmp_path, scripts):
    (tmp_path / os.fsdecode(b"\xff.txt")).write_bytes(b"some words here\n" * 10)
    done = scripts.run("data_prep.py", *"text . --name x --tokenizer byte".split(), cwd=tmp_path)
    assert done.returncode == 0 and "train  1 documents, 145 tokens, 144 bytes" in done.stdout and not done.stderr
