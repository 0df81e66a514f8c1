"""Triton kernels for everything that is not a matmul or attention: one pass over memory each, deterministic to the bit.

Each has the name and the arguments of its counterpart in llmc/layers/. Only door.py imports triton; a machine without it
trains with the torch operations.
"""

from importlib.util import find_spec
from types import SimpleNamespace

from llmc.layers import torch_operations

OLDEST_CAPABILITY = (8, 0)  # Triton compiles bf16 for no older card


def why_no_kernels(capability: tuple[int, int]) -> str:
    """Empty where the kernels can run on a card of this compute capability, else the reason."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if capability < OLDEST_CAPABILITY:
        return "they need a card of SM80 or later"
    return ""


def operations(fused: bool) -> SimpleNamespace:
    """The functions a model runs, by name: Triton's where `fused`, else torch's."""
    if not fused:
        return SimpleNamespace(**torch_operations())
    from llmc.kernels.operations import triton_operations

    return SimpleNamespace(**triton_operations())
