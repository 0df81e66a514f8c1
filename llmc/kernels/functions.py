"""The launchers of the kernels, by the names of their counterparts in llmc/layers/."""

from llmc.kernels.adamw import launch_adamw_update, stage_adamw_update
from llmc.kernels.attention import attention_backward, attention_forward, attention_one_row, pack_gradients
from llmc.kernels.columns import matmul_dbias
from llmc.kernels.encoder import encoder_forward, launch_encoder_backward
from llmc.kernels.fused_classifier import fused_classifier_inplace
from llmc.kernels.gelu import gelu_backward_inplace, gelu_forward
from llmc.kernels.global_norm import global_norm
from llmc.kernels.layernorm import layernorm_backward, layernorm_forward, layernorm_normalize, residual_layernorm_forward
from llmc.staging import stage_encoder_backward


def triton_operations() -> dict:
    """Name -> launcher. Of those that layers/functions.py splits in_halves only the halves are here, stage_* and launch_*."""
    launchers = (
        encoder_forward, stage_encoder_backward, launch_encoder_backward, layernorm_forward, residual_layernorm_forward,
        layernorm_normalize, layernorm_backward, gelu_forward, gelu_backward_inplace, pack_gradients, matmul_dbias,
        fused_classifier_inplace, global_norm, stage_adamw_update, launch_adamw_update,
    )  # fmt: skip
    return {f.__name__: f for f in launchers}


def triton_attention() -> dict:
    """The same for attention, whose counterparts are in llmc/layers/attention.py and, for one row, attention_library.py."""
    return {f.__name__: f for f in (attention_forward, attention_backward, attention_one_row)}
