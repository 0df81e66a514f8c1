"""LayerNorm: forward, with or without the addition before it or from kept statistics, and backward. See llmc/layers/layernorm.py.

A program holds whole rows. Backward is a fixed number of programs, each over a range of rows of its own, whose sums for the
weight, the bias and the projection's bias are partials that a second kernel adds in order. As these programs are few, a warp
scheduler has only two warps to choose from, and by their count its instructions take as long as the memory traffic. So products
are added by fma, both sums over a row are taken in one reduction, and nothing is masked where zeros have the same effect: on
sm90 441 instructions for two rows of 768, not 581.
"""

from llmc.kernels import door
from llmc.kernels.columns import finish_columns
from llmc.kernels.door import (
    cdiv, constant, fma, jit, load, narrow, range_of_program, rows_at_once, stages_of, store, sum_over_rows, tile, tl, widen,
)  # fmt: skip
from llmc.layers.layernorm import EPSILON
from llmc.layers.rows import rows_of


@jit
def _row_mean(x, C):
    """The mean of each row of x, whose columns beyond C are zero."""
    total = tl.sum(x, 1)
    return tl.div_rn(total, tl.zeros_like(total) + C)


@jit
def _layernorm_forward(
    out, mean, rstd, inp, residual, weight, bias, n_rows, C, epsilon, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.arange(0, COLUMNS)
    row, mask = tile(tl.program_id(0).to(tl.int64) * ROWS, n_rows, column, C, ROWS)
    at = row[:, None] * C + column[None, :]
    x = load(inp + at, mask)
    if ADD:
        added = narrow(x + load(residual + at, mask), inp.dtype.element_ty)
        tl.store(inp + at, added, mask=mask)
        x = widen(added)
    m = _row_mean(x, C)
    centered = tl.where(mask, x - m[:, None], 0.0)
    variance = _row_mean(centered * centered, C)
    r = tl.div_rn(constant(variance, 1.0), tl.sqrt_rn(variance + epsilon))
    tl.store(mean + row, m, mask=row < n_rows)
    tl.store(rstd + row, r, mask=row < n_rows)
    w, b = load(weight + column, column < C), load(bias + column, column < C)
    store(out + at, centered * r[:, None] * w[None, :] + b[None, :], mask)


@jit
def _layernorm_normalize(out, mean, rstd, inp, weight, bias, n_rows, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    row, mask = tile(tl.program_id(0).to(tl.int64) * ROWS, n_rows, column, C, ROWS)
    at = row[:, None] * C + column[None, :]
    m, r = load(mean + row, row < n_rows), load(rstd + row, row < n_rows)
    w, b = load(weight + column, column < C), load(bias + column, column < C)
    store(out + at, (load(inp + at, mask) - m[:, None]) * r[:, None] * w[None, :] + b[None, :], mask)


@jit
def _layernorm_backward(
    dresidual, partials, dout, inp, weight, mean, rstd, n_rows, rows_each, C, stride, share,
    PROJECTION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """share is 1 / C. Beyond the last row or column dout and dresidual are loaded as zeros, so everything that is added up is zero
    there, except the projection's sums in columns beyond C, which are not stored."""
    first, end = range_of_program(rows_each, n_rows)
    column = tl.arange(0, COLUMNS)
    zeros = tl.zeros((ROWS, COLUMNS), tl.float32)  # also added to a column, to make it as wide as fma needs
    weight_sum, bias_sum, proj_sum = zeros, zeros, zeros
    w = load(weight + column, column < C)
    for i in tl.range(0, rows_each, ROWS, num_stages=STAGES):
        row, mask = tile(first + i, end, column, C, ROWS)
        at = row[:, None] * C + column[None, :]
        m, r = load(mean + row, row < end), load(rstd + row, row < end)
        dy = load(dout + at, mask)
        old = tl.load(dresidual + at, mask=mask, other=0.0)  # here: no load moves across a barrier, and a row's sums have some
        x_hat = (load(inp + at, mask) - m[:, None]) * r[:, None]
        bias_sum += dy
        weight_sum = fma(x_hat, dy, weight_sum)
        # dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) with g = dout * weight
        g = dy * w[None, :]
        g_mean, gx_mean = tl.split(tl.sum(tl.join(g, g * x_hat), 1) * share)
        centered = fma(x_hat, zeros - gx_mean[:, None], g - g_mean[:, None])
        new = fma(centered, zeros + r[:, None], widen(old))
        store(dresidual + at, new, mask)
        if PROJECTION:
            proj_sum += new
    partial = partials + tl.program_id(0) * stride + column
    tl.store(partial, sum_over_rows(weight_sum), mask=column < C)
    tl.store(partial + C, sum_over_rows(bias_sum), mask=column < C)
    if PROJECTION:
        tl.store(partial + 2 * C, sum_over_rows(proj_sum), mask=column < C)


def _launch_forward(out, mean, rstd, inp, residual, weight, bias, add):
    x = rows_of(inp)
    n, C = x.shape
    rows, columns, warps = rows_at_once(C, inp)
    door.launch(
        _layernorm_forward, (cdiv(n, rows),), out, mean, rstd, inp, residual, weight, bias, n, C, EPSILON,
        ADD=add, ROWS=rows, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip


def layernorm_forward(out, mean, rstd, inp, weight, bias, scratch):
    _launch_forward(out, mean, rstd, inp, inp, weight, bias, False)


def residual_layernorm_forward(residual_out, out, mean, rstd, residual, weight, bias, scratch):
    _launch_forward(out, mean, rstd, residual_out, residual, weight, bias, True)


def layernorm_normalize(out, inp, mean, rstd, weight, bias, scratch):
    n, C = rows_of(inp).shape
    rows, columns, warps = rows_at_once(C, inp)
    door.launch(
        _layernorm_normalize, (cdiv(n, rows),), out, mean, rstd, inp, weight, bias, n, C, ROWS=rows, COLUMNS=columns, num_warps=warps
    )  # fmt: skip


def layernorm_backward(dresidual, dweight, dbias, dproj_bias, dout, inp, weight, mean, rstd, scratch, *, accumulate):
    """Scratch: column_partials (P, >= 3C) fp32."""
    n, C = rows_of(inp).shape
    rows, columns, warps = rows_at_once(C, inp)
    partials = scratch["column_partials"]
    door.launch(
        _layernorm_backward, (len(partials),), dresidual, partials, dout, inp, weight, mean, rstd,
        n, cdiv(n, len(partials)), C, partials.shape[1], 1 / C,
        PROJECTION=dproj_bias is not None, ROWS=rows, COLUMNS=columns, STAGES=stages_of(rows, columns, inp), num_warps=warps,
    )  # fmt: skip
    finish_columns([dweight, dbias] if dproj_bias is None else [dweight, dbias, dproj_bias], partials, accumulate)
