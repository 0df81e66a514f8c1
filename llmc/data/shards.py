"""Token shards: the file format, and the loader that serves training batches from a list of them.

A shard is 256 little-endian int32 (20240520, 1, number of tokens, zeros) and then that many uint16 tokens. The loader keeps
llm.c's data order exactly, for any number of processes, and its place in it can be saved and restored.
"""

import glob
import mmap
import os
import zlib
from dataclasses import dataclass

import numpy as np

from llmc.data.order import TokenOrder, token_order
from llmc.data.remainder import Geometry, Remainder, pack
from llmc.errors import UserError
from llmc.files import HEADER_BYTES, check_size, new_header, read_header, write_atomically
from llmc.rand import MersenneTwister

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
    """The most tokens in a row that every shard has, each with a target: of the smallest. Raises UserError as TokenLoader does."""
    return min(len(open_shard(path)) for path in find_shards(pattern, flag)) - 1


@dataclass(frozen=True, slots=True, eq=False)
class LoaderState:
    """A TokenLoader's place in the data, as llm.c's state file keeps it. Arrays are int32; without shuffling they are empty."""

    should_shuffle: bool
    current_shard_idx: int  # place in shard_indices
    current_sample_idx: int  # place in intra_shard_indices: samples of this shard already served
    shard_indices: np.ndarray
    shard_num_samples: int
    intra_shard_indices: np.ndarray
    shuffle_rng: bytes


def check_permutations(state: LoaderState) -> None:
    """A damaged state must not become an index into the wrong sample, or a crash an epoch later."""
    orders = (state.shard_indices, state.current_shard_idx + 1), (state.intra_shard_indices, state.current_sample_idx)
    if any(place > len(order) or not np.array_equal(np.sort(order), np.arange(len(order))) for order, place in orders):
        raise UserError(
            "the checkpoint's data order is not a permutation of its shards and samples; its state file is damaged, resume from another"
        )


class TokenLoader:
    """Batches of (inputs, targets) from the shards that `pattern` names, in llm.c's order.

    A sample is B*T*num_processes consecutive tokens; this rank takes its own B*T of them and one more, the last target. Shards
    and, in each shard entered, samples are shuffled when `shuffle`, or else served in order, for ever. All shards are
    checked at the start, so a run does not stop in the night. A run that goes on with other batches, processes or shards is first
    served what is left of its epoch (`go_on`).
    Raises UserError for files that are missing, damaged or smaller than one batch.
    """

    def __init__(self, pattern, B, T, *, rank=0, num_processes=1, shuffle=False, vocab_size=65536, flag="-i"):
        self.geometry, self.rank = Geometry(B, T, num_processes), rank
        self.vocab_size, self.flag, self.pattern = vocab_size, flag, pattern
        self.paths = find_shards(pattern, flag)
        self.shards = [(os.path.basename(path), self._checked_size(path)) for path in self.paths]
        self.num_tokens = sum(num_tokens for _, num_tokens in self.shards)
        self.num_batches = sum(self._samples_in(num_tokens) for _, num_tokens in self.shards)  # of an epoch
        # llm.c seeds by rank, so each rank walks the shards in an order of its own
        self._rng = MersenneTwister(42 + rank) if shuffle else None
        self._shard_indices = np.arange(len(self.paths), dtype=np.int32)
        # inputs and targets are one buffer seen one token apart: one conversion from uint16 serves both
        self._buffer = np.empty(B * T + 1, dtype=np.int64)
        self._inputs, self._targets = self._buffer[:-1].reshape(B, T), self._buffer[1:].reshape(B, T)
        self._last_inputs = self._inputs
        self._remainder = None
        self.reset()

    def summary(self) -> str:
        """What is read, in a few words that differ where the shards do."""
        names = zlib.crc32(repr(self.shards).encode())
        return f"{len(self.shards)} shards of {self.num_tokens} tokens ({names:08x})"

    def reset(self) -> None:
        """Begin an epoch. The generator goes on from where it is, so every epoch has another order."""
        self._remainder = None
        if self._rng:
            self._rng.permute(self._shard_indices)
        self._enter_shard(0)

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """The next inputs and targets, int64 (B, T) each.

        Both are views of one buffer that the next call overwrites. Raises UserError for a token outside the vocabulary.
        """
        if self._remainder and self._remainder.has_more:
            self._last_inputs, targets = self._remainder.next_batch()
            return self._last_inputs, targets
        self._remainder, self._last_inputs = None, self._inputs
        if self._sample_idx == self._num_samples:
            self._enter_next_shard()
        start = self._start_of(self._sample_idx)
        self._buffer[:] = self._checked_tokens(self._shard_indices[self._shard_idx], self._tokens, start, start + len(self._buffer))
        self._sample_idx += 1
        self._read_ahead()
        return self._inputs, self._targets

    def token_order(self) -> TokenOrder:
        """Which positions of the inputs just served hold the same token: to be asked for while a device is busy with them."""
        return token_order(self._last_inputs)

    def state(self) -> LoaderState:
        """Where the loader is: after `restore` of it, next_batch returns what it would return now.

        While a remainder is served, the start of the epoch that follows: a reader that knows of no remainder begins there.
        """
        return LoaderState(
            should_shuffle=self._rng is not None,
            current_shard_idx=self._shard_idx,
            current_sample_idx=self._sample_idx,
            shard_indices=self._shard_indices.copy() if self._rng else np.empty(0, np.int32),
            shard_num_samples=self._num_samples,
            intra_shard_indices=self._sample_indices.copy() if self._rng else np.empty(0, np.int32),
            shuffle_rng=self._rng.to_bytes() if self._rng else b"",
        )

    def data_state(self) -> dict:
        """What `state` has no room for, in plain values for the extra file: the names and lengths of the shards, and a remainder."""
        data = {"shards": [list(shard) for shard in self.shards]}
        if self._remainder:
            data["remainder"] = {"intervals": pack(self._remainder.remainder.intervals), "served": self._remainder.served}
        return data

    def go_on(self, continued) -> None:
        """Go on as llmc.data.resume.plan_resume says: at a saved place, or at the start of an epoch, after a remainder if there is one.

        Raises UserError, and stays where it was, as `restore` does.
        """
        if continued.state:
            self.restore(continued.state)
        else:
            self.check_shuffle(continued.should_shuffle)
            if self._rng:
                self._rng, self._shard_indices = MersenneTwister(continued.seed), np.arange(len(self.paths), dtype=np.int32)
            self.reset()
        if continued.remainder:
            assert continued.remainder.geometry == self.geometry
            self._remainder = RemainderReader(continued.remainder, continued.served, self)

    def restore(self, state: LoaderState) -> None:
        """Go to a saved place. Raises UserError, and stays where it was, if these shards or this batch do not have it."""
        shuffle = self._rng is not None
        self.check_shuffle(state.should_shuffle)
        if shuffle:
            self._match("shards", len(state.shard_indices), len(self.paths))
            check_permutations(state)
        elif state.current_shard_idx >= len(self.paths):
            self._match("shards", f"at least {state.current_shard_idx + 1}", len(self.paths))
        shard_indices = state.shard_indices if shuffle else self._shard_indices
        tokens = open_shard(self.paths[shard_indices[state.current_shard_idx]])
        num_samples = self._samples_in(len(tokens))
        if shuffle:
            self._match("samples in the current shard", state.shard_num_samples, num_samples)
        elif state.current_sample_idx > num_samples:
            self._match("samples in the current shard", f"at least {state.current_sample_idx}", num_samples)
        if shuffle:
            self._rng = MersenneTwister.from_bytes(state.shuffle_rng)
            self._sample_indices = np.array(state.intra_shard_indices, dtype=np.int32)
        self._shard_indices = np.array(shard_indices, dtype=np.int32)
        self._tokens, self._num_samples = tokens, num_samples
        self._shard_idx, self._sample_idx = state.current_shard_idx, state.current_sample_idx
        self._remainder = None
        self._read_ahead()

    def check_shuffle(self, saved: bool) -> None:
        """Raise UserError unless a checkpoint that read its data shuffled, or not, can be resumed here."""
        if saved != (self._rng is not None):
            was, now = ("shuffled", "in order") if saved else ("in order", "shuffled")
            raise UserError(
                f"the checkpoint was reading its training data {was} and this run reads it {now}; "
                "resume with the -a of the run it comes from"
            )

    def _match(self, what: str, saved, found) -> None:
        if saved != found:
            raise UserError(
                f"the checkpoint's training data has {saved} {what} and {self.flag} {self.pattern} has {found}: the files, -b, -t or "
                f"the number of processes changed since; resume with the same ones"
            )

    def _samples_in(self, num_tokens: int) -> int:
        """Samples of a shard; one token less, for the last target. The rest of a shard is dropped."""
        return (num_tokens - 1) // self.geometry.sample_tokens

    def _start_of(self, sample_idx: int) -> int:
        """The first token, in the shard, that this rank reads for the sample_idx-th sample to be served."""
        sample = sample_idx if self._rng is None else int(self._sample_indices[sample_idx])
        return (sample * self.geometry.num_processes + self.rank) * self.geometry.batch_tokens

    def _checked_size(self, path: str) -> int:
        num_tokens = len(open_shard(path))
        if not self._samples_in(num_tokens):
            g = self.geometry
            raise UserError(
                f"{self.flag} {path} holds {num_tokens} tokens, and one batch takes {g.sample_tokens + 1} (-b {g.B} times -t {g.T} times "
                f"{g.num_processes} processes, plus 1); choose a smaller -b or -t, or leave this shard out"
            )
        return num_tokens

    def _enter_shard(self, shard_idx: int) -> None:
        """Go to the start of the shard at place shard_idx of the order."""
        self._shard_idx, self._sample_idx = shard_idx, 0
        self._tokens = open_shard(self.paths[self._shard_indices[shard_idx]])
        self._num_samples = self._samples_in(len(self._tokens))
        self._sample_indices = None
        if self._rng:
            self._sample_indices = np.arange(self._num_samples, dtype=np.int32)
            self._rng.permute(self._sample_indices)
        self._read_ahead()

    def _enter_next_shard(self) -> None:
        if self._shard_idx + 1 == len(self.paths):
            self.reset()
        else:
            self._enter_shard(self._shard_idx + 1)

    def _read_ahead(self) -> None:
        """Ask the system to read the next sample's pages while the step that was just fed is computed."""
        if self._sample_idx < self._num_samples:
            start = self._start_of(self._sample_idx)
            will_need(self._tokens, start, start + len(self._buffer))

    def _checked_tokens(self, shard: int, tokens: np.memmap, start: int, end: int) -> np.ndarray:
        """tokens[start:end] of a shard, if the model knows them all."""
        part = tokens[start:end]
        if part.max() >= self.vocab_size:
            position = start + int(np.argmax(part >= self.vocab_size))
            raise UserError(
                f"{self.flag} {self.paths[shard]}: token {tokens[position]} at position {position} is outside the model's vocabulary of "
                f"{self.vocab_size}; prepare the data with this model's tokenizer, or choose another model"
            )
        return part


class RemainderReader:
    """Batches from what is left of an epoch, of which `served` are done: a TokenLoader's source until there are no more."""

    def __init__(self, remainder: Remainder, served: int, loader: TokenLoader):
        self.remainder, self.served, self._loader = remainder, served, loader
        self._starts = np.cumsum([0] + [num_tokens for _, num_tokens in loader.shards])
        self._order = remainder.order(loader.rank)
        self._buffer = np.empty((2, loader.geometry.batch_tokens), np.int64)
        self._batch = self._buffer.reshape(2, loader.geometry.B, loader.geometry.T)
        self._read_ahead()

    @property
    def has_more(self) -> bool:
        return self.served < len(self._order)

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """As TokenLoader's; a target is the token after its input in the shard, also where a fragment ends."""
        filled = 0
        for shard, tokens, start, end in self._ahead:
            part = self._loader._checked_tokens(shard, tokens, start, end + 1)
            self._buffer[0, filled : filled + end - start], self._buffer[1, filled : filled + end - start] = part[:-1], part[1:]
            filled += end - start
        self.served += 1
        self._read_ahead()
        return self._batch[0], self._batch[1]

    def _read_ahead(self) -> None:
        """Open the next batch's shards, mostly one, and ask the system to read its pages."""
        self._ahead, opened = [], {}
        if not self.has_more:
            return
        for start, end in self.remainder.batch(self._loader.rank, int(self._order[self.served])).tolist():
            shard = int(np.searchsorted(self._starts, start, side="right")) - 1
            tokens = opened.get(shard)
            if tokens is None:
                tokens = opened[shard] = open_shard(self._loader.paths[shard])
            start, end = (int(place - self._starts[shard]) for place in (start, end))
            will_need(tokens, start, end + 1)
            self._ahead.append((shard, tokens, start, end))


def will_need(tokens: np.memmap, start: int, end: int) -> None:
    """Ask the system to read these tokens' pages soon. Never waits."""
    if not hasattr(mmap, "MADV_WILLNEED"):
        return
    start, end = HEADER_BYTES + 2 * start, HEADER_BYTES + 2 * end
    page_start = start - start % mmap.PAGESIZE
    tokens.base.madvise(mmap.MADV_WILLNEED, page_start, end - page_start)
