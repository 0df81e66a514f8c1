"""The walk of one rank through its shards, in exactly llm.c's order: sample by sample, shard by shard, epoch by epoch, without end.

A Cursor is immutable: each step makes a new one. So one can be saved, returned to, and looked ahead from while batches are served.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from llmc.data.remainder import Geometry, Remainder
from llmc.data.shards import count_tokens, open_shard
from llmc.errors import RESUME_FROM_ANOTHER, UserError
from llmc.files import Numbers
from llmc.rand import MersenneTwister


class Piece(NamedTuple):
    """Consecutive inputs in a shard, [start, end); the target of each is the token after it."""

    shard: Numbers
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """What is left of an epoch begun with another batch shape, number of data ranks or set of shards; `served` batches of it are done."""

    remainder: Remainder
    order: np.ndarray  # (num_samples,): its samples in the order in which this rank goes through them
    served: int

    @property
    def has_more(self) -> bool:
        return self.served < len(self.order)


@dataclass(frozen=True, slots=True, eq=False)
class Cursor:
    """Where a rank is between two batches.

    rng             draws the order of the next shard's samples and of the next epoch's shards; None where nothing is shuffled
    shard_indices   (shards,) int32: the order of the shards in this epoch
    shard_idx       index in shard_indices of the current shard
    shard           the tokens of the current shard
    num_samples     number of samples in it
    sample_indices  (num_samples,) int32: their order; None where nothing is shuffled
    sample_idx      index in sample_indices of the next sample: how many of this shard were served
    rest            served before all of the above; None once an ordinary batch was served
    batch           the pieces of the batch served last, end to end; () at a start
    """

    rng: MersenneTwister | None
    shard_indices: np.ndarray
    shard_idx: int
    shard: Numbers
    num_samples: int
    sample_indices: np.ndarray | None
    sample_idx: int
    rest: Rest | None = None
    batch: tuple[Piece, ...] = ()


class Walk:
    """Goes from cursor to cursor, for one rank of a geometry, and opens shards on the way (`keep_open`, `close`).

    A sample is B*T*data_ranks consecutive tokens; the rank takes its own B*T of them, and one more, the last target.
    Raises UserError if a shard cannot be opened, or no longer has the tokens it had.
    """

    def __init__(self, paths: list[str], sizes: list[int], geometry: Geometry, rank: int):
        self.paths, self.sizes, self.geometry, self.rank = paths, sizes, geometry, rank
        self._starts = np.cumsum([0, *sizes])  # of the shards on a remainder's axis
        self._open: set[Numbers] = set()

    def begin(self, rng: MersenneTwister | None, shard_indices: np.ndarray | None = None) -> Cursor:
        """The start of an epoch. rng shuffles shard_indices: the previous epoch's order of the shards, by default that of their names."""
        if shard_indices is None:
            shard_indices = np.arange(len(self.paths), dtype=np.int32)
        if rng:
            rng, shard_indices = permuted(rng, shard_indices)
        return self._enter(rng, shard_indices, 0)

    def after(self, cursor: Cursor) -> Cursor:
        """The cursor one batch later."""
        if cursor.rest and cursor.rest.has_more:
            rest = replace(cursor.rest, served=cursor.rest.served + 1)
            return replace(cursor, rest=rest, batch=self._batch_of_rest(cursor.rest))
        if cursor.sample_idx == cursor.num_samples:
            cursor = self._next_shard(cursor)
        return replace(cursor, sample_idx=cursor.sample_idx + 1, rest=None, batch=self._batch_of_shard(cursor))

    def open(self, number: int) -> Numbers:
        """Open the shard with this number among the paths."""
        path, size = self.paths[number], self.sizes[number]
        found = count_tokens(path)
        if found != size:
            raise UserError(f"{path} held {size} tokens when this run began and holds {found} now; put the old file back")
        shard = open_shard(path)
        self._open.add(shard)
        return shard

    def keep_open(self, *cursors: Cursor) -> None:
        """Close the shards that are not those of these cursors."""
        kept = {cursor.shard for cursor in cursors}
        for shard in self._open - kept:
            shard.close()
        self._open &= kept

    def close(self) -> None:
        """Let go of all shards, from which nothing more is read."""
        for shard in self._open:
            shard.close()

    def _next_shard(self, cursor: Cursor) -> Cursor:
        """The start of the next shard or, after the last one, of the next epoch."""
        if cursor.shard_idx + 1 == len(self.paths):
            return self.begin(cursor.rng, cursor.shard_indices)
        return self._enter(cursor.rng, cursor.shard_indices, cursor.shard_idx + 1)

    def _enter(self, rng, shard_indices: np.ndarray, shard_idx: int) -> Cursor:
        """The start of the shard at index shard_idx of the order."""
        number = shard_indices[shard_idx]
        shard, num_samples, sample_indices = self.open(number), self.geometry.samples_in(self.sizes[number]), None
        if rng:
            rng, sample_indices = permuted(rng, np.arange(num_samples, dtype=np.int32))
        return Cursor(rng, shard_indices, shard_idx, shard, num_samples, sample_indices, sample_idx=0)

    def _batch_of_shard(self, cursor: Cursor) -> tuple[Piece, ...]:
        """The rank's part of the sample after this place: one piece."""
        sample = cursor.sample_idx if cursor.sample_indices is None else int(cursor.sample_indices[cursor.sample_idx])
        start = self.geometry.start_of(sample, self.rank)
        return (Piece(cursor.shard, start, start + self.geometry.batch_tokens),)

    def _batch_of_rest(self, rest: Rest) -> tuple[Piece, ...]:
        """The rank's part of the next sample of the rest: its pieces are mostly of one shard."""
        batch, opened = [], {}
        for start, end in rest.remainder.batch(self.rank, int(rest.order[rest.served])).tolist():
            number = int(np.searchsorted(self._starts, start, side="right")) - 1
            if number not in opened:
                opened[number] = self.open(number)
            first = int(self._starts[number])
            batch.append(Piece(opened[number], start - first, end - first))
        return tuple(batch)


def permuted(rng: MersenneTwister, array: np.ndarray) -> tuple[MersenneTwister, np.ndarray]:
    """The generator after it has shuffled the array, and the shuffled array. Both are copies; the arguments stay as they are."""
    rng, array = deepcopy(rng), array.copy()
    rng.permute(array)
    return rng, array


# ----------------------------------------------------------------------------
# a cursor as a file stores it


@dataclass(frozen=True, slots=True, eq=False)
class LoaderState:
    """A place in the data as llm.c's state file stores it. Arrays are int32; without shuffling they are empty."""

    should_shuffle: bool
    current_shard_idx: int  # index in shard_indices
    current_sample_idx: int  # index in intra_shard_indices: samples of this shard already served
    shard_indices: np.ndarray
    shard_num_samples: int
    intra_shard_indices: np.ndarray
    shuffle_rng: bytes


def state_of(cursor: Cursor) -> LoaderState:
    """A cursor as a LoaderState. While a rest is served, it is the start of the epoch after it: readers that know no rest begin there."""
    shuffled, none = cursor.rng is not None, np.empty(0, np.int32)
    return LoaderState(
        should_shuffle=shuffled,
        current_shard_idx=cursor.shard_idx,
        current_sample_idx=cursor.sample_idx,
        shard_indices=cursor.shard_indices if shuffled else none,
        shard_num_samples=cursor.num_samples,
        intra_shard_indices=cursor.sample_indices if shuffled else none,
        shuffle_rng=cursor.rng.to_bytes() if shuffled else b"",
    )


def check_permutations(state: LoaderState) -> None:
    """Raise UserError unless both orders are permutations: a damaged one must not index a wrong sample, or crash an epoch later."""
    orders = (state.shard_indices, state.current_shard_idx + 1), (state.intra_shard_indices, state.current_sample_idx)
    if any(place > len(order) or not np.array_equal(np.sort(order), np.arange(len(order))) for order, place in orders):
        raise UserError(
            f"the checkpoint's data order is not a permutation of its shards and samples; its state file is damaged: {RESUME_FROM_ANOTHER}"
        )
