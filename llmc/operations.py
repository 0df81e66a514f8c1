"""Which functions a model runs, torch's, cuBLASLt's or kernels of Triton or numba: the one place that decides.

Each kind is imported where it is chosen: train_gpt2.py imports this module before torch, and Triton or numba may not be installed.
"""

from functools import partial
from types import SimpleNamespace


def operations(kernels: str, matmul: str = "native", attention: str = "cpu", workspace=None) -> SimpleNamespace:
    """The functions that a model runs, under their names: torch's operations, or Triton's or numba's kernels. What in_halves splits is
    there as its two halves.

    matmul     as in PlanOptions: numba, fp8, or native and widened, which are torch's
    attention  the kind, as PlanOptions.attention has it
    workspace  scratch of matmuls with GELU inside; without it there are none
    """
    if kernels == "numba":
        from llmc.kernels_cpu.functions import numba_operations

        functions = numba_operations()
    elif kernels == "triton":
        from llmc.kernels.functions import triton_operations

        functions = triton_operations()
    else:
        from llmc.layers.functions import in_halves, torch_operations

        functions = torch_operations()
        functions |= in_halves(functions)
    matmuls = matmul_operations(matmul, kernels) | ({} if workspace is None else gelu_matmuls(workspace))
    # no name is in two of these: it would be a TypeError
    return SimpleNamespace(**attention_operations(attention, kernels, functions), **functions, **matmuls)


def attention_operations(kind: str, kernels: str, functions: dict) -> dict:
    """Name -> function: attention_forward, attention_backward and attention_one_row. numba's kernels have their own, whatever the kind."""
    if kernels == "numba":
        from llmc.kernels_cpu.functions import numba_attention

        return numba_attention()
    if kind == "cpu":
        from llmc.layers.functions import cpu_attention

        return cpu_attention()
    if kind == "triton":
        from llmc.kernels.functions import triton_attention

        return triton_attention()
    from llmc.layers.attention_library import library_attention

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


def gelu_matmuls(workspace) -> dict:
    """Name -> function, for the matmuls with GELU, or its gradient, inside. Like torch's own, they take TF32 where torch is told to."""
    import torch

    from llmc.kernels.cublaslt import MatmulGelu

    fused = MatmulGelu(workspace.view(torch.uint8), tf32=torch.backends.cuda.matmul.allow_tf32)
    return {"matmul_gelu_forward": fused.forward, "matmul_gelu_backward": fused.backward}


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
