"""Tokenizers: GPT-2's, bytes, a file of merge ranks, a run's own."""
import base64
from pathlib import Path

import numpy as np
import tiktoken

from nanodepth.cli import UserError
from nanodepth.data import MAX_VOCAB

EOT = "<|endoftext|>"
# GPT-2's pattern: contractions, words, numbers, punctuation, white space; a leading space goes with the word
SPLIT_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def load_tokenizer(name) -> tiktoken.Encoding:
    """The tokenizer `gpt2`, `byte` (ids are byte values, 256 ends a text), or that of a file of merge ranks.

    The file has a line `BASE64 RANK` per token (tiktoken's format); its end-of-text id is the number of ranks, and it
    splits text like GPT-2. UserError for a missing or broken file, and for gpt2 when its vocabulary cannot be had.
    """
    name = str(name)
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as e:                       # requests' errors are OSErrors; ValueError: wrong hash
            raise UserError(f"tokenizer gpt2 needs its vocabulary once from the network ({type(e).__name__}): "
                            "connect once, or set TIKTOKEN_CACHE_DIR to a folder that has it, "
                            "or prepare the text with --tokenizer byte") from None
    if name == "byte":
        ranks, pattern = {bytes([i]): i for i in range(256)}, "(?s:.)"
        return tiktoken.Encoding("byte", pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: 256})
    ranks = read_ranks(name)
    return tiktoken.Encoding(Path(name).stem, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks,
                             special_tokens={EOT: len(ranks)})


def read_ranks(name) -> dict:
    """{token in bytes: its rank} of a file of merge ranks. UserError unless they give any text uint16 tokens."""
    try:
        lines = Path(name).read_bytes().splitlines()
    except OSError as e:
        raise UserError(f"tokenizer {name!r}: {e.strerror}: use gpt2, byte, "
                        "or the path of a file of merge ranks") from None
    ranks = {}
    for i, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise UserError(f"{name}:{i}: not a merge rank: {line[:40]!r}: "
                            "a line is a base64 token, a space, its rank") from None
    if sorted(ranks.values()) != list(range(len(lines))):
        raise UserError(f"{name}: the ranks of its {len(lines):,} lines are not 0 to {len(lines) - 1:,}, each once")
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise UserError(f"{name}: no rank for the byte {missing[0]} ({len(missing)} of 256 are missing): "
                        "some text has no tokens")
    if len(ranks) >= MAX_VOCAB:
        raise UserError(f"{name}: {len(ranks):,} ranks and end-of-text do not fit in uint16 tokens: "
                        f"at most {MAX_VOCAB - 1:,}")
    return ranks


def run_tokenizer(run, config) -> tiktoken.Encoding:
    """The tokenizer of a run folder with this config: its own file if it has one, else gpt2 or byte.

    tokenizer.json, in folders that convert.py made, is read by the package tokenizers. Raises UserError.
    """
    for name, load in (("tokenizer.tiktoken", load_tokenizer), ("tokenizer.json", JsonTokenizer)):
        if (Path(run) / name).is_file():
            return load(Path(run) / name)
    return load_tokenizer(config["tokenizer"])


class JsonTokenizer:
    """A tokenizer.json of Hugging Face with the four members of a tiktoken.Encoding that we use."""

    def __init__(self, path):
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"{path} needs the package tokenizers: pip install tokenizers") from None
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:                                          # it raises bare Exceptions
            raise UserError(f"{path}: not a tokenizer.json: {e}") from None
        self.inner.no_truncation()                                      # settings of training, not of the text
        self.inner.no_padding()
        self.n_vocab = self.inner.get_vocab_size()
        found = [self.inner.token_to_id(name) for name in (EOT, "<|end_of_text|>", "</s>")]
        if all(i is None for i in found):
            raise UserError(f"{path}: no end-of-text token ({EOT}, <|end_of_text|> or </s>)")
        self.eot_token = next(i for i in found if i is not None)

    def encode_ordinary(self, text):
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, tokens):
        return self.inner.decode(tokens, skip_special_tokens=False)


def token_bytes(tokenizer) -> np.ndarray:
    """int64 (n_vocab,): bytes of text that each token stands for; 0 for end-of-text and for unused ids."""
    widths = np.zeros(tokenizer.n_vocab, np.int64)
    for token in tokenizer.token_byte_values():
        widths[tokenizer.encode_single_token(token)] = len(token)
    return widths


def train_bpe(texts, n_vocab: int, path):
    """Learns n_vocab - 1 merge ranks (end-of-text is the last id) from an iterable of str and writes them to `path`.

    Raises UserError without the optional package rustbpe, for n_vocab outside 257 ... 65,536, and for too little text.
    """
    if not 257 <= n_vocab <= MAX_VOCAB:
        raise UserError(f"a vocabulary of {n_vocab} is not possible: 256 bytes and end-of-text make 257, "
                        f"uint16 ends at {MAX_VOCAB}")
    try:
        import rustbpe
    except ImportError:
        raise UserError("learning a vocabulary needs the package rustbpe: pip install rustbpe") from None
    learner = rustbpe.Tokenizer()
    learner.train_from_iterator(texts, n_vocab - 1, pattern=SPLIT_PATTERN)
    ranks = sorted(learner.get_mergeable_ranks(), key=lambda pair: pair[1])
    if len(ranks) < n_vocab - 1:
        raise UserError(f"a vocabulary of {n_vocab:,} cannot be learnt from so little text: at most {len(ranks) + 1:,}")
    Path(path).write_bytes(b"".join(base64.b64encode(bytes(token)) + b" %d\n" % rank for token, rank in ranks))
