"""Reads text files document by document."""
import glob
import io
import json
import lzma
import os
import zlib
from pathlib import Path

from tqdm import tqdm

from nanodepth.cli import UserError, one_line
from nanodepth.tokenizers import EOT

POINTER = b"version https://git-lfs.github.com/spec/"                   # how a Git LFS pointer begins


def text_files(paths):
    """The files (str) of paths, which are files, folders, or patterns such as "*.txt" if no file has that name.

    A folder gives the files of KINDS in it and below it, without hidden ones. The paths stay in order; the files of
    each path are sorted. UserError for a path without files, a file of another kind, and a file that is given twice.
    """
    files, seen = [], set()
    for path in map(os.path.expanduser, paths):
        found = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)
        if not found:
            raise UserError(f"{path or repr(path)}: no such file or folder")
        files += sorted({file for one in found for file in (files_below(one) if os.path.isdir(one) else [one])})
    for file in files:
        if not (os.path.isfile(file) and kind_of(file)):
            raise UserError(f"{file}: not a text file: {KNOWN} are read")
        if os.path.realpath(file) in seen:
            raise UserError(f"{file}: given twice: name a file once, or its folder")
        seen.add(os.path.realpath(file))
    return files


def files_below(folder):
    """The files of KINDS in a folder and below it, without hidden ones. Links to folders are followed, once each.

    UserError if there are none, OSError if a folder cannot be read.
    """
    def stop(error):
        raise error

    found, others, seen = [], 0, set()
    for place, below, names in os.walk(folder, onerror=stop, followlinks=True):
        if os.path.realpath(place) in seen:
            below.clear()
            continue
        seen.add(os.path.realpath(place))
        below[:] = sorted(name for name in below if not name.startswith("."))
        paths = [os.path.join(place, name) for name in names if not name.startswith(".")]
        paths = [path for path in paths if os.path.isfile(path)]        # a dangling link is no file
        found += [path for path in paths if kind_of(path)]
        others += sum(not kind_of(path) for path in paths)
    if not found:
        raise UserError(f"{folder}: no text in this folder: {KNOWN} are read")
    if others:
        print(f"{folder}: other kinds of files, left out: {others:,} ({KNOWN} are read)")
    return found


def kind_of(file):
    """The key of KINDS with which a file's name ends, or None."""
    return next((kind for kind in KINDS if file.lower().endswith(kind)), None)


def documents(files, field="text", label="reading"):
    """Yields the text of each document in files of KINDS, in order.

    field: which field of .jsonl and .parquet has the text. Skips rows whose text is empty or null, and prints how many.
    Prints how many lines of a .txt or .md hold <|endoftext|> but separate nothing, because there is more on them.
    UserError with file and line if something cannot be read.
    """
    n_empty, n_kept, files = 0, 0, [str(file) for file in files]
    total = sum(map(os.path.getsize, files))
    with tqdm(total=total, unit="B", unit_scale=True, desc=label, disable=None, leave=False) as bar:
        for file in files:
            begin = bar.n
            with open(file, "rb") as disk:
                if disk.read(len(POINTER)) == POINTER:
                    raise UserError(f"{file}: a Git LFS pointer and not the file itself: run git lfs pull")
                disk.seek(0)
                read = KINDS[kind_of(file)]
                for text in read(disk, field):
                    if read is text_documents and EOT in text:
                        n_kept += sum(EOT in line for line in text.split("\n"))
                    bar.update(begin + disk.tell() - bar.n)
                    if text:
                        yield text
                    else:
                        n_empty += 1
    if n_empty:
        print(f"{label}: skipped {n_empty:,} rows without text")
    if n_kept:
        print(f"{label}: kept {n_kept:,} lines with {EOT} and more as text; alone on its line, it separates documents")


def unpacked(disk, new_frame):
    """Yields the lines of a compressed file as bytes. Its frames may have zero bytes between them as padding."""
    frame, line = None, []                                              # line: pieces of the current line
    while packed := disk.read(2**14):
        while packed := packed if frame else packed.lstrip(b"\0"):
            frame = frame or new_frame()
            try:
                text = frame.decompress(packed)
            except Exception as e:                                      # each kind of archive has its own errors
                raise UserError(f"{disk.name}: broken or truncated archive ({one_line(e)})") from None
            for piece in io.BytesIO(text):
                line.append(piece)
                if piece.endswith(b"\n"):
                    yield b"".join(line)
                    line = []
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise UserError(f"{disk.name}: broken or truncated archive (the last frame has no end)")
    if line:
        yield b"".join(line)


def lines_of(disk):
    """Yields (number from 1, text) of a file's lines, decompressed, without the byte order mark of some editors."""
    new_frame = PACKINGS.get(Path(disk.name).suffix.lower())
    for i, line in enumerate(unpacked(disk, new_frame) if new_frame else disk, 1):
        try:
            yield i, line.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as e:
            raise UserError(f"{disk.name}:{i}: not UTF-8 text (byte 0x{line[e.start]:02x}): convert it") from None


def text_documents(disk, field):
    """Documents of a .txt or .md. Lines with only <|endoftext|>, and the line break before each, separate them."""
    lines = []
    for _, line in lines_of(disk):
        if line.rstrip("\r\n") != EOT:
            lines.append(line)
            continue
        if text := "".join(lines).removesuffix("\n").removesuffix("\r"):
            yield text
        lines = []
    if lines:
        yield "".join(lines)


def jsonl_documents(disk, field):
    """Documents of a .jsonl file, one object per line; blank lines do not count."""
    for i, line in lines_of(disk):
        if not line.strip():
            continue
        try:
            text = (json.loads(line)[field] or "").encode("utf-8", "replace")       # half a surrogate pair becomes ?
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{disk.name}:{i}: not a JSON object with text in the field {field!r} "
                            f"({type(e).__name__}): correct the line or name the --field") from None
        yield text.decode()


def parquet_documents(disk, field):
    """Documents of a .parquet file, one per row."""
    import pyarrow.parquet
    try:
        table = pyarrow.parquet.ParquetFile(disk, pre_buffer=False, buffer_size=2**20)      # not by whole row groups
        for rows in table.iter_batches(256, columns=[field]):
            texts = [text for column in rows.columns for text in column.to_pylist()]
            if not (rows.columns and all(isinstance(text, str | None) for text in texts)):
                there = ", ".join(f"{column.name!r} ({column.type})" for column in table.schema_arrow)
                raise UserError(f"{disk.name}: no column {field!r} with text: name one with --field: {there}")
            yield from texts
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise UserError(f"{disk.name}: broken or truncated ({one_line(e)})") from None


def zst_frame():
    import zstandard
    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()


PACKINGS = {".gz": lambda: zlib.decompressobj(31), ".xz": lzma.LZMADecompressor, ".zst": zst_frame}     # of one frame
KINDS = {kind + packing: read for packing in ("", *PACKINGS)
         for kind, read in ((".txt", text_documents), (".md", text_documents), (".jsonl", jsonl_documents))}
KINDS[".parquet"] = parquet_documents
KNOWN = ".txt, .md, .jsonl (plain, .gz, .xz or .zst) and .parquet"
