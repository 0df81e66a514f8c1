"""dq, dk and dv into one tensor, and the bias gradient on the way: see llmc/layers/attention.py."""

from llmc.kernels import door
from llmc.kernels.columns import finish_columns
from llmc.kernels.door import TILE_COLUMNS, TILE_ROWS, cdiv, jit, narrow, range_of_program, tile, tl, widen


@jit
def _pack_gradients(
    dqkvr, partials, dq, dk, dv, n_rows, rows_each, C, stride, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    section = tl.program_id(1) // BLOCKS
    gradient = dq
    if section == 1:
        gradient = dk
    if section == 2:
        gradient = dv
    first, end = range_of_program(rows_each, n_rows)
    column = tl.program_id(1) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(0, rows_each, ROWS):
        row, mask = tile(first + i, end, column, C, ROWS)
        x = tl.load(gradient + row[:, None] * C + column[None, :], mask=mask, other=0.0)
        packed = narrow(widen(x), dqkvr.dtype.element_ty)
        tl.store(dqkvr + row[:, None] * (3 * C) + section * C + column[None, :], packed, mask=mask)
        total += widen(packed)
    tl.store(partials + tl.program_id(0) * stride + section * C + column, tl.sum(total, 0), mask=column < C)


def pack_gradients(dqkvr, dbias, gradients, NH, scratch, *, accumulate):
    """Scratch: column_partials (P, >= 3C) fp32. A gradient whose memory is not laid out as (B, T, C) is copied first."""
    B, T, C3 = dqkvr.shape
    C = C3 // 3
    dq, dk, dv = (g.transpose(1, 2).reshape(B * T, C).contiguous() for g in gradients)
    partials, blocks = scratch["column_partials"], cdiv(C, TILE_COLUMNS)
    door.launch(
        _pack_gradients, (len(partials), 3 * blocks), dqkvr, partials, dq, dk, dv, B * T, cdiv(B * T, len(partials)), C, partials.shape[1],
        BLOCKS=blocks, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
    )  # fmt: skip
    finish_columns([dbias], partials, accumulate)
