"""Which positions of a batch hold the same token: the sort on the host against grouping in plain Python."""

import numpy as np
import pytest
import torch
from case_a import restore

from llmc.data.loader import TokenLoader
from llmc.data.order import token_order
from llmc.data.shards import write_shard


def tokens(shape, below, seed=0, dtype=np.int64, start=0):
    return np.random.default_rng(seed).integers(start, below, shape).astype(dtype)


CASES = {
    "one token": np.array([[7]]),
    "the token 0 alone": np.array([[0]]),
    "all the same": np.full((3, 7), 41),
    "two of them, alternating": np.arange(26).reshape(2, 13) % 2,
    "all different": np.random.default_rng(1).permutation(77).reshape(7, 11),
    "falling": np.arange(60)[::-1].reshape(4, 15),
    "primes": tokens((3, 7), 11),
    "a few frequent ones": tokens((5, 101), 4) * 25000,
    "as large as a shard's ids": tokens((4, 64), 1 << 16),
    "65535 and below": np.array([[65535, 0, 65535, 1], [65534, 65535, 0, 65534]]),
    "65536 and below": np.array([[65536, 65535, 65536, 0], [1, 0, 65536, 65535]]),  # in 16 bits 65536 is 0
    "ids beyond 65536": tokens((3, 37), 200_000, start=65_530),
    "just below 2**31": tokens((2, 50), 2**31 - 1, start=2**31 - 5),
    "one sequence": tokens((31,), 5),
    "GPT-2's": tokens((16, 1024), 50257),
}
every_case = pytest.mark.parametrize("inputs", CASES.values(), ids=CASES)


def grouped(inputs):
    """{token: its positions, ascending}, tokens in ascending order."""
    groups = {}
    for position, token in enumerate(np.asarray(inputs).ravel().tolist()):
        groups.setdefault(token, []).append(position)
    return dict(sorted(groups.items()))


def as_groups(order):
    """The same from a TokenOrder."""
    starts = order.starts.tolist()
    return {token: order.positions[a:b].tolist() for token, a, b in zip(order.tokens.tolist(), starts, starts[1:])}


def assert_is_the_order_of(order, inputs):
    inputs, want = np.asarray(inputs), grouped(inputs)
    assert as_groups(order) == want and list(as_groups(order)) == list(want)
    assert len(order.tokens) == len(want) and len(order.starts) == len(want) + 1
    assert order.starts[0] == 0 and order.starts[-1] == inputs.size == len(order.positions)
    assert (np.diff(order.starts) > 0).all()  # no group is empty
    for field in ("positions", "tokens", "starts"):
        assert getattr(order, field).dtype == np.int32, field


@every_case
def test_positions_are_grouped_by_token_and_ascend_within_one(inputs):
    order = token_order(inputs)
    assert_is_the_order_of(order, inputs)
    assert sorted(order.positions.tolist()) == list(range(inputs.size))
    for group in as_groups(order).values():
        assert group == sorted(group)


@every_case
def test_the_inputs_stay_as_they_are(inputs):
    kept = inputs.copy()
    token_order(inputs)
    assert np.array_equal(inputs, kept)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint32, np.uint64])
def test_any_integer_type_gives_the_same_order(dtype):
    ids = tokens((5, 23), 60_000)
    order, other = token_order(ids), token_order(ids.astype(dtype))
    for field in ("positions", "tokens", "starts"):
        assert np.array_equal(getattr(order, field), getattr(other, field))


def test_tensors_and_strided_views_are_taken_as_they_read():
    ids = tokens((6, 17), 9)
    assert_is_the_order_of(token_order(torch.from_numpy(ids)), ids)
    for view in (ids.T, ids[::2, ::3], ids[:, ::-1]):
        assert_is_the_order_of(token_order(view), view)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_loader_s_order_is_that_of_the_batch_just_served(tmp_path, shuffle):
    """Over several shards and epochs, and after a reset and a restore: never the next batch, which the loader has read ahead."""
    for i, size in enumerate((101, 60, 77)):
        write_shard(tmp_path / f"s_{i}.bin", tokens(size, 13, seed=i))
    loader = TokenLoader(str(tmp_path / "s_*.bin"), 3, 5, shuffle=shuffle)
    seen, place = set(), None
    for turn in range(40):
        if turn == 25:
            loader.reset()
        if turn == 30:
            restore(loader, place)
        inputs, _ = loader.next_batch()
        served = inputs.copy()
        if turn == 10:
            place = loader.state()
        assert_is_the_order_of(loader.token_order(), served)
        assert_is_the_order_of(loader.token_order(), served)  # asking changes nothing
        assert np.array_equal(inputs, served)
        seen.add(served.tobytes())
    assert len(seen) > 10  # the batches differ, so that an order of another one would show


def test_an_order_outlives_its_batch(tmp_path):
    """The loader's buffer is overwritten by the next batch; an order that was asked for before is not."""
    write_shard(tmp_path / "s_0.bin", tokens(500, 13))
    loader = TokenLoader(str(tmp_path / "s_0.bin"), 3, 5)
    served = loader.next_batch()[0].copy()
    order = loader.token_order()
    loader.next_batch()
    assert_is_the_order_of(order, served)
