"""Multiple-choice evaluation in llm.c's format (HellaSwag, MMLU): which of the completions does the model find likeliest?

The file is 256 int32 (20240522, 1, number of examples, bytes of the longest), then a stream of uint16. Each example is 65535,
its size in bytes (these words included), its index, the label, the number of completions, and then the context and each completion,
each as its length and its tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmc.errors import UserError
from llmc.files import EVAL_MAGIC, HEADER_BYTES, new_header, read_header, write_atomically

EVAL_VERSION = 1
START_EXAMPLE = 65535
NUM_COMPLETIONS = 4  # what llm.c reads; it refuses any other number
REMAKE = "make it again with scripts/prepare_hellaswag.py"


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One question: token ids of the context and of each completion, and the index of the right one (label)."""

    label: int
    context: np.ndarray
    completions: tuple[np.ndarray, ...]


class Row(NamedTuple):
    """One row of a batch: a context followed by one completion."""

    tokens: np.ndarray
    context_length: int


def write_eval_file(path, examples: Iterable[Example]) -> int:
    """Write an eval file for this trainer and llm.c, whole or not at all. Returns their number. Raises UserError if one does not fit."""
    bodies = []
    for index, example in enumerate(examples):
        words = [START_EXAMPLE, 0, index, example.label, len(example.completions)]
        for part in (example.context, *example.completions):
            words += [len(part), *part]
        words[1] = 2 * len(words)
        if index >= 2**16 - 1 or words[1] >= 2**16:  # both are 16 bits wide in the file
            raise UserError(
                f"{path}: example {index} takes {words[1]} bytes; the eval format ends at 65535 examples of 65535 bytes, leave it out"
            )
        bodies.append(np.array(words, dtype="<u2"))
    if not bodies:
        raise UserError(f"{path}: there are no examples to write; check the input")
    header = new_header(EVAL_MAGIC, EVAL_VERSION, len(bodies), max(body.nbytes for body in bodies))
    write_atomically(path, (header, *bodies), doing="writing the examples")
    return len(bodies)


def read_eval_file(path) -> list[Example]:
    """All examples of an eval file, checked. Raises UserError, which names a damaged example."""
    _, version, num_examples, *_ = read_header(path, EVAL_MAGIC).tolist()
    if version != EVAL_VERSION:
        raise UserError(f"{path} is an eval file of version {version}, expected {EVAL_VERSION}; {REMAKE}")
    raw = Path(path).read_bytes()[HEADER_BYTES:]
    stream = np.frombuffer(raw[: len(raw) // 2 * 2], dtype="<u2")
    if num_examples <= 0:
        raise UserError(f"{path} says it holds {num_examples} examples; expected at least one, {REMAKE}")
    examples, at = [], 0
    for index in range(num_examples):
        head = stream[at : at + 3].tolist()
        num_words = head[1] // 2 if len(head) == 3 else 0
        if len(head) < 3 or at + num_words > len(stream):
            raise UserError(f"{path} is cut short in example {index} of {num_examples}; copy or {REMAKE}")
        if head[0] != START_EXAMPLE or head[2] != index:
            raise UserError(
                f"{path} is damaged at example {index}: found delimiter {head[0]} and index {head[2]}, "
                f"expected {START_EXAMPLE} and {index}; {REMAKE}"
            )
        examples.append(_parse_example(stream[at + 3 : at + num_words], f"{path}: example {index}"))
        at += num_words
    if 2 * at != len(raw):
        raise UserError(f"{path} is too long: {len(raw) - 2 * at} bytes follow its {num_examples} examples; copy or {REMAKE}")
    return examples


def _parse_example(words: np.ndarray, name: str) -> Example:
    """The Example in the words that follow its index. `name` identifies it in a UserError."""
    label, num_completions = words[:2].tolist() if len(words) > 1 else (0, 0)
    if num_completions != NUM_COMPLETIONS:
        raise UserError(f"{name} has {num_completions} completions, expected {NUM_COMPLETIONS}; {REMAKE}")
    if label >= num_completions:
        raise UserError(f"{name} has label {label}, expected one from 0 to {num_completions - 1}; {REMAKE}")
    parts, at = [], 2
    for _ in range(1 + num_completions):
        length = int(words[at]) if at < len(words) else 0
        parts.append(words[at + 1 : at + 1 + length])
        if not length or len(parts[-1]) < length:
            raise UserError(f"{name} has a context or completion that is empty or longer than the example; {REMAKE}")
        at += 1 + length
    if at != len(words):
        raise UserError(f"{name} is {len(words) - at} words longer than its parts; {REMAKE}")
    return Example(label, parts[0], tuple(parts[1:]))


class EvalLoader:
    """Scores a model on this rank's share of an eval file, with any batch size.

    The whole file is read and checked at the start (HellaSwag is 4 MB). Raises UserError for a file that is damaged, or that holds an
    example longer than T or a token outside the vocabulary. `num_examples` counts the whole file, not only this rank's share.
    """

    def __init__(self, path, B: int, T: int, *, rank: int = 0, data_ranks: int = 1, vocab_size: int):
        self.B, self.T = B, T
        if not Path(path).exists():
            raise UserError(
                f"-h 1: {path} does not exist; make it with: python scripts/prepare_hellaswag.py, or name another with --hellaswag-data"
            )
        examples = read_eval_file(path)
        self.num_examples = len(examples)
        for index, example in enumerate(examples):
            self._check_fits(example, f"{path}: example {index}", vocab_size)
        per_rank = -(-len(examples) // data_ranks)
        self._examples = examples[rank * per_rank : (rank + 1) * per_rank]
        # the same on all ranks, even on one with fewer examples or none: token_losses may communicate with the other ranks
        self.num_batches = -(-per_rank * NUM_COMPLETIONS // B)
        self._inputs = np.zeros((B, T), dtype=np.int64)
        self._targets = np.zeros((B, T), dtype=np.int64)

    def evaluate(self, token_losses: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> int:
        """How many of this rank's examples the model gets right.

        token_losses(inputs, targets) takes int64 (B, T) twice, reused between calls, and returns the loss at every position,
        float32 (B, T). It is called `num_batches` times. Rows form one stream that is cut into batches, so the rows of one example may
        be spread over several, and no B is too small. Unused positions hold token 0.
        """
        scores, rows = [], self._rows()
        for _ in range(self.num_batches):
            batch = self._fill(rows)
            scores += map(completion_loss, token_losses(self._inputs, self._targets), batch)
        chosen = [likeliest(scores[at : at + NUM_COMPLETIONS]) for at in range(0, len(scores), NUM_COMPLETIONS)]
        return sum(place == example.label for place, example in zip(chosen, self._examples))

    def _rows(self) -> Iterator[Row]:
        for example in self._examples:
            for completion in example.completions:
                yield Row(np.concatenate([example.context, completion]), len(example.context))

    def _fill(self, rows: Iterator[Row]) -> list[Row]:
        """Put the next B rows, or the fewer that are left, into the batch, and return them."""
        self._inputs.fill(0)
        self._targets.fill(0)
        batch = list(islice(rows, self.B))
        for row, inputs, targets in zip(batch, self._inputs, self._targets):
            inputs[: len(row.tokens)] = row.tokens
            targets[: len(row.tokens) - 1] = row.tokens[1:]
        return batch

    def _check_fits(self, example: Example, name: str, vocab_size: int) -> None:
        longest = len(example.context) + max(map(len, example.completions))
        if longest > self.T:
            raise UserError(f"{name} takes {longest} tokens and a row has -t {self.T}; choose a -t of {longest} or more, or -h 0")
        top = max(part.max() for part in (example.context, *example.completions))
        if top >= vocab_size:
            raise UserError(
                f"{name} has token {top}, outside the model's vocabulary of {vocab_size}; prepare it with this model's tokenizer, or -h 0"
            )


def completion_loss(losses: np.ndarray, row: Row) -> np.float32:
    """The mean loss of a row's completion tokens; the last context token predicts the first of them.

    The losses are added one by one in float32, as llm.c does: numpy's own sum adds in pairs and could tip a tie.
    """
    losses = np.asarray(losses[row.context_length - 1 : len(row.tokens) - 1], dtype=np.float32)
    return np.cumsum(losses, dtype=np.float32)[-1] / np.float32(len(losses))


def likeliest(scores: list[np.float32]) -> int:
    """The index of the smallest mean loss, the first of equals. A NaN in place 0 wins, as nothing is less than NaN (as in llm.c)."""
    return min(range(len(scores)), key=scores.__getitem__)
