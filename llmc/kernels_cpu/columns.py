"""Sums over rows, as a fixed number of partial sums that are added in order: the same bits on any number of threads."""

from llmc.kernels_cpu import door
from llmc.kernels_cpu.door import F0, array, cdiv, helper, jit, load, prange, store

BLOCK = 256  # columns
SUMMED_ROWS = 16  # rows summed on their own before they are added to a part's sum: rounding errors grow with the number of terms


@helper
def range_of_part(part, rows_each, n_rows):
    """(first, end) of the rows that a part sums over."""
    return part * rows_each, min((part + 1) * rows_each, n_rows)


@helper
def zero(x, first, n):
    for i in range(first, first + n):
        store(x, i, F0)


@helper
def add_row(out, first, x, x_first, C):
    for c in range(C):
        store(out, first + c, load(out, first + c) + load(x, x_first + c))


@helper
def _finish_block(out, partials, parts, stride, first, at, n, accumulate):
    for part in range(1, parts):
        add_row(partials, at, partials, part * stride + at, n)
    for c in range(n):
        total = load(partials, at + c)
        if accumulate:
            total += load(out, first + c)
        store(out, first + c, total)


@jit
def _finish_columns(out0, out1, out2, sections, partials, parts, stride, C, blocks, accumulate):
    for block in prange(sections * blocks):
        section, first = int(block) // blocks, int(block) % blocks * BLOCK
        n, at = min(BLOCK, C - first), section * C + first
        if section == 0:
            _finish_block(out0, partials, parts, stride, first, at, n, accumulate)
        elif section == 1:
            _finish_block(out1, partials, parts, stride, first, at, n, accumulate)
        else:
            _finish_block(out2, partials, parts, stride, first, at, n, accumulate)


def parts_of(n_rows, partials):
    """(rows of a part, number of parts that have any), for at most as many parts as partials (P, ...) has rows."""
    rows_each = cdiv(n_rows, len(partials))
    return rows_each, cdiv(n_rows, rows_each)


def finish_columns(outs, partials, parts, accumulate):
    """outs[i][c] = the sum over the first `parts` rows of partials, of column i * C + c, plus what it held if `accumulate`.

    There are up to three outs (C,), all of one type and size. partials is destroyed.
    """
    C, stride = len(outs[0]), partials.shape[1]
    arrays = (*(array(out) for out in outs), *[array(outs[0])] * (3 - len(outs)))
    door.launch(_finish_columns, *arrays, len(outs), array(partials), parts, stride, C, cdiv(C, BLOCK), bool(accumulate))
