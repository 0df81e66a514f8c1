"""What a model is made of: plain functions over named tensors, forward and backward, in torch.

Everything in a step except the matmuls also exists as kernels with the same names and arguments: Triton kernels for a GPU in
llmc/kernels/, numba kernels for a CPU in llmc/kernels_cpu/, which has matmuls too.

    encoder             token and position embeddings
    layernorm           alone, or with the addition of the residual before it
    linear              a linear layer's matmuls, each with its scratch
    matmul              products in torch; of bf16 factors also widened to fp32, piece by piece
    matmul_fp8          products in 8 bits
    attention           on a CPU, in blocks
    attention_library   torch's kernels, on a GPU and for one row
    gelu                and its gradient, in place
    residual            the addition by itself
    fused_classifier    softmax, cross-entropy and the logits' gradient, in place
    global_norm         of all gradients
    adamw               the update, with every form of master weights
    rounding            stochastic rounding to bf16
    rows                sums over rows, a few at a time
    functions           those that also exist as kernels, by name
"""
