"""The loader keeps llm.c's order, returns to any place in it, and looks ahead without leaving it."""

import dataclasses
import json
import os
import resource
from functools import partial
from pathlib import Path

import case_a
import numpy as np
import pytest
from case_a import restore

from llmc.data.loader import TokenLoader
from llmc.data.remainder import Geometry, Remainder
from llmc.data.shards import write_shard
from llmc.data.walk import Rest
from llmc.errors import UserError

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return case_a.write_case_a(tmp_path_factory.mktemp("case_a"))


@pytest.fixture
def shards(tmp_path):
    """Three shards of different sizes; token i of shard s is 1000*s + i % 1000."""
    for s, size in enumerate((101, 60, 77)):
        write_shard(tmp_path / f"s_{s}.bin", 1000 * s + np.arange(size) % 1000)
    return str(tmp_path / "s_*.bin")


def test_shards_of_the_same_lengths_are_told_apart_by_their_names(shards, tmp_path):
    """By what ranks compare: they are to read the same files, wherever each has them."""
    summary = TokenLoader(shards, 2, 10).summary()
    assert summary.startswith("3 shards of 238 tokens (")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in tmp_path.glob("s_*.bin"):
        (elsewhere / path.name).write_bytes(path.read_bytes())
    assert TokenLoader(str(elsewhere / "s_*.bin"), 2, 10).summary() == summary
    (elsewhere / "s_1.bin").rename(elsewhere / "s_9.bin")
    assert TokenLoader(str(elsewhere / "s_*.bin"), 2, 10).summary() != summary


def batches(loader, count):
    return [tuple(x.copy() for x in loader.next_batch()) for _ in range(count)]


def batches_of(tokens, n):
    """What a loader of two rows of n/2 serves of them in order."""
    tokens = np.array(tokens)
    return [tuple(tokens[at + shift : at + shift + n].reshape(2, -1) for shift in (0, 1)) for at in range(0, len(tokens) - n, n)]


def assert_same(ours, theirs):
    for (a, b), (c, d) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)


def fnv1a_64(values) -> str:
    """FNV-1a over int32 bytes. The golden files were hashed from this start, FNV's 14695981039346656037 less its last digit."""
    digest = 1469598103934665603
    for byte in values.astype("<i4").tobytes():
        digest = (digest ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{digest:016x}"


@pytest.mark.parametrize("golden", ["1proc_shuffled", "2proc_ordered", "3proc_shuffled"])
def test_data_order_is_llmc_s(case, golden):
    """Every batch of every rank for several epochs, B=4, T=32: first input, last target, hashes of all inputs and targets."""
    ranks = json.loads((GOLDEN / f"loader_A_{golden}.json").read_text())
    for rank, expected in enumerate(ranks.values()):
        loader = TokenLoader(
            str(case / "train_*.bin"), 4, 32, rank=rank, data_ranks=len(ranks), shuffle="shuffled" in golden, vocab_size=96
        )
        for line in expected:
            inputs, targets = loader.next_batch()
            assert [inputs[0, 0], targets[-1, -1], fnv1a_64(inputs), fnv1a_64(targets)] == line
    assert loader.num_tokens == 8333


def test_a_seed_s_order_is_that_of_no_rank_of_another(shards):
    loaders = [TokenLoader(shards, 1, 1, rank=rank, data_ranks=5, shuffle=True, seed=seed) for seed in (0, 1, 2) for rank in range(5)]
    orders = {tuple(loader.state().intra_shard_indices) for loader in loaders}
    assert len(orders) == len(loaders)


def test_batches_are_contiguous_int64_and_targets_are_the_next_tokens(shards):
    loader = TokenLoader(shards, 3, 5)
    inputs, targets = loader.next_batch()
    for x in (inputs, targets):
        assert x.shape == (3, 5) and x.dtype == np.int64 and x.flags.c_contiguous
    np.testing.assert_array_equal(inputs.ravel(), np.arange(15))
    np.testing.assert_array_equal(targets.ravel(), np.arange(1, 16))


def test_ranks_in_order_share_each_sample_without_overlap(shards):
    ranks = [TokenLoader(shards, 2, 4, rank=r, data_ranks=3) for r in range(3)]
    for sample in range(4):  # (101 - 1) // 24
        inputs = np.concatenate([loader.next_batch()[0].ravel() for loader in ranks])
        np.testing.assert_array_equal(inputs, sample * 24 + np.arange(24))
    assert ranks[0].next_batch()[0][0, 0] == 1000  # the tail of shard 0 is dropped


def test_an_epoch_serves_every_sample_once_in_a_new_order(shards):
    loader = TokenLoader(shards, 2, 5, shuffle=True)
    per_epoch = 10 + 5 + 7
    epochs = [[int(inputs[0, 0]) for inputs, _ in batches(loader, per_epoch)] for _ in range(3)]
    every = [s * 1000 + 10 * i for s, n in enumerate((10, 5, 7)) for i in range(n)]
    assert all(sorted(epoch) == every for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_reset_starts_an_ordered_loader_over(shards):
    loader = TokenLoader(shards, 2, 5)
    first = batches(loader, 3)
    loader.reset()
    assert_same(batches(loader, 3), first)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("served", [0, 1, 5, 10, 21, 22, 23, 50])
def test_resuming_equals_never_stopping(shards, shuffle, served):
    """Mid-shard, at a shard's end, at an epoch's end and in a later epoch; 30 more batches cross another epoch."""
    loader = TokenLoader(shards, 2, 5, shuffle=shuffle)
    batches(loader, served)
    state = loader.state()
    expected = batches(loader, 30)
    resumed = TokenLoader(shards, 2, 5, shuffle=shuffle)
    batches(resumed, 3)
    restore(resumed, state)
    assert_same(batches(resumed, 30), expected)
    restore(resumed, state)  # serving on did not change it
    assert_same(batches(resumed, 30), expected)


def test_a_restored_place_keeps_the_permutation_in_the_file(shards):
    """llm.c trusts the saved order rather than drawing it again; so a hand-made order is what is served."""
    loader = TokenLoader(shards, 2, 5, shuffle=True)
    order = np.array([2, 0, 1], np.int32)
    samples = np.array([6, 5, 4, 3, 2, 1, 0], np.int32)
    state = dataclasses.replace(
        loader.state(), current_shard_idx=0, current_sample_idx=1, shard_indices=order, shard_num_samples=7, intra_shard_indices=samples
    )
    restore(loader, state)
    assert loader.next_batch()[0][0, 0] == 2050


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shard_indices": np.arange(4, dtype=np.int32)}, "has 4 shards and .* has 3: .*-b, -t"),
        ({"shard_num_samples": 99}, "has 99 samples in the current shard"),
        ({"should_shuffle": False}, "in order and this run reads it shuffled"),
        ({"shard_indices": np.array([0, 0, 1], np.int32)}, "not a permutation"),
        ({"current_shard_idx": 3}, "not a permutation"),
        ({"current_sample_idx": 1000}, "not a permutation"),
        ({"shuffle_rng": b""}, "0 bytes, expected 2520"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(shards, change, message):
    loader, untouched = (TokenLoader(shards, 2, 5, shuffle=True) for _ in range(2))
    with pytest.raises(UserError, match=message):
        restore(loader, dataclasses.replace(loader.state(), **change))
    assert_same(batches(loader, 30), batches(untouched, 30))


def test_an_ordered_state_beyond_the_data_is_refused(shards):
    loader = TokenLoader(shards, 2, 5)
    with pytest.raises(UserError, match="at least 4 shards"):
        restore(loader, dataclasses.replace(loader.state(), current_shard_idx=3))
    with pytest.raises(UserError, match="at least 11 samples"):
        restore(loader, dataclasses.replace(loader.state(), current_sample_idx=11))


def test_tokens_beyond_two_gib_are_reached(tmp_path):
    """llm.c's seek offset is a 32-bit int. The file is sparse: 2.4 GB long, a few kB on the disk."""
    path, count, place = tmp_path / "big.bin", 1_200_000_001, 1_199_999_000
    tail = np.arange(1001, dtype=np.uint16)
    with open(path, "wb") as file:
        file.write(case_a.header(20240520, 1, count))
        file.seek(1024 + 2 * place)
        file.write(tail.tobytes())
    loader = TokenLoader(str(path), 2, 50)
    restore(loader, dataclasses.replace(loader.state(), current_sample_idx=place // 100))
    inputs, targets = loader.next_batch()
    np.testing.assert_array_equal(inputs.ravel(), tail[:100])
    np.testing.assert_array_equal(targets.ravel(), tail[1:101])


def test_a_shard_smaller_than_a_batch_says_the_arithmetic(shards):
    arithmetic = r"s_1.bin holds 60 tokens, and one batch takes 61 \(-b 2 times -t 10 times 3 data-parallel ranks, plus 1\)"
    with pytest.raises(UserError, match=arithmetic):
        TokenLoader(shards, 2, 10, data_ranks=3)


def test_a_token_outside_the_vocabulary_is_named_with_its_place(tmp_path):
    tokens = np.zeros(50, np.uint16)
    tokens[33] = 96
    write_shard(tmp_path / "x.bin", tokens)
    loader = TokenLoader(str(tmp_path / "x.bin"), 2, 5, vocab_size=96)
    batches(loader, 3)
    with pytest.raises(UserError, match="x.bin: token 96 at position 33 is outside the model's vocabulary of 96"):
        loader.next_batch()


@pytest.mark.parametrize("shuffle", [False, True])
def test_looking_ahead_changes_neither_what_is_served_nor_the_place(shards, shuffle):
    """By any number of batches, also beyond a shard and an epoch of 22; a reset and a restore forget what was looked at."""
    plain, looking = (TokenLoader(shards, 2, 5, shuffle=shuffle) for _ in range(2))
    places = []
    for turn, ahead in enumerate([0, 1, 7, 3, 0, 30, 2, 50] * 8):
        looking.look_ahead(ahead)
        assert_same(batches(looking, 1), batches(plain, 1))
        for mine, his in zip(dataclasses.astuple(looking.state()), dataclasses.astuple(plain.state()), strict=True):
            np.testing.assert_array_equal(mine, his)
        places.append(plain.state())
        if turn % 11 == 10:
            looking.look_ahead(ahead)
            looking.reset(), plain.reset()
        if turn % 17 == 16:
            looking.look_ahead(ahead)
            restore(looking, places[turn // 2]), restore(plain, places[turn // 2])


@pytest.mark.parametrize("position", [33, 60])
def test_a_bad_token_ahead_is_named_and_the_batches_before_it_are_served(tmp_path, position):
    """Also if it is a batch's last target, which the batch before the one that begins with it needs too."""
    tokens = np.zeros(101, np.uint16)
    tokens[position] = 96
    write_shard(tmp_path / "x.bin", tokens)
    loader, good = TokenLoader(str(tmp_path / "x.bin"), 2, 5, vocab_size=96), (position - 1) // 10
    loader.look_ahead(good)
    for _ in range(2):  # and again, if asked again
        with pytest.raises(UserError, match=f"x.bin: token 96 at position {position} is outside"):
            loader.look_ahead(good + 1)
    assert len(batches(loader, good)) == good
    with pytest.raises(UserError, match=f"token 96 at position {position}"):
        loader.next_batch()
    assert loader.state().current_sample_idx == good


def test_a_shard_that_is_gone_is_met_ahead_of_its_first_batch(tmp_path):
    for name in "ab":
        write_shard(tmp_path / f"{name}.bin", np.zeros(41, np.uint16))
    loader = TokenLoader(str(tmp_path / "*.bin"), 2, 5)
    (tmp_path / "b.bin").unlink()
    loader.look_ahead(4)
    with pytest.raises(UserError, match="b.bin does not exist"):
        loader.look_ahead(5)
    batches(loader, 4)


def test_a_shard_that_is_another_than_it_was_is_refused_however_it_is_entered(tmp_path):
    """By going on, looking ahead or returning to it; longer or shorter, even by so much that the place would be outside."""
    for name in "ab":
        write_shard(tmp_path / f"{name}.bin", np.zeros(41, np.uint16))
    loader = TokenLoader(str(tmp_path / "*.bin"), 2, 5, shuffle=True)
    batches(loader, 6)
    in_second = loader.state()
    for size in (9, 31, 51):
        for name in "ab":
            write_shard(tmp_path / f"{name}.bin", np.zeros(size, np.uint16))
        for go in (partial(loader.look_ahead, 3), partial(restore, loader, in_second), loader.reset):
            with pytest.raises(UserError, match=f"[ab].bin held 41 tokens when this run began and holds {size} now; put the old file back"):
                go()
    batches(loader, 2)  # of what is open
    loader.rewind(4)
    assert len(batches(loader, 4)) == 4


@pytest.mark.parametrize("place", ["shards", "rest"])
def test_looking_ahead_over_more_shards_than_may_be_open_is_served(tmp_path, place):
    """In order and after a rewind; and where what is left of an epoch lies in one shard, which each batch opens."""
    count = 3 if place == "rest" else 120
    for s in range(count):
        write_shard(tmp_path / f"{s:03}.bin", 11 * s + np.arange(11))
    loader = TokenLoader(str(tmp_path / "*.bin"), 2, 5)
    if place == "rest":
        remainder = Remainder(np.array([[11, 21]]), loader.geometry)
        loader._go_to(dataclasses.replace(loader._cursor, rest=Rest(remainder, np.zeros(120, np.int64), 0)))
    expected = np.stack([np.arange(10).reshape(2, 5) + 11 * (1 if place == "rest" else s) for s in range(120)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        loader.look_ahead(120)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    np.testing.assert_array_equal([inputs for inputs, _ in batches(loader, 120)], expected)
    if place == "shards":
        for _ in range(2):
            loader.rewind(120)
            np.testing.assert_array_equal([inputs for inputs, _ in batches(loader, 130)][:120], expected)


def test_a_rewind_goes_on_where_it_ended_in_the_middle_of_a_shard(tmp_path):
    """Served beyond before, and then again."""
    for s in range(3):
        write_shard(tmp_path / f"{s}.bin", 100 * s + np.arange(31))
    loader, straight = (TokenLoader(str(tmp_path / "*.bin"), 2, 5) for _ in range(2))
    expected = batches(straight, 9)
    loader.rewind(4)
    assert_same(batches(loader, 7), expected[:7])
    loader.rewind(4)
    assert_same(batches(loader, 9), expected)


def test_batches_that_were_looked_at_outlive_their_file(tmp_path):
    """The place stays where it was if reading the one after them fails."""
    path = tmp_path / "x.bin"
    write_shard(path, range(101))
    loader = TokenLoader(str(path), 2, 5)
    loader.look_ahead(3)
    os.truncate(path, 1024 + 2 * 21)
    assert_same(batches(loader, 3), batches_of(range(31), 10))
    for _ in range(2):
        with pytest.raises(UserError, match="x.bin cannot be read beyond byte 1084: it was cut short"):
            loader.next_batch()
    assert loader.state().current_sample_idx == 3


def test_the_first_batches_are_served_again_and_again_whatever_becomes_of_their_file(tmp_path):
    """From wherever the loader was; more of them than before are read anew, or refused."""
    path = tmp_path / "x.bin"
    write_shard(path, range(101))
    loader = TokenLoader(str(path), 2, 5)
    batches(loader, 5)
    loader.rewind(3)
    os.truncate(path, 1024 + 2 * 21)
    for served in (3, 1, 0, 2, 3):
        loader.rewind(3)
        assert_same(batches(loader, served), batches_of(range(31), 10)[:served])
        assert loader.state().current_sample_idx == served
    for _ in range(2):
        with pytest.raises(UserError, match="cut short"):
            loader.rewind(4)
    loader.rewind(2)
    assert_same(batches(loader, 3), batches_of(range(31), 10))


def test_a_shard_that_is_gone_is_met_no_sooner_than_its_batch(shards, tmp_path):
    """In what is left of an epoch the batch after it may be of a shard that is gone."""
    order = np.array([0, 1])
    remainder = Remainder(np.array([[0, 10], [101, 111]]), Geometry(2, 5, 1))
    loader = TokenLoader(shards, 2, 5, shuffle=True)
    (tmp_path / "s_1.bin").unlink()
    loader._go_to(dataclasses.replace(loader._cursor, rest=Rest(remainder, order, 0)))
    loader.look_ahead(1)
    np.testing.assert_array_equal(batches(loader, 1)[0][0].ravel(), np.arange(10))
    with pytest.raises(UserError, match="s_1.bin does not exist"):
        loader.look_ahead(1)
