"""What a model is made of: plain functions over named tensors, forward and backward, in torch.

All that a step does beside matmuls and attention also exists as Triton kernels, under the same names and arguments, in llmc/kernels/.
"""


def torch_operations() -> dict:
    """Name -> function, of all that has a kernel too."""
    from llmc.layers.adamw import adamw_update
    from llmc.layers.attention import pack_gradients
    from llmc.layers.encoder import encoder_backward, encoder_forward
    from llmc.layers.fused_classifier import fused_classifier_inplace
    from llmc.layers.gelu import gelu_backward_inplace, gelu_forward
    from llmc.layers.global_norm import global_norm
    from llmc.layers.layernorm import layernorm_backward, layernorm_forward, layernorm_normalize, residual_layernorm_forward
    from llmc.layers.matmul import matmul_dbias

    functions = (
        encoder_forward, encoder_backward, layernorm_forward, residual_layernorm_forward, layernorm_normalize, layernorm_backward,
        gelu_forward, gelu_backward_inplace, pack_gradients, matmul_dbias, fused_classifier_inplace, global_norm, adamw_update,
    )  # fmt: skip
    return {f.__name__: f for f in functions}
