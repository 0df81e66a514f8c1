"""Linear layers. Weights are (out_features, in_features), as in llm.c. Source: llm.c llmc/matmul.cuh."""

import torch


def matmul_forward(out, inp, weight, bias=None):
    """out = inp @ weight.T + bias.

    out     (..., OC)  written     inp  (..., C)  read     all contiguous, one dtype
    weight  (OC, C)    read        bias (OC,)     read, or None
    Cost 2*rows*C*OC FLOP.
    """
    x, y = inp.view(-1, inp.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)


def matmul_backward(dinp, dweight, dbias, dout, inp, weight, *, accumulate, bias_sum=None, widened=None):
    """Gradients of out = inp @ weight.T + bias.

    dinp     (..., C)   written
    dweight  (OC, C)    accumulated, or written when accumulate is False (then what it held does not matter)
    dbias    (OC,)      likewise, or None for no bias; bias_sum (>= OC,) of its type is scratch
    dout     (..., OC), inp (..., C), weight (OC, C)  read
    widened  fp32 scratch of any shape, where the weight gradients are fp32 and the rest is bf16, on a CPU; at least OC + C elements
    dinp may share memory with inp: the weight gradient is done with inp before dinp is written.
    Cost 4*rows*C*OC FLOP.
    """
    dy, x = dout.view(-1, dout.shape[-1]), inp.view(-1, inp.shape[-1])
    for part_dy, part_x in _operands(dweight, dy, x, widened):
        if part_dy.dtype == dweight.dtype:
            torch.addmm(dweight, part_dy.t(), part_x, beta=float(accumulate), out=dweight)
        else:
            torch.addmm(dweight, part_dy.t(), part_x, out_dtype=dweight.dtype, beta=float(accumulate), out=dweight)
        if dbias is not None and accumulate:
            dbias.add_(torch.sum(part_dy, 0, dtype=dbias.dtype, out=bias_sum[: len(dbias)]))
        elif dbias is not None:
            torch.sum(part_dy, 0, dtype=dbias.dtype, out=dbias)
        accumulate = True
    torch.mm(dy, weight, out=dinp.view(-1, dinp.shape[-1]))


def _operands(dweight, dy, x, widened):
    """dy and x; or their rows piece by piece, widened, where a CPU has no matmul from bf16 to fp32."""
    if dy.dtype == dweight.dtype or dy.device.type != "cpu":
        yield dy, x
        return
    OC, C = dy.shape[1], x.shape[1]
    widened = widened.view(-1)
    rows = len(widened) // (OC + C)
    for at in range(0, len(dy), rows):
        n = min(rows, len(dy) - at)
        wide_dy, wide_x = widened[: n * OC].view(n, OC), widened[n * OC : n * (OC + C)].view(n, C)
        yield wide_dy.copy_(dy[at : at + n]), wide_x.copy_(x[at : at + n])
