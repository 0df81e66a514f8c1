"""The generators repeat torch's and llm.c's numbers bit for bit, also after a trip through a file."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.errors import UserError
from llmc.rand import BLOCK, MersenneTwister, XorShift

GOLDEN = json.loads((Path(__file__).parent / "golden/rand_42.json").read_text())


def after(draws, seed=42):
    twister = MersenneTwister(seed)
    for _ in range(draws):
        twister.u32()
    return twister


def test_u32_draws_are_llmc_s():
    twister = MersenneTwister(42)
    assert [twister.u32() for _ in range(8)] == GOLDEN["u32"]


def test_permutation_is_llmc_s():
    """The golden file draws 8 u32, 40 normals (40 + 16 for the ragged tail) and 7 normals (4 pairs of doubles) first."""
    twister = after(8 + (40 + 16) + 4 * 4)
    items = np.arange(20, dtype=np.int32)
    twister.permute(items)
    assert items.tolist() == GOLDEN["perm20"]


def test_permuting_leaves_the_stream_where_single_draws_would():
    vector, single = MersenneTwister(7), MersenneTwister(7)
    items = np.arange(1000)
    vector.permute(items)
    for _ in range(999):
        single.u32()
    assert sorted(items.tolist()) == list(range(1000))
    assert vector.to_bytes() == single.to_bytes()


def test_permuting_one_element_or_none_draws_nothing():
    twister = MersenneTwister(7)
    twister.permute(np.arange(1))
    twister.permute(np.arange(0))
    assert twister.to_bytes() == MersenneTwister(7).to_bytes()


@pytest.mark.parametrize("draws", [0, 1, 623, 624, 625, 1000])
def test_packed_state_continues_the_same_stream(draws):
    twister = after(draws)
    packed = twister.to_bytes()
    again = MersenneTwister.from_bytes(packed)
    assert len(packed) == 2520
    assert again.to_bytes() == packed
    assert [again.u32() for _ in range(700)] == [twister.u32() for _ in range(700)]
    assert again.to_bytes() == twister.to_bytes()


@pytest.mark.parametrize("draws", [0, 1, 623, 624, 625, 1000])
def test_packed_state_is_what_torch_keeps(draws):
    """seed, left, next and the 624 words, read out of torch's own serialised generator (there, each word takes 8 bytes)."""
    generator = torch.Generator().manual_seed(42)
    torch.empty(draws, dtype=torch.int32).random_(generator=generator)  # one u32 per element
    raw = generator.get_state().numpy().tobytes()
    seed, left, _, drawn = struct.unpack_from("<QiiQ", raw)
    words = struct.unpack_from(f"<{BLOCK}Q", raw, 24)
    assert struct.unpack_from(f"<QiI{BLOCK}I", after(draws).to_bytes()) == (seed, left, drawn, *words)


def test_damaged_state_is_refused():
    packed = MersenneTwister(42).to_bytes()
    with pytest.raises(UserError, match="2519 bytes, expected 2520"):
        MersenneTwister.from_bytes(packed[:-1])
    with pytest.raises(UserError, match="not a Mersenne Twister"):
        MersenneTwister.from_bytes(packed[:-4] + b"\0\0\0\0")
    with pytest.raises(UserError, match="not a Mersenne Twister"):
        MersenneTwister.from_bytes(packed[:8] + struct.pack("<iI", 5, 5) + packed[16:])


def test_xorshift_is_llmc_s():
    generator = XorShift(1337)
    drawn = np.array([generator.f32() for _ in range(8)])
    np.testing.assert_allclose(drawn, GOLDEN["xorshift_f32"], atol=5e-9)
    assert generator.state == GOLDEN["xorshift_state"]
    assert (drawn.astype(np.float32) == drawn).all()
