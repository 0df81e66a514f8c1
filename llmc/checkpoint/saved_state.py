"""A checkpoint's training state as one whole, however many ranks wrote it and whether each kept all of it or a share.

With ZeRO a rank's file holds its 1/num_processes slice of each layer's elements, tensor after tensor in file order and, within a
tensor, layer after layer; a tensor without layers counts as one layer. Without ZeRO each file holds everything. Readers ask for
elements in the order of a whole file and need not know which it is. Source: llm.c train_gpt2.cu, gpt2_get_tensor_at_layer.
"""

import os

import numpy as np

from llmc.checkpoint.extra_file import Extra, read_extra
from llmc.checkpoint.state_file import (
    NUM_PROCESSES, STEP, USE_MASTER_WEIGHTS, TrainingState, has_master, read_facts, read_state_header, tensor_offset,
)  # fmt: skip
from llmc.checkpoint.store import extra_path, state_path
from llmc.config import ModelConfig
from llmc.errors import RESUME_FROM_ANOTHER, UserError
from llmc.files import Numbers
from llmc.memory.layout import flat_layout
from llmc.memory.tables import num_parameters, state_tensors

# entries of the header in which all files of a checkpoint must agree
AGREED = {"the number of processes": NUM_PROCESSES, "whether there are master weights, 0 no, 1 yes": USE_MASTER_WEIGHTS}


class SavedState:
    """All state files of the checkpoint of `step` in `folder`, for a model of `config`.

    num_processes       ranks that wrote it
    sharded             whether each rank's file holds only its share of m, v and master
    use_master_weights  whether they hold a master
    Opening reads headers and loader sections. Raises UserError, naming the file, unless all files are whole and of one run.
    """

    def __init__(self, folder, step: int, config: ModelConfig):
        self.folder, self.step = folder, step
        first = self._checked_header(0)
        self.num_processes, self.use_master_weights = int(first[NUM_PROCESSES]), bool(first[USE_MASTER_WEIGHTS])
        self._layers = layers(config)
        whole = num_parameters(config)
        held = (whole, whole // self.num_processes)  # elements in a whole file, in a shard
        self._states: list[TrainingState] = []
        for rank in range(self.num_processes):
            path, header = state_path(folder, step, rank), self._checked_header(rank)
            for what, entry in AGREED.items():
                self._agree(path, what, int(header[entry]), int(first[entry]))
            state, sharded = read_whole_or_shard(path, self.num_processes, whole, self._layers, like=self.sharded if rank else None)
            if rank == 0:
                self.sharded, self._file_parameters = sharded, held[sharded]
            self._agree(path, "how many parameters a file holds", held[sharded], self._file_parameters)
            self._states.append(state)
        self._numbers: Numbers | None = None  # those of the file that was read last

    def _checked_header(self, rank: int) -> np.ndarray:
        path = state_path(self.folder, self.step, rank)
        header = read_state_header(path, rank)
        if header[STEP] != self.step:
            raise UserError(
                f"{path} says that it was written at step {header[STEP]}; "
                f"expected {self.step}, so the file is not the one of this checkpoint; {RESUME_FROM_ANOTHER}"
            )
        return header

    def _agree(self, path, what: str, found: int, expected: int) -> None:
        if found != expected:
            raise UserError(
                f"{path} and the file of rank 0 disagree on {what}: {found} and {expected}; they are not of one run, "
                f"so {RESUME_FROM_ANOTHER}"
            )

    def state_of(self, rank: int) -> TrainingState:
        """That rank's TrainingState, its loader's place included."""
        return self._states[rank]

    def extra_of(self, rank: int) -> Extra:
        """That rank's extra file. Raises UserError when it is damaged."""
        return read_extra(extra_path(self.folder, self.step, rank))

    def read(self, name: str, at: int, n: int) -> np.ndarray:
        """Elements at..at+n of m, v or master, in the order of a whole file; float32 (n,), in memory of its own.

        Files are read, not mapped: a map's pages count as the process's own memory once they are touched.
        """
        assert name in state_tensors(self.use_master_weights) and 0 <= at and 0 <= n and at + n <= self._layers[-1][1]
        if not self.sharded:
            return self._read_file(name, 0, at, n)
        out, filled = np.empty(n, np.float32), 0
        while filled < n:
            rank, place, count = self._find(at + filled, n - filled)
            out[filled : filled + count] = self._read_file(name, rank, place, count)
            filled += count
        return out

    def close(self) -> None:
        """Let go of the file that was read last."""
        if self._numbers is not None:
            self._numbers.close()

    def _find(self, at: int, most: int) -> tuple[int, int, int]:
        """The rank whose file has element `at` of the whole, its place there, and how many elements from it on are consecutive in both."""
        start, end = self._layers[np.searchsorted(self._layers[:, 1], at, side="right")].tolist()
        share = (end - start) // self.num_processes
        rank, inside = divmod(at - start, share)
        return rank, start // self.num_processes + inside, min(most, share - inside)

    def _read_file(self, name: str, rank: int, at: int, n: int) -> np.ndarray:
        path = state_path(self.folder, self.step, rank)
        if self._numbers is None or self._numbers.path != path:
            self.close()
            self._numbers = Numbers(path, "<f4", 0)
        return self._numbers.read(tensor_offset(name, self._file_parameters) // 4 + at, n)


def layers(config: ModelConfig) -> np.ndarray:
    """(n, 2) int64: first element and end of each layer of each tensor, in file order: the units that ZeRO cuts into equal shares."""
    return np.array([(t.layer(l).start, t.layer(l).stop) for t in flat_layout(config) for l in range(t.layers)], np.int64)


def read_whole_or_shard(path, num_processes: int, whole: int, layers: np.ndarray, like: bool | None) -> tuple[TrainingState, bool]:
    """The TrainingState in a state file whose header is good, and whether its length is that of a shard rather than of the whole.

    whole  number of the model's parameters
    like   whether the checkpoint's first file is a shard; None for that file itself
    Raises UserError for a file that is neither: what is wrong with it as what the first is, or as what the first is long enough to be.
    """
    if ((layers[:, 1] - layers[:, 0]) % num_processes).any():
        return read_facts(path, whole), False
    errors = []
    for sharded, held in ((False, whole), (True, whole // num_processes)):
        try:
            return read_facts(path, held), sharded
        except UserError as error:
            errors.append(error)
    as_whole, as_shard = errors
    if like is None:
        last = state_tensors(has_master(path))[-1]
        like = os.path.getsize(path) < tensor_offset(last, whole) + 4 * whole
    raise as_shard if like else as_whole
