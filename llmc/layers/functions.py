"""torch's functions by their names, as llmc/operations.py chooses among them and those of the kernels."""

from functools import partial

from llmc.layers.adamw import adamw_update
from llmc.layers.attention import attention_backward, attention_forward
from llmc.layers.attention_library import attention_one_row, pack_gradients
from llmc.layers.encoder import encoder_backward, encoder_forward
from llmc.layers.fused_classifier import fused_classifier_inplace
from llmc.layers.gelu import gelu_backward_inplace, gelu_forward
from llmc.layers.global_norm import global_norm
from llmc.layers.layernorm import layernorm_backward, layernorm_forward, layernorm_normalize, residual_layernorm_forward
from llmc.layers.matmul import matmul_dbias


def torch_operations() -> dict:
    """Name -> function, for the operations that also exist as kernels."""
    functions = (
        encoder_forward, encoder_backward, layernorm_forward, residual_layernorm_forward, layernorm_normalize, layernorm_backward,
        gelu_forward, gelu_backward_inplace, pack_gradients, matmul_dbias, fused_classifier_inplace, global_norm, adamw_update,
    )  # fmt: skip
    return {f.__name__: f for f in functions}


def cpu_attention() -> dict:
    """Name -> function, for attention on a CPU; for one row it is torch's own kernel."""
    functions = {f.__name__: f for f in (attention_forward, attention_backward)}
    return functions | {"attention_one_row": partial(attention_one_row, kind="cpu")}


def in_halves(functions: dict) -> dict:
    """The functions whose arguments change from step to step, in two halves: stage_* takes those arguments, launch_* does the rest.

    Here the first half only passes them on. That of kernels copies them into the plan's memory (llmc/staging.py), so that the second half
    launches the same work every time and can be captured.
    """

    def launch_encoder_backward(dwte, dwpe, dout, inputs, staged, scratch, *, accumulate):
        order, seed = staged
        functions["encoder_backward"](dwte, dwpe, dout, inputs, order, scratch, seed=seed, accumulate=accumulate)

    def launch_adamw_update(flat, staged, scratch):
        tensors, numbers = staged
        functions["adamw_update"](flat, tensors, scratch, **numbers)

    return {
        "stage_encoder_backward": lambda order, seed, scratch: (order, seed),
        "launch_encoder_backward": launch_encoder_backward,
        "stage_adamw_update": lambda tensors, scratch, *, lr, weight_decay, step, grad_norm: (
            tensors, dict(lr=lr, weight_decay=weight_decay, step=step, grad_norm=grad_norm)
        ),
        "launch_adamw_update": launch_adamw_update,
    }  # fmt: skip
