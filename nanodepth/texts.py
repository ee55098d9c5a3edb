"""Text files, read document by document."""
import glob
import gzip
import importlib
import json
import lzma
import os
import zlib
from functools import partial
from pathlib import Path

from tqdm import tqdm

from nanodepth.cli import UserError, one_line
from nanodepth.tokenizers import EOT

BOM = b"\xef\xbb\xbf"                   # some editors begin a file with it; it is no text
ROWS = 256                              # of a .parquet that are read in one go


def text_files(paths):
    """The files (str) that the paths mean: files, folders, or patterns such as "*.txt" where there is no such file.

    A folder means the files of KINDS in it and below it, without hidden ones. The files of one path are sorted, the
    paths stay in order. UserError for a path that means no file, a file of another kind, and one that is meant twice.
    """
    files = []
    for path in map(str, paths):
        found = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)
        if not found:
            raise UserError(f"{path or repr(path)}: no such file or folder")
        files += sorted({file for one in found for file in (files_below(one) if os.path.isdir(one) else [one])})
    seen = set()
    for file in files:
        if not os.path.isfile(file):
            raise UserError(f"{file}: {'not a file' if os.path.exists(file) else 'no such file'}")
        if not kind_of(file):
            raise UserError(f"{file}: unknown kind of file: {KNOWN} are read")
        if os.path.realpath(file) in seen:
            raise UserError(f"{file}: given twice: name a file once, or its folder")
        seen.add(os.path.realpath(file))
    return files


def files_below(folder):
    """The files of KINDS in a folder and below it, without hidden ones. UserError if there are none."""
    def stop(error):
        raise UserError(f"{error.filename}: {error.strerror}")

    found = []
    for place, below, names in os.walk(folder, onerror=stop):
        below[:] = [name for name in below if not name.startswith(".")]
        paths = [os.path.join(place, name) for name in names if not name.startswith(".") and kind_of(name)]
        found += [path for path in paths if os.path.isfile(path)]       # a dangling link is no file
    if not found:
        raise UserError(f"{folder}: no text in this folder: {KNOWN} are read")
    return found


def kind_of(file):
    """The key of KINDS that a file's name ends in, or None."""
    return next((kind for kind in KINDS if file.lower().endswith(kind)), None)


def documents(files, field="text", label="reading"):
    """Yields the text of each document of some files of KINDS, in order; `field`: the text's in .jsonl and .parquet.

    Empty documents are left out. UserError naming file and line for what cannot be read.
    """
    total = sum(os.path.getsize(file) for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc=label, disable=None, leave=False) as bar:
        for file in map(str, files):
            yield from KINDS[kind_of(file)](file, field, bar)


def package(name, file):
    """An optional package's module. UserError naming the file that needs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        needed = name.split(".")[0]
        raise UserError(f"{file} needs the package {needed}: pip install {needed}") from None


def read_lines(file, bar):
    """Yields (number from 1, bytes) of a file's lines, unpacked, without a byte order mark; moves the progress bar."""
    try:
        with open(file, "rb") as disk:
            lines, before = PACKINGS.get(Path(file).suffix.lower(), iter)(disk), bar.n
            for i, line in enumerate(lines, 1):
                if i % 64 == 0:
                    bar.update(disk.tell() - bar.n + before)
                yield i, line.removeprefix(BOM) if i == 1 else line
            bar.update(disk.tell() - bar.n + before)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as e:
        raise UserError(f"{file}: broken or truncated archive ({e})") from None
    except OSError as e:
        raise UserError(f"{file}: {e.strerror or e}") from None


def zst_lines(disk):
    """Yields the lines of a .zst as bytes, frame by frame. EOFError if it is broken or truncated."""
    try:
        from compression import zstd                                    # Python 3.14 has it
        new_frame = partial(zstd.ZstdDecompressor, options={zstd.DecompressionParameter.window_log_max: 31})
    except ImportError:
        zstd = package("zstandard", disk.name)
        new_frame = zstd.ZstdDecompressor(max_window_size=2**31).decompressobj
    frame, begun = None, []                                             # begun: pieces of a line without its end
    while packed := disk.read(2**14):
        while packed:
            frame = frame or new_frame()
            try:
                *ends, rest = frame.decompress(packed).split(b"\n")
            except zstd.ZstdError as e:
                raise EOFError(one_line(e)) from None
            for end in ends:
                yield b"".join((*begun, end, b"\n"))
                begun = []
            begun.append(rest)
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("the last frame has no end")
    if last := b"".join(begun):
        yield last


def decode(raw, file, line):
    """The text of some bytes that begin in this line of a file. UserError naming the line if they are not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        line += raw[:e.start].count(b"\n")
        raise UserError(f"{file}:{line}: not UTF-8 text (byte 0x{raw[e.start]:02x}): convert it") from None


def text_documents(file, field, bar):
    """Documents of a .txt or .md. Lines of only <|endoftext|> separate them, with the line break before each."""
    begin, document = 1, []
    for i, line in read_lines(file, bar):
        if line.rstrip(b"\r\n") != EOT.encode():
            document.append(line)
            continue
        raw = b"".join(document).removesuffix(b"\n").removesuffix(b"\r")
        if raw:
            yield decode(raw, file, begin)
        begin, document = i + 1, []
    if document:
        yield decode(b"".join(document), file, begin)


def jsonl_documents(file, field, bar):
    """Documents of a .jsonl file: an object a line, its text in `field`; blank lines do not count."""
    for i, line in read_lines(file, bar):
        if not line.strip():
            continue
        line = decode(line.removeprefix(BOM), file, i)                   # of files put one behind the other
        try:
            text = json.loads(line)[field].encode("utf-8", "replace").decode()      # half a surrogate pair is no text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise UserError(f"{file}:{i}: not a JSON object with text in the field {field!r} "
                            f"({type(e).__name__}): correct the line or name the --field") from None
        if text:
            yield text


def parquet_documents(file, field, bar):
    """Documents of a .parquet file: a row each, its text in the column `field`; an empty cell is none."""
    pyarrow, parquet = package("pyarrow", file), package("pyarrow.parquet", file)
    try:
        with open(file, "rb") as disk:
            table = parquet.ParquetFile(disk, pre_buffer=False, buffer_size=2**20)      # no whole row groups in memory
            names = table.schema_arrow.names
            if field not in names:
                raise UserError(f"{file}: no column {field!r}, but {', '.join(map(repr, names))}: name the --field")
            size, n_rows = os.path.getsize(file), table.metadata.num_rows
            for rows in table.iter_batches(ROWS, columns=[field]):
                for text in rows.column(0).to_pylist():
                    if not isinstance(text, str | None):
                        raise UserError(f"{file}: the column {field!r} holds {rows.schema.types[0]} and no text: "
                                        "name the --field")
                    if text:
                        yield text
                bar.update(size * rows.num_rows / n_rows)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise UserError(f"{file}: broken or truncated ({one_line(e)})") from None


PACKINGS = {".gz": gzip.open, ".xz": lzma.open, ".zst": zst_lines}
KINDS = {kind + packing: read for packing in ("", *PACKINGS)
         for kind, read in ((".txt", text_documents), (".md", text_documents), (".jsonl", jsonl_documents))}
KINDS[".parquet"] = parquet_documents
KNOWN = ".txt, .md, .jsonl (plain, .gz, .xz or .zst) and .parquet"
