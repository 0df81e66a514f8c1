"""Triton kernels for everything that is not a matmul, one pass over memory each, and attention in bf16. All are deterministic to the bit.

Each has the name and the arguments of its counterpart in llmc/layers/. Only door.py imports triton; a machine without it
trains with the torch operations.

    door        what kernels are written with, and how they are launched
    columns     sums over rows, the same bits on any card
    encoder layernorm attention gelu fused_classifier global_norm adamw
                the counterparts
    fp8         operands of FP8 matmuls
    cublaslt    matmuls with GELU in their epilogues
    functions   the launchers by name
"""

from importlib.util import find_spec

from llmc.cards import AMPERE
from llmc.errors import lines_of

OLDEST_CAPABILITY = AMPERE  # Triton compiles bf16 for no older card


def why_no_kernels(capability: tuple[int, int]) -> str:
    """Empty where the kernels can run on a card of this compute capability, else the reason."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return too_old(capability) or launch_problem()


def too_old(capability: tuple[int, int]) -> str:
    """The reason why no card of this compute capability can run the kernels; empty if one can."""
    return "" if capability >= OLDEST_CAPABILITY else "they need a card of SM80 or later"


def launch_problem(device="cuda") -> str:
    """Why a kernel cannot be launched on a device; empty if it can. Triton needs a C compiler, to build its launchers."""
    import torch

    try:
        partials, numbers, norm = (torch.ones(n, device=device) for n in (4, 64, 1))
        from llmc.kernels.functions import global_norm  # and with it all the others

        global_norm(norm, numbers, {"norm_partials": partials}, piece=64)
        norm.item()  # what goes wrong on the device shows here
    except Exception as error:
        return f"they cannot be launched here: {lines_of(error)[-1]}"
    return ""
