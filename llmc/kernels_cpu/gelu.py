"""GELU, and its gradient with the bias gradient and, where asked for, GELU again in the same pass: see llmc/layers/gelu.py."""

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.columns import TILE_ROWS, add_row, finish_columns, parts_of, range_of_part, zero
from llmc.kernels_cpu.door import (
    F0, F1, aligned, array, bits_of, cdiv, exp, fetch, fetch_to_write, float_of, helper, iand, ior, jit, load, prange, select,
    store,
)  # fmt: skip
from llmc.layers.gelu import FLATTEST, A, B
from llmc.layers.rows import rows_of

CHUNK = 8192
NEAR = 256  # numbers that are calculated while the next as many are fetched
A, B, THREE_B, FLATTEST, HALF = (np.float32(x) for x in (A, B, 3 * B, FLATTEST, 0.5))
SIGN, ALL_BUT_SIGN = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)


@helper
def _small_side(x):
    """y = -|x|, but not below -FLATTEST, and c = sigmoid(y (A + B y^2))."""
    y = float_of(ior(bits_of(x), SIGN))
    y = select(y < -FLATTEST, -FLATTEST, y)
    return y, F1 / (F1 + exp(F0 - (y * y * B + A) * y))


@helper
def _gelu(x, yc):
    """yc, plus x where that is positive."""
    return select(x + yc > yc, x + yc, yc)


@helper
def _forward(out, inp, first, end):
    for at in range(first, end, NEAR):
        fetch(inp, at + NEAR, NEAR)
        fetch_to_write(out, at + NEAR, NEAR)
        for i in range(at, min(at + NEAR, end)):
            x = load(inp, i)
            y, c = _small_side(x)
            store(out, i, _gelu(x, c * y))


@helper
def _backward_row(d_in_out, total, inp, out_again, first):
    """total (C,) += the new d_in_out."""
    for at in range(0, len(total), NEAR):
        ahead = first + min(at + NEAR, len(total))
        fetch(inp, ahead, NEAR)
        fetch_to_write(d_in_out, ahead, NEAR)
        if out_again is not None:
            fetch_to_write(out_again, ahead, NEAR)
        for column in range(at, min(at + NEAR, len(total))):
            i = first + column
            x = load(inp, i)
            y, c = _small_side(x)
            if out_again is not None:
                store(out_again, i, _gelu(x, y * c))
            half = HALF - ((y * y * THREE_B + A) * (F1 - c) * c * y + c)
            slope = float_of(ior(iand(bits_of(half), ALL_BUT_SIGN), iand(bits_of(x), SIGN))) + HALF
            new = slope * load(d_in_out, i)
            store(d_in_out, i, new)
            store(total, column, load(total, column) + new)


@jit
def _gelu_forward(out, inp, n, chunks):
    for chunk in prange(chunks):
        first = np.int64(chunk) * CHUNK
        _forward(out, inp, first, min(first + CHUNK, n))


@jit
def _gelu_backward(d_in_out, partials, inp, out_again, n_rows, rows_each, parts, C, stride):
    for part in prange(parts):
        first, end = range_of_part(np.int64(part), rows_each, n_rows)
        partial, total = np.int64(part) * stride, aligned(C)
        zero(partials, partial, C)
        for tile in range(first, end, TILE_ROWS):
            zero(total, 0, C)
            for row in range(tile, min(tile + TILE_ROWS, end)):
                _backward_row(d_in_out, total, inp, out_again, row * C)
            add_row(partials, partial, total, 0, C)


def gelu_forward(out, inp, scratch):
    n = inp.numel()
    door.launch(_gelu_forward, array(out), array(inp), n, cdiv(n, CHUNK))


def gelu_backward_inplace(d_in_out, dbias, inp, scratch, *, accumulate, out_again=None):
    """Scratch: column_partials (P, >= C) fp32."""
    n, C = rows_of(inp).shape
    partials = scratch["column_partials"]
    rows_each, parts = parts_of(n, partials)
    again = None if out_again is None else array(out_again)
    door.launch(_gelu_backward, array(d_in_out), array(partials), array(inp), again, n, rows_each, parts, C, partials.shape[1])
    finish_columns([dbias], partials, parts, accumulate)
