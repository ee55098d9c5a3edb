"""Tokenizers: text and back, ids, rank files, training one."""
import random
import struct

import numpy as np
import pytest

from folders import DOCS, ranks_file
from nanodepth import tokenizers
from nanodepth.cli import UserError


@pytest.fixture(params=["byte", "file", "gpt2"])
def tokenizer(request, tmp_path):
    if request.param == "file":
        singles = [bytes([i]) for i in range(255, -1, -1)]              # not in the order of bytes
        return tokenizers.load_tokenizer(ranks_file(tmp_path / "my.tiktoken", singles + [b"la", b"st", b"last", b" w"]))
    try:
        return tokenizers.load_tokenizer(request.param)
    except UserError as e:
        pytest.skip(str(e))


@pytest.mark.quick
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


def test_bad_rank_files(tmp_path):
    singles = [bytes([i]) for i in range(256)]
    raws = [ranks_file(tmp_path / "r", tokens).read_bytes() for tokens in (
        singles[:7] + singles[8:], [*singles, b"a"], singles + [struct.pack(">I", i) for i in range(65280)])]
    for raw in (*raws, b"YQ== 0\nhello\n", b""):
        (tmp_path / "r").write_bytes(raw)
        with pytest.raises(UserError, match="r: not a file of merge ranks: a line is a token in base64, a space, its"):
            tokenizers.load_tokenizer(tmp_path / "r")


def test_train_bpe(tmp_path):
    rustbpe = pytest.importorskip("rustbpe")
    texts = DOCS * 3 + ["the cat sat on the mat, the rat sat on the cat. " * 5]
    tokenizers.train_bpe(iter(texts), 300, tmp_path / "t")
    mine, other = tokenizers.load_tokenizer(tmp_path / "t"), rustbpe.Tokenizer()
    assert mine.n_vocab == 300 and mine.eot_token == 299
    other.train_from_iterator(iter(texts), 299,
                              pattern=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    for text in texts:
        assert mine.decode(mine.encode_ordinary(text)) == text and mine.encode_ordinary(text) == other.encode(text)
    assert len(mine.encode_ordinary(texts[-1])) < len(texts[-1]) / 3     # it has learned
    for some, n, said in ((texts, 256, "256"), (texts, 65537, "65537"), (["abc"], 5000, "so little text")):
        with pytest.raises(UserError, match=said):
            tokenizers.train_bpe(iter(some), n, tmp_path / "u")
    assert not (tmp_path / "u").exists()


def test_a_tokenizer_json(tmp_path):
    """Truncation and padding belong to somebody's training: a text has all of its tokens and no others. What is no
    Unicode is the token of \\ufffd, as with tiktoken."""
    inner = pytest.importorskip("tokenizers")
    made = inner.Tokenizer(inner.models.WordLevel({"a": 0, "b": 1, "</s>": 2, "\ufffd": 3}, unk_token="</s>"))
    made.pre_tokenizer = inner.pre_tokenizers.WhitespaceSplit()
    made.enable_truncation(4)
    made.enable_padding(length=6)
    made.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizers.run_tokenizer(tmp_path, {})
    assert (ours.n_vocab, ours.eot_token) == (4, 2)
    assert ours.encode_ordinary("a b") == [0, 1] and ours.encode_ordinary("a b " * 20) == [0, 1] * 20
    byte = tokenizers.load_tokenizer("byte")
    for bad in ("\udcff", "\ud83d"):                                     # a byte that is not UTF-8; half a pair
        assert ours.encode_ordinary(f"a {bad} b") == [0, 3, 1]
        assert byte.decode(byte.encode_ordinary(f"a {bad} b")) == "a \ufffd b"
