"""llm.c's debug state: one step's inputs, logits, loss and gradients, for its C tests. Source: llm.c train_gpt2.py write_state."""

import numpy as np

from llmc.config import ModelConfig
from llmc.errors import UserError
from llmc.files import DEBUG_STATE_MAGIC, HEADER_BYTES, check_size, new_header, read_header, write_atomically
from llmc.memory.tables import PARAMETERS, num_parameters, parameter_shapes

DEBUG_STATE_VERSION = 2  # 1: before the vocabulary was padded


def write_debug_state(path, inputs, targets, logits, loss: float, gradients: dict[str, np.ndarray]) -> None:
    """Write a debug state, whole or not at all.

    inputs, targets  (B, T) int
    logits           (B, T, V) fp32, of the real vocabulary only
    loss             mean over B*T
    gradients        the 16 tensors by name, any order, as fp32 arrays of parameter_shapes (wte with its padded rows)
    Raises UserError where the disk is full or denies.
    """
    B, T = inputs.shape
    assert targets.shape == (B, T) and logits.shape[:2] == (B, T) and logits.dtype == np.float32
    assert gradients.keys() == {p.name for p in PARAMETERS} and all(g.dtype == np.float32 for g in gradients.values())
    pieces = [
        new_header(DEBUG_STATE_MAGIC, DEBUG_STATE_VERSION, B, T),
        np.ascontiguousarray(inputs, "<i4"),
        np.ascontiguousarray(targets, "<i4"),
        np.ascontiguousarray(logits, "<f4"),
        np.array([loss], "<f4"),
        *(np.ascontiguousarray(gradients[p.name], "<f4") for p in PARAMETERS),
    ]
    write_atomically(path, pieces, doing="writing the debug state")


def read_debug_state(path, config: ModelConfig) -> dict:
    """A debug state of the model with these sizes: inputs, targets, logits, loss and gradients, shaped as write_debug_state takes them.

    The file does not name its model, so its length is all there is to check. Raises UserError when it does not fit.
    """
    header = read_header(path, DEBUG_STATE_MAGIC)
    version, B, T = header[1:4].tolist()
    if version != DEBUG_STATE_VERSION or B <= 0 or T <= 0:
        raise UserError(
            f"{path} is a debug state of version {version}, B {B}, T {T}; expected version {DEBUG_STATE_VERSION} and positive sizes, "
            "so write it again with scripts/write_debug_state.py"
        )
    V = config.vocab_size
    size = HEADER_BYTES + 4 * (2 * B * T + B * T * V + 1 + num_parameters(config))
    check_size(path, size, f"a debug state of B {B}, T {T} for this model")
    flat = np.memmap(path, "<f4", "r", offset=HEADER_BYTES)
    shapes = {"inputs": (B, T), "targets": (B, T), "logits": (B, T, V), "loss": (), **parameter_shapes(config)}
    parts = cut(flat, shapes)
    gradients = {name: parts.pop(name) for name in parameter_shapes(config)}
    inputs, targets = parts["inputs"].view("<i4"), parts["targets"].view("<i4")
    return {"inputs": inputs, "targets": targets, "logits": parts["logits"], "loss": float(parts["loss"]), "gradients": gradients}


def cut(flat: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Views of a flat array, back to back."""
    views, at = {}, 0
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        views[name] = flat[at : at + n].reshape(shape)
        at += n
    assert at == flat.size
    return views
