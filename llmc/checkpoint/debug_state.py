"""llm.c's debug state: one step's inputs, logits, loss and gradients, for its C tests. Source: llm.c train_gpt2.py write_state."""

import numpy as np

from llmc.files import DEBUG_STATE_MAGIC, new_header, write_atomically
from llmc.memory.tables import PARAMETERS

DEBUG_STATE_VERSION = 2  # 1: before the vocabulary was padded


def write_debug_state(path, inputs, targets, logits, loss: float, gradients: dict[str, np.ndarray]) -> None:
    """Write a debug state, whole or not at all.

    inputs, targets  (B, T) int
    logits           (B, T, V) fp32, of the real vocabulary only
    loss             mean over B*T
    gradients        the 16 tensors by name, in any order, as fp32 arrays of parameter_shapes (wte with its padded rows)
    Raises UserError where the disk is full or denies the write.
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
