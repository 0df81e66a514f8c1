"""The tiny case that the golden numbers belong to: a model, two training shards, one for validation, an eval file.

The recipe is part of the golden set, numpy's PCG64 with these seeds and these draws in this order, so the bytes are fixed
(test_shards.py holds their hashes).
"""

from pathlib import Path

import numpy as np

from llmc.checkpoint.snapshot import await_all, begin_snapshot
from llmc.checkpoint.state_file import read_facts, tensor_offset
from llmc.checkpoint.store import mark_done
from llmc.checkpoint.writer import Writer
from llmc.config import ModelConfig
from llmc.data.resume import Continued
from llmc.data.walk import LoaderState
from llmc.memory.tables import PARAMETERS, resolve, sizes_of, state_tensors

CONFIG = ModelConfig(max_seq_len=64, vocab_size=96, num_layers=3, num_heads=4, channels=64, padded_vocab_size=128)
SHARD_TOKENS = {"val.bin": 2000, "train_01.bin": 5000, "train_02.bin": 3333}
EVAL_EXAMPLES, EVAL_T = 50, 32
STD = {"qkvw": 0.08, "fcw": 0.06}  # larger than at a real start, so that attention and GELU have something to do


def header(*entries) -> bytes:
    padded = np.zeros(256, dtype=np.int32)
    padded[: len(entries)] = entries
    return padded.tobytes()


def model_bytes() -> bytes:
    """fp32 model file; biases and layernorms are noisy too, so that no gradient is trivially right."""
    draw = np.random.default_rng(7).standard_normal
    tensors = []
    for p in PARAMETERS:
        shape = resolve(p.shape, sizes_of(CONFIG))
        rows = (CONFIG.vocab_size, *shape[1:]) if p.name == "wte" else shape
        std = 0.02 / np.sqrt(2 * CONFIG.num_layers) if p.init == "residual" else STD.get(p.name, 0.02)
        tensor = np.zeros(shape, dtype=np.float32)
        tensor[: rows[0]] = (draw(rows) * std).astype(np.float32)
        tensors.append(tensor + np.float32(p.init == "ones"))
    c = CONFIG
    sizes = header(20240326, 3, c.max_seq_len, c.vocab_size, c.num_layers, c.num_heads, c.channels, c.padded_vocab_size)
    return sizes + b"".join(tensor.tobytes() for tensor in tensors)


def token_stream(count: int) -> np.ndarray:
    """Tokens that follow a fixed permutation, with one in ten jumping anywhere: quickly learnt, never perfectly."""
    rng, V = np.random.default_rng(8), CONFIG.vocab_size
    successor, first = rng.permutation(V), rng.integers(V)
    jumps, anywhere = rng.random(count) < 0.1, rng.integers(0, V, count)
    tokens = np.empty(count, dtype=np.uint16)
    tokens[0] = first
    for i in range(1, count):
        tokens[i] = anywhere[i] if jumps[i] else successor[tokens[i - 1]]
    return tokens


def eval_bytes() -> bytes:
    """50 examples of random tokens, four completions each; an untrained model should get about a quarter right."""
    rng, V, limit = np.random.default_rng(5), CONFIG.vocab_size, EVAL_T // 3
    examples = []
    for index in range(EVAL_EXAMPLES):
        context = rng.integers(0, V, rng.integers(3, limit))
        parts = [context] + [rng.integers(0, V, rng.integers(2, limit)) for _ in range(4)]
        tail = [rng.integers(0, 4), 4] + [word for part in parts for word in (len(part), *part)]
        examples.append(np.array([65535, 2 * (3 + len(tail)), index, *tail], dtype=np.uint16))
    longest = max(example.nbytes for example in examples)
    return header(20240522, 1, EVAL_EXAMPLES, longest) + b"".join(example.tobytes() for example in examples)


def write_case_a(folder) -> Path:
    """Write model.bin, train_01.bin, train_02.bin, val.bin and eval.bin into `folder`, and return it as a Path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(model_bytes())
    cuts = np.cumsum(list(SHARD_TOKENS.values()))
    for name, tokens in zip(SHARD_TOKENS, np.split(token_stream(cuts[-1]), cuts[:-1])):
        (folder / name).write_bytes(header(20240520, 1, len(tokens)) + tokens.tobytes())
    (folder / "eval.bin").write_bytes(eval_bytes())
    return folder


class NoLoader:
    """Stands in for a loader, of nothing, where a checkpoint wants its state."""

    def state(self) -> LoaderState:
        none = np.zeros(0, np.int32)
        return LoaderState(False, 0, 0, none, 0, none, b"")


def restore(loader, state):
    """Let a loader go on at a saved place, as a resumed run with the same shards and batches does."""
    loader.go_on(Continued(state, state.should_shuffle))


def read_state(path, num_parameters):
    """A state file's facts, and its tensors by name, (num_parameters,) fp32."""
    state = read_facts(path, num_parameters)
    names = state_tensors(state.use_master_weights)
    return state, {name: np.fromfile(path, "<f4", num_parameters, offset=tensor_offset(name, num_parameters)) for name in names}


def save_snapshot(folder, step, model, loader, extra):
    """Write model, state and extra files of `step`, then DONE, at once. Arguments and errors are begin_snapshot's."""
    writer = Writer()
    begin_snapshot(writer, folder, step, model, loader, extra)
    await_all(writer, model.sharing)
    mark_done(folder, writer.take())
