"""The two random generators llm.c's runs depend on, bit for bit: torch's Mersenne Twister and xorshift*.

The twister orders the training data, xorshift* seeds the stochastic rounding and draws the sampler's coins. Sources:
Matsumoto and Nishimura's mt19937, Vigna's xorshift64*, and llm.c's llmc/rand.h for how their state is laid out in a file.
"""

import struct

import numpy as np

from llmc.errors import RESUME_FROM_ANOTHER, UserError

BLOCK = 624  # the twister makes its numbers this many at a time
STATE_STRUCT = struct.Struct("<Qi I 624I 2I")  # seed, left, next, state, matrix_a: llm.c's mt19937_state, raw
MATRIX_A = (0, 0x9908B0DF)


class MersenneTwister:
    """torch.Generator's CPU stream: the same numbers after the same seed, and llm.c's 2520 bytes to keep it in a file."""

    def __init__(self, seed: int):
        """Start from `seed`, an integer in [0, 2**32)."""
        self.seed = seed
        self._bits = np.random.MT19937(0)
        # numpy's legacy seeding is mt19937's own init_genrand, as torch's is; the seed given to MT19937() would be hashed first
        self._bits.state = np.random.RandomState(seed).get_state(legacy=False)
        self._drawn = False

    def u32(self) -> int:
        """The next 32 bits."""
        self._drawn = True
        return int(self._bits.random_raw())

    def permute(self, array: np.ndarray) -> None:
        """Shuffle a 1-d array in place: for i from n-1 down to 1, swap a[i] with a[u32 % (i+1)]. Takes n-1 draws."""
        n = len(array)
        if n < 2:
            return
        self._drawn = True
        # one call for all draws; the swaps depend on each other, and run twice as fast on a list as on an array
        picks = self._bits.random_raw(n - 1) % np.arange(n, 1, -1, dtype=np.uint64)
        items = array.tolist()
        for i, j in zip(range(n - 1, 0, -1), picks.tolist()):
            items[i], items[j] = items[j], items[i]
        array[:] = items

    def to_bytes(self) -> bytes:
        """The state as llm.c's C struct, 2520 bytes."""
        state = self._bits.state["state"]
        drawn = int(state["pos"]) if self._drawn else 0  # numpy says 624 both for "block used up" and for "just seeded"
        left = BLOCK - drawn + 1 if self._drawn else 1
        return STATE_STRUCT.pack(self.seed, left, drawn, *state["key"].tolist(), *MATRIX_A)

    @classmethod
    def from_bytes(cls, data: bytes) -> "MersenneTwister":
        """The generator that `to_bytes`, or llm.c, wrote. Raises UserError for anything else."""
        if len(data) != STATE_STRUCT.size:
            raise UserError(
                f"the saved shuffle generator has {len(data)} bytes, expected {STATE_STRUCT.size}; "
                f"its state file is damaged: {RESUME_FROM_ANOTHER}"
            )
        seed, left, drawn, *words = STATE_STRUCT.unpack(data)
        fresh = (left, drawn) == (1, 0)
        if tuple(words[BLOCK:]) != MATRIX_A or not (fresh or (1 <= drawn <= BLOCK and left == BLOCK - drawn + 1)):
            raise UserError(
                f"the saved shuffle generator is not a Mersenne Twister's state; its state file is damaged: {RESUME_FROM_ANOTHER}"
            )
        twister = cls(0)
        twister.seed = seed  # llm.c leaves this word unset, so it is carried and never used
        key = np.array(words[:BLOCK], dtype=np.uint32)
        twister._bits.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": BLOCK if fresh else drawn}}
        twister._drawn = not fresh
        return twister


class XorShift:
    """Vigna's xorshift64*, as llm.c has it. `state` is the whole generator: an int of 64 bits, never 0."""

    def __init__(self, state: int):
        self.state = state

    def u32(self) -> int:
        """The next 32 bits: the upper half of the scrambled state."""
        x = self.state
        x ^= x >> 12
        x ^= (x << 25) & 0xFFFFFFFFFFFFFFFF
        x ^= x >> 27
        self.state = x
        return (x * 0x2545F4914F6CDD1D & 0xFFFFFFFFFFFFFFFF) >> 32

    def f32(self) -> float:
        """The next number in [0, 1), a multiple of 2**-24, so exact in fp32."""
        return (self.u32() >> 8) / 16777216.0
