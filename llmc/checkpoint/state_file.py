"""The training state beside a model: optimizer moments, generators, the loader's place. Source: llm.c train_gpt2.cu.

Every rank writes its own; with tensor parallelism the first of a group writes for all. The files are state_STEP_RANK.bin, byte for byte
llm.c's; what these have no room for is in extra_file.py's.
"""

import os
from dataclasses import dataclass
from itertools import chain

import numpy as np

from llmc.checkpoint.model_file import adding_up_to
from llmc.data.walk import LoaderState
from llmc.errors import RESUME_FROM_ANOTHER, UserError
from llmc.files import HEADER_BYTES, STATE_MAGIC, check_size, get_uint64, new_header, put_uint64, read_header, write_atomically
from llmc.memory.tables import state_tensors
from llmc.rand import STATE_STRUCT

STATE_VERSION = 1
# header entries: int32, then uint64
NUM_PROCESSES, RANK, USE_MASTER_WEIGHTS, SHOULD_SHUFFLE, STEP = 2, 3, 4, 5, 10
RNG_STATE, RNG_STATE_LAST_UPDATE, SHARD_IDX, SAMPLE_IDX = 20, 22, 30, 32
SHUFFLE_RNG_BYTES = STATE_STRUCT.size  # 2520, llm.c's mt19937_state


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What one rank must remember beside the model and the tensors of its optimizer."""

    step: int  # optimizer steps done
    num_processes: int
    rank: int
    use_master_weights: bool
    rng_state: int  # uint64, of the xorshift* generator for stochastic rounding
    rng_state_last_update: int  # uint64, from before the last update: re-rounds the weights from the master identically
    loader: LoaderState


def write_state(path, state: TrainingState, tensors, num_parameters: int) -> str:
    """Write a state file, whole or not at all.

    tensors         iterable of uint8 arrays, C-contiguous: the bytes of m, v and, with master weights, master, in fp32
    num_parameters  elements of each: this rank's shard
    Returns the file's CRC-32.
    Raises UserError where the disk is full or denies the write; AssertionError when the bytes do not add up.
    """
    loader = state.loader
    header = new_header(STATE_MAGIC, STATE_VERSION, state.num_processes, state.rank, state.use_master_weights, loader.should_shuffle)
    header[STEP] = state.step
    put_uint64(header, RNG_STATE, state.rng_state)
    put_uint64(header, RNG_STATE_LAST_UPDATE, state.rng_state_last_update)
    put_uint64(header, SHARD_IDX, loader.current_shard_idx)
    put_uint64(header, SAMPLE_IDX, loader.current_sample_idx)
    tensors = adding_up_to(tensors, 4 * num_parameters * len(state_tensors(state.use_master_weights)))
    return write_atomically(path, chain([header], tensors, loader_pieces(loader)), doing="writing the state")


def loader_pieces(loader: LoaderState) -> list:
    """The loader section that ends a state file; nothing for a loader that does not shuffle."""
    if not loader.should_shuffle:
        return []
    assert len(loader.intra_shard_indices) == loader.shard_num_samples and len(loader.shuffle_rng) == SHUFFLE_RNG_BYTES
    return [
        np.array([len(loader.shard_indices)], "<u8"),
        np.ascontiguousarray(loader.shard_indices, "<i4"),
        np.array([loader.shard_num_samples], "<u8"),
        np.ascontiguousarray(loader.intra_shard_indices, "<i4"),
        loader.shuffle_rng,
    ]


def read_num_processes(path) -> int:
    """How many ranks wrote the checkpoint this state file belongs to. Raises UserError as read_state_header does."""
    return int(read_state_header(path)[NUM_PROCESSES])


def has_master(path) -> bool:
    """Whether a state file holds fp32 master weights. Raises UserError as read_state_header does."""
    return bool(read_state_header(path)[USE_MASTER_WEIGHTS])


def read_state_header(path, rank: int | None = None) -> np.ndarray:
    """(256,) int32 of a state file whose header makes sense and, where `rank` is known, is that rank's. Raises UserError otherwise."""
    header = read_header(path, STATE_MAGIC)
    version, num_processes, wrote_rank, use_master_weights, should_shuffle = header[1:6].tolist()
    if version != STATE_VERSION:
        raise UserError(f"{path} is a training state of version {version}; expected {STATE_VERSION}, so {RESUME_FROM_ANOTHER}")
    if not 0 <= wrote_rank < num_processes:
        raise UserError(
            f"{path} says rank {wrote_rank} of {num_processes} processes; expected a rank below that number, so the header is damaged; "
            f"{RESUME_FROM_ANOTHER}"
        )
    if not (0 <= use_master_weights <= 1 and 0 <= should_shuffle <= 1 and header[STEP] >= 0):
        raise UserError(
            f"{path} says use_master_weights {use_master_weights}, should_shuffle {should_shuffle}, step {header[STEP]}; "
            f"expected 0 or 1, 0 or 1 and a step from 0 on, so the header is damaged; {RESUME_FROM_ANOTHER}"
        )
    if rank not in (None, wrote_rank):
        raise UserError(
            f"{path} was written by rank {wrote_rank} of {num_processes} processes; expected rank {rank}, as its name says, "
            f"so the file is not this checkpoint's; {RESUME_FROM_ANOTHER}"
        )
    return header


def tensor_offset(name: str, num_parameters: int) -> int:
    """The byte at which m, v or the master begins in a state file with num_parameters elements of each."""
    return HEADER_BYTES + 4 * num_parameters * state_tensors(True).index(name)


def read_facts(path, num_parameters: int) -> TrainingState:
    """All of a state file except its tensors, of which only the length is checked.

    num_parameters  elements of each tensor, with which the file's length must agree to the byte
    Raises UserError for a missing, damaged or foreign file.
    """
    header = read_state_header(path)
    names = state_tensors(bool(header[USE_MASTER_WEIGHTS]))
    tensors_end = HEADER_BYTES + 4 * num_parameters * len(names)
    return TrainingState(
        step=int(header[STEP]),
        num_processes=int(header[NUM_PROCESSES]),
        rank=int(header[RANK]),
        use_master_weights=bool(header[USE_MASTER_WEIGHTS]),
        rng_state=get_uint64(header, RNG_STATE),
        rng_state_last_update=get_uint64(header, RNG_STATE_LAST_UPDATE),
        loader=read_loader(path, header, tensors_end, f"a state of {len(names)} x {num_parameters} parameters"),
    )


def read_loader(path, header: np.ndarray, offset: int, tensors: str) -> LoaderState:
    """The loader's state: its place from the header, its order from the section at `offset`, which must end the file.

    tensors  what precedes the section, for the error sentence
    Raises UserError unless the file ends where the section does.
    """
    place = {"current_shard_idx": get_uint64(header, SHARD_IDX), "current_sample_idx": get_uint64(header, SAMPLE_IDX)}
    if not header[SHOULD_SHUFFLE]:
        check_size(path, offset, f"{tensors} without a shuffled loader", RESUME_FROM_ANOTHER)
        none = np.zeros(0, np.int32)
        return LoaderState(False, **place, shard_indices=none, shard_num_samples=0, intra_shard_indices=none, shuffle_rng=b"")
    tensors += " with a shuffled loader"
    with open(path, "rb") as file:
        file.seek(offset)
        # the expected length grows as the two counts are read; each must fit before its array is touched
        end = offset + 16 + SHUFFLE_RNG_BYTES
        shard_indices, end = read_counted(path, file, end, tensors)
        intra_shard_indices, end = read_counted(path, file, end, tensors)
        check_size(path, end, f"{tensors} of {len(shard_indices)} shards and {len(intra_shard_indices)} samples", RESUME_FROM_ANOTHER)
        shuffle_rng = file.read(SHUFFLE_RNG_BYTES)
    return LoaderState(
        True, **place, shard_indices=shard_indices, shard_num_samples=len(intra_shard_indices),
        intra_shard_indices=intra_shard_indices, shuffle_rng=shuffle_rng,
    )  # fmt: skip


def read_counted(path, file, end: int, reason: str) -> tuple[np.ndarray, int]:
    """Read a uint64 count and that many int32. Returns these, and `end`, the least length the file must have, increased by their bytes.

    Raises UserError when the file is shorter than that.
    """
    raw = file.read(8)
    end += 4 * int.from_bytes(raw, "little")
    if os.path.getsize(path) < end:
        check_size(path, end, reason, RESUME_FROM_ANOTHER)
    return np.frombuffer(file.read(4 * int.from_bytes(raw, "little")), "<i4"), end
