"""GELU, tanh approximation, from the logistic function: 0.5 (1 + tanh(u)) = sigmoid(2u).

With y = -|x| and c = sigmoid(y (A + B y^2)) no digits cancel on either side of zero:

    GELU(x)  = x + y c for x > 0, y c below
    GELU'(x) = 1 - d   for x > 0, d   below      d = c + y (A + 3B y^2) (1 - c) c

y is clamped at -FLATTEST, where c is 1e-29, so that no power of x overflows: below that GELU stays at -1.3e-28, not quite 0.

torch's sigmoid costs a third of its tanh on a CPU, and kernels can match it to the bit: on an x86 CPU its exp is SLEEF's expf of 1.0 ulp,

    exp(d) = 2^q exp(s): q = round(d / ln 2), s = d - q ln 2 with ln 2 in two parts, and a polynomial of degree 6

Source: Hendrycks and Gimpel 2016; llm.c llmc/gelu.cuh.
"""

from math import pi, sqrt

import torch

from llmc.layers.rows import finish_column_sums, row_pieces, rows_of, widened

A = 2 * sqrt(2 / pi)
B = 0.044715 * A
FLATTEST = 9.0
LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.428606765330187045e-06
TO_WHOLE = 1.5 * 2**23  # added to an fp32 number, it rounds that to a whole one, which is in the lowest bits
EXP = (  # factors of s^2, s^3, ..., s^7
    0.5, 0.166666671633720397949219, 0.0416664853692054748535156, 0.00833336077630519866943359, 0.00139304355252534151077271,
    0.000198527617612853646278381,
)  # fmt: skip
HALF = torch.tensor(0.5)  # torch.sub takes no plain number first; a tensor of one number on a CPU goes with any device


def gelu_forward(out, inp, scratch):
    """out = GELU(inp), elementwise in fp32.

    out, inp  (..., C), which may be the same     scratch  view rows (4, >= C) fp32
    """
    o, x = rows_of(out), rows_of(inp)
    for part, a, y, c, _ in row_pieces(x, scratch):
        wide = widened(x[part], a)
        _small_side(y, c, wide)
        o[part].copy_(_gelu(y, wide, c.mul_(y)))


def gelu_backward_inplace(d_in_out, dbias, inp, scratch, *, accumulate, out_again=None):
    """d_in_out *= GELU'(inp): the output's gradient becomes the input's. Also the gradient of the bias in the matmul that made inp.

    d_in_out   (..., C)  read and written
    dbias      (C,)      sum over rows of the new d_in_out, in fp32; accumulated, or written when accumulate is False
    inp        (..., C)  read
    out_again  (..., C)  written with GELU(inp) if given: recompute in the same pass
    scratch    views rows (4, >= C) and column_sums (2, >= C), fp32
    """
    d, x = rows_of(d_in_out), rows_of(inp)
    bias_sum, piece_sum = scratch["column_sums"][:, : x.shape[1]]
    bias_sum.zero_()
    for part, a, y, c, slope in row_pieces(x, scratch):
        wide = widened(x[part], a)
        _small_side(y, c, wide)
        if out_again is not None:  # a may be wide itself; GELU keeps its sign, which is all that is needed below
            rows_of(out_again)[part].copy_(_gelu(a, wide, torch.mul(y, c, out=slope)))
        torch.mul(y, y, out=slope).mul_(3 * B).add_(A)
        torch.ops.aten.sigmoid_backward.grad_input(slope, c, grad_input=slope)  # *= (1 - c) c
        slope.mul_(y).add_(c)
        torch.sub(HALF, slope, out=slope).copysign_(wide).add_(0.5)
        slope.mul_(widened(d[part], y))
        d[part].copy_(slope)
        bias_sum.add_(torch.sum(slope, 0, out=piece_sum))
    finish_column_sums(dbias, bias_sum, accumulate)


def _small_side(y, c, x):
    """y = -|x|, but not below -FLATTEST; c = sigmoid(y (A + B y^2)), at most a half."""
    torch.copysign(x, -1.0, out=y).clamp_min_(-FLATTEST)
    torch.mul(y, y, out=c).mul_(B).add_(A).mul_(y).sigmoid_()


def _gelu(out, x, yc):
    """out = yc, plus x where that is positive."""
    return torch.maximum(torch.add(x, yc, out=out), yc, out=out)
