"""Tokenizers: GPT-2's, bytes, a file of merge ranks, a run's own."""
import base64
import os
from pathlib import Path

import numpy as np
import tiktoken

from nanodepth.cli import UserError

EOT = "<|endoftext|>"
MAX_VOCAB = 2**16                       # tokens are uint16
# GPT-2's pattern: contractions, words, numbers, punctuation, white space; a leading space goes with the word
SPLIT_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def load_tokenizer(name) -> tiktoken.Encoding:
    """The tokenizer `gpt2`, `byte` (ids are byte values; 256 is end-of-text), or that of a file of merge ranks.

    The file has a line `BASE64 RANK` per token (tiktoken's format). Its end-of-text id is the number of ranks, and text
    is split as by GPT-2. UserError for a missing or broken file, and for gpt2 if its vocabulary cannot be downloaded.
    """
    name, pattern = os.path.expanduser(name), SPLIT_PATTERN
    if name == "byte":
        ranks, pattern = {bytes([i]): i for i in range(256)}, "(?s:.)"
    elif name == "gpt2":
        try:
            ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
        except (OSError, ValueError) as e:                       # requests' errors are OSErrors; ValueError: wrong hash
            raise UserError(f"tokenizer gpt2 must download its vocabulary once ({type(e).__name__}): connect to the "
                            "network, or set TIKTOKEN_CACHE_DIR to a folder that has it, or prepare the text with "
                            "--tokenizer byte") from None
    else:
        ranks = read_ranks(name)
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: len(ranks)})


def read_ranks(name) -> dict:
    """{token in bytes: its rank} of a file of merge ranks. UserError unless they can encode any text as uint16."""
    try:
        lines = [line.split() for line in Path(name).read_bytes().splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except OSError as e:
        raise UserError(f"tokenizer {name!r}: {e.strerror}: use gpt2, byte, or the path of a file of merge "
                        "ranks") from None
    except ValueError:
        ranks = {}
    if not (sorted(ranks.values()) == [*range(len(lines))] and {bytes([i]) for i in range(256)} <= ranks.keys() and
            len(ranks) < MAX_VOCAB):
        raise UserError(f"{name}: not a file of merge ranks: a line is a token in base64, a space, its rank; the ranks "
                        f"are 0, 1, 2, ..., each once; all 256 bytes are tokens; at most {MAX_VOCAB - 1:,} tokens")
    return ranks


def run_tokenizer(run, config):
    """The tokenizer of a run folder with this config: its own file if it has one, else gpt2 or byte.

    A tokenizer.json, in folders that convert.py made, needs the package tokenizers. UserError as in load_tokenizer().
    """
    for name, load in (("tokenizer.tiktoken", load_tokenizer), ("tokenizer.json", JsonTokenizer)):
        if (Path(run) / name).is_file():
            return load(Path(run) / name)
    return load_tokenizer(config["tokenizer"])


class JsonTokenizer:
    """A Hugging Face tokenizer.json, with the four members of tiktoken.Encoding that we use."""

    def __init__(self, path):
        import tokenizers                                               # the package, and not this file
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:                                          # it raises bare Exceptions
            raise UserError(f"{path}: not a tokenizer.json: {e}") from None
        self.inner.no_truncation()                                      # settings of training, not of the text
        self.inner.no_padding()
        self.n_vocab = 1 + max(self.inner.get_vocab().values(), default=-1)                 # ids may have gaps
        ids = map(self.inner.token_to_id, (EOT, "<|end_of_text|>", "</s>"))
        self.eot_token = next((i for i in ids if i is not None), None)
        if self.eot_token is None:
            raise UserError(f"{path}: no end-of-text token ({EOT}, <|end_of_text|> or </s>)")

    def encode_ordinary(self, text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")    # as tiktoken: no half pairs
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

    Needs the package rustbpe. UserError for n_vocab outside 257 ... 65,536, and for too little text.
    """
    if not 257 <= n_vocab <= MAX_VOCAB:
        raise UserError(f"a vocabulary of {n_vocab} is not possible: at least 257 (256 bytes and end-of-text), at most "
                        f"{MAX_VOCAB} (uint16)")
    import rustbpe
    learner = rustbpe.Tokenizer()
    learner.train_from_iterator(texts, n_vocab - 1, pattern=SPLIT_PATTERN)
    ranks = sorted(learner.get_mergeable_ranks(), key=lambda pair: pair[1])
    if len(ranks) < n_vocab - 1:
        raise UserError(f"a vocabulary of {n_vocab:,} cannot be learnt from so little text: at most {len(ranks) + 1:,}")
    Path(path).write_bytes(b"".join(base64.b64encode(bytes(token)) + b" %d\n" % rank for token, rank in ranks))
