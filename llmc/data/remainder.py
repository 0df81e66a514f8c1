"""What is left of an epoch when a run resumes with another batch shape, number of data ranks or other shards, and how it is dealt out.

All shards are laid end to end on one axis: token p of a shard is at p plus the number of tokens in the shards before it. A place on
the axis is an input if the token after it, its target, is in the same shard; so the last place of a shard never is one, and the
intervals of two shards never touch. What is left is the inputs that no rank has been trained on: disjoint intervals
(n, 2) int64 of [start, end), ascending. They include the tail of each shard, which made no whole sample of the old geometry.

To be dealt out, the intervals are laid end to end as a stream of inputs: first the whole rows of T in each interval, then the
leftover of each, joined into rows of several fragments. Every input keeps its own target, the next token of its shard. The stream
is then cut as llm.c cuts a shard: sample j is B*T*data_ranks inputs, rank r takes the r-th B*T of them, and goes through
the samples in its own order. The inputs at the stream's end that make no whole sample, fewer than B*T*data_ranks, are dropped.
"""

import base64
import zlib
from dataclasses import dataclass

import numpy as np

from llmc.rand import MersenneTwister

ORDER_SEED = 1042  # plus the rank: seeds the order of the samples. any constant would do, but it must be the same after a resume


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a run cuts its data. data_ranks counts the ranks that read different data: all or, with tensor parallelism, one of each group."""

    B: int
    T: int
    data_ranks: int

    @property
    def batch_tokens(self) -> int:
        """Inputs of one rank in one micro-step."""
        return self.B * self.T

    @property
    def sample_tokens(self) -> int:
        """Inputs of all ranks in one micro-step."""
        return self.B * self.T * self.data_ranks

    def samples_in(self, num_tokens: int) -> int:
        """Whole samples in a shard of num_tokens. One token more is needed, for the last target. The rest of the shard is dropped."""
        return (num_tokens - 1) // self.sample_tokens

    def start_of(self, sample, rank: int):
        """The first of a rank's inputs of a sample, or of several samples in an array, counted in the shard, or the stream, they are of."""
        return (sample * self.data_ranks + rank) * self.batch_tokens

    @property
    def ranks_in_words(self) -> str:
        """How many there are, in words that are true with and without tensor parallelism."""
        return f"{self.data_ranks} data-parallel rank{'s' if self.data_ranks > 1 else ''}"

    def __str__(self):
        return f"-b {self.B} -t {self.T} on {self.ranks_in_words}"


class Remainder:
    """The intervals left of an epoch, dealt out to the ranks of a geometry. The result depends on these two alone."""

    def __init__(self, intervals: np.ndarray, geometry: Geometry):
        self.intervals, self.geometry = intervals, geometry
        start, end = intervals.T
        cut = end - (end - start) % geometry.T
        stream = np.concatenate([np.stack([start, cut], axis=1), np.stack([cut, end], axis=1)])
        self._stream = stream[stream[:, 0] < stream[:, 1]]  # (m, 2): intervals in the order of the stream
        self._ends = np.cumsum(self._stream[:, 1] - self._stream[:, 0])  # (m,): where each of them ends in the stream

    @property
    def num_inputs(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def num_samples(self) -> int:
        """Number of micro-steps, that is of batches for each rank."""
        return self.num_inputs // self.geometry.sample_tokens

    @property
    def num_dropped(self) -> int:
        """Inputs at the stream's end that make no whole sample."""
        return self.num_inputs % self.geometry.sample_tokens

    def order(self, rank: int) -> np.ndarray:
        """(num_samples,): the samples in the order in which the rank goes through them."""
        samples = np.arange(self.num_samples)
        MersenneTwister(ORDER_SEED + rank).permute(samples)
        return samples

    def batch(self, rank: int, sample: int) -> np.ndarray:
        """(k, 2): the intervals whose inputs, end to end, are the rank's B*T of that sample."""
        start = self.geometry.start_of(sample, rank)
        return self._cut(np.array([[start, start + self.geometry.batch_tokens]]))

    def left(self, served: int) -> np.ndarray:
        """The intervals still left once every rank has served that many samples, including those that would be dropped."""
        g = self.geometry
        starts = np.sort(np.concatenate([g.start_of(self.order(rank)[served:], rank) for rank in range(g.data_ranks)]))
        dealt = self.num_samples * g.sample_tokens
        ranges = np.concatenate([np.stack([starts, starts + g.batch_tokens], axis=1), [[dealt, self.num_inputs]]])
        return merged(self._cut(merged(ranges)))

    def _cut(self, ranges: np.ndarray) -> np.ndarray:
        """The axis intervals that make up these ranges of the stream (ascending and disjoint), in stream order."""
        if not len(ranges):
            return ranges
        first = np.searchsorted(self._ends, ranges[0, 0], side="right")
        last = np.searchsorted(self._ends, ranges[-1, 1], side="left")
        # what lies between two neighbouring cuts is part of one interval, and is wholly inside a range or outside all
        cuts = np.unique(np.concatenate([self._ends[first:last], ranges.ravel()]))
        starts, ends = cuts[:-1], cuts[1:]
        inside = starts < ranges[np.searchsorted(ranges[:, 0], starts, side="right") - 1, 1]
        starts, ends = starts[inside], ends[inside]
        piece = np.searchsorted(self._ends, starts, side="right")
        back = self._stream[piece, 1] - self._ends[piece]  # added to a stream position, gives the axis position
        return np.stack([starts + back, ends + back], axis=1)


def merged(intervals: np.ndarray) -> np.ndarray:
    """Disjoint intervals in ascending order; empty ones are left out and adjacent ones joined."""
    intervals = intervals[intervals[:, 0] < intervals[:, 1]]
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    apart = np.flatnonzero(intervals[1:, 0] > intervals[:-1, 1])
    first, last = np.concatenate([[0], apart + 1]), np.concatenate([apart, [len(intervals) - 1]])
    return np.stack([intervals[first, 0], intervals[last, 1]], axis=1) if len(intervals) else intervals


def count_inputs(intervals: np.ndarray) -> int:
    """Inputs in all of them."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def pack(intervals: np.ndarray) -> str:
    """The intervals in few characters: the differences of successive bounds, which repeat, are compressed and base64-encoded.

    An epoch left in the middle by 8 ranks can be a million intervals, too many to write as numbers at every checkpoint.
    """
    differences = np.diff(intervals.ravel(), prepend=0).astype("<i8")
    return base64.b64encode(zlib.compress(differences.tobytes())).decode()


def unpack(text: str) -> np.ndarray:
    """What `pack` packed. Raises ValueError for anything else."""
    try:
        differences = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), "<i8")
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(differences) % 2 or (differences[1:] <= 0).any() or (differences[:1] < 0).any():
        raise ValueError("intervals do not ascend")
    return np.cumsum(differences, dtype=np.int64).reshape(-1, 2)
