"""Causal attention, a head at a time and in it a block of queries: see llmc/layers/attention_cpu.py.

Scores lie the other way round, (keys, queries), so that all of softmax goes on between vectors of queries. A block of queries sees all of
its keys before its softmax is taken, in forward and once more in backward, which has nothing but qkvr. Keys and values are packed once
for a head, queries for their block, as the factors that products want (tiles.py). Blocks of atty and dq are computed transposed as well,
(channels, queries): so a block of queries is always columns of the right matrix. A thread works on whole heads in room of its own, so the
bits do not depend on their number.
"""

from collections import namedtuple

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.columns import TILE_ROWS as SUMMED_ROWS
from llmc.kernels_cpu.columns import add_row, finish_columns, zero
from llmc.kernels_cpu.door import F0, F1, LINE, aligned, array, exp_below_zero, factors, jit, load, prange, select, shared, sqrt, store
from llmc.kernels_cpu.tiles import (
    LANES, close_tiles, multiply, open_tiles, pack_left, pack_right, store_factor, streams_lines, transpose_rows, values_of, whole_depth,
    write_row,
)  # fmt: skip
from llmc.memory.plan import ATTENTION_BLOCK as BLOCK

LOWEST = np.float32(-np.inf)

# of every worker, each flat: see NUMBA_ATTENTION of the plan for sizes
Rooms = namedtuple(
    "Rooms",
    (
        "packed",  # factors of left matrices: forward k and the transposed v; backward k, the transposed k, and v
        "scores",  # fp32: scores, then their exponentials; gradients of probabilities
        "weights",  # factors: forward exponentials, right; backward probabilities and gradients of scores, left, if pairs also right
        "weight_values",  # the same as numbers
        "queries",  # factors of right matrices: the transposed q; backward also q, and datty either way
        "block",  # fp32: a block of atty or dq, transposed and as it is
        "sums",  # fp32: dk and dv
    ),
)


@shared
def _pack_weights(out, powers, end):
    """Exponentials (end, BLOCK) as factors of a right matrix."""
    n = values_of(out)
    for key in range(0, end, n):
        for query in range(BLOCK):
            first = key * BLOCK + query
            store_factor(out, key // n * BLOCK + query, load(powers, first), load(powers, first + (n - 1) * BLOCK))


@shared
def _transpose(out, x, columns):
    """out (BLOCK, columns) = the transposed x, columns a multiple of BLOCK."""
    for i in range(0, BLOCK, LANES):
        for j in range(0, columns, LANES):
            transpose_rows(out, i * columns + j, columns, x, j * BLOCK + i, BLOCK)


@shared
def _exponentials(scores, highest, total, end, scale):
    """Scores (end, BLOCK) become exp(scale * (score - the highest of its query)), zero where a query does not see the key: of the last
    keys, which are the queries' own positions, it sees those up to itself. Also the inverse of their sum, by query."""
    for key in range(BLOCK):
        at = (end - BLOCK + key) * BLOCK
        for query in range(key):
            store(scores, at + query, LOWEST)
    for query in range(BLOCK):
        store(highest, query, LOWEST)
        store(total, query, F0)
    for key in range(end):
        for query in range(BLOCK):
            score, most = load(scores, key * BLOCK + query), load(highest, query)
            store(highest, query, select(score > most, score, most))
    for key in range(end):
        for query in range(BLOCK):
            power = exp_below_zero((load(scores, key * BLOCK + query) - load(highest, query)) * scale)
            store(scores, key * BLOCK + query, power)
            store(total, query, load(total, query) + power)
    for query in range(BLOCK):
        store(total, query, F1 / load(total, query))


@shared
def _mean_gradients(delta, powers, gradients, share, end):
    """delta = the mean of gradients under the probabilities powers * share, by query."""
    zero(delta, 0, BLOCK)
    for key in range(end):
        for query in range(BLOCK):
            at = key * BLOCK + query
            store(delta, query, load(delta, query) + load(gradients, at) * load(powers, at))
    for query in range(BLOCK):
        store(delta, query, load(delta, query) * load(share, query))


@shared
def _score_gradients(p, ds, ds_right, powers, gradients, share, delta, end):
    """Probabilities p and gradients ds of scores; the latter also as factors of a right matrix, unless those are the same."""
    n = values_of(ds_right)
    for key in range(0, end, n):
        for query in range(BLOCK):
            at, last = key * BLOCK + query, (key + n - 1) * BLOCK + query
            p_at, p_last = load(powers, at) * load(share, query), load(powers, last) * load(share, query)
            ds_at, ds_last = p_at * (load(gradients, at) - load(delta, query)), p_last * (load(gradients, last) - load(delta, query))
            store(p, at, p_at)
            store(ds, at, ds_at)
            if n > 1:
                store(p, last, p_last)
                store(ds, last, ds_last)
                store_factor(ds_right, key // n * BLOCK + query, ds_at, ds_last)


@shared
def _write_gradient(out, first, stride, sums, sums_at, gradient, width, tile_sum, rows, scale, streams):
    """Rows of a gradient, times scale, to out; and to its sums over rows, before they are rounded. The gradient is scaled in place."""
    HS = len(tile_sum)
    for tile in range(0, rows, SUMMED_ROWS):
        zero(tile_sum, 0, HS)
        for row in range(tile, min(tile + SUMMED_ROWS, rows)):
            for i in range(HS):
                x = load(gradient, row * width + i) * scale
                store(gradient, row * width + i, x)
                store(tile_sum, i, load(tile_sum, i) + x)
            write_row(out, first + row * stride, gradient, row * width, HS, streams)
        add_row(sums, sums_at, tile_sum, 0, HS)


@jit
def _forward(out, qkvr, rooms, B, T, NH, HS, workers, streams):
    C, Hb, n = NH * HS, rooms.block.shape[2] // BLOCK, values_of(rooms.packed)
    keys_end, scale = (T + BLOCK - 1) // BLOCK * BLOCK, F1 / sqrt(np.float32(HS))
    depth, keys_row, values_row = whole_depth(rooms.packed, HS), Hb // n, keys_end // n
    for worker in prange(workers):
        w = np.int64(worker)
        keys, values, queries = rooms.packed[w, 0], rooms.packed[w, 1], rooms.queries[w, 0]
        scores, weights, block, block_rows = rooms.scores[w, 0], rooms.weights[w, 0], rooms.block[w, 0], rooms.block[w, 1]
        highest, share, shapes = aligned(BLOCK), aligned(BLOCK), np.empty(LINE, np.uint8)
        open_tiles(keys, shapes)
        for head in range(w, B * NH, workers):
            first, column = head // NH * T, head % NH * HS
            q_at, out_at = first * 3 * C + column, first * C + column
            pack_left(keys, 0, keys_row, keys_end, depth, qkvr, q_at + C, 3 * C, 1, T, HS)
            pack_left(values, 0, values_row, Hb, values_row, qkvr, q_at + 2 * C, 1, 3 * C, HS, T)
            for at in range(0, T, BLOCK):
                end, rows = at + BLOCK, min(BLOCK, T - at)
                pack_right(queries, BLOCK, 0, BLOCK, depth, qkvr, q_at + at * 3 * C, 3 * C, 1, rows, HS)
                multiply(scores, BLOCK, keys, keys_row, queries, BLOCK, end, BLOCK, depth, 0)
                _exponentials(scores, highest, share, end, scale)
                _pack_weights(weights, scores, end)
                multiply(block, BLOCK, values, values_row, weights, BLOCK, Hb, BLOCK, end // n, 0)
                _transpose(block_rows, block, Hb)
                for row in range(rows):
                    for i in range(HS):
                        store(block_rows, row * Hb + i, load(block_rows, row * Hb + i) * load(share, row))
                    write_row(out, out_at + (at + row) * C, block_rows, row * Hb, HS, streams)
        close_tiles(keys, shapes)


@jit
def _backward(dqkvr, bias_sums, datty, qkvr, rooms, B, T, NH, HS, workers, streams):
    C, Hb, n = NH * HS, rooms.block.shape[2] // BLOCK, values_of(rooms.packed)
    keys_end, scale = (T + BLOCK - 1) // BLOCK * BLOCK, F1 / sqrt(np.float32(HS))
    depth, keys_row, columns_row, queries_row = whole_depth(rooms.packed, HS), Hb // n, keys_end // n, BLOCK // n
    for worker in prange(workers):
        w = np.int64(worker)
        k_rows, k_columns, v_rows = rooms.packed[w, 0], rooms.packed[w, 1], rooms.packed[w, 2]
        q_columns, q_rows, do_columns, do_rows = rooms.queries[w, 0], rooms.queries[w, 1], rooms.queries[w, 2], rooms.queries[w, 3]
        powers, dp, dk, dv = rooms.scores[w, 0], rooms.scores[w, 1], rooms.sums[w, 0], rooms.sums[w, 1]
        p, ds, p_values, ds_values = rooms.weights[w, 0], rooms.weights[w, 1], rooms.weight_values[w, 0], rooms.weight_values[w, 1]
        ds_right, block, block_rows = ds if n == 1 else rooms.weights[w, 2], rooms.block[w, 0], rooms.block[w, 1]
        highest, share, delta = aligned(BLOCK), aligned(BLOCK), aligned(BLOCK)
        tile_sum, shapes = aligned(HS), np.empty(LINE, np.uint8)
        open_tiles(p, shapes)
        for head in range(w, B * NH, workers):
            first, column = head // NH * T, head % NH * HS
            q_at, out_at, sums_at = first * 3 * C + column, first * C + column, head // NH * 3 * C + column
            for which in range(3):
                zero(bias_sums, sums_at + which * C, HS)
            pack_left(k_rows, 0, keys_row, keys_end, depth, qkvr, q_at + C, 3 * C, 1, T, HS)
            pack_left(k_columns, 0, columns_row, Hb, columns_row, qkvr, q_at + C, 1, 3 * C, HS, T)
            pack_left(v_rows, 0, keys_row, keys_end, depth, qkvr, q_at + 2 * C, 3 * C, 1, T, HS)
            adds = 0  # the last block of queries comes first: it writes all of dk and dv
            for at in range(keys_end - BLOCK, -1, -BLOCK):
                end, rows = at + BLOCK, min(BLOCK, T - at)
                q, do = q_at + at * 3 * C, out_at + at * C
                pack_right(q_columns, BLOCK, 0, BLOCK, depth, qkvr, q, 3 * C, 1, rows, HS)
                pack_right(q_rows, Hb, 0, Hb, queries_row, qkvr, q, 1, 3 * C, HS, rows)
                pack_right(do_columns, BLOCK, 0, BLOCK, depth, datty, do, C, 1, rows, HS)
                pack_right(do_rows, Hb, 0, Hb, queries_row, datty, do, 1, C, HS, rows)
                multiply(powers, BLOCK, k_rows, keys_row, q_columns, BLOCK, end, BLOCK, depth, 0)
                _exponentials(powers, highest, share, end, scale)
                multiply(dp, BLOCK, v_rows, keys_row, do_columns, BLOCK, end, BLOCK, depth, 0)
                _mean_gradients(delta, powers, dp, share, end)
                _score_gradients(p_values, ds_values, ds_right, powers, dp, share, delta, end)
                multiply(dv, Hb, p, queries_row, do_rows, Hb, end, Hb, queries_row, adds)
                multiply(dk, Hb, ds, queries_row, q_rows, Hb, end, Hb, queries_row, adds)
                multiply(block, BLOCK, k_columns, columns_row, ds_right, BLOCK, Hb, BLOCK, end // n, 0)
                _transpose(block_rows, block, Hb)
                _write_gradient(dqkvr, q, 3 * C, bias_sums, sums_at, block_rows, Hb, tile_sum, rows, scale, streams)
                adds = 1
            _write_gradient(dqkvr, q_at + C, 3 * C, bias_sums, sums_at + C, dk, Hb, tile_sum, T, scale, streams)
            _write_gradient(dqkvr, q_at + 2 * C, 3 * C, bias_sums, sums_at + 2 * C, dv, Hb, tile_sum, T, F1, streams)
        close_tiles(p, shapes)


def attention_cpu_forward(atty, qkvr, NH, scratch):
    """Scratch: attention_packed, _scores, _weights, _queries and _block, as the plan has them; of _sums only that it is there."""
    B, T, C = atty.shape
    rooms, workers, streams = _rooms(scratch), _workers(scratch, B * NH), streams_lines(atty, C // NH, scratch["attention_packed"])
    door.launch(_forward, array(atty), array(qkvr), rooms, B, T, NH, C // NH, workers, streams)


def attention_cpu_backward(dqkvr, dbias, datty, qkvr, NH, scratch, *, accumulate):
    """Scratch: as forward's, and attention_sums and attention_bias."""
    B, T, C = datty.shape
    bias = scratch["attention_bias"]
    rooms, workers, streams = _rooms(scratch), _workers(scratch, B * NH), streams_lines(dqkvr, C // NH, scratch["attention_packed"])
    door.launch(_backward, *(array(t) for t in (dqkvr, bias, datty, qkvr)), rooms, B, T, NH, C // NH, workers, streams)
    finish_columns([dbias], bias, B, accumulate)


def _rooms(scratch):
    views = (
        ("packed", factors),
        ("scores", array),
        ("weights", factors),
        ("weights", array),
        ("queries", factors),
        ("block", array),
        ("sums", array),
    )
    rooms = [(scratch[f"attention_{name}"], view) for name, view in views]
    return Rooms(*(view(room).reshape(*room.shape[:2], -1) for room, view in rooms))


def _workers(scratch, heads):
    return min(len(scratch["attention_block"]), heads, door.threads())
