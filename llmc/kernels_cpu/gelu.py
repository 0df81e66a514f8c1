"""GELU, and its gradient with the bias gradient and, where asked for, GELU again in the same pass: see llmc/layers/gelu.py.

In fp32 both are calculated. bf16 has only 65536 numbers, so there GELU and its slope are looked up, by the bits of a number, in tables
that the operations of llmc/layers/ fill. In a step of d12 that takes half as long, and gives the same bits.
"""

from functools import cache

import numpy as np
import torch

from llmc.kernels_cpu import door
from llmc.kernels_cpu.columns import SUMMED_ROWS, add_row, finish_columns, parts_of, range_of_part, zero
from llmc.kernels_cpu.door import (
    F0, F1, aligned, array, bits_of, cdiv, exp, fetch, fetch_to_write, float_of, helper, iand, ior, jit, load, load_bits, prange, select,
    store, store_bits,
)  # fmt: skip
from llmc.layers import gelu as layer
from llmc.layers.gelu import FLATTEST, A, B
from llmc.layers.rows import rows_of

CHUNK = 8192  # numbers that a thread takes at once: few enough for small models to have some for every thread
# numbers that are calculated while the next NEAR are fetched, 8 cache lines of bf16 or 16 of fp32: data that are in no cache then take
# forward a quarter and backward a third less time than without
NEAR = 256
A, B, THREE_B, FLATTEST, HALF = (np.float32(x) for x in (A, B, 3 * B, FLATTEST, 0.5))
SIGN, ALL_BUT_SIGN = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)


@helper
def _small_side(x):
    """y = -|x|, but not below -FLATTEST, and c = sigmoid(y (A + B y^2))."""
    y = float_of(ior(bits_of(x), SIGN))
    y = select(y < -FLATTEST, -FLATTEST, y)
    return y, F1 / (F1 + exp(F0 - (y * y * B + A) * y))


@helper
def _store_gelu(out, inp, i, values):
    """out[i] = GELU(inp[i]), from the table of values if given."""
    if values is not None:
        store_bits(out, i, load_bits(values, np.intp(load_bits(inp, i))))
    else:
        x = load(inp, i)
        y, c = _small_side(x)
        yc = c * y
        store(out, i, select(x + yc > yc, x + yc, yc))


@helper
def _slope(inp, i, slopes):
    """GELU'(inp[i]), from the table of slopes if given."""
    if slopes is not None:
        return load(slopes, np.intp(load_bits(inp, i)))
    x = load(inp, i)
    y, c = _small_side(x)
    half = HALF - ((y * y * THREE_B + A) * (F1 - c) * c * y + c)
    return float_of(ior(iand(bits_of(half), ALL_BUT_SIGN), iand(bits_of(x), SIGN))) + HALF


@helper
def _forward(out, inp, values, first, end):
    for at in range(first, end, NEAR):
        fetch(inp, at + NEAR, NEAR)
        fetch_to_write(out, at + NEAR, NEAR)
        for i in range(at, min(at + NEAR, end)):
            _store_gelu(out, inp, i, values)


@helper
def _backward_row(d_in_out, total, inp, out_again, values, slopes, first):
    """A row of d_in_out *= the slopes; total (C,) += the new d_in_out."""
    for at in range(0, len(total), NEAR):
        ahead = first + min(at + NEAR, len(total))
        fetch(inp, ahead, NEAR)
        fetch_to_write(d_in_out, ahead, NEAR)
        if out_again is not None:
            fetch_to_write(out_again, ahead, NEAR)
        for column in range(at, min(at + NEAR, len(total))):
            i = first + column
            new = _slope(inp, i, slopes) * load(d_in_out, i)
            if out_again is not None:
                _store_gelu(out_again, inp, i, values)
            store(d_in_out, i, new)
            store(total, column, load(total, column) + new)


@jit
def _gelu_forward(out, inp, values, n, chunks):
    for chunk in prange(chunks):
        first = np.int64(chunk) * CHUNK
        _forward(out, inp, values, first, min(first + CHUNK, n))


@jit
def _gelu_backward(d_in_out, partials, inp, out_again, values, slopes, n_rows, rows_each, parts, C, stride):
    for part in prange(parts):
        first, end = range_of_part(np.int64(part), rows_each, n_rows)
        partial, total = np.int64(part) * stride, aligned(C)
        zero(partials, partial, C)
        for tile in range(first, end, SUMMED_ROWS):
            zero(total, 0, C)
            for row in range(tile, min(tile + SUMMED_ROWS, end)):
                _backward_row(d_in_out, total, inp, out_again, values, slopes, row * C)
            add_row(partials, partial, total, 0, C)


@cache
def _tables():
    """(GELU of every bf16, as bits; its slope there, in fp32), both indexed by the bf16's bits. 128 and 256 KiB."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(1, -1).view(torch.bfloat16)
    values, slopes = torch.empty_like(every), torch.ones(every.shape)
    scratch = {"rows": torch.empty(4, 2**16), "column_sums": torch.empty(2, 2**16)}
    layer.gelu_forward(values, every, scratch)
    layer.gelu_backward_inplace(slopes, torch.empty(2**16), every, scratch, accumulate=False)
    return array(values), array(slopes)


def _tables_for(inp):
    """The tables for bf16; (None, None) for fp32."""
    return _tables() if inp.dtype == torch.bfloat16 else (None, None)


def gelu_forward(out, inp, scratch):
    n, (values, _) = inp.numel(), _tables_for(inp)
    door.launch(_gelu_forward, array(out), array(inp), values, n, cdiv(n, CHUNK))


def gelu_backward_inplace(d_in_out, dbias, inp, scratch, *, accumulate, out_again=None):
    """Scratch: column_partials (P, >= C) fp32."""
    n, C = rows_of(inp).shape
    partials = scratch["column_partials"]
    rows_each, parts = parts_of(n, partials)
    again = None if out_again is None else array(out_again)
    arrays = (array(d_in_out), array(partials), array(inp), again, *_tables_for(inp))
    door.launch(_gelu_backward, *arrays, n, rows_each, parts, C, partials.shape[1])
    finish_columns([dbias], partials, parts, accumulate)
