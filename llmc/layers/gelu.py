"""GELU, tanh approximation. Source: llm.c llmc/gelu.cuh; Hendrycks and Gimpel 2016."""

import torch


def gelu_forward(out, inp):
    """out = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), elementwise; any shape, fp32 inside."""
    torch.ops.aten.gelu.out(inp, approximate="tanh", out=out)


def gelu_backward_inplace(d_in_out, inp):
    """d_in_out *= gelu'(inp): the gradient of the output becomes that of the input, in place."""
    torch.ops.aten.gelu_backward.grad_input(d_in_out, inp, approximate="tanh", grad_input=d_in_out)
