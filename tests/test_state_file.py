"""The state file and the debug state: bytes built by hand, and every way they can be wrong."""

import os
import struct

import numpy as np
import pytest

from case_a import read_state

from llmc.checkpoint.debug_state import write_debug_state
from llmc.checkpoint.state_file import TrainingState, read_facts, read_num_processes, read_state_header, write_state
from llmc.config import ModelConfig
from llmc.data.walk import LoaderState
from llmc.errors import UserError
from llmc.memory.tables import parameter_shapes

N = 11  # parameters in this rank's shard
RNG = struct.pack("<QiI624I2I", 44, 17, 607, *range(3, 627), 0, 0x9908B0DF)  # llm.c's mt19937_state
M, V, MASTER = (np.arange(N, dtype=np.float32) * factor for factor in (0.5, 2.0, -3.0))
SHARDS, SAMPLES = np.array([2, 0, 1], np.int32), np.array([3, 1, 0, 2, 4], np.int32)
SHUFFLED = LoaderState(True, 1, 2**33 + 5, SHARDS, 5, SAMPLES, RNG)
ORDERED = LoaderState(False, 0, 7, np.zeros(0, np.int32), 0, np.zeros(0, np.int32), b"")
RNG_STATE, RNG_STATE_LAST_UPDATE = 2**64 - 3, 13371337


def state(loader=SHUFFLED, master=True, **changes) -> TrainingState:
    facts = {"step": 123, "num_processes": 4, "rank": 2, "use_master_weights": master, "loader": loader}
    return TrainingState(**{**facts, "rng_state": RNG_STATE, "rng_state_last_update": RNG_STATE_LAST_UPDATE, **changes})


def expected_header(magic=20240527, version=1, processes=4, rank=2, master=1, shuffle=1, step=123, shard=1, sample=2**33 + 5) -> bytes:
    """llm.c's state_header[256], entry by entry, without any of our code."""
    return b"".join([
        struct.pack("<10i", magic, version, processes, rank, master, shuffle, 0, 0, 0, 0),  # 0 to 9
        struct.pack("<10i", step, *[0] * 9),  # 10 to 19
        struct.pack("<QQ6i", RNG_STATE, RNG_STATE_LAST_UPDATE, *[0] * 6),  # 20 to 29
        struct.pack("<QQ", shard, sample),  # 30 to 33
        bytes(4 * (256 - 34)),
    ])  # fmt: skip


LOADER = struct.pack("<Q3iQ5i", 3, 2, 0, 1, 5, 3, 1, 0, 2, 4) + RNG
TENSORS = struct.pack("<33f", *M, *V, *MASTER)
WHOLE = expected_header() + TENSORS + LOADER


def pieces(*tensors):
    """Bytes of the tensors, cut where a staging buffer might."""
    for tensor in tensors:
        data = tensor.view(np.uint8)
        yield from (data[:7], data[7:])


def same_loader(a: LoaderState, b: LoaderState) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in LoaderState.__dataclass_fields__)


def refused(path, *words, rank=None) -> None:
    """Reading the header, or the facts, raises one sentence with the path and these words."""
    with pytest.raises(UserError) as raised:
        read_state_header(path, rank)
        read_facts(path, N)
    for word in (str(path), *words):
        assert word in str(raised.value)


def test_a_written_state_is_byte_for_byte_llmc_s(tmp_path):
    """Header, m, v, master, then the shuffled loader with its raw generator struct; and it reads back."""
    path = tmp_path / "s.bin"
    write_state(path, state(), pieces(M, V, MASTER), N)
    assert len(expected_header()) == 1024 and len(RNG) == 2520
    assert path.read_bytes() == WHOLE
    read, tensors = read_state(path, N)
    assert same_loader(read.loader, SHUFFLED) and read.loader.shard_indices.dtype == np.int32 and isinstance(read.loader.shuffle_rng, bytes)
    assert [getattr(read, name) for name in TrainingState.__dataclass_fields__][:-1] == [123, 4, 2, True, RNG_STATE, RNG_STATE_LAST_UPDATE]
    assert list(tensors) == ["m", "v", "master"] and len(TENSORS) == 3 * 4 * N
    assert all(np.array_equal(tensors[name], tensor) for name, tensor in zip(tensors, (M, V, MASTER)))
    assert read_num_processes(path) == 4


def test_an_unshuffled_state_without_master_ends_after_v(tmp_path):
    """No loader section, no third tensor."""
    path = tmp_path / "s.bin"
    write_state(path, state(ORDERED, master=False, num_processes=1, rank=0), pieces(M, V), N)
    assert path.read_bytes() == expected_header(processes=1, rank=0, master=0, shuffle=0, shard=0, sample=7) + TENSORS[: 8 * N]
    read, tensors = read_state(path, N)
    assert same_loader(read.loader, ORDERED) and list(tensors) == ["m", "v"] and np.array_equal(tensors["v"], V)
    path.write_bytes(path.read_bytes() + b"x")
    refused(path, f"has {1024 + 8 * N + 1} bytes", "oversized by 1", "without a shuffled loader")


def test_tensors_that_do_not_add_up_write_nothing(tmp_path):
    """Forgetting the master is an assertion, not a short file."""
    with pytest.raises(AssertionError):
        write_state(tmp_path / "s.bin", state(), pieces(M, V), N)
    assert os.listdir(tmp_path) == []


TENSORS_END = 1024 + 12 * N
CUTS = [1024, TENSORS_END - 1, TENSORS_END, TENSORS_END + 7, TENSORS_END + 19, TENSORS_END + 30, len(WHOLE) - 2521, len(WHOLE) - 1]


@pytest.mark.parametrize("length", CUTS)
def test_a_state_cut_anywhere_is_refused(tmp_path, length):
    """In the tensors, in a count, in an array, in the generator."""
    path = tmp_path / "s.bin"
    path.write_bytes(WHOLE[:length])
    refused(path, f"has {length} bytes", "truncated by")


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", ["is empty", "a training state file"]),
        (WHOLE[:1000], ["only 1000 bytes"]),
        (expected_header(magic=20240326) + TENSORS, ["is a model file", "expected a training state file"]),
        (expected_header(version=2) + TENSORS + LOADER, ["version 2", "expected 1"]),
        (expected_header(rank=4) + TENSORS + LOADER, ["rank 4 of 4 processes", "damaged"]),
        (expected_header(rank=-1) + TENSORS + LOADER, ["rank -1 of 4 processes", "damaged"]),
        (expected_header(master=-1) + TENSORS + LOADER, ["use_master_weights -1", "damaged"]),
        (expected_header(master=7) + TENSORS + LOADER, ["use_master_weights 7", "damaged"]),
        (expected_header(shuffle=2) + TENSORS + LOADER, ["should_shuffle 2", "damaged"]),
        (expected_header(shuffle=-1) + TENSORS + LOADER, ["should_shuffle -1", "damaged"]),
        (expected_header(step=-1) + TENSORS + LOADER, ["step -1", "damaged"]),
        (WHOLE + b"x", [f"has {len(WHOLE) + 1} bytes", "oversized by 1", f"exactly {len(WHOLE)}", "3 shards and 5 samples"]),
        (expected_header(master=0) + TENSORS + LOADER, ["2 x 11 parameters"]),  # the section then starts inside the master
        (expected_header() + TENSORS + struct.pack("<Q", 2**62) + LOADER[8:], ["truncated by"]),  # a count no memory holds
    ],
)  # fmt: skip
def test_a_wrong_state_is_refused_in_one_sentence(tmp_path, content, words):
    """The path, what was found, and what was expected."""
    path = tmp_path / "s.bin"
    path.write_bytes(content)
    refused(path, *words)


def test_a_state_of_another_rank_or_another_model_is_refused(tmp_path):
    """The wrong rank's file, a shard of another length, no file."""
    path = tmp_path / "s.bin"
    path.write_bytes(WHOLE)
    refused(path, "rank 2 of 4 processes", "expected rank 1, as its name says", rank=1)
    with pytest.raises(UserError, match="3 x 12 parameters"):
        read_facts(path, N + 1)
    refused(tmp_path / "nowhere.bin", "does not exist")


CONFIG = ModelConfig(max_seq_len=3, vocab_size=5, num_layers=1, num_heads=1, channels=2, padded_vocab_size=8)
B, T = 2, 3


def debug_parts():
    draw = np.random.default_rng(2)
    inputs, targets = draw.integers(0, 5, (2, B, T))
    logits = draw.standard_normal((B, T, 5)).astype(np.float32)
    gradients = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in parameter_shapes(CONFIG).items()}
    return inputs, targets, logits, 1.625, gradients


def test_a_debug_state_is_byte_for_byte_llmc_s(tmp_path):
    """Header with B and T, x, y, logits over the real vocabulary, loss, gradients in parameter order."""
    path = tmp_path / "d.bin"
    inputs, targets, logits, loss, gradients = debug_parts()
    write_debug_state(path, inputs, targets, logits, loss, dict(reversed(gradients.items())))
    order = [
        "wte", "wpe", "ln1w", "ln1b", "qkvw", "qkvb", "attprojw", "attprojb",
        "ln2w", "ln2b", "fcw", "fcb", "fcprojw", "fcprojb", "lnfw", "lnfb",
    ]  # fmt: skip
    expected = struct.pack("<256i", 20240327, 2, B, T, *[0] * 252)
    expected += struct.pack("<12i", *inputs.flat, *targets.flat) + struct.pack("<30f", *logits.flat) + struct.pack("<f", loss)
    expected += b"".join(struct.pack(f"<{gradients[name].size}f", *gradients[name].flat) for name in order)
    assert path.read_bytes() == expected
