"""Linear layers whose factors have 8 bits: --matmul fp8. The functions of matmul.py, and what they make of a tensor first.

All are e4m3, each scaled by one number, so that its largest element is the largest that the type holds. Products are added up in fp32, and
results have the types they have in matmul.py. FP8 matmuls want both factors with the dimension they sum over last: what forward has that
way, backward has not, and takes transposed.

Gradients are e4m3 too, where e5m2, a bit of range for one of precision, is more usual: with a scale of its own for every tensor precision
is what is scarce, and e4m3 is what was timed on an H200.

Nothing is kept from one matmul to the next, least of all a scale: operands are made anew from tensors that are bf16, so a step has the same
bits at every level of recompute, and a run that resumes goes on with the bits of one that never stopped.

Working room, `room`, where operands lie as bytes (uint8): fp8_inp and fp8_dout (2, ...) for the widest matmul's rows, fp8_weight for the
largest weight, of each its scale (1,) fp32, as fp8_inp_scale, fp8_sum fp32 as large as the largest weight, and what fp8_operand needs.
Without a room these functions are matmul.py's, as they are for the classifier.

Source: Micikevicius et al. 2022 (FP8 Formats for Deep Learning).
"""

from math import inf

import torch

from llmc.layers import matmul
from llmc.layers.rows import rows_of

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
SMALLEST_TOP = 2.0**-100  # that a tensor's largest element is taken for: of zeros too there is a scale


def fp8_operand(scale, x, scratch, *, rows=None, columns=None):
    """x / scale in FP8, rounded to nearest even: as it lies, transposed, or both. scale is its largest element over the type's; what is not
    a number stays so, and does not count.

    scale    (1,) fp32   written     rows     (R, C)  e4m3, written, or None     scratch  only a kernel needs any
    x        (..., C)    read        columns  (C, R)  likewise
    """
    wide = rows_of(x).to(torch.float32, copy=True)
    top = wide.abs().nan_to_num_(nan=0.0, posinf=inf).amax().clamp_min_(SMALLEST_TOP)
    largest = torch.full_like(top, LARGEST)  # by a number torch may divide as by its reciprocal
    torch.div(top, largest, out=scale[0])
    wide.mul_(largest / top).clamp_(-LARGEST, LARGEST)
    if rows is not None:
        rows.copy_(wide)
    if columns is not None:
        columns.copy_(wide.t())


def matmul_forward(out, inp, weight, bias=None, room=None, *, fp8_operand):
    """out = inp @ weight.T + bias.

    out     (..., OC)  written     inp  (..., C)  read     all contiguous, bf16; C and OC are multiples of 16
    weight  (OC, C)    read        bias (OC,)     read, or None
    """
    if room is None:
        return matmul.matmul_forward(out, inp, weight, bias)
    (x, of_inp), (w, of_weight) = (_operand(name, t, room, fp8_operand) for name, t in (("fp8_inp", inp), ("fp8_weight", weight)))
    # as is usual, sums of forward are the fast ones, which keep fewer bits; those of gradients are promoted to fp32 on the way
    _multiply(rows_of(out), x, w, of_inp, of_weight, bias, fast=True)


def matmul_dout(dout, room, *, fp8_operand):
    """Make what matmul_dinput and matmul_dweight take of dout (..., OC), bf16: before the first of them. Rows are a multiple of 16."""
    rows, columns = _dout(dout, room)
    fp8_operand(room["fp8_dout_scale"], dout, room, rows=rows, columns=columns)


def matmul_dinput(dinp, dout, weight, room=None, *, fp8_operand):
    """dinp (..., C) = dout (..., OC) @ weight (OC, C), after matmul_dout."""
    if room is None:
        return matmul.matmul_dinput(dinp, dout, weight)
    w, of_weight = _operand("fp8_weight", weight, room, fp8_operand, transposed=True)
    _multiply(rows_of(dinp), _dout(dout, room)[0], w, room["fp8_dout_scale"], of_weight)


def matmul_dweight(dweight, dout, inp, *, accumulate, room=None, fp8_operand):
    """dweight (OC, C), bf16 or fp32, = dout.T @ inp, plus what it held if `accumulate`; after matmul_dout, inp (..., C)."""
    if room is None:
        return matmul.matmul_dweight(dweight, dout, inp, accumulate=accumulate)
    x, of_inp = _operand("fp8_inp", inp, room, fp8_operand, transposed=True)
    total = room["fp8_sum"].view(-1)[: dweight.numel()].view(dweight.shape) if accumulate else dweight
    _multiply(total, _dout(dout, room)[1], x, room["fp8_dout_scale"], of_inp)
    if accumulate:
        dweight.add_(total)


def _operand(name, x, room, fp8_operand, transposed=False):
    """x in FP8, as it lies or transposed, made in the room of that name; and its scale."""
    R, C = rows_of(x).shape
    made, scale = _matrix(room[name], *((C, R) if transposed else (R, C))), room[f"{name}_scale"]
    fp8_operand(scale, x, room, **{"columns" if transposed else "rows": made})
    return made, scale


def _dout(dout, room):
    """Where dout lies in FP8: its rows, and its columns."""
    R, OC = rows_of(dout).shape
    rows, columns = room["fp8_dout"]
    return _matrix(rows, R, OC), _matrix(columns, OC, R)


def _matrix(place, rows, columns):
    """A matrix at the start of a room."""
    return place.view(-1)[: rows * columns].view(E4M3).view(rows, columns)


def _multiply(out, a, b, of_a, of_b, bias=None, fast=False):
    """out (M, N) = a (M, K) @ b (N, K).T, times both scales, plus bias (N,)."""
    torch.ops.aten._scaled_mm.out(a, b.t(), of_a, of_b, bias, None, out.dtype, fast, out=out)
