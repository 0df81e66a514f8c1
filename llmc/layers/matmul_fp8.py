"""Linear layers with FP8 factors: --matmul fp8. The functions of matmul.py, and the conversion of tensors to FP8 that precedes them.

All factors are e4m3. Each tensor has one scale, chosen so that its largest element becomes the largest that the type holds. Products are
added up in fp32, and results have the same types as in matmul.py. FP8 matmuls need the dimension they sum over to be the last of both
factors. Those of forward lie that way; those of backward that do not are taken transposed.

Gradients are e4m3 too. More usual is e5m2, which has one bit less of precision and one more of range; but where every tensor has a scale
of its own, precision is the scarcer of the two, and e4m3 is what was timed on an H200.

Nothing but dout is kept from one matmul to the next, not even a scale: operands are made anew from bf16 tensors. So a step has the same
bits at every level of recompute, and a resumed run continues with the bits of one that never stopped.

Operands lie in scratch as bytes (uint8): fp8_inp and fp8_dout (2, ...), for the rows of the widest matmul, and fp8_weight, for the largest
weight; each has its scale (1,) fp32, such as fp8_inp_scale. There are also fp8_sum, fp32, as large as the largest weight, and what
fp8_operand needs. Without scratch these functions are matmul.py's, as they are for the classifier.

Source: Micikevicius et al. 2022 (FP8 Formats for Deep Learning).
"""

from math import inf

import torch

from llmc.layers import matmul
from llmc.layers.rows import rows_of

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
SMALLEST_TOP = 2.0**-100  # least value for a tensor's largest element, so that zeros have a scale too


def fp8_operand(scale, x, scratch, *, rows=None, columns=None):
    """x / scale in FP8, rounded to nearest even: as it lies, transposed, or both. scale is x's largest magnitude over the type's; NaNs stay
    NaN, and do not count.

    scale    (1,) fp32   written     rows     (R, C)  e4m3, written, or None     scratch  only the kernel needs any
    x        (..., C)    read        columns  (C, R)  likewise
    """
    wide = rows_of(x).to(torch.float32, copy=True)
    top = wide.abs().nan_to_num_(nan=0.0, posinf=inf).amax().clamp_min_(SMALLEST_TOP)
    largest = torch.full_like(top, LARGEST)  # a tensor: to divide by a number torch may multiply by its reciprocal
    torch.div(top, largest, out=scale[0])
    wide.mul_(largest / top).clamp_(-LARGEST, LARGEST)
    if rows is not None:
        rows.copy_(wide)
    if columns is not None:
        columns.copy_(wide.t())


def matmul_forward(out, inp, weight, bias=None, scratch=None, *, fp8_operand):
    """out = inp @ weight.T + bias.

    out     (..., OC)  written     inp  (..., C)  read     all contiguous, bf16; C and OC are multiples of 16
    weight  (OC, C)    read        bias (OC,)     read, or None
    """
    if scratch is None:
        return matmul.matmul_forward(out, inp, weight, bias)
    (x, of_inp), (w, of_weight) = (_operand(name, t, scratch, fp8_operand) for name, t in (("fp8_inp", inp), ("fp8_weight", weight)))
    # as is usual, forward uses fast accumulation, which keeps fewer bits; sums of gradients are promoted to fp32 on the way
    _multiply(rows_of(out), x, w, of_inp, of_weight, bias, fast=True)


def matmul_dout(dout, scratch, *, fp8_operand):
    """Convert dout (..., OC), bf16, to FP8 before the first of matmul_dinput and matmul_dweight. Its rows are a multiple of 16."""
    rows, columns = _dout(dout, scratch)
    fp8_operand(scratch["fp8_dout_scale"], dout, scratch, rows=rows, columns=columns)


def matmul_dinput(dinp, dout, weight, scratch=None, *, fp8_operand):
    """dinp (..., C) = dout (..., OC) @ weight (OC, C), after matmul_dout."""
    if scratch is None:
        return matmul.matmul_dinput(dinp, dout, weight)
    w, of_weight = _operand("fp8_weight", weight, scratch, fp8_operand, transposed=True)
    _multiply(rows_of(dinp), _dout(dout, scratch)[0], w, scratch["fp8_dout_scale"], of_weight)


def matmul_dweight(dweight, dout, inp, *, accumulate, scratch=None, fp8_operand):
    """dweight (OC, C), bf16 or fp32, = dout.T @ inp, plus what it held if `accumulate`; after matmul_dout, inp (..., C)."""
    if scratch is None:
        return matmul.matmul_dweight(dweight, dout, inp, accumulate=accumulate)
    x, of_inp = _operand("fp8_inp", inp, scratch, fp8_operand, transposed=True)
    total = scratch["fp8_sum"].view(-1)[: dweight.numel()].view(dweight.shape) if accumulate else dweight
    _multiply(total, _dout(dout, scratch)[1], x, scratch["fp8_dout_scale"], of_inp)
    if accumulate:
        dweight.add_(total)


def _operand(name, x, scratch, fp8_operand, transposed=False):
    """x in FP8, as it lies or transposed, made in the scratch of that name; and its scale."""
    R, C = rows_of(x).shape
    made, scale = _matrix(scratch[name], *((C, R) if transposed else (R, C))), scratch[f"{name}_scale"]
    fp8_operand(scale, x, scratch, **{"columns" if transposed else "rows": made})
    return made, scale


def _dout(dout, scratch):
    """Views of the scratch for dout in FP8: as it lies (rows, OC), and transposed (OC, rows)."""
    R, OC = rows_of(dout).shape
    rows, columns = scratch["fp8_dout"]
    return _matrix(rows, R, OC), _matrix(columns, OC, R)


def _matrix(place, rows, columns):
    """An e4m3 matrix at the start of a scratch buffer."""
    return place.view(-1)[: rows * columns].view(E4M3).view(rows, columns)


def _multiply(out, a, b, of_a, of_b, bias=None, fast=False):
    """out (M, N) = a (M, K) @ b (N, K).T, times both scales, plus bias (N,)."""
    torch.ops.aten._scaled_mm.out(a, b.t(), of_a, of_b, bias, None, out.dtype, fast, out=out)
