"""Files that are written whole or not at all, and the 1024-byte headers with which llm.c's binary files begin."""

import errno
import hashlib
import os
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from llmc.errors import WHAT_TO_DO, UserError, file_error

HEADER_INTS, HEADER_BYTES = 256, 1024
DIGEST_PIECE = 1 << 16  # bytes

MODEL_MAGIC, STATE_MAGIC, DEBUG_STATE_MAGIC = 20240326, 20240527, 20240327
TOKENIZER_MAGIC, SHARD_MAGIC, EVAL_MAGIC = 20240328, 20240520, 20240522

# what the first int32 says a file is, so that an error can name what is at a mixed-up path
KINDS = {
    MODEL_MAGIC: "a model file",
    STATE_MAGIC: "a training state file",
    DEBUG_STATE_MAGIC: "a debug state file (inputs, logits and gradients of one step)",
    TOKENIZER_MAGIC: "a tokenizer file",
    SHARD_MAGIC: "a token shard",
    EVAL_MAGIC: "an evaluation file",
    20240801: "a Llama-3 token shard (uint32 tokens of another vocabulary, which a GPT-2 has no rows for)",
    20240803: "a Llama-3 model (rotary positions, RMSNorm and SwiGLU, which a GPT-2 does not have)",
}


READ_BYTES = 1 << 20  # of a file at a time
SYNC_BYTES = 1 << 30  # written between syncs: the page cache would take more, and the last sync would do all of the waiting in one call


def write_atomically(path, pieces, *, doing: str = "writing") -> str:
    """Write `pieces` to `path` so that the file appears whole or not at all, as `replaced` does, and raises what that raises.

    pieces  iterable of C-contiguous buffers (bytes, numpy arrays), written back to back; may be a generator
    Returns the CRC-32 of what was written, 8 hex digits.
    """
    crc = 0
    with replaced(path, doing=doing) as temporary, open(temporary, "wb") as file:
        unsynced = 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
            unsynced += file.write(piece)
            if unsynced >= SYNC_BYTES:
                file.flush()
                os.fsync(file.fileno())
                unsynced = 0
    return f"{crc:08x}"


def crc_of(path, moved=lambda: None) -> str:
    """The CRC-32 of what is in a file, 8 hex digits. Raises UserError if it cannot be read.

    moved  called before each piece
    """
    crc = 0
    with readable(path), open(path, "rb", buffering=0) as file:
        while piece := file.read(READ_BYTES):
            moved()
            crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


@contextmanager
def replaced(path, *, doing: str):
    """Let what is inside write a file under the temporary name that this gives, path + ".tmp"; at the end it takes its place at `path`.

    doing   the verb of the error sentence, as in "writing the model"
    The data is flushed to the disk and only then renamed, so an earlier file under the final name survives any failure. Whatever is
    raised on the way, KeyboardInterrupt included, first removes the temporary file. Raises UserError for an OSError (full disk, denied,
    no such folder); everything else passes through.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise UserError(f"{doing} failed at {path}: the folder {path.parent} does not exist; create it first")
    temporary = Path(f"{path}.tmp")
    try:
        yield temporary
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())  # before the rename: a renamed file without its data is a half file
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise file_error(error, path, doing) from error
        raise


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it, unless it is there. Raises UserError where the disk denies it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_error(error, folder, "making the folder") from error


def sync_folder(folder) -> None:
    """Make renames and removals in `folder` survive a power cut. Raises OSError."""
    if os.name != "posix":
        return  # Windows cannot open folders
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems cannot sync a folder
            raise
    finally:
        os.close(handle)


def new_header(*entries: int) -> np.ndarray:
    """(256,) little-endian int32, `entries` first, zeros after."""
    header = np.zeros(HEADER_INTS, "<i4")
    header[: len(entries)] = entries
    return header


def put_uint64(header: np.ndarray, index: int, value: int) -> None:
    """Store `value` in the two entries from `index` on, low word first, as a C pointer cast does."""
    header[index : index + 2].view("<u8")[0] = value


def get_uint64(header: np.ndarray, index: int) -> int:
    """The value put_uint64 stored at `index`."""
    return int(header[index : index + 2].view("<u8")[0])


def read_header(path, magic: int) -> np.ndarray:
    """(256,) int32, read-only: the header of a file that should begin with `magic`.

    Raises UserError when the file is missing, unreadable, empty, shorter than a header, or of another kind.
    """
    expected = KINDS[magic].split(" (")[0]
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait
        raise UserError(f"{path} cannot be read (it is a directory, a pipe or a device); expected {expected}, so pass the path of a file")
    try:
        with open(path, "rb") as file:
            raw = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; expected {expected}, so check the path") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); expected {expected}, so check the path and its permissions") from None
    if len(raw) < HEADER_BYTES:
        found = "is empty" if not raw else f"has only {len(raw)} bytes"
        raise UserError(f"{path} {found}; {expected} begins with a header of {HEADER_BYTES} bytes, so download or write it again")
    header = np.frombuffer(raw, "<i4")
    found = int(header[0])
    if found in KINDS and found != magic:
        raise UserError(f"{path} is {KINDS[found]}; expected {expected}, so pass the path of one")
    if found != magic:
        hint = ", such as scripts/prepare_text.py makes of text (nanoGPT's have no header)" if magic == SHARD_MAGIC else ""
        raise UserError(f"{path} begins with the number {found}; expected {magic}, {expected}, so pass the path of one{hint}")
    return header


@contextmanager
def readable(path):
    """Turn an OSError inside, such as a network file system's or one for too many open files, into a UserError."""
    try:
        yield
    except OSError as error:
        what_to_do = WHAT_TO_DO.get(error.errno, "check that it is still there, its permissions and its disk")
        raise UserError(f"{path} cannot be read ({error.strerror or error}); {what_to_do}") from None


class Numbers:
    """The numbers of one type in a file, from byte `offset` on; each read copies those asked for into new memory.

    The file is not memory-mapped: the pages of a map count as the process's own memory once they are touched, so a resumed run would seem
    to hold its checkpoint twice. It stays open, as a rank's share of a model may be very many short runs. Raises UserError if it cannot
    be opened.
    """

    def __init__(self, path, dtype, offset: int):
        self.path, self._dtype, self._offset = path, np.dtype(dtype), offset
        with readable(path):
            self._file = open(path, "rb", buffering=0)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self) -> None:
        """Let go of the file, from which nothing more is read."""
        self._file.close()

    def read(self, at: int, n: int) -> np.ndarray:
        """Numbers at..at+n. Raises UserError if they cannot be read, although the file was whole when its size was checked."""
        with readable(self.path):
            self._file.seek(self._offset + at * self._dtype.itemsize)
            numbers = np.fromfile(self._file, self._dtype, n)
        if len(numbers) < n:
            end = self._offset + (at + len(numbers)) * self._dtype.itemsize
            raise UserError(f"{self.path} cannot be read beyond byte {end}: it was cut short, or its disk fails; put the whole file back")
        return numbers

    def digest(self) -> str:
        """digest_of the file."""
        with readable(self.path):
            return _digest(self._file)


def digest_of(path) -> str:
    """12 hex digits that stand for a file's contents: a hash of its size and of 64 pieces spread over it, which take no time to read."""
    with open(path, "rb") as file:
        return _digest(file)


def _digest(file) -> str:
    size, pieces = os.fstat(file.fileno()).st_size, 64
    digest = hashlib.sha256(str(size).encode())
    for piece in range(pieces):
        file.seek(max(0, size - DIGEST_PIECE) * piece // (pieces - 1))
        digest.update(file.read(DIGEST_PIECE))
    return digest.hexdigest()[:12]


def check_size(path, expected: int, reason: str, advice: str = "download or write it again") -> None:
    """Raise UserError unless the file has exactly `expected` bytes; `reason` says where that number comes from."""
    with readable(path):
        found = os.path.getsize(path)
    if found != expected:
        state = f"truncated by {expected - found}" if found < expected else f"oversized by {found - expected}"
        raise UserError(f"{path} has {found} bytes, {state}: {reason} needs exactly {expected}; {advice}")
