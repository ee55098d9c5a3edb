"""Documents out of folders, patterns and files of all kinds."""
import gzip
import json
import lzma
import os
import random
import re
from pathlib import Path

import pytest

from folders import DOCS, EOT, write_parquet, zst
from nanodepth.cli import UserError
from nanodepth.texts import documents, text_files


def docs_of(path, raw, field="text"):
    path.write_bytes(raw)
    return list(documents([path], field))


@pytest.mark.quick
def test_documents_of_a_text_file(tmp_path):
    def docs(raw):
        return docs_of(tmp_path / "a.txt", raw)

    assert docs(b"a\n\nb\n") == ["a\n\nb\n"]                              # no separator: the file as it is
    assert docs(b"a\n<|endoftext|>\nb\n<|endoftext|>\n") == ["a", "b"]
    inside = b"a\n <|endoftext|>\n<|endoftext|>b"
    assert docs(b"<|endoftext|>\n\n<|endoftext|>\n" + inside) == [inside.decode()]
    assert docs(b"a\r\n<|endoftext|>\r\nb\r\n") == ["a", "b\r\n"]
    assert docs("\ufeffa\x0bb\u2028c\n\ufeffd".encode()) == ["a\x0bb\u2028c\n\ufeffd"]    # an editor's mark is no text


def test_fields_of_a_jsonl_file(tmp_path, capsys):
    """A null or empty text is counted and left out; a missing one is an error."""
    file = tmp_path / "a.jsonl"
    assert docs_of(file, b'{"text": "x\\ud83d y"}\n\n{"text": ""}\n{"text": null}\n{"text": "<|endoftext|>"}') == [
        "x? y", EOT]
    assert capsys.readouterr().out == "reading: skipped 2 rows without text\n"
    assert docs_of(file, b'{"data.id": "b"}', "data.id") == ["b"]
    for field in ("data", "text"):
        with pytest.raises(UserError, match=f"a.jsonl:1: not a JSON object with text in the field '{field}'"):
            docs_of(file, b'{"data": {"text": "a"}}', field)
    for line in (b'{"text": 5}', b'["text"]', b"null", b'{"text": "b"'):
        with pytest.raises(UserError, match="a.jsonl:3: not a JSON object with text in the field 'text'"):
            docs_of(file, b'{"text": "a"}\n\n' + line)


def test_folders_and_patterns(tmp_path, monkeypatch, capsys):
    """Against a list by hand: the files of a folder or a pattern are sorted, hidden and foreign ones left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    for name in ("b/z.txt", "b/a/x.md", "b/a-/y.jsonl", "b/B.TXT", "b/.hidden.txt", "b/.git/c.txt", "b/page.html",
                 "c/2.txt", "c/10.txt", "c/1.md", "[1].txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps({"text": name}) if ".jsonl" in name else name, encoding="utf-8")
    os.symlink("nowhere", "b/dangling.txt")
    os.symlink(".git", "b/link")
    below = ["b/B.TXT", "b/a-/y.jsonl", "b/a/x.md", "b/z.txt"]
    assert text_files(["b", "c"]) and capsys.readouterr().out.startswith("b: other kinds of files, left out: 3 (")
    for paths, files in ((["b"], below), (["c/*.txt", "b"], ["c/10.txt", "c/2.txt", *below]),
                         (["[1].txt"], ["[1].txt"]), (["c/[12].*"], ["c/1.md", "c/2.txt"]),
                         (["[bc]"], [*below, "c/1.md", "c/10.txt", "c/2.txt"]), (["**/?.md"], ["b/a/x.md", "c/1.md"]),
                         (["c/2.txt", "c/1.md"], ["c/2.txt", "c/1.md"])):
        assert text_files(paths) == files
        assert list(documents(text_files(paths))) == files
    assert text_files(["~/2.txt", Path("~/1*")]) == [f"{tmp_path}/c/{name}" for name in ("2.txt", "1.md", "10.txt")]


@pytest.mark.parametrize("packing, compress", [("gz", gzip.compress), ("xz", lzma.compress), ("zst", zst)])
def test_archives(tmp_path, packing, compress):
    """A line over several frames. What is cut off anywhere, or is no archive, is an error."""
    rng, file = random.Random(0), tmp_path / f"a.txt.{packing}"
    text = "".join(chr(rng.randrange(32, 127)) for _ in range(100_000))
    text = f"{text[:70_000]}\n\n{text[70_000:]}\nend"
    a, b = (compress(part.encode()) for part in (text[:40_000], text[40_000:]))
    assert docs_of(file, a + b) == [text]
    for broken in (b"", a[:1], a[:5], a[:20_000], a + b[:20_000], a + b[:-1], (a + b)[:-50] + b"#" * 50, a + b"#" + b,
                   b"plain text"):
        with pytest.raises(UserError, match=f"a.txt.{packing}: broken or truncated archive") as e:
            docs_of(file, broken)
        assert "\n" not in str(e.value)


def test_columns_of_parquet(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    file = write_parquet(tmp_path / "a.parquet", {
        "id": [1, 2, 3], "body": ["a\n<|endoftext|>\nb", None, ""], "raw": [b"x", b"y", b"z"],
        "tag": pyarrow.array(["x", "y", "x"]).dictionary_encode(), "parts": [["x"], [], ["y"]],
        "data": [{"text": "p", "id": 1}, {"text": None, "id": 2}, None]})
    assert list(documents([file], "body")) == ["a\n<|endoftext|>\nb"]
    assert capsys.readouterr().out == "reading: skipped 2 rows without text\n"
    assert list(documents([file], "tag")) == [*"xyx"]
    for field in ("text", "id", "raw", "parts", "data", "data.text"):
        with pytest.raises(UserError, match=re.escape(
                f"a.parquet: no column '{field}' with text: name one with --field: 'id' (int64), 'body' (string)")):
            list(documents([file], field))
    raw = write_parquet(tmp_path / "b.parquet", {"text": [doc * 50 for doc in DOCS]}).read_bytes()
    for broken in (b"", b"PAR1", raw[:-1], raw[:len(raw) // 2], raw[:4] + b"#" * 30 + raw[34:], b"{}\n" * 9):
        with pytest.raises(UserError, match="b.parquet: broken or truncated") as e:
            docs_of(tmp_path / "b.parquet", broken)
        assert "\n" not in str(e.value)


def test_parquet_is_read_in_pieces(tmp_path, monkeypatch):
    """A document of a file of one row group is there before the rows far behind it are."""
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"text": [f"{i} {'x' * 9}" for i in range(5000)]}), tmp_path / "a.parquet")
    read, real = [], parquet.ParquetFile.iter_batches
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", lambda *args, **kwargs: (
        read.append(rows.num_rows) or rows for rows in real(*args, **kwargs)))
    texts = documents([tmp_path / "a.parquet"])
    assert next(texts) == "0 xxxxxxxxx" and sum(read) <= 1000
    assert len([*texts]) == 4999 and sum(read) == 5000
