"""Token and position embeddings: see llmc/layers/encoder.py.

Backward has no atomics: the loader has grouped the positions by token, and one program adds the rows of one token, in order
of position, and writes its gradient once. Rows of a few positions are fetched together, which hides most of the latency; the bits
do not depend on how many.
"""

from llmc.kernels import door
from llmc.kernels.door import cdiv, jit, load, next_power_of_2, round_by, rounding_noise, rows_at_once, store, tile, tl

COLUMNS = 1024
# rows whose loads can be under way together. gpu_check.py --tune tries others: on an H200 it took tokens' from 16 to 4
TOKEN_UNROLL, POSITION_UNROLL = 4, 8


@jit
def _encoder_forward(out, inputs, wte, wpe, n_rows, T, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    row, mask = tile(tl.program_id(0).to(tl.int64) * ROWS, n_rows, column, C, ROWS)
    token = tl.load(inputs + row, mask=row < n_rows, other=0)
    x = load(wte + token[:, None] * C + column[None, :], mask) + load(wpe + (row % T)[:, None] * C + column[None, :], mask)
    store(out + row[:, None] * C + column[None, :], x, mask)


@jit
def _store_rounded(grad, total, noise_row, column, mask, seed, ADD: tl.constexpr):
    """grad (bf16 pointers) = the stochastic rounding of total, or, if ADD, of total plus what grad held."""
    if ADD:
        total += load(grad, mask)
    noise = rounding_noise(column.to(tl.uint32), noise_row.to(tl.uint32), seed.to(tl.uint32, bitcast=True))
    tl.store(grad, round_by(total, noise), mask=mask)


@jit
def _encoder_backward_tokens(
    dwte, dout, positions, starts, tokens, C, seed, IN_FP32: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr
):
    group = tl.program_id(0)
    start, end = tl.load(starts + group), tl.load(starts + group + 1)
    if start < end:
        token = tl.load(tokens + group).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = column < C
        row = dwte + token * C
        none = tl.zeros((COLUMNS,), tl.int32)  # in the interpreter i + j is a plain number, and comparing that gives no mask
        if IN_FP32:
            total = load(row + column, mask)
        else:
            total = tl.zeros((COLUMNS,), tl.float32)
        for i in range(start, end, UNROLL):
            for j in tl.static_range(UNROLL):
                here = none + i + j < end
                position = tl.load(positions + tl.minimum(i + j, end - 1)).to(tl.int64)
                x = load(dout + position * C + column, mask & here)
                total = tl.where(here, total + x, total)
        if IN_FP32:
            store(row + column, total, mask)
        else:
            _store_rounded(row + column, total, token, column, mask, tl.load(seed), True)


@jit
def _encoder_backward_positions(
    dwpe, dout, B, T, C, first_noise_row, seed, IN_FP32: tl.constexpr, ACCUMULATE: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < C
    none = tl.zeros((COLUMNS,), tl.int32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for b in range(0, B, UNROLL):
        for j in tl.static_range(UNROLL):
            here = none + b + j < B
            x = load(dout + ((b + j) * T + t) * C + column, mask & here)
            total = tl.where(here, total + x, total)
    row = dwpe + t * C
    if IN_FP32:
        if ACCUMULATE:
            total += load(row + column, mask)
        store(row + column, total, mask)
    else:
        _store_rounded(row + column, total, t + first_noise_row, column, mask, tl.load(seed), ACCUMULATE)


def encoder_forward(out, inputs, wte, wpe):
    B, T, C = out.shape
    rows, columns, warps = rows_at_once(C, out)
    door.launch(
        _encoder_forward, (cdiv(B * T, rows),), out, inputs, wte, wpe, B * T, T, C, ROWS=rows, COLUMNS=columns, num_warps=warps
    )  # fmt: skip


def launch_encoder_backward(dwte, dwpe, dout, inputs, staged, scratch, *, accumulate):
    B, T, C = dout.shape
    starts, tokens = scratch["token_groups"]
    columns = min(COLUMNS, next_power_of_2(C))
    blocks, in_fp32 = cdiv(C, columns), dwte.element_size() == 4
    if not accumulate:
        dwpe[T:].zero_()
    door.launch(
        _encoder_backward_positions, (T, blocks), dwpe, dout, B, T, C, dwte.shape[0], scratch["token_seed"],
        IN_FP32=in_fp32, ACCUMULATE=bool(accumulate), COLUMNS=columns, UNROLL=POSITION_UNROLL, num_warps=4,
    )  # fmt: skip
    door.launch(
        _encoder_backward_tokens, (B * T, blocks), dwte, dout, scratch["token_order"], starts, tokens, C, scratch["token_seed"],
        IN_FP32=in_fp32, COLUMNS=columns, UNROLL=TOKEN_UNROLL, num_warps=4,
    )  # fmt: skip
