"""Reads text files document by document."""
import glob
import gzip
import json
import lzma
import os
from pathlib import Path

from nanodepth.cli import UserError, one_line, progress
from nanodepth.tokenizers import EOT


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
    """The files of KINDS in a folder and below it, without hidden ones. UserError if there are none."""
    paths, errors = [], []
    for place, below, names in os.walk(folder, onerror=errors.append):
        below[:] = [name for name in below if name[0] != "."]
        paths += [os.path.join(place, name) for name in below + names if name[0] != "."]
    if errors:
        raise errors[0]
    found = [path for path in paths if kind_of(path) and os.path.isfile(path)]
    if not found:
        raise UserError(f"{folder}: no text in this folder: {KNOWN} are read")
    if others := sum(os.path.isfile(path) or os.path.islink(path) for path in paths) - len(found):
        print(f"{folder}: other kinds of files, left out: {others:,} ({KNOWN} are read, links to folders are not)")
    return found


def kind_of(file):
    """The key of KINDS with which a file's name ends, or None."""
    return next((kind for kind in KINDS if file.lower().endswith(kind)), None)


def documents(files, field="text", label="reading"):
    """Yields the text of each document in files of KINDS, in order.

    field: which field of .jsonl and .parquet has the text. Skips rows whose text is empty or null, and prints how many.
    UserError with file and line if something cannot be read.
    """
    n_empty, files = 0, [str(file) for file in files]
    total = sum(map(os.path.getsize, files))
    with progress(total=total, unit="B", unit_scale=True, desc=label) as bar:
        for file in files:
            begin = bar.n
            with open(file, "rb") as disk:
                for text in KINDS[kind_of(file)](disk, field):
                    bar.update(begin + disk.tell() - bar.n)
                    if text:
                        yield text
                    else:
                        n_empty += 1
    if n_empty:
        print(f"{label}: skipped {n_empty:,} rows without text")


def lines_of(disk):
    """Yields (number from 1, text) of a file's lines, decompressed, without the byte order mark of some editors."""
    unpack, i = PACKINGS.get(Path(disk.name).suffix.lower()), 0
    try:
        for i, line in enumerate(unpack(disk) if unpack else disk, 1):
            yield i, line.decode("utf-8-sig" if i == 1 else "utf-8")
        if unpack and not disk.tell():
            raise EOFError("it is empty")                                   # gzip takes it for an empty text
    except UnicodeDecodeError as e:
        raise UserError(f"{disk.name}:{i}: not UTF-8 text (byte 0x{e.object[e.start]:02x}): convert it") from None
    except (UserError, MemoryError):
        raise
    except Exception as e:                                              # each kind of archive has its own errors
        what = "broken or truncated archive" if unpack else "cannot be read"
        raise UserError(f"{disk.name}: {what} ({one_line(e)})") from None


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
            text = (json.loads(line.removeprefix("\ufeff"))[field] or "").encode("utf-8", "replace")    # half a pair: ?
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
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


def unxz(disk):
    file = lzma.open(disk)
    file._buffer.raw._trailing_error = ()                   # else it drops what follows the first stream and is broken
    return file


def unzst(disk):
    try:
        from compression import zstd                                        # since Python 3.14
    except ImportError:
        try:
            import backports.zstd as zstd
        except ImportError:
            raise UserError(f"{disk.name}: .zst needs a package that is missing: pip install backports.zstd") from None
    return zstd.open(disk, options={zstd.DecompressionParameter.window_log_max: 31})


PACKINGS = {".gz": gzip.open, ".xz": unxz, ".zst": unzst}
KINDS = {kind + packing: read for packing in ("", *PACKINGS)
         for kind, read in ((".txt", text_documents), (".md", text_documents), (".jsonl", jsonl_documents))}
KINDS[".parquet"] = parquet_documents
KNOWN = ".txt, .md, .jsonl (plain, .gz, .xz or .zst) and .parquet"
