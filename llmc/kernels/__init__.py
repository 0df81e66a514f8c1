"""Triton kernels for everything that is not a matmul, one pass over memory each, and attention in bf16. All are deterministic to the bit.

Each has the name and the arguments of its counterpart in llmc/layers/. Only door.py imports triton; a machine without it
trains with the torch operations.
"""

from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

from llmc.cards import AMPERE
from llmc.errors import lines_of
from llmc.layers import cpu_attention, in_halves, torch_operations

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
        operations("triton").global_norm(norm, numbers, {"norm_partials": partials}, piece=64)
        norm.item()  # what goes wrong on the device shows here
    except Exception as error:
        return f"they cannot be launched here: {lines_of(error)[-1]}"
    return ""


def operations(kernels: str, matmul: str = "native", attention: str = "cpu") -> SimpleNamespace:
    """The functions a model runs, by name, as torch's operations or Triton's or numba's kernels, among them the halves of
    llmc.layers.in_halves.

    matmul     as in PlanOptions: numba, fp8, or native and widened, which are torch's
    attention  the kind, as PlanOptions.attention_kind has it
    """
    if kernels == "numba":
        from llmc.kernels_cpu.functions import numba_operations

        functions = numba_operations()
    elif kernels == "triton":
        from llmc.kernels.functions import triton_operations

        functions = triton_operations()
    else:
        functions = torch_operations()
        functions |= in_halves(functions)
    return SimpleNamespace(**attention_operations(attention, functions) | functions | matmul_operations(matmul, kernels))


def attention_operations(kind: str, functions: dict) -> dict:
    """Name -> function: attention_forward, attention_backward and attention_one_row. numba's own replace all three."""
    if kind == "cpu":
        return cpu_attention()
    if kind == "triton":
        from llmc.kernels.functions import triton_attention

        return triton_attention()
    from llmc.layers.attention import library_attention

    return library_attention(kind, functions["pack_gradients"])


MATMULS = ("matmul_forward", "matmul_dinput", "matmul_dweight")


def matmul_operations(matmul: str, kernels: str) -> dict:
    """Name -> function, for the matmuls, and for matmul_one_row."""
    if matmul == "numba":
        from llmc.kernels_cpu import matmul as source
    else:
        from llmc.layers import matmul as source
    functions = {name: getattr(source, name) for name in (*MATMULS, "matmul_one_row")}
    return functions | (fp8_matmuls(kernels) if matmul == "fp8" else {})


def fp8_matmuls(kernels: str) -> dict:
    """Name -> function, for the FP8 matmuls, and for matmul_dout, which precedes a pair of them in backward."""
    from llmc.layers import matmul_fp8 as source

    return {name: partial(getattr(source, name), fp8_operand=fp8_operand_of(kernels)) for name in (*MATMULS, "matmul_dout")}


def fp8_operand_of(kernels: str):
    """fp8_operand: the Triton kernel, or the one made of torch's operations."""
    if kernels == "triton":
        from llmc.kernels.fp8 import fp8_operand as function
    else:
        from llmc.layers.matmul_fp8 import fp8_operand as function
    return function


def other_matmuls(matmul: str) -> list:
    """Functions of (out, a, b), square matrices, that multiply by other means than torch's matmul: to be measured."""
    if matmul != "numba":
        return []
    from llmc.kernels_cpu.matmul import square_multiplier

    return [square_multiplier()]
