"""Where the training data continues after a resume: at the very place it was left, or with what is left of the epoch.

If batch shape, number of data ranks and shards are those the checkpoint was written with, the loader returns to its place and the run is
bit for bit the one that was stopped. If any of them changed, the rest of the epoch is served first (see remainder.py), each input
once, and ordinary epochs of the new geometry follow.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from llmc.data.remainder import Geometry, Remainder, count_inputs, merged, unpack
from llmc.data.shards import MAX_SHARD_TOKENS
from llmc.data.walk import LoaderState, check_permutations
from llmc.errors import RESUME_FROM_ANOTHER, UserError
from llmc.rand import MersenneTwister

if TYPE_CHECKING:
    from llmc.checkpoint.extra_file import Extra

Shards = list[tuple[str, int]]  # (name, number of tokens) of each, in the loader's order


@dataclass(frozen=True, slots=True, eq=False)
class Continued:
    """The instructions for TokenLoader.go_on.

    state            the place to return to, or None to begin a new epoch
    should_shuffle   whether the data was read shuffled
    seed             seeds this rank's shuffling if a new epoch begins
    remainder        what is to be served first, or None
    served           number of batches of the remainder already served
    notes            lines for the user
    """

    state: LoaderState | None
    should_shuffle: bool
    seed: int = 0
    remainder: Remainder | None = None
    served: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What the extra files say about the run that wrote them. None where they do not say, as in a checkpoint of llm.c."""

    geometry: Geometry | None
    shards: Shards | None
    intervals: np.ndarray | None  # of a remainder that was being served
    served: int


def plan_resume(states: list[LoaderState], extras: "list[Extra]", *, geometry: Geometry, rank: int, shards: Shards) -> Continued:
    """How this rank's loader continues from a checkpoint.

    states, extras          of the ranks that wrote it, as they are in its files
    geometry, rank, shards  of this run; with tensor parallelism, one state for each group of ranks that share their data

    For the epochs after a remainder, each rank's generator is seeded with a draw from old rank 0's generator, plus the rank. So their
    order is the same whenever this checkpoint is resumed from, and no epoch repeats an earlier one.
    What was left of a shard that is gone is lost. All of a new shard counts as left, even if it was there before and had been removed.
    Raises UserError if the checkpoint is damaged or does not say what is needed, or if a shard differs from what it was.
    """
    written = read_written(extras)
    shuffled = states[0].should_shuffle
    if written.geometry is None and len(states) != geometry.data_ranks and shuffled:
        raise UserError(
            f"the checkpoint is of {len(states)} processes and does not say their -b and -t, as llm.c's do not, so what is left of "
            f"its epoch cannot be known; resume with {len(states)} processes (-pn {len(states)}, or that times --tensor-parallel)"
        )
    was = written.geometry or Geometry(geometry.B, geometry.T, len(states))
    old_shards = shards if written.shards is None else written.shards
    rest = None if written.intervals is None else Remainder(written.intervals, was)
    if rest and written.served > rest.num_samples:
        raise damaged(f"{written.served} batches served of {rest.num_samples}")
    if (was, old_shards) == (geometry, shards):
        return Continued(states[rank], shuffled, remainder=rest, served=written.served)
    if not shuffled:  # the same batches again and again (-a 1): there is no epoch
        return Continued(None, shuffled)
    left = rest.left(written.served) if rest else not_served(states, old_shards, was)
    left, notes = on_other_shards(left, old_shards, shards)
    remainder = Remainder(left, geometry)
    notes.insert(0, remainder_note(remainder, was))
    seed = (MersenneTwister.from_bytes(states[0].shuffle_rng).u32() + rank) % 2**32
    return Continued(None, shuffled, seed, remainder if remainder.num_samples else None, notes=tuple(notes))


def remainder_note(remainder: Remainder, was: Geometry) -> str:
    """One line for the user on what is served after the change."""
    now = remainder.geometry
    change = f"with {now}, after {was}" if was != now else "with other training files"
    if not remainder.num_samples:
        return f"resuming {change}: {remainder.num_inputs:,} tokens of this epoch are left, fewer than a batch takes; the next epoch begins"
    dropped = f"; {remainder.num_dropped:,} make no whole batch and are dropped" if remainder.num_dropped else ""
    return (
        f"resuming {change}: {remainder.num_inputs:,} tokens of this epoch are left, "
        f"{remainder.num_samples:,} batches for each rank{dropped}"
    )


# ----------------------------------------------------------------------------
# what is left


def starts_of(shards: Shards) -> list[int]:
    """Where on the axis (see remainder.py) each shard starts, and where the last one ends."""
    return list(accumulate((num_tokens for _, num_tokens in shards), initial=0))


def not_served(states: list[LoaderState], shards: Shards, geometry: Geometry) -> np.ndarray:
    """Intervals of the inputs that no rank has served in the epoch of these states. Raises UserError for impossible states."""
    samples = [geometry.samples_in(num_tokens) for _, num_tokens in shards]
    for state in states:
        check_place(state, samples)
    if len({batches_served(state, samples) for state in states}) > 1:
        raise damaged("its ranks stopped at different batches")
    places = [np.argsort(state.shard_indices) for state in states]  # the place of each shard in the rank's order
    intervals, starts = [], starts_of(shards)
    for shard, (_, num_tokens) in enumerate(shards):
        left = np.ones((samples[shard], geometry.data_ranks), bool)
        for rank, state in enumerate(states):
            if places[rank][shard] < state.current_shard_idx:
                left[:, rank] = False
            elif places[rank][shard] == state.current_shard_idx:
                left[state.intra_shard_indices[: state.current_sample_idx], rank] = False
        # bounds of the batches as they lie in the shard, then the end of the tail that was too short for a sample
        bounds = np.append(np.arange(left.size + 1) * geometry.batch_tokens, num_tokens - 1)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], left.ravel(), [True, False]])))
        intervals.append(starts[shard] + bounds[edges].reshape(-1, 2))
    return merged(np.concatenate(intervals))


def check_place(state: LoaderState, samples: list[int]) -> None:
    """Raise UserError unless the state is a possible place in shards with these numbers of samples."""
    has, expected, what = len(state.shard_indices), len(samples), "shards"
    if has == expected:
        check_permutations(state)
        has, expected, what = state.shard_num_samples, samples[state.shard_indices[state.current_shard_idx]], "samples in the current shard"
    if has != expected:
        raise UserError(
            f"the checkpoint's training data has {has} {what}, where {expected} were expected: its state file is damaged, or it does not "
            f"say which files it read and they changed since; resume with the same files, or {RESUME_FROM_ANOTHER}"
        )


def batches_served(state: LoaderState, samples: list[int]) -> int:
    """Micro-steps of this epoch that the rank has done."""
    return sum(samples[shard] for shard in state.shard_indices[: state.current_shard_idx]) + state.current_sample_idx


def on_other_shards(intervals: np.ndarray, was: Shards, now: Shards) -> tuple[np.ndarray, list[str]]:
    """The intervals moved to the axis of the present shards, matched by name, and a note on each shard that is gone or new.

    Raises UserError if the length of a shard changed, or if two shards have the same name.
    """
    for shards in (was, now):
        if len(dict(shards)) < len(shards):
            raise UserError(
                "two files of the training data have the same name, so what is left of each cannot be told apart; "
                "rename one, or resume with the batch, the processes and the files of the checkpoint"
            )
    old_starts, sizes, here, notes = dict(zip((name for name, _ in was), starts_of(was))), dict(was), [], []
    for (name, num_tokens), start in zip(now, starts_of(now)):
        if name not in sizes:
            here.append(np.array([[start, start + num_tokens - 1]]))
            notes.append(f"note: {name} is new: its {num_tokens - 1:,} tokens belong to what is left of this epoch")
        elif num_tokens != sizes[name]:
            raise UserError(
                f"{name} held {sizes[name]} tokens when the checkpoint was written and holds {num_tokens} now; "
                "put the old file back, or give the new one another name"
            )
        else:
            here.append(within(intervals, old_starts[name], num_tokens) + start - old_starts[name])
    for name, num_tokens in was:
        if name not in dict(now):
            rest = count_inputs(within(intervals, old_starts[name], num_tokens))
            notes.append(f"note: {name} is gone: {rest:,} tokens of it were left and are not trained on")
    return np.concatenate(here), notes


def within(intervals: np.ndarray, start: int, size: int) -> np.ndarray:
    """The intervals that lie in the shard of `size` tokens at `start`."""
    first, last = np.searchsorted(intervals[:, 0], [start, start + size])
    return intervals[first:last]


# ----------------------------------------------------------------------------
# what the extra files say


def read_written(extras: "list[Extra]") -> Written:
    """The facts in the extra files, on which those of all ranks must agree. Raises UserError if they do not, or are damaged."""
    facts = [(extra.B, extra.T, extra.data) for extra in extras]
    if any(fact != facts[0] for fact in facts):
        raise damaged("its ranks disagree on B, T or the data")
    B, T, data = facts[0]
    if B is None and T is None and data is None:
        return Written(None, None, None, 0)
    if not (is_count(B, 1) and is_count(T, 1)):
        raise damaged(f"it says B {B!r} and T {T!r}")
    geometry = Geometry(B, T, len(extras))
    if data is None:  # written before extra files described the data
        return Written(geometry, None, None, 0)
    try:
        shards = [(name, num_tokens) for name, num_tokens in data["shards"]]
        rest = data.get("remainder")
        intervals, served = (None, 0) if rest is None else (unpack(rest["intervals"]), rest["served"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(f"its data cannot be read, {type(error).__name__} {error}") from None
    if not (shards and all(isinstance(name, str) and is_count(num_tokens, 1) for name, num_tokens in shards) and is_count(served, 0)):
        raise damaged("its data makes no sense")
    if intervals is not None and not inside(intervals, shards):
        raise damaged("what it says is left is not in its shards")
    return Written(geometry, shards, intervals, served)


def is_count(value, least: int) -> bool:
    """Whether this can be a number of tokens in a shard, of rows or of batches: a larger one is damage, so nothing is allocated for it."""
    return type(value) is int and least <= value <= MAX_SHARD_TOKENS


def inside(intervals: np.ndarray, shards: Shards) -> bool:
    """Whether each interval lies within one shard without its last token, which has no target."""
    starts = np.array(starts_of(shards))
    shard = np.searchsorted(starts, intervals[:, 0], side="right") - 1
    return bool((shard < len(shards)).all() and (intervals[:, 1] < starts[shard + 1]).all())


def damaged(reason: str) -> UserError:
    """The error for everything that can be wrong with the checkpoint's place in the data."""
    return UserError(f"the checkpoint's place in its training data is damaged ({reason}); {RESUME_FROM_ANOTHER}")
