"""Documents out of folders, patterns and files of all kinds."""
import json
import os
import random
import sys
from pathlib import Path

import pytest

import data_prep
from folders import DOCS, EOT, main, splits_of, write_parquet, zst
from nanodepth import tokenizers
from nanodepth.cli import UserError
from nanodepth.texts import documents, text_files


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
