"""Text files, read document by document."""
import gzip
import json
import lzma
import os
import zlib
from pathlib import Path

from tqdm import tqdm

from nanodepth.options import UserError
from nanodepth.tokenizers import EOT

BOM = b"\xef\xbb\xbf"                   # some editors begin a file with it; it is no text


def documents(files, field="text", label="reading"):
    """Yields the text of each document of .txt and .jsonl files, either one plain, .gz or .xz, in order.

    Empty documents are left out. UserError naming file and line for what cannot be read.
    """
    total = sum(os.path.getsize(file) for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc=label, disable=None, leave=False) as bar:
        for file in files:
            lines = read_lines(file, bar)
            if ".jsonl" in Path(file).suffixes:
                yield from jsonl_documents(lines, file, field)
            else:
                yield from text_documents(lines, file)


def read_lines(file, bar):
    """Yields (number from 1, bytes) of a file's lines, unpacked, without a byte order mark; moves the progress bar."""
    with open(file, "rb") as disk:
        unpacked = {".gz": gzip.open, ".xz": lzma.open}.get(Path(file).suffix, lambda f: f)(disk)
        before = bar.n
        try:
            for i, line in enumerate(unpacked, 1):
                if i % 64 == 0:
                    bar.update(disk.tell() - bar.n + before)
                yield i, line.removeprefix(BOM) if i == 1 else line
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as e:
            raise UserError(f"{file}: broken or truncated archive ({e})") from None
        bar.update(disk.tell() - bar.n + before)


def decode(raw, file, line):
    """The text of some bytes that begin in this line of a file. UserError naming the line if they are not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        line += raw[:e.start].count(b"\n")
        raise UserError(f"{file}:{line}: not UTF-8 text (byte 0x{raw[e.start]:02x}): convert it") from None


def text_documents(lines, file):
    """Documents of a .txt file. Lines of only <|endoftext|> separate them; the line break before one belongs to it."""
    begin, document = 1, []
    for i, line in lines:
        if line.rstrip(b"\r\n") != EOT.encode():
            document.append(line)
            continue
        raw = b"".join(document).removesuffix(b"\n").removesuffix(b"\r")
        if raw:
            yield decode(raw, file, begin)
        begin, document = i + 1, []
    if document:
        yield decode(b"".join(document), file, begin)


def jsonl_documents(lines, file, field):
    """Documents of a .jsonl file: an object a line, its text in `field`; blank lines do not count."""
    for i, line in lines:
        if not line.strip():
            continue
        line = decode(line.removeprefix(BOM), file, i)                   # of files put one behind the other
        try:
            text = json.loads(line)[field].encode("utf-8", "replace").decode()      # half a surrogate pair is no text
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{file}:{i}: not a JSON object with text in the field {field!r} "
                            f"({type(e).__name__}): correct the line or name the --field") from None
        if text:
            yield text
