"""Token shards, the files of training data: 256 little-endian int32 (20240520, 1, number of tokens, zeros) and then that many uint16
tokens."""

import glob
import mmap
import os

import numpy as np

from llmc.errors import UserError
from llmc.files import HEADER_BYTES, check_size, new_header, read_header, write_atomically

SHARD_MAGIC, SHARD_VERSION = 20240520, 1
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32


def write_shard(path, tokens) -> None:
    """Write `tokens`, a 1-d sequence of ids in [0, 65536), as a shard; whole or not at all. Raises UserError if it cannot."""
    tokens = np.asarray(tokens)
    assert tokens.ndim == 1 and 0 < len(tokens) <= MAX_SHARD_TOKENS, "a shard holds 1 to 2**31-1 tokens"
    assert tokens.dtype == np.uint16 or (tokens.min() >= 0 and tokens.max() < 2**16), "token ids are 16 bits wide"
    header = new_header(SHARD_MAGIC, SHARD_VERSION, len(tokens))
    write_atomically(path, (header, np.ascontiguousarray(tokens, dtype="<u2")), doing="writing the tokens")


def open_shard(path) -> np.memmap:
    """The tokens of a shard, uint16 (num_tokens,), mapped read-only. Raises UserError unless the file is whole and a shard."""
    _, version, num_tokens, *_ = read_header(path, SHARD_MAGIC).tolist()
    if version != SHARD_VERSION:
        raise UserError(f"{path} is a token shard of version {version}, expected {SHARD_VERSION}; make it again with scripts/prepare_*.py")
    if num_tokens <= 0:
        raise UserError(f"{path} says it holds {num_tokens} tokens, expected at least one; make it again with scripts/prepare_*.py")
    check_size(path, HEADER_BYTES + 2 * num_tokens, f"a shard of {num_tokens} tokens")
    # a mapping, not seek and read: offsets are 64 bits wide, where llm.c's int ends at 2 GiB
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(num_tokens,))


def find_shards(pattern: str, flag: str) -> list[str]:
    """The files `pattern` (a path or a glob) names, sorted, as the data order wants. Raises UserError if there are none."""
    paths = sorted(path for path in glob.glob(pattern) if not os.path.isdir(path))
    if not paths and os.path.isfile(pattern):  # a name with a [ in it
        paths = [pattern]
    if os.path.isdir(pattern):
        raise UserError(f"{flag} {pattern}: that is a folder; name the shards in it, as in '{os.path.join(pattern, '*.bin')}'")
    if not paths:
        raise UserError(
            f"{flag} {pattern}: no such file; check the path or pattern, "
            "or make the default data with: python scripts/prepare_tinyshakespeare.py"
        )
    return paths


def longest_row(pattern: str, flag: str) -> int:
    """The most tokens in a row that every shard has, each with a target. Raises UserError as find_shards and open_shard do."""
    return min(len(open_shard(path)) for path in find_shards(pattern, flag)) - 1


def will_need(tokens: np.memmap, start: int, end: int) -> None:
    """Ask the system to read these tokens' pages soon. Never waits."""
    if not hasattr(mmap, "MADV_WILLNEED"):
        return
    start, end = HEADER_BYTES + 2 * start, HEADER_BYTES + 2 * end
    page_start = start - start % mmap.PAGESIZE
    tokens.base.madvise(mmap.MADV_WILLNEED, page_start, end - page_start)
