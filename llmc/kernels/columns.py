"""Sums over rows, as a fixed number of partial sums that are added in order: the same bits on any card and in any run."""

from llmc.kernels import door
from llmc.kernels.door import cdiv, jit, load, range_of_program, stages_of, store, sum_over_rows, tile, tl
from llmc.layers.rows import rows_of

SUM_COLUMNS = 32
SUM_TILE_ROWS, SUM_TILE_COLUMNS = 4, 1024  # (65536, 3072) takes 0.098 ms on an H200; 16 x 256 without stages takes 0.142


@jit
def _finish_columns(out0, out1, out2, partials, C, stride, PARTIALS: tl.constexpr, COLUMNS: tl.constexpr, ACCUMULATE: tl.constexpr):
    section = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < C
    at = tl.arange(0, PARTIALS)[:, None] * stride + section * C + column[None, :]
    total = sum_over_rows(tl.load(partials + at, mask=mask[None, :], other=0.0))
    out = out0
    if section == 1:
        out = out1
    if section == 2:
        out = out2
    if ACCUMULATE:
        total += load(out + column, mask)
    store(out + column, total, mask)


@jit
def _column_sums(partials, x, n_rows, rows_each, C, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    first, end = range_of_program(rows_each, n_rows)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in tl.range(0, rows_each, ROWS, num_stages=STAGES):
        row, mask = tile(first + i, end, column, C, ROWS)
        total += load(x + row[:, None] * C + column[None, :], mask)
    tl.store(partials + tl.program_id(0) * stride + column, sum_over_rows(total), mask=column < C)


def matmul_dbias(dbias, dout, scratch, *, accumulate):
    """Scratch: column_partials (P, >= OC) fp32. See llmc/layers/matmul.py."""
    n, C = rows_of(dout).shape
    partials = scratch["column_partials"]
    door.launch(
        _column_sums, (len(partials), cdiv(C, SUM_TILE_COLUMNS)), partials, dout, n, cdiv(n, len(partials)), C, partials.shape[1],
        ROWS=SUM_TILE_ROWS, COLUMNS=SUM_TILE_COLUMNS, STAGES=stages_of(SUM_TILE_ROWS, SUM_TILE_COLUMNS, dout), num_warps=4,
    )  # fmt: skip
    finish_columns([dbias], partials, accumulate)


def finish_columns(outs, partials, accumulate):
    """outs[i][c] = the sum over rows of column i * C + c of partials (P, >= len(outs) * C) fp32, plus what it held if `accumulate`.

    P is a power of two. There are up to three outs (C,), all of one type and size.
    """
    C = len(outs[0])
    out0, out1, out2 = (*outs, outs[0], outs[0])[:3]
    door.launch(
        _finish_columns, (cdiv(C, SUM_COLUMNS), len(outs)), out0, out1, out2, partials, C, partials.shape[1],
        PARTIALS=partials.shape[0], COLUMNS=SUM_COLUMNS, ACCUMULATE=bool(accumulate),
    )  # fmt: skip
