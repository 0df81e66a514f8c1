"""The loader that serves training and validation batches from token shards, in llm.c's order for any number of ranks."""

import os
import zlib
from collections import deque
from dataclasses import replace

import numpy as np

from llmc.data.order import TokenOrder, token_order
from llmc.data.remainder import Geometry, pack
from llmc.data.shards import count_tokens, find_shards
from llmc.data.walk import Cursor, LoaderState, Piece, Rest, Walk, check_permutations, state_of
from llmc.errors import UserError
from llmc.rand import MersenneTwister


class TokenLoader:
    """Batches of (inputs, targets) from the shards that `pattern` names.

    Epochs follow each other without end. With `shuffle`, the order of the shards and that of the samples within each shard are
    shuffled. Headers and sizes of all shards are checked at the start, so that a run does not stop in the night; tokens are checked when
    they are read, which can be ahead of time (`look_ahead`). A run resumed with another batch shape, number of data ranks or set of
    shards is first served what is left of its epoch (`go_on`).
    seed, 0 to 65535, begins another order; 0 is llm.c's.
    Raises UserError for files that are missing, damaged or smaller than one batch.
    """

    def __init__(self, pattern, B, T, *, rank=0, data_ranks=1, shuffle=False, vocab_size=65536, flag="-i", seed=0):
        self.geometry, self.rank = Geometry(B, T, data_ranks), rank
        self.vocab_size, self.flag, self.pattern = vocab_size, flag, pattern
        self.paths = find_shards(pattern, flag)
        sizes = [self._checked_size(path) for path in self.paths]
        self.shards = [(os.path.basename(path), num_tokens) for path, num_tokens in zip(self.paths, sizes)]
        self.num_tokens = sum(sizes)
        self.num_batches = sum(map(self.geometry.samples_in, sizes))  # in one epoch
        self._walk = Walk(self.paths, sizes, self.geometry, rank)
        self._again = ()
        self._buffer = np.empty((2, B, T), dtype=np.int64)
        # llm.c seeds by rank, so each rank walks the shards in its own order; a further seed's are far from those of any rank
        self._first = self._walk.begin(MersenneTwister(42 + rank + (seed << 16)) if shuffle else None)
        self._go_to(self._first)

    def summary(self) -> str:
        """The data in a few words, which differ if names or sizes of the shards do."""
        names = zlib.crc32(repr(self.shards).encode())
        return f"{len(self.shards)} shards of {self.num_tokens} tokens ({names:08x})"

    def reset(self) -> None:
        """Begin the next epoch. The generator continues from its present state, so every epoch has a different order."""
        self._go_to(self._walk.begin(self._cursor.rng, self._cursor.shard_indices))

    def rewind(self, batches: int) -> None:
        """Go back to the very first batch, to serve that many batches from there. They are read on the first call, and kept.

        Raises UserError as `look_ahead` does.
        """
        if len(self._again) < batches:
            self._go_to(self._first)
            self.look_ahead(batches)
            self._again = tuple(self._coming)
        self._cursor, self._coming = self._first, deque(self._again)

    def look_ahead(self, batches: int) -> None:
        """Read and check the next `batches` batches. They are kept, two bytes a token, and served whatever becomes of their files.
        Looking ahead changes neither what is served nor `state`.

        Raises UserError at the first batch that cannot be served, e.g. for a token outside the vocabulary; earlier ones are still served.
        """
        while len(self._coming) < batches:
            before = self._coming[-1][0] if self._coming else self._cursor
            cursor = self._walk.after(before)
            self._coming.append((cursor, [self._read(piece) for piece in cursor.batch]))
            self._let_go(cursor)

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """The next inputs and targets, int64 (B, T) each. A target is the token after its input in the shard, even at the end of a piece.

        Both are views of one buffer that the next call overwrites. Raises UserError as `look_ahead` does.
        """
        self.look_ahead(1)
        self._cursor, pieces = self._coming.popleft()
        inputs, targets = self._buffer.reshape(2, -1)
        filled = 0
        for tokens in pieces:
            n = len(tokens) - 1
            inputs[filled : filled + n], targets[filled : filled + n] = tokens[:-1], tokens[1:]
            filled += n
        return self._buffer[0], self._buffer[1]

    def close(self) -> None:
        """Let go of the shards, from which nothing more is read."""
        self._walk.close()

    def token_order(self) -> TokenOrder:
        """Which positions of the inputs just served hold the same token. Best called while the device is already busy."""
        return token_order(self._buffer[0])

    def state(self) -> LoaderState:
        """Where the loader is: one that goes on from here serves what this one would now."""
        return state_of(self._cursor)

    def data_state(self) -> dict:
        """What `state` has no room for, as plain values for the extra file: names and lengths of the shards, and any remainder."""
        data = {"shards": [list(shard) for shard in self.shards]}
        if rest := self._cursor.rest:
            data["remainder"] = {"intervals": pack(rest.remainder.intervals), "served": rest.served}
        return data

    def go_on(self, continued) -> None:
        """Continue as llmc.data.resume.plan_resume decided: at a saved place, or at the start of an epoch; any remainder is served first.

        Raises UserError, and then stays where it was, if these shards and this batch shape have no such place.
        """
        if continued.state:
            cursor = self._cursor_of(continued.state)
        else:
            self.check_shuffle(continued.should_shuffle)
            cursor = self._walk.begin(MersenneTwister(continued.seed) if self._shuffles else None)
        if remainder := continued.remainder:
            assert remainder.geometry == self.geometry
            cursor = replace(cursor, rest=Rest(remainder, remainder.order(self.rank), continued.served))
        self._go_to(cursor)

    def check_shuffle(self, saved: bool) -> None:
        """Raise UserError if the checkpoint shuffled its data (`saved`) and this run does not, or the reverse."""
        if saved != self._shuffles:
            was, now = ("shuffled", "in order") if saved else ("in order", "shuffled")
            raise UserError(
                f"the checkpoint was reading its training data {was} and this run reads it {now}; "
                "resume with the -a of the run it comes from"
            )

    @property
    def _shuffles(self) -> bool:
        return self._cursor.rng is not None

    def _go_to(self, cursor: Cursor) -> None:
        self._cursor, self._coming = cursor, deque()  # _coming: those after it that were read ahead, and the tokens of their pieces
        self._let_go(cursor)

    def _let_go(self, cursor: Cursor) -> None:
        """Let go of the shards of other places: batches that are kept may be of more of them than the system lets be open."""
        self._walk.keep_open(cursor, self._first, *(last for last, _ in self._again[-1:]))

    def _cursor_of(self, state: LoaderState) -> Cursor:
        """The cursor that a state describes. Raises UserError if it does not exist with these shards and this batch shape."""
        self.check_shuffle(state.should_shuffle)
        shuffled, shard_indices = state.should_shuffle, self._cursor.shard_indices
        if shuffled:
            self._match("shards", len(state.shard_indices), len(self.paths))
            check_permutations(state)
            shard_indices = np.asarray(state.shard_indices, dtype=np.int32)
        elif state.current_shard_idx >= len(self.paths):
            self._match("shards", f"at least {state.current_shard_idx + 1}", len(self.paths))
        number = shard_indices[state.current_shard_idx]
        shard, num_samples = self._walk.open(number), self.geometry.samples_in(self._walk.sizes[number])
        if shuffled:
            self._match("samples in the current shard", state.shard_num_samples, num_samples)
        elif state.current_sample_idx > num_samples:
            self._match("samples in the current shard", f"at least {state.current_sample_idx}", num_samples)
        rng, sample_indices = None, None
        if shuffled:
            rng, sample_indices = MersenneTwister.from_bytes(state.shuffle_rng), np.asarray(state.intra_shard_indices, dtype=np.int32)
        return Cursor(rng, shard_indices, state.current_shard_idx, shard, num_samples, sample_indices, state.current_sample_idx)

    def _match(self, what: str, saved, found) -> None:
        if saved != found:
            raise UserError(
                f"the checkpoint's training data has {saved} {what} and {self.flag} {self.pattern} has {found}: the files, -b, -t or "
                f"the number of data-parallel ranks changed since; resume with the same ones"
            )

    def _checked_size(self, path: str) -> int:
        num_tokens = count_tokens(path)
        if not self.geometry.samples_in(num_tokens):
            g = self.geometry
            raise UserError(
                f"{self.flag} {path} holds {num_tokens} tokens, and one batch takes {g.sample_tokens + 1} (-b {g.B} times -t {g.T} times "
                f"{g.ranks_in_words}, plus 1); choose a smaller -b or -t, or leave this shard out"
            )
        return num_tokens

    def _read(self, piece: Piece) -> np.ndarray:
        """The tokens of a piece, and its last target. Raises UserError unless all are in the model's vocabulary."""
        tokens = piece.shard.read(piece.start, piece.end - piece.start + 1)
        if tokens.max() >= self.vocab_size:
            place = int(np.argmax(tokens >= self.vocab_size))
            raise UserError(
                f"{self.flag} {piece.shard.path}: token {tokens[place]} at position {piece.start + place} is outside the model's "
                f"vocabulary of {self.vocab_size}; prepare the data with this model's tokenizer, or choose another model"
            )
        return tokens
