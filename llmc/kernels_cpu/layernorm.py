"""LayerNorm: forward, with or without the addition before it or from kept statistics, and backward. See llmc/layers/layernorm.py.

A thread takes a row at a time, widened to fp32 in the core's cache, and prefetches the next one meanwhile. Where a row takes several
passes, one tensor is prefetched before each, as a core can wait for only so many cache lines at once. Backward is a fixed number of parts,
each a range of rows, whose sums for the weight, the bias and the projection's bias are partials that are then added in order.
"""

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.columns import SUMMED_ROWS, add_row, finish_columns, parts_of, range_of_part, zero
from llmc.kernels_cpu.door import F0, F1, aligned, array, cdiv, fetch, fetch_to_write, helper, jit, load, plus, prange, sqrt, store
from llmc.layers.layernorm import EPSILON
from llmc.layers.rows import rows_of

ROWS = 8  # in a part, where nothing is summed over rows
EPS = np.float32(EPSILON)


@helper
def _statistics(x):
    """Mean and rstd of a row in fp32. There is no other path to them, so the bits are the same after an addition and for any type."""
    C = np.float32(len(x))
    total = F0
    for c in range(len(x)):
        total = plus(total, load(x, c))
    mean = total / C
    total = F0
    for c in range(len(x)):
        centered = load(x, c) - mean
        total = plus(total, centered * centered)
    return mean, F1 / sqrt(total / C + EPS)


@helper
def _read_row(x, inp, residual, first):
    """x = a row of inp, after the row of residual, if given, was added to it in place."""
    for c in range(len(x)):
        if residual is not None:
            store(inp, first + c, load(inp, first + c) + load(residual, first + c))
        store(x, c, load(inp, first + c))


@helper
def _normalize(out, first, inp, inp_first, C, mean, rstd, weight, bias):
    for c in range(C):
        store(out, first + c, (load(inp, inp_first + c) - mean) * rstd * load(weight, c) + load(bias, c))


@jit
def _layernorm_forward(out, mean, rstd, inp, residual, weight, bias, n, parts):
    C = len(weight)
    for part in prange(parts):
        x = aligned(C)
        for row in range(np.int64(part) * ROWS, min(np.int64(part) * ROWS + ROWS, n)):
            fetch(inp, row * C + C, C)
            _read_row(x, inp, residual, row * C)
            if residual is not None:
                fetch(residual, row * C + C, C)
            mean[row], rstd[row] = _statistics(x)
            fetch_to_write(out, row * C + C, C)
            _normalize(out, row * C, x, 0, C, mean[row], rstd[row], weight, bias)


@jit
def _layernorm_normalize(out, mean, rstd, inp, weight, bias, n, parts):
    C = len(weight)
    for part in prange(parts):
        for row in range(np.int64(part) * ROWS, min(np.int64(part) * ROWS + ROWS, n)):
            fetch(inp, row * C + C, C)
            fetch_to_write(out, row * C + C, C)
            _normalize(out, row * C, inp, row * C, C, mean[row], rstd[row], weight, bias)


@helper
def _sum_weight_and_bias(total, x_hat, g, dout, inp, first, weight, mean, rstd):
    """x_hat and g = dout * weight, for a row; its share of dweight and dbias is added to total (3C,)."""
    C = len(weight)
    for c in range(C):
        dy = load(dout, first + c)
        normal = (load(inp, first + c) - mean) * rstd
        store(x_hat, c, normal)
        store(g, c, dy * load(weight, c))
        store(total, c, load(total, c) + normal * dy)
        store(total, C + c, load(total, C + c) + dy)


@helper
def _means(x_hat, g):
    """mean(g), mean(g * x_hat)"""
    g_sum, gx_sum = F0, F0
    for c in range(len(g)):
        g_sum = plus(g_sum, load(g, c))
        gx_sum = plus(gx_sum, load(g, c) * load(x_hat, c))
    return g_sum / np.float32(len(g)), gx_sum / np.float32(len(g))


@helper
def _add_to_stream(dresidual, first, total, x_hat, g, g_mean, gx_mean, rstd, projection):
    """For a row, dresidual += rstd * (g - mean(g) - x_hat * mean(g * x_hat)); with `projection`, the last C of total += the result."""
    C = len(g)
    for c in range(C):
        dx = (load(g, c) - g_mean - load(x_hat, c) * gx_mean) * rstd
        new = load(dresidual, first + c) + dx
        store(dresidual, first + c, new)
        if projection is not None:
            store(total, 2 * C + c, load(total, 2 * C + c) + new)


@jit
def _layernorm_backward(dresidual, partials, projection, dout, inp, weight, mean, rstd, n, rows_each, parts, stride):
    C = len(weight)
    for part in prange(parts):
        first, end = range_of_part(np.int64(part), rows_each, n)
        partial = np.int64(part) * stride
        zero(partials, partial, 3 * C)
        x_hat, g, total = aligned(C), aligned(C), aligned(3 * C)
        for tile in range(first, end, SUMMED_ROWS):
            zero(total, 0, 3 * C)
            for row in range(tile, min(tile + SUMMED_ROWS, end)):
                m, r = load(mean, row), load(rstd, row)
                fetch(dout, row * C + C, C)
                _sum_weight_and_bias(total, x_hat, g, dout, inp, row * C, weight, m, r)
                fetch(inp, row * C + C, C)
                g_mean, gx_mean = _means(x_hat, g)
                fetch_to_write(dresidual, row * C + C, C)
                _add_to_stream(dresidual, row * C, total, x_hat, g, g_mean, gx_mean, r, projection)
            add_row(partials, partial, total, 0, 3 * C)


def _launch_forward(out, mean, rstd, inp, residual, weight, bias):
    n, _ = rows_of(inp).shape
    arrays = (array(t) for t in (out, mean, rstd, inp))
    door.launch(_layernorm_forward, *arrays, None if residual is None else array(residual), array(weight), array(bias), n, cdiv(n, ROWS))


def layernorm_forward(out, mean, rstd, inp, weight, bias, scratch):
    _launch_forward(out, mean, rstd, inp, None, weight, bias)


def residual_layernorm_forward(residual_out, out, mean, rstd, residual, weight, bias, scratch):
    _launch_forward(out, mean, rstd, residual_out, residual, weight, bias)


def layernorm_normalize(out, inp, mean, rstd, weight, bias, scratch):
    n, _ = rows_of(inp).shape
    arrays = (array(t) for t in (out, mean, rstd, inp, weight, bias))
    door.launch(_layernorm_normalize, *arrays, n, cdiv(n, ROWS))


def layernorm_backward(dresidual, dweight, dbias, dproj_bias, dout, inp, weight, mean, rstd, scratch, *, accumulate):
    """Scratch: column_partials (P, >= 3C) fp32."""
    n, _ = rows_of(inp).shape
    partials = scratch["column_partials"]
    rows_each, parts = parts_of(n, partials)
    projection = None if dproj_bias is None else True  # a type, not a value, so that the kernel has no branch
    arrays = (array(t) for t in (dout, inp, weight, mean, rstd))
    door.launch(_layernorm_backward, array(dresidual), array(partials), projection, *arrays, n, rows_each, parts, partials.shape[1])
    finish_columns([dweight, dbias] if dproj_bias is None else [dweight, dbias, dproj_bias], partials, parts, accumulate)
