"""Token shards, the files of training data: 256 little-endian int32 (20240520, 1, number of tokens, zeros) and then that many uint16
tokens."""

import glob
import os
import re

import numpy as np

from llmc.errors import UserError
from llmc.files import HEADER_BYTES, SHARD_MAGIC, Numbers, check_size, new_header, read_header, write_atomically

SHARD_VERSION = 1
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
TOKENS_TO_TELL = 4096  # whether all are single bytes


def write_shard(path, tokens) -> None:
    """Write `tokens`, a 1-d sequence of ids in [0, 65536), as a shard, whole or not at all. Raises UserError if it cannot."""
    tokens = np.asarray(tokens)
    assert tokens.ndim == 1 and 0 < len(tokens) <= MAX_SHARD_TOKENS, "a shard holds 1 to 2**31-1 tokens"
    assert tokens.dtype == np.uint16 or (tokens.min() >= 0 and tokens.max() < 2**16), "token ids are 16 bits wide"
    header = new_header(SHARD_MAGIC, SHARD_VERSION, len(tokens))
    write_atomically(path, (header, np.ascontiguousarray(tokens, dtype="<u2")), doing="writing the tokens")


SET = r"\[([!^]?)(\][^]/]*\]|[^]/]+\])"  # of a glob: what may negate it, and the rest, in which ] may stand only first


def count_tokens(path) -> int:
    """How many tokens a shard holds, by its header. Raises UserError unless the file is a shard, and whole."""
    _, version, num_tokens, *_ = read_header(path, SHARD_MAGIC).tolist()
    if version != SHARD_VERSION:
        raise UserError(f"{path} is a token shard of version {version}, expected {SHARD_VERSION}; make it again with scripts/prepare_*.py")
    if num_tokens <= 0:
        raise UserError(f"{path} says it holds {num_tokens} tokens, expected at least one; make it again with scripts/prepare_*.py")
    check_size(path, HEADER_BYTES + 2 * num_tokens, f"a shard of {num_tokens} tokens")
    return num_tokens


def open_shard(path) -> Numbers:
    """The tokens of a shard that count_tokens has looked at, uint16. Not memory-mapped: where a file is cut short or its disk fails,
    touching a map ends the process by a signal, without a message."""
    return Numbers(path, "<u2", HEADER_BYTES)


def first_tokens(path) -> list[int]:
    """So many tokens of a shard that they tell whether it is of single bytes alone. Raises UserError as count_tokens does."""
    num_tokens = min(TOKENS_TO_TELL, count_tokens(path))
    with open_shard(path) as shard:
        return shard.read(0, num_tokens).tolist()


def matches(pattern: str) -> list[str]:
    """What there is of that name. [^...] means all characters but these, as in llm.c and as [!...] does; Python's glob alone takes ^ for
    one more of them."""
    return glob.glob(re.sub(SET, lambda found: f"[!{found[2]}" if found[1] == "^" else found[0], pattern))


def find_shards(pattern: str, flag: str) -> list[str]:
    """The files that `pattern` (a path or a glob) names, sorted: the data order depends on it. Raises UserError if there are none."""
    paths = sorted(path for path in matches(pattern) if not os.path.isdir(path))
    if not paths and os.path.isfile(pattern):  # a name with a [ in it
        paths = [pattern]
    if os.path.isdir(pattern):
        raise UserError(f"{flag} {pattern}: that is a folder; name the shards in it, as in '{os.path.join(pattern, '*.bin')}'")
    if not paths:
        raise UserError(
            f"{flag} {pattern}: no such file; check the path or pattern, or make shards by one of scripts/prepare_*.py, "
            "those that are the default with: python scripts/prepare_tinyshakespeare.py"
        )
    return paths


def inputs_of_shortest(pattern: str, flag: str) -> int:
    """Number of inputs in the shortest shard: tokens that have a target. Raises UserError as find_shards and count_tokens do."""
    return min(count_tokens(path) for path in find_shards(pattern, flag)) - 1
