"""Where the documents of a corpus come from: downloads, folders, and files of text, JSON and tables. What cannot be read is a UserError."""

import codecs
import hashlib
import http.client
import json
import os
import urllib.request
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from llmc.errors import UserError
from llmc.files import make_folder

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
PIECE_CHARS = 1 << 14  # such a text is cut into documents of at most this: 4 sequences of 1024 tokens
SILENCE_S = 30.0  # how long a download may stand still
KINDS_TOLD = 8  # of what is left out, the most frequent
NAME_THE_FIELD = "name the one that holds the text with --jsonl-field"
MEND_THE_LINE = "mend or remove this line"
LEAVE_OUT_ROWS = "write the table again without such rows"
JSON_KINDS = {
    type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array", dict: "an object",
    bytes: "bytes",  # in .parquet alone
}  # fmt: skip


def download(url: str, path: Path) -> Path:
    """Fetch `url` to `path` unless it is there. Raises UserError saying what to fetch by hand."""
    if path.exists():
        print(f"found {path}, not downloading it again")
        return path
    make_folder(path.parent)
    part = path.with_name(path.name + ".part")
    try:
        with urllib.request.urlopen(url, timeout=SILENCE_S) as response, open(part, "wb") as file:
            size = int(response.headers.get("Content-Length") or 0)
            with tqdm(total=size or None, desc=path.name, unit="B", unit_scale=True, disable=None) as bar:
                while block := response.read(1 << 20):
                    file.write(block)
                    bar.update(len(block))
        if size and part.stat().st_size != size:
            raise OSError(f"the connection closed after {part.stat().st_size} of {size} bytes")
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        part.unlink(missing_ok=True)
        raise UserError(f"cannot download {url} ({error}); download it by hand and run again with --input and its path") from error
    return path


def input_files(given: Iterable[Path], suffixes: Iterable[str], tell: bool = False) -> list[Path]:
    """The files meant by paths of files and folders; a folder stands for all files below it with these suffixes, in any case, sorted. One
    that is there by several paths is taken once, by the first.

    tell   print how many others are in folders, and of which kinds
    """
    suffixes, files, others = tuple(suffixes), [], Counter()
    for path in given:
        if path.is_dir():
            below = files_below(path)
            found = [p for p in below if p.suffix.lower() in suffixes and is_file(p)]
            others.update(p.suffix.lower() for p in below if p.suffix.lower() not in suffixes)
            if not found:
                raise UserError(f"--input {path}: no {' or '.join(suffixes)} file in this folder; check the path")
            files += found
        elif not path.exists():
            raise UserError(f"--input {path}: no such file or folder; check the path")
        elif not path.is_file():
            raise UserError(f"--input {path}: a pipe or a device, which cannot be read twice; write it to a file, and give that")
        elif path.suffix.lower() not in suffixes:
            raise UserError(f"--input {path}: expected a {' or '.join(suffixes)} file; convert it, or give another")
        else:
            files.append(path)
    if tell and others:
        kinds = [ascii(kind)[1:-1] or "no suffix" for kind, _ in others.most_common(KINDS_TOLD)] + ["..."] * (len(others) > KINDS_TOLD)
        print(f"left out: {others.total()} file{'s' * (others.total() > 1)} of other kinds ({', '.join(kinds)})")
    once = {}
    for path in files:
        once.setdefault(_identity(path), path)
    return list(once.values())


def files_below(folder: Path) -> list[Path]:
    """All below a folder that is no folder itself, sorted, without what is_passed_over. Raises UserError where a folder cannot be read.

    Links to folders are followed, but to none that holds this folder, and no folder is entered twice: so links in a circle end. They come
    last, so what is there by its own path has that path.
    """
    files, entered, starts = [], set(map(_identity, folder.resolve().parents)), deque([folder])
    while starts:
        for place, folders, names in os.walk(starts.popleft(), onerror=_refuse_to_leave_out):
            if _identity(place) in entered:
                folders.clear()
                continue
            entered.add(_identity(place))
            folders[:] = sorted(name for name in folders if not is_passed_over(name))  # os.walk goes where these say, but into no link
            starts += (path for path in map(Path(place).joinpath, folders) if path.is_symlink())
            files += [Path(place, name) for name in names if not is_passed_over(name)]
    return sorted(files)


def _identity(path: Path | str) -> tuple[int, int]:
    """The same for two paths of one file or folder."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def is_file(path: Path) -> bool:
    """Whether what was found in a folder is a file, and no pipe or device. Raises UserError if it is a link to nothing."""
    with read_or_refused(path):
        if not path.is_file() and not path.exists():
            raise UserError(f"{path} is a link to {os.readlink(path)}, which leads to no file; mend or remove the link")
        return path.is_file()


def is_passed_over(name: str) -> bool:
    """Whether what is called this in a folder was hidden (.git, .venv) or made by Python; a path that is given by itself is taken."""
    return name.startswith(".") or name == "__pycache__"


def _refuse_to_leave_out(error: OSError):
    with read_or_refused(error.filename):
        raise error


def one_input(given: Path, name: str, *suffixes: str) -> Path:
    """The file meant by a path: of a folder the one of that name, or the only one with one of these suffixes."""
    files = input_files([given], suffixes)
    files = [path for path in files if path.name == name] or files
    if len(files) > 1:
        found = f"{len(files)} {' or '.join(suffixes)} files"
        raise UserError(f"--input {given}: {found}, expected one, or one named {name}; give the path of the one meant")
    return files[0]


def read_documents(files: Iterable[Path], field: str = "text") -> Iterator[str]:
    """The documents of text, .jsonl and .parquet files, one file after the other; `field` is where JSON or a table keeps the text."""
    readers = dict.fromkeys(TEXT_SUFFIXES, _txt_documents) | {".jsonl": _jsonl_documents, ".parquet": _parquet_documents}
    for path in files:
        with read_or_refused(path):
            yield from readers[path.suffix.lower()](path, field)


@contextmanager
def read_or_refused(path: Path | str):
    """Reading a file in here raises UserError where that cannot be done, or where it is no UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({_where_not_utf8(Path(path))}); convert it") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check the path and its permissions") from error


def _where_not_utf8(path: Path) -> str:
    """The first line of a file that is not UTF-8, or what the file is instead. Its error tells neither: it is of a part of the file."""
    decoder, number = codecs.getincrementaldecoder("utf-8")(), 1
    with open(path, "rb") as file:
        if file.read(4).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
            return "it begins as UTF-16 or UTF-32 does"
        file.seek(0)
        for block in chain(iter(partial(file.read, PIECE_CHARS), b""), [b""]):
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return f"line {number + error.object.count(10, 0, error.start)}: {error.reason}"
            number += block.count(b"\n")
    return "it has changed meanwhile"


def read_text(path: Path) -> str:
    """All of a text file; bytes that are not UTF-8 become U+FFFD. Raises UserError if it cannot be read."""
    with read_or_refused(path):
        return path.read_text(encoding="utf-8", errors="replace")


def _txt_documents(path: Path, field: str) -> Iterator[str]:
    with open(path, encoding="utf-8-sig") as file:
        rest = ""
        while block := file.read(PIECE_CHARS):
            rest += block
            while len(rest) > PIECE_CHARS:
                cut = _cut_place(rest)
                yield rest[:cut]
                rest = rest[cut:]
        if rest:
            yield rest


def _cut_place(text: str) -> int:
    """Where to end a document within PIECE_CHARS: after a blank line if the second half has one, else a line, a word, or anywhere."""
    for mark in ("\n\n", "\n", " "):
        place = text.rfind(mark, PIECE_CHARS // 2, PIECE_CHARS)
        if place >= 0:
            return place + len(mark)
    return PIECE_CHARS


def _jsonl_documents(path: Path, field: str) -> Iterator[str]:
    absent = NAME_THE_FIELD
    for place, record in read_jsonl(path):
        yield text_field(record, field, place, MEND_THE_LINE, absent)
        absent = MEND_THE_LINE  # the name is right: a line before has it


def read_jsonl(path: Path) -> Iterator[tuple[str, object]]:
    """("file:line", value) of every line that is not blank. Raises UserError for one that is not JSON, or a file that cannot be read."""
    with read_or_refused(path), open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON, a number of thousands of digits, brackets in brackets in brackets
                reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                raise UserError(f"{path}:{number} is not JSON ({reason}); {MEND_THE_LINE}") from error


def text_field(record, field: str, place: str, remedy: str = "mend the file", absent: str | None = None) -> str:
    """record[field], a string. Raises UserError for anything else, with `place` and what to do: remedy, or `absent`, if that is given, for
    an object without the field, and which may help too where it holds no text."""
    if not isinstance(record, dict):
        raise UserError(f'{place} has no field "{field}" but is {json_kind(record)}; {remedy}')
    if field not in record:
        raise UserError(f'{place} has no field "{field}" but the fields {", ".join(record)}; {absent or remedy}')
    if not isinstance(record[field], str):
        otherwise = f", or {absent}" if absent else ""
        raise UserError(f'{place}: field "{field}" holds {json_kind(record[field])}, expected text; {remedy}{otherwise}')
    return record[field]


def json_kind(value) -> str:
    """What JSON calls a value: null, an array, ..."""
    return JSON_KINDS.get(type(value)) or f"a {type(value).__name__}"


def need_pyarrow():
    """The module pyarrow.parquet. Raises UserError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("reading .parquet files needs pyarrow; pip install pyarrow") from error
    return pyarrow.parquet


def _parquet_documents(path: Path, field: str) -> Iterator[str]:
    for place, record in read_parquet(path, [field], NAME_THE_FIELD):
        yield text_field(record, field, place, LEAVE_OUT_ROWS if record[field] is None else NAME_THE_FIELD)


def read_parquet(path: Path, columns: list[str], remedy: str) -> Iterator[tuple[str, dict]]:
    """("file, row N", value of each of these columns) of every row, N from 0. Raises UserError for a file that cannot be read and, with
    `remedy` as what to do, for one that lacks a column."""
    parquet = need_pyarrow()
    from pyarrow import ArrowException

    try:
        with parquet.ParquetFile(path) as table:
            names, row = table.schema_arrow.names, 0
            if missing := [column for column in columns if column not in names]:
                raise UserError(f'{path} has no column "{missing[0]}" but {", ".join(names)}; {remedy}')
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    yield f"{path}, row {row}", record
                    row += 1
    except UnicodeDecodeError as error:
        raise UserError(f"{path} has text that is not UTF-8, in row {row} or one after it ({error.reason}); convert it") from error
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # the system's, not pyarrow's own
            with read_or_refused(path):
                raise
        raise UserError(f"{path} is not a parquet file, or a damaged one; download or copy it again") from error


def fingerprint(facts: Iterable) -> str:
    """A short name for what a corpus is made from, so that another corpus is not mistaken for its continuation."""
    return hashlib.sha256(repr(list(facts)).encode()).hexdigest()[:16]


def file_facts(files: Iterable[Path]) -> list[tuple]:
    """(name, bytes, time of last change) of local files."""
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
