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
    return too_old(capability) or launch_problem()


def too_old(capability: tuple[int, int]) -> str:
    """The reason why no card of this compute capability runs them; empty if one does."""
    return "" if capability >= OLDEST_CAPABILITY else "they need a card of SM80 or later"


def launch_problem() -> str:
    """Why a kernel cannot be launched on the current device, empty if it can: Triton builds its launchers with a C compiler."""
    import torch

    try:
        partials, numbers, norm = (torch.ones(n, device="cuda") for n in (4, 64, 1))
        operations(True).global_norm(norm, numbers, {"norm_partials": partials}, piece=64)
        torch.cuda.synchronize()
    except Exception as error:
        return f"they cannot be launched here: {str(error).strip().splitlines()[-1]}"
    return ""


def operations(fused: bool) -> SimpleNamespace:
    """The functions a model runs, by name: Triton's where `fused`, else torch's."""
    if not fused:
        return SimpleNamespace(**torch_operations())
    from llmc.kernels.operations import triton_operations

    return SimpleNamespace(**triton_operations())
