"""Linear layers. Weights are (out_features, in_features), as in llm.c. Source: llm.c llmc/matmul.cuh.

On CUDA these are cuBLAS and, with a bias, cuBLASLt and its epilogue. The gradient of a bias is summed where its rows are
at hand anyway: see gelu, attention and layernorm.
"""

import torch

from llmc.backend import bf16_products
from llmc.layers.rows import add_column_sums, finish_column_sums, rows_of


def matmul_forward(out, inp, weight, bias=None):
    """out = inp @ weight.T + bias.

    out     (..., OC)  written     inp  (..., C)  read     all contiguous, one dtype
    weight  (OC, C)    read        bias (OC,)     read, or None
    Cost 2*rows*C*OC FLOP.
    """
    if bias is None:
        torch.mm(rows_of(inp), weight.t(), out=rows_of(out))
    else:
        torch.addmm(bias, rows_of(inp), weight.t(), out=rows_of(out))


def matmul_dinput(dinp, dout, weight):
    """dinp (..., C) = dout (..., OC) @ weight (OC, C). Cost 2*rows*C*OC FLOP."""
    torch.mm(rows_of(dout), weight, out=rows_of(dinp))


def matmul_dweight(dweight, dout, inp, *, accumulate, widened=None):
    """The weight's gradient: dout.T @ inp.

    dweight  (OC, C)    accumulated, or written when accumulate is False (then what it held does not matter)
    dout     (..., OC), inp (..., C)  read
    widened  fp32 scratch of any shape, where the weight gradients are fp32 and the rest is bf16, on a CPU; at least OC + C elements
    Cost 2*rows*C*OC FLOP.
    """
    widens = dout.dtype != dweight.dtype and dout.device.type == "cpu"
    with bf16_products(widens):
        for dy, x in _operands(rows_of(dout), rows_of(inp), widens, widened):
            if dy.dtype == dweight.dtype:
                torch.addmm(dweight, dy.t(), x, beta=float(accumulate), out=dweight)
            else:
                torch.addmm(dweight, dy.t(), x, out_dtype=dweight.dtype, beta=float(accumulate), out=dweight)
            accumulate = True


def matmul_backward(dinp, dweight, dout, inp, weight, *, accumulate, widened=None):
    """Both gradients of out = inp @ weight.T + bias. dinp may be inp: the weight's is done with it before it is written."""
    matmul_dweight(dweight, dout, inp, accumulate=accumulate, widened=widened)
    matmul_dinput(dinp, dout, weight)


def matmul_dbias(dbias, dout, scratch, *, accumulate):
    """The bias' gradient dbias (OC,), the sum over rows of dout (..., OC): for where no other pass has those rows at hand.

    Scratch: rows (4, ...) and column_sums (2, >= OC), fp32.
    """
    total = scratch["column_sums"][0][: len(dbias)].zero_()
    add_column_sums(total, rows_of(dout), scratch)
    finish_column_sums(dbias, total, accumulate)


def _operands(dy, x, widens, widened):
    """dy and x; or their rows piece by piece, widened, where a CPU has no matmul from bf16 to fp32."""
    if not widens:
        yield dy, x
        return
    OC, C = dy.shape[1], x.shape[1]
    widened = widened.view(-1)
    rows = len(widened) // (OC + C)
    for at in range(0, len(dy), rows):
        n = min(rows, len(dy) - at)
        wide_dy, wide_x = widened[: n * OC].view(n, OC), widened[n * OC : n * (OC + C)].view(n, C)
        yield wide_dy.copy_(dy[at : at + n]), wide_x.copy_(x[at : at + n])
