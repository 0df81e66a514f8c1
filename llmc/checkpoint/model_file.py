"""The model .bin: a header with the sizes, then the 16 parameters back to back. Source: llm.c train_gpt2.cu, train_gpt2.py.

numpy only: `--plan` reads a model's sizes before torch is imported.
"""

from itertools import chain

import numpy as np

from llmc.config import ModelConfig
from llmc.errors import UserError
from llmc.files import HEADER_BYTES, MODEL_MAGIC, Numbers, check_size, new_header, read_header, write_atomically
from llmc.memory.tables import DTYPE_BYTES, num_parameters

VERSIONS = {"fp32": 3, "bf16": 5}


def parameter_bytes(config: ModelConfig, precision: str) -> int:
    """Bytes of all 16 tensors in a file of this precision."""
    return num_parameters(config) * DTYPE_BYTES[precision]


def write_model(path, config: ModelConfig, precision: str, pieces) -> str:
    """Write a model file, whole or not at all.

    precision  "fp32" | "bf16", of every tensor, including those of the layernorms
    pieces     iterable of uint8 arrays, C-contiguous: the parameters in table order, cut anywhere
    Returns the file's CRC-32.
    Raises UserError where the disk is full or denies the write; AssertionError when the pieces do not add up to the model.
    """
    header = new_header(
        MODEL_MAGIC, VERSIONS[precision], config.max_seq_len, config.vocab_size,
        config.num_layers, config.num_heads, config.channels, config.padded_vocab_size,
    )  # fmt: skip
    pieces = adding_up_to(pieces, parameter_bytes(config, precision))
    return write_atomically(path, chain([header], pieces), doing="writing the model")


def adding_up_to(pieces, expected: int):
    """Pass on uint8 pieces, asserting at the end that they add up to `expected` bytes, while the file is still a temporary one."""
    total = 0
    for piece in pieces:
        assert piece.dtype == np.uint8, f"pieces are bytes, not {piece.dtype}"
        total += piece.nbytes
        yield piece
    assert total == expected, f"the pieces came to {total} bytes instead of {expected}"


def read_model_header(path) -> tuple[ModelConfig, str]:
    """The sizes and the precision ("fp32" | "bf16") of a model file. Reads 1024 bytes, whatever the model's size.

    Raises UserError when the file is missing, of another kind or version, has impossible sizes, or is not exactly as long
    as its sizes say.
    """
    header = read_header(path, MODEL_MAGIC)
    version = int(header[1])
    precision = {number: name for name, number in VERSIONS.items()}.get(version)
    if precision is None:
        reason = "llm.c's, from before the vocabulary was padded" if version in (1, 2) else "unknown"
        raise UserError(
            f"{path} is a model file of version {version} ({reason}); expected 3 (fp32) or 5 (bf16), "
            "so write it again with llm.c's train_gpt2.py or scripts/convert_hf.py"
        )
    config = ModelConfig(*header[2:8].tolist()).check(str(path))
    check_size(path, HEADER_BYTES + parameter_bytes(config, precision), f"a {precision} model of {num_parameters(config)} parameters")
    return config, precision


def open_weights(path, precision: str) -> Numbers:
    """The parameters in a model file of this precision, in file order; bf16 as int16. Once it is open it may be read though the run that
    wrote it deletes it. Raises UserError if it cannot be opened."""
    return Numbers(path, "<f4" if precision == "fp32" else "<i2", HEADER_BYTES)
