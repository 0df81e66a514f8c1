"""GELU, and its gradient with the bias gradient and, where asked for, GELU again in the same pass: see llmc/layers/gelu.py.

fp32 has the bits of a CPU. That takes 37 to 57 instructions per element, for which an H200 needs as long as for moving the element's 8 to
16 bytes, so it costs no time. bf16 moves half the bytes, so there exp and the reciprocal are the GPU's own, with errors of 1e-7 to 4e-6
where rounding has 4e-3.
"""

from llmc.kernels import door
from llmc.kernels.columns import finish_columns
from llmc.kernels.door import (
    TILE_COLUMNS, TILE_ROWS, cdiv, jit, load, range_of_program, rough_sigmoid_below_zero, sigmoid_below_zero, stages_of, store,
    sum_over_rows, tile, tl,
)  # fmt: skip
from llmc.layers.gelu import FLATTEST, A, B
from llmc.layers.rows import rows_of

A, B, THREE_B, FLATTEST = (tl.constexpr(x) for x in (A, B, 3 * B, FLATTEST))
ELEMENTS = 4096  # of a program, 16 to a thread: 32 bytes of bf16. gpu_check.py --tune tries others


@jit
def _small_side(x, IN_FP32: tl.constexpr):
    """y = -|x|, but not below -FLATTEST, and c = sigmoid(y (A + B y^2))."""
    y = (x.to(tl.uint32, bitcast=True) | 0x80000000).to(tl.float32, bitcast=True)
    y = tl.maximum(y, -FLATTEST, propagate_nan=tl.PropagateNan.ALL)
    u = (y * y * B + A) * y
    if IN_FP32:
        return y, sigmoid_below_zero(u)
    else:
        return y, rough_sigmoid_below_zero(u)


@jit
def _gelu(x, yc):
    """yc, plus x where that is positive."""
    return tl.where(x + yc > yc, x + yc, yc)


@jit
def _gelu_forward(out, inp, n, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    x = load(inp + at, at < n)
    y, c = _small_side(x, inp.dtype.element_ty == tl.float32)
    store(out + at, _gelu(x, c * y), at < n)


@jit
def _gelu_backward(
    d_in_out, partials, inp, out_again, n_rows, rows_each, C, stride,
    AGAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first, end = range_of_program(rows_each, n_rows)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in tl.range(0, rows_each, ROWS, num_stages=STAGES):
        row, mask = tile(first + i, end, column, C, ROWS)
        at = row[:, None] * C + column[None, :]
        x, dy = load(inp + at, mask), load(d_in_out + at, mask)
        y, c = _small_side(x, inp.dtype.element_ty == tl.float32)
        if AGAIN:
            store(out_again + at, _gelu(x, y * c), mask)
        half = 0.5 - ((y * y * THREE_B + A) * (1.0 - c) * c * y + c)
        sign = x.to(tl.uint32, bitcast=True) & 0x80000000
        slope = ((half.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True) + 0.5
        new = slope * dy
        store(d_in_out + at, new, mask)
        total += new
    tl.store(partials + tl.program_id(0) * stride + column, sum_over_rows(total), mask=column < C)


def gelu_forward(out, inp, scratch):
    n = inp.numel()
    door.launch(_gelu_forward, (cdiv(n, ELEMENTS),), out, inp, n, ELEMENTS=ELEMENTS)


def gelu_backward_inplace(d_in_out, dbias, inp, scratch, *, accumulate, out_again=None):
    """Scratch: column_partials (P, >= C) fp32."""
    n, C = rows_of(inp).shape
    partials = scratch["column_partials"]
    door.launch(
        _gelu_backward, (len(partials), cdiv(C, TILE_COLUMNS)), d_in_out, partials, inp, inp if out_again is None else out_again,
        n, cdiv(n, len(partials)), C, partials.shape[1], AGAIN=out_again is not None, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
        STAGES=stages_of(TILE_ROWS, TILE_COLUMNS, inp),
    )  # fmt: skip
    finish_columns([dbias], partials, accumulate)
