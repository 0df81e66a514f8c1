"""Causal attention, flash style; and packing dq, dk and dv of torch's kernels. See llmc/layers/attention.py and attention_library.py.

A program of forward computes the output of a tile of queries of one head, over all keys that they see. Backward is two kernels: a program
of one computes dq of a tile of queries, a program of the other dk and dv of a tile of keys, over all queries that see them. Both recompute
probabilities from scores and the log-sum-exp that forward kept: seven products of tiles where five would do. But no two programs add to
the same number, so bits repeat, and all memory is in the plan. Source: Dao 2023 (FlashAttention-2).

On an H200, for 64 x 12 and 16 x 25 heads of 64 channels and 1024 positions, forward takes two thirds of the time of torch's flash
attention, and backward 0.65 and 0.53 of it, which is less than cuDNN takes. Backward took 1.45 and 0.80 ms with tiles of 128 rows and eight
warps. With 64 rows and four warps many small programs share a multiprocessor, and it takes 1.04 and 0.56; forward gains 5%.
"""

from math import e, log2, sqrt

from llmc.kernels import door
from llmc.kernels.columns import finish_columns, matmul_dbias
from llmc.kernels.door import (
    INTERPRETED, TILE_COLUMNS, TILE_ROWS, cdiv, fma, jit, narrow, next_power_of_2, range_of_program, stages_of, sum_over_rows, tile, tl,
    widen,
)  # fmt: skip
from llmc.memory.tuning import ATTENTION_ROWS

# keys that a tile of queries meets at a time, in forward and in backward; queries that a tile of keys meets at a time; and warps. The first
# of each pair is for heads of up to 64 channels, the second for more, for which there would not be enough registers otherwise
FORWARD_KEYS, BACKWARD_KEYS, BACKWARD_QUERIES, WARPS = (64, 32), (32, 32), (32, 16), (4, 8)


# ----------------------------------------------------------------------------
# tiles of one head


@jit
def _head_of_program(blocks, NH, HS):
    """The index of this program's head among those of all sequences, its sequence, and its first channel. A head has `blocks` programs."""
    head = tl.program_id(0) // blocks
    return head.to(tl.int64), (head // NH).to(tl.int64), head % NH * HS


@jit
def _rows(place, row, stride, column, end, HS: tl.constexpr):
    """Load rows of a head; they are zero from row `end` on, where that is not None, and beyond its HS channels."""
    at = place + row[:, None] * stride + column[None, :]
    if end is None and HS == column.shape[0]:
        return tl.load(at)
    else:
        return tl.load(at, mask=_there(row, column, end, HS), other=0.0)


@jit
def _there(row, column, end, HS: tl.constexpr):
    """Which elements exist of rows that end before `end`, or all exist if that is None."""
    there = (column < HS)[None, :]
    if end is not None:
        there = (row < end)[:, None] & there
    return there


@jit
def _numbers(place, row, end):
    """Load a number for each row; it is zero from row `end` on, where that is not None."""
    if end is None:
        return tl.load(place + row)
    else:
        return tl.load(place + row, mask=row < end, other=0.0)


@jit
def _multiply(a, b):
    """a @ b in fp32. A score must be the same number in forward and in backward, where it is computed transposed. A GPU sums over the depth
    in one order, but numpy's order depends on the shape, so under the interpreter the sum is in fp64.
    """
    if INTERPRETED:
        return tl.dot(widen(a).to(tl.float64), widen(b).to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    return tl.dot(a, b)


@jit
def _add_product(total, a, b):
    """total + a @ b, in the registers of total."""
    if INTERPRETED:
        return total + _multiply(a, b)
    return tl.dot(a, b, total)


@jit
def _powers(scores, scale, top):
    """2^(scale * scores - top); top is a row or a column."""
    zeros = tl.zeros_like(scores)
    return tl.exp2(fma(scores, zeros + scale, tl.broadcast_to(0.0 - top, scores.shape)))


# ----------------------------------------------------------------------------
# forward


@jit
def _attend(
    sums, highest, total, q, k, v, first_key, stride, column, position, end, scale,
    HS: tl.constexpr, KEYS: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """Add one more tile of keys to the running sums. If it HIDES, not all queries see all of them.

    sums     (ROWS, CHANNELS)  of 2^(scale * score - highest) times a key's values     total  (ROWS,)  the same without values
    highest  (ROWS,)           the largest scale * score so far
    """
    key = first_key + tl.arange(0, KEYS)
    scores = _multiply(q, tl.trans(_rows(k, key, stride, column, end, HS)))
    if HIDES:
        scores = tl.where(position[:, None] >= key[None, :], scores, float("-inf"))
    top = tl.maximum(highest, tl.max(scores, 1) * scale)
    powers, shrink = _powers(scores, scale, top[:, None]), tl.exp2(highest - top)
    values = _rows(v, key, stride, column, end, HS)
    sums = _add_product(sums * shrink[:, None], narrow(powers, values.dtype), values)
    return sums, top, total * shrink + tl.sum(powers, 1)


@jit(do_not_specialize=["T", "first"])  # they differ for every token of a sample
def _attention_forward(
    atty, lse, q, k, v, T, first, NH, C, q_stride, stride, scale,
    HS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, KEEPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Queries from position `first` on, the first row of q, atty and lse, attend to T keys. lse is written only if it KEEPS that."""
    n_rows = T - first
    end_of_rows, end = None if WHOLE else n_rows, None if WHOLE else T
    blocks = tl.cdiv(n_rows, ROWS)
    head, sequence, channel = _head_of_program(blocks, NH, HS)
    block = blocks - 1 - tl.program_id(0) % blocks  # those that see most keys begin first
    row, column, start = block * ROWS + tl.arange(0, ROWS), tl.arange(0, CHANNELS), first + block * ROWS
    position = first + row
    q = _rows(q + sequence * n_rows * q_stride + channel, row, q_stride, column, end_of_rows, HS)
    k += sequence * T * stride + channel
    v += sequence * T * stride + channel
    sums = tl.zeros((ROWS, CHANNELS), tl.float32)
    highest, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    seen_by_all = (start + 1) // KEYS * KEYS
    for key in range(0, seen_by_all, KEYS):
        sums, highest, total = _attend(sums, highest, total, q, k, v, key, stride, column, position, end, scale, HS, KEYS, False)
    for key in range(seen_by_all, tl.minimum(start + ROWS, T), KEYS):
        sums, highest, total = _attend(sums, highest, total, q, k, v, key, stride, column, position, end, scale, HS, KEYS, True)
    out = narrow(sums * tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), total)[:, None], atty.dtype.element_ty)
    at = sequence * n_rows * C + channel + row[:, None] * C + column[None, :]
    tl.store(atty + at, out, mask=_there(row, column, end_of_rows, HS))
    if KEEPS:
        tl.store(lse + head * n_rows + row, highest + tl.log2(total), mask=row < n_rows)


# ----------------------------------------------------------------------------
# backward


@jit
def _add_dq(
    dq, q, do, k, v, lse, delta, first_key, stride, column, position, end, scale,
    HS: tl.constexpr, KEYS: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """dq plus its sum over one tile of keys."""
    key = first_key + tl.arange(0, KEYS)
    keys, values = _rows(k, key, stride, column, end, HS), _rows(v, key, stride, column, end, HS)
    p = _powers(_multiply(q, tl.trans(keys)), scale, lse[:, None])
    ds = p * (_multiply(do, tl.trans(values)) - delta[:, None])
    if HIDES:
        ds = tl.where(position[:, None] >= key[None, :], ds, 0.0)
    return _add_product(dq, narrow(ds, keys.dtype), keys)


@jit
def _tile_of_queries(
    k, v, q, do, lse, delta, first_query, stride, C, column, position, end, scale,
    HS: tl.constexpr, QUERIES: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """(q, do, p, ds) of one tile of queries for a tile of keys. Rows from `end` on are zeros and add nothing to what is made of them."""
    query = first_query + tl.arange(0, QUERIES)
    q, do = _rows(q, query, stride, column, end, HS), _rows(do, query, C, column, end, HS)
    lse, delta = _numbers(lse, query, end), _numbers(delta, query, end)
    p = _powers(_multiply(k, tl.trans(q)), scale, lse[None, :])
    ds = p * (_multiply(v, tl.trans(do)) - delta[None, :])
    if HIDES:
        sees = query[None, :] >= position[:, None]
        p, ds = tl.where(sees, p, 0.0), tl.where(sees, ds, 0.0)
    return q, do, p, ds


@jit
def _add_dk_dv(
    dk, dv, k, v, q, do, lse, delta, first_query, stride, C, column, position, end, scale,
    HS: tl.constexpr, QUERIES: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """dk and dv plus their sums over one tile of queries."""
    q, do, p, ds = _tile_of_queries(k, v, q, do, lse, delta, first_query, stride, C, column, position, end, scale, HS, QUERIES, HIDES)
    return _add_product(dk, narrow(ds, q.dtype), q), _add_product(dv, narrow(p, do.dtype), do)


@jit
def _write_gradient(place, sums, gradient, row, stride, column, end, HS: tl.constexpr):
    """Write rows of dq, dk or dv, and the sum over these rows before rounding."""
    there = _there(row, column, end, HS)
    tl.store(place + row[:, None] * stride + column[None, :], narrow(gradient, place.dtype.element_ty), mask=there)
    tl.store(sums + column, sum_over_rows(tl.where(there, gradient, 0.0)), mask=column < HS)


@jit
def _attention_backward_queries(
    dqkvr, sums, delta, datty, atty, lse, qkvr, T, NH, C, scale, root,
    HS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries; and delta, the sum over channels of datty * atty, for the next kernel."""
    blocks, stride, end = tl.cdiv(T, ROWS), 3 * C, None if WHOLE else T
    head, sequence, channel = _head_of_program(blocks, NH, HS)
    block = blocks - 1 - tl.program_id(0) % blocks
    row, column, start = block * ROWS + tl.arange(0, ROWS), tl.arange(0, CHANNELS), block * ROWS
    at, out_at, of_row = sequence * T * stride + channel, sequence * T * C + channel, head * T + row
    q, do = _rows(qkvr + at, row, stride, column, end, HS), _rows(datty + out_at, row, C, column, end, HS)
    d = tl.sum(widen(do) * widen(_rows(atty + out_at, row, C, column, end, HS)), 1)
    tl.store(delta + of_row, d, mask=row < T)
    log_sum = _numbers(lse + head * T, row, end)
    k, v, dq = qkvr + at + C, qkvr + at + 2 * C, tl.zeros((ROWS, CHANNELS), tl.float32)
    seen_by_all = (start + 1) // KEYS * KEYS
    for key in range(0, seen_by_all, KEYS):
        dq = _add_dq(dq, q, do, k, v, log_sum, d, key, stride, column, row, end, scale, HS, KEYS, False)
    for key in range(seen_by_all, tl.minimum(start + ROWS, T), KEYS):
        dq = _add_dq(dq, q, do, k, v, log_sum, d, key, stride, column, row, end, scale, HS, KEYS, True)
    sums += (sequence * blocks + block) * stride + channel
    _write_gradient(dqkvr + at, sums, dq * root, row, stride, column, end, HS)


@jit
def _attention_backward_keys(
    dqkvr, sums, delta, datty, lse, qkvr, T, NH, C, scale, root,
    HS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys."""
    blocks, stride, end = tl.cdiv(T, ROWS), 3 * C, None if WHOLE else T
    head, sequence, channel = _head_of_program(blocks, NH, HS)
    block = tl.program_id(0) % blocks
    row, column, start = block * ROWS + tl.arange(0, ROWS), tl.arange(0, CHANNELS), block * ROWS
    at = sequence * T * stride + channel
    k, v = _rows(qkvr + at + C, row, stride, column, end, HS), _rows(qkvr + at + 2 * C, row, stride, column, end, HS)
    q, do = qkvr + at, datty + sequence * T * C + channel
    lse += head * T
    delta += head * T
    dk, dv = tl.zeros((ROWS, CHANNELS), tl.float32), tl.zeros((ROWS, CHANNELS), tl.float32)
    for query in range(start, tl.minimum(start + ROWS, T), QUERIES):
        dk, dv = _add_dk_dv(dk, dv, k, v, q, do, lse, delta, query, stride, C, column, row, end, scale, HS, QUERIES, True)
    for query in range(start + ROWS, T, QUERIES):
        dk, dv = _add_dk_dv(dk, dv, k, v, q, do, lse, delta, query, stride, C, column, row, end, scale, HS, QUERIES, False)
    sums += (sequence * blocks + block) * stride + channel
    _write_gradient(dqkvr + at + C, sums + C, dk * root, row, stride, column, end, HS)
    _write_gradient(dqkvr + at + 2 * C, sums + 2 * C, dv, row, stride, column, end, HS)


# ----------------------------------------------------------------------------
# launchers


def _of_heads(HS, rows, *lengths) -> dict:
    """The constants of a launch for heads of HS channels, by tiles of at most so many rows.

    WHOLE: tiles fill each of these lengths, and heads have at most 64 channels; then no load asks whether a row exists. Compiled for sm90
    by Triton 3.6, that leaves out 6 to 12% of the main loops' instructions, by 3.9 5 to 8%. For 128 channels the kernel of queries would by
    3.9 take 133 registers instead of 127, and a multiprocessor have room for one of its programs, not two.
    """
    channels = max(16, next_power_of_2(HS))  # a product of tiles takes no fewer
    return dict(HS=HS, CHANNELS=channels, WHOLE=HS <= 64 and not any(length % rows for length in lengths))


def _tiles(HS, met, *lengths) -> dict:
    """The same where a tile of ATTENTION_ROWS meets others of `met` rows; and its rows and warps."""
    return _of_heads(HS, max(met, ATTENTION_ROWS), *lengths) | dict(ROWS=ATTENTION_ROWS, num_warps=WARPS[HS > 64])


def _launch_forward(atty, lse, q, k, v, B, T, first, NH, q_stride, stride):
    """Launch forward; lse is None where it is not needed."""
    C = atty.shape[-1]
    HS, keys = C // NH, FORWARD_KEYS[C // NH > 64]
    door.launch(
        _attention_forward, (B * NH * cdiv(T - first, ATTENTION_ROWS),),
        atty, atty if lse is None else lse, q, k, v, T, first, NH, C, q_stride, stride, log2(e) / sqrt(HS),
        KEYS=keys, KEEPS=lse is not None, **_tiles(HS, keys, first, T),
    )  # fmt: skip


def attention_forward(atty, lse, qkvr, NH, scratch):
    """See llmc/layers/attention.py; no scratch."""
    B, T, C = atty.shape
    packed = qkvr.view(-1)
    _launch_forward(atty, lse, packed, packed[C:], packed[2 * C :], B, T, 0, NH, 3 * C, 3 * C)


def attention_backward(dqkvr, dbias, datty, qkvr, atty, lse, NH, scratch, *, accumulate):
    """Scratch: attention_delta (B, NH, T), attention_sums (B, tiles of T, 3C), and column_partials (P, >= 3C), fp32."""
    B, T, C = datty.shape
    delta, sums, HS = scratch["attention_delta"], scratch["attention_sums"], C // NH
    grid, numbers = (B * NH * cdiv(T, ATTENTION_ROWS),), (T, NH, C, log2(e) / sqrt(HS), 1 / sqrt(HS))
    keys, queries = BACKWARD_KEYS[HS > 64], BACKWARD_QUERIES[HS > 64]
    door.launch(
        _attention_backward_queries, grid, dqkvr, sums, delta, datty, atty, lse, qkvr, *numbers, KEYS=keys, **_tiles(HS, keys, T)
    )  # fmt: skip
    door.launch(
        _attention_backward_keys, grid, dqkvr, sums, delta, datty, lse, qkvr, *numbers, QUERIES=queries, **_tiles(HS, queries, T)
    )  # fmt: skip
    matmul_dbias(dbias, sums, scratch, accumulate=accumulate)


def attention_one_row(out, qkvr, cache, position, NH):
    """See llmc/layers/attention_library.py."""
    C = out.shape[1]
    cache[:, position] = qkvr.view(3, C)[1:]
    _launch_forward(out, None, qkvr, *cache, 1, position + 1, position, NH, 3 * C, C)


# ----------------------------------------------------------------------------
# gradients of torch's kernels


@jit
def _pack_gradients(
    dqkvr, partials, dq, dk, dv, n_rows, rows_each, C, stride,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    section = tl.program_id(1) // BLOCKS
    gradient = dq
    if section == 1:
        gradient = dk
    if section == 2:
        gradient = dv
    first, end = range_of_program(rows_each, n_rows)
    column = tl.program_id(1) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in tl.range(0, rows_each, ROWS, num_stages=STAGES):
        row, mask = tile(first + i, end, column, C, ROWS)
        x = tl.load(gradient + row[:, None] * C + column[None, :], mask=mask, other=0.0)
        packed = narrow(widen(x), dqkvr.dtype.element_ty)
        tl.store(dqkvr + row[:, None] * (3 * C) + section * C + column[None, :], packed, mask=mask)
        total += widen(packed)
    tl.store(partials + tl.program_id(0) * stride + section * C + column, sum_over_rows(total), mask=column < C)


def pack_gradients(dqkvr, dbias, gradients, NH, scratch, *, accumulate):
    """Scratch: column_partials (P, >= 3C) fp32. A gradient whose memory is not laid out as (B, T, C) is copied first."""
    B, T, C3 = dqkvr.shape
    C = C3 // 3
    dq, dk, dv = (g.transpose(1, 2).reshape(B * T, C).contiguous() for g in gradients)
    partials, blocks = scratch["column_partials"], cdiv(C, TILE_COLUMNS)
    door.launch(
        _pack_gradients, (len(partials), 3 * blocks), dqkvr, partials, dq, dk, dv, B * T, cdiv(B * T, len(partials)), C, partials.shape[1],
        BLOCKS=blocks, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, STAGES=stages_of(TILE_ROWS, TILE_COLUMNS, dq),
    )  # fmt: skip
    finish_columns([dbias], partials, accumulate)
