"""The launchers of the kernels, by the names of their counterparts in llmc/layers/."""

from llmc.kernels_cpu.adamw import launch_adamw_update, stage_adamw_update
from llmc.kernels_cpu.attention import attention_backward, attention_forward, attention_one_row
from llmc.kernels_cpu.encoder import encoder_forward, launch_encoder_backward
from llmc.kernels_cpu.fused_classifier import fused_classifier_inplace
from llmc.kernels_cpu.gelu import gelu_backward_inplace, gelu_forward
from llmc.kernels_cpu.global_norm import global_norm
from llmc.kernels_cpu.layernorm import layernorm_backward, layernorm_forward, layernorm_normalize, residual_layernorm_forward
from llmc.staging import stage_encoder_backward


def numba_operations() -> dict:
    """Name -> launcher. Of those that layers/functions.py splits in_halves only the halves are here, stage_* and launch_*."""
    launchers = (
        encoder_forward, stage_encoder_backward, launch_encoder_backward, layernorm_forward, residual_layernorm_forward,
        layernorm_normalize, layernorm_backward, gelu_forward, gelu_backward_inplace, fused_classifier_inplace, global_norm,
        stage_adamw_update, launch_adamw_update,
    )  # fmt: skip
    return {f.__name__: f for f in launchers}


def numba_attention() -> dict:
    """The same for attention, which has no use for a pack_gradients: it packs its gradients, and sums the bias gradient, itself."""
    return {f.__name__: f for f in (attention_forward, attention_backward, attention_one_row)}
