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


def matmul_backward(dinp, dweight, dbias, dout, inp, weight, *, accumulate, bias_sum=None):
    """Gradients of out = inp @ weight.T + bias.

    dinp     (..., C)   written
    dweight  (OC, C)    accumulated, or written when accumulate is False (then what it held does not matter)
    dbias    (OC,)      likewise, or None for no bias; bias_sum (>= OC,) is its scratch
    dout     (..., OC), inp (..., C), weight (OC, C)  read
    dinp may share memory with inp: the weight gradient is done with inp before dinp is written.
    Cost 4*rows*C*OC FLOP.
    """
    dy, x = dout.view(-1, dout.shape[-1]), inp.view(-1, inp.shape[-1])
    torch.addmm(dweight, dy.t(), x, beta=float(accumulate), out=dweight)
    if dbias is not None:
        if accumulate:
            dbias.add_(torch.sum(dy, 0, out=bias_sum[: len(dbias)]))
        else:
            torch.sum(dy, 0, out=dbias)
    torch.mm(dy, weight, out=dinp.view(-1, dinp.shape[-1]))
