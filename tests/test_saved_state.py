"""A checkpoint of any number of ranks, sharded or not, reads as one whole; files that are not of one run are refused by name."""

import random
import struct
from math import prod

import numpy as np
import pytest

from llmc.checkpoint.extra_file import NO_FILE, Extra, write_extra
from llmc.checkpoint.saved_state import SavedState, layers
from llmc.checkpoint.state_file import TrainingState, write_state
from llmc.checkpoint.store import extra_path, state_path
from llmc.config import ModelConfig
from llmc.data.walk import LoaderState
from llmc.errors import UserError
from llmc.memory.tables import PARAMETERS, num_parameters, parameter_shapes
from llmc.rand import MersenneTwister

CONFIG = ModelConfig(max_seq_len=8, vocab_size=23, num_layers=3, num_heads=4, channels=48, padded_vocab_size=24)
N = num_parameters(CONFIG)
NAMES, STEP = ("m", "v", "master"), 7


def loader_state(rank: int) -> LoaderState:
    """Shuffled, and of another length on every rank."""
    return LoaderState(
        True, 0, rank, np.array([1, 0], np.int32), 5 + rank, np.arange(5 + rank, dtype=np.int32), MersenneTwister(42 + rank).to_bytes()
    )


NOT_SHUFFLED = LoaderState(False, 0, 1, np.zeros(0, np.int32), 0, np.zeros(0, np.int32), b"")


def whole_tensors() -> dict[str, np.ndarray]:
    """Every element of the three has a value of its own, exact in fp32."""
    return {name: np.arange(N, dtype=np.float32) + i * 2**20 for i, name in enumerate(NAMES)}


def shard(tensor: np.ndarray, rank: int, num_processes: int) -> np.ndarray:
    """The rank's share, cut the slow and obvious way: tensor by tensor, layer by layer."""
    shapes, at, parts = parameter_shapes(CONFIG), 0, []
    for p in PARAMETERS:
        n = prod(shapes[p.name])
        for layer in tensor[at : at + n].reshape(CONFIG.num_layers if p.per_layer else 1, -1):
            share = len(layer) // num_processes
            parts.append(layer[rank * share : (rank + 1) * share])
        at += n
    assert at == N
    return np.concatenate(parts)


def write_rank(folder, rank, num_processes, *, sharded, master=True, loader=None, step=STEP, name_rank=None):
    tensors = whole_tensors()
    held = [tensors[name] for name in (NAMES if master else NAMES[:2])]
    if sharded:
        held = [shard(tensor, rank, num_processes) for tensor in held]
    state = TrainingState(step, num_processes, rank, master, 1000 + rank, 2000 + rank, loader or loader_state(rank))
    name_rank = rank if name_rank is None else name_rank
    write_state(state_path(folder, STEP, name_rank), state, (tensor.view(np.uint8) for tensor in held), len(held[0]))
    write_extra(extra_path(folder, STEP, name_rank), Extra({}, {}, B=4, T=rank + 1))


def write_checkpoint(folder, num_processes, **form):
    for rank in range(num_processes):
        write_rank(folder, rank, num_processes, **form)


@pytest.mark.parametrize("loader", [None, NOT_SHUFFLED], ids=["shuffled", "ordered"])
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_what_was_written_reads_as_one_whole(tmp_path, num_processes, sharded, master, loader):
    """All of each tensor, every layer of it, and 200 random pieces that begin and end anywhere."""
    write_checkpoint(tmp_path, num_processes, sharded=sharded, master=master, loader=loader)
    saved = SavedState(tmp_path, STEP, CONFIG)
    assert (saved.num_processes, saved.use_master_weights) == (num_processes, master)
    assert saved.sharded == (sharded and num_processes > 1)
    chance = random.Random(num_processes)
    cuts = [(0, N), (0, 0), (N, 0), (N - 1, 1), *((start, end - start) for start, end in layers(CONFIG).tolist())]
    cuts += [(at, chance.randint(0, N - at)) for at in (chance.randint(0, N) for _ in range(50))]
    for name, tensor in whole_tensors().items():
        for at, n in cuts if name != "master" or master else []:
            read = saved.read(name, at, n)
            assert read.dtype == np.float32 and not isinstance(read, np.memmap)
            np.testing.assert_array_equal(read, tensor[at : at + n])


def test_every_rank_s_facts_are_its_own(tmp_path):
    write_checkpoint(tmp_path, 3, sharded=True)
    saved = SavedState(tmp_path, STEP, CONFIG)
    for rank in range(3):
        state = saved.state_of(rank)
        assert (state.rank, state.rng_state, state.rng_state_last_update) == (rank, 1000 + rank, 2000 + rank)
        assert state.loader.shard_num_samples == 5 + rank and saved.extra_of(rank) == Extra({}, {}, B=4, T=rank + 1)
    extra_path(tmp_path, STEP, 1).unlink()
    assert saved.extra_of(1) == NO_FILE


def test_layers_are_what_zero_cuts():
    """12 tensors of 3 layers and 4 without, end to end, in file order."""
    found = layers(CONFIG)
    assert len(found) == 12 * 3 + 4 and found[0].tolist() == [0, 24 * 48] and found[-1].tolist() == [N - 48, N]
    np.testing.assert_array_equal(found[1:, 0], found[:-1, 1])


def test_where_the_processes_do_not_divide_the_layers_only_whole_files_are_known(tmp_path):
    """9 divides the 24 * 48 elements of wte, but not the 48 of a bias."""
    write_checkpoint(tmp_path, 9, sharded=False)
    assert not SavedState(tmp_path, STEP, CONFIG).sharded
    for rank in (3, 0):
        state_path(tmp_path, STEP, rank).write_bytes(state_path(tmp_path, STEP, rank).read_bytes()[: 1024 + N])
        refused(tmp_path, f"state_00000007_0000{rank}.bin has {1024 + N} bytes", f"a state of 3 x {N} parameters")


def refused(folder, *words):
    with pytest.raises(UserError) as raised:
        SavedState(folder, STEP, CONFIG)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_files_that_are_not_of_one_run_are_refused_by_name(tmp_path, sharded):
    """A mixture of whole files and shards, other processes, a master or none, another step, another rank's file, no file."""
    third, held = "state_00000007_00002.bin", f"{N} and {N // 4}" if sharded else f"{N // 4} and {N}"
    for change, *words in (
        (dict(sharded=not sharded), f"disagree on how many parameters a file holds: {held};"),
        (dict(num_processes=3), "disagree on the number of processes: 3 and 4; they are not of one run"),
        (dict(master=False), "disagree on whether there are master weights, 0 no, 1 yes: 0 and 1"),
        (dict(step=6), "written at step 6; expected 7"),
        (dict(rank=1), "written by rank 1 of 4 processes; expected rank 2"),
    ):
        write_checkpoint(tmp_path, 4, sharded=sharded)
        write_rank(tmp_path, **dict(dict(rank=2, num_processes=4, sharded=sharded, name_rank=2), **change))
        refused(tmp_path, third, *words)
    state_path(tmp_path, STEP, 2).unlink()
    refused(tmp_path, third, "does not exist")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_of_any_other_length_is_refused_by_name(tmp_path, sharded):
    """As a file like the first; the first, as what it may be by its length."""
    for rank in (1, 0):
        write_checkpoint(tmp_path, 2, sharded=sharded)
        path = state_path(tmp_path, STEP, rank)
        good = path.read_bytes()
        for damaged in (good[:-1], good + b"x", good[:1024], good[: len(good) // 2], good[: len(good) * 5 // 6]):
            path.write_bytes(damaged)
            is_shard = sharded or rank == 0 and len(damaged) < 1024 + 12 * N
            refused(tmp_path, str(path), f"has {len(damaged)} bytes", f"a state of 3 x {N // 2 if is_shard else N} parameters")
    path.write_bytes(good[:16] + struct.pack("<i", 0) + good[20:])  # forgot its master
    refused(tmp_path, str(path))


def test_one_process_s_damage_is_told_as_before(tmp_path):
    """With one process there is one length it can have, and the sentence says by how much it is off."""
    write_checkpoint(tmp_path, 1, sharded=False)
    path = state_path(tmp_path, STEP, 0)
    path.write_bytes(path.read_bytes() + b"x")
    refused(tmp_path, str(path), "oversized by 1", f"3 x {N} parameters with a shuffled loader")
