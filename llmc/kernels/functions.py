"""The launchers of the kernels, by the names of their counterparts in llmc/layers/."""

from llmc.kernels.adamw import adamw_update, launch_adamw_update, stage_adamw_update
from llmc.kernels.attention import attention_backward, attention_forward, attention_one_row, pack_gradients
from llmc.kernels.columns import matmul_dbias
from llmc.kernels.encoder import encoder_backward, encoder_forward, launch_encoder_backward, stage_encoder_backward
from llmc.kernels.fused_classifier import fused_classifier_inplace
from llmc.kernels.gelu import gelu_backward_inplace, gelu_forward
from llmc.kernels.global_norm import global_norm
from llmc.kernels.layernorm import layernorm_backward, layernorm_forward, layernorm_normalize, residual_layernorm_forward


def triton_operations() -> dict:
    """Name -> launcher."""
    launchers = (
        encoder_forward, encoder_backward, layernorm_forward, residual_layernorm_forward, layernorm_normalize, layernorm_backward,
        gelu_forward, gelu_backward_inplace, pack_gradients, matmul_dbias, fused_classifier_inplace, global_norm, adamw_update,
    )  # fmt: skip
    return {f.__name__: f for f in launchers}


def triton_attention() -> dict:
    """The same for attention, whose counterparts are others: a CPU's attention, and torch's on a GPU."""
    return {f.__name__: f for f in (attention_forward, attention_backward, attention_one_row)}


def staged_operations() -> dict:
    """The operations whose arguments change from step to step, in two halves: one copies these to the device, the other launches."""
    halves = (stage_encoder_backward, launch_encoder_backward, stage_adamw_update, launch_adamw_update)
    return {f.__name__: f for f in halves}
