"""Causal attention, a head at a time and in it a block of queries: see llmc/layers/attention_cpu.py.

Scores lie the other way round, (keys, queries), so that all of softmax goes on between vectors of queries. A block of queries sees all of
its keys before its softmax is taken, in forward and once more in backward, which has nothing but qkvr. Keys and values are packed once
for a head, queries for their block, as the factors that products want (tiles.py): of rows, where neighbours in a row are a pair, or of
columns, where those in two rows are. A thread works on whole heads in room of its own, so the bits do not depend on their number.
"""

from collections import namedtuple

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.columns import TILE_ROWS as SUMMED_ROWS
from llmc.kernels_cpu.columns import add_row, finish_columns, zero
from llmc.kernels_cpu.door import F0, F1, array, exp_below_zero, factors, jit, load, prange, select, shared, sqrt, store
from llmc.kernels_cpu.tiles import copy_factor, multiply, store_factor, values_of
from llmc.memory.plan import ATTENTION_BLOCK as BLOCK

LOWEST = np.float32(-np.inf)

# of every worker, each flat: see NUMBA_ATTENTION of the plan for sizes
Rooms = namedtuple(
    "Rooms",
    (
        "packed",  # factors: forward k of rows and v of columns; backward k of rows, k of columns, v of rows
        "scores",  # fp32: scores, then their exponentials; gradients of probabilities
        "weights",  # factors: forward exponentials; backward probabilities, gradients of scores, in bf16 these once more, of columns
        "weight_values",  # the same as numbers
        "queries",  # factors: q of rows; backward also q of columns, and datty of rows and of columns
        "block",  # fp32: a block of atty or dq
        "sums",  # fp32: dk and dv
    ),
)


@shared
def _pack_rows(out, row_step, step, x, first, stride, rows, all_rows, width):
    """Factors of rows: that which x[first + row * stride + i * n] begins goes to out[row * row_step + i * step]; 0 beyond `rows`."""
    n = values_of(out)
    for row in range(rows):
        at, place = first + row * stride, row * row_step
        for i in range(width // n):
            copy_factor(out, place + i * step, x, at + i * n)
        if width % n:
            store_factor(out, place + width // n * step, load(x, at + width - 1), F0)
    for row in range(rows, all_rows):
        for i in range((width + n - 1) // n):
            store_factor(out, row * row_step + i * step, F0, F0)


@shared
def _pack_columns(out, row_step, x, first, stride, rows, all_rows, width):
    """Factors of columns: that which x[first + row * stride + i] begins goes to out[row // n * row_step + i]; 0 beyond `rows`."""
    n = values_of(out)
    for row in range(0, rows - rows % n, n):
        at, place = first + row * stride, row // n * row_step
        for i in range(width):
            store_factor(out, place + i, load(x, at + i), load(x, at + (n - 1) * stride + i))
    if rows % n:
        for i in range(width):
            store_factor(out, rows // n * row_step + i, load(x, first + (rows - 1) * stride + i), F0)
    for row in range((rows + n - 1) // n, all_rows // n):
        for i in range(width):
            store_factor(out, row * row_step + i, F0, F0)


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
def _score_gradients(p, ds, ds_pairs, powers, gradients, share, delta, end):
    """Probabilities p and gradients ds of scores; the latter also as factors of columns, unless those are the same."""
    n = values_of(ds_pairs)
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
                store_factor(ds_pairs, key // n * BLOCK + query, ds_at, ds_last)


@shared
def _write_gradient(out, first, stride, sums, sums_at, gradient, width, tile_sum, rows, scale):
    """Rows of a gradient, times scale, to out; and to its sums over rows, before they are rounded."""
    HS = len(tile_sum)
    for tile in range(0, rows, SUMMED_ROWS):
        zero(tile_sum, 0, HS)
        for row in range(tile, min(tile + SUMMED_ROWS, rows)):
            for i in range(HS):
                x = load(gradient, row * width + i) * scale
                store(out, first + row * stride + i, x)
                store(tile_sum, i, load(tile_sum, i) + x)
        add_row(sums, sums_at, tile_sum, 0, HS)


@jit
def _forward(out, qkvr, rooms, B, T, NH, HS, workers):
    C, Hb, n = NH * HS, rooms.block.shape[2] // BLOCK, values_of(rooms.packed)
    depth, keys_end, scale = (HS + n - 1) // n, (T + BLOCK - 1) // BLOCK * BLOCK, F1 / sqrt(np.float32(HS))
    for worker in prange(workers):
        w = np.int64(worker)
        keys, values, queries, block = rooms.packed[w, 0], rooms.packed[w, 1], rooms.queries[w, 0], rooms.block[w, 0]
        scores, weights = rooms.scores[w, 0], rooms.weights[w, 0]
        highest, share = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        for head in range(w, B * NH, workers):
            first, column = head // NH * T, head % NH * HS
            q_at, out_at = first * 3 * C + column, first * C + column
            _pack_rows(keys, Hb // n, 1, qkvr, q_at + C, 3 * C, T, keys_end, HS)
            _pack_columns(values, Hb, qkvr, q_at + 2 * C, 3 * C, T, keys_end, HS)
            for at in range(0, T, BLOCK):
                end, rows = at + BLOCK, min(BLOCK, T - at)
                _pack_rows(queries, 1, BLOCK, qkvr, q_at + at * 3 * C, 3 * C, rows, BLOCK, HS)
                multiply(scores, BLOCK, keys, Hb // n, 1, queries, BLOCK, end, BLOCK, depth, 0)
                _exponentials(scores, highest, share, end, scale)
                _pack_columns(weights, BLOCK, scores, 0, BLOCK, end, end, BLOCK)
                multiply(block, Hb, weights, 1, BLOCK, values, Hb, BLOCK, Hb, end // n, 0)
                for row in range(rows):
                    for i in range(HS):
                        store(out, out_at + (at + row) * C + i, load(block, row * Hb + i) * load(share, row))


@jit
def _backward(dqkvr, bias_sums, datty, qkvr, rooms, B, T, NH, HS, workers):
    C, Hb, n = NH * HS, rooms.block.shape[2] // BLOCK, values_of(rooms.packed)
    depth, keys_end, scale = (HS + n - 1) // n, (T + BLOCK - 1) // BLOCK * BLOCK, F1 / sqrt(np.float32(HS))
    for worker in prange(workers):
        w = np.int64(worker)
        k_rows, k_columns, v_rows, block = rooms.packed[w, 0], rooms.packed[w, 1], rooms.packed[w, 2], rooms.block[w, 0]
        q_rows, q_columns, do_rows, do_columns = rooms.queries[w, 0], rooms.queries[w, 1], rooms.queries[w, 2], rooms.queries[w, 3]
        powers, dp, dk, dv = rooms.scores[w, 0], rooms.scores[w, 1], rooms.sums[w, 0], rooms.sums[w, 1]
        p, ds, p_values, ds_values = rooms.weights[w, 0], rooms.weights[w, 1], rooms.weight_values[w, 0], rooms.weight_values[w, 1]
        ds_pairs = ds if n == 1 else rooms.weights[w, 2]
        highest, share, delta = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        tile_sum = np.empty(HS, np.float32)
        for head in range(w, B * NH, workers):
            first, column = head // NH * T, head % NH * HS
            q_at, out_at, sums_at = first * 3 * C + column, first * C + column, head // NH * 3 * C + column
            for which in range(3):
                zero(bias_sums, sums_at + which * C, HS)
            _pack_rows(k_rows, Hb // n, 1, qkvr, q_at + C, 3 * C, T, keys_end, HS)
            _pack_columns(k_columns, Hb, qkvr, q_at + C, 3 * C, T, keys_end, HS)
            _pack_rows(v_rows, Hb // n, 1, qkvr, q_at + 2 * C, 3 * C, T, keys_end, HS)
            adds = 0  # the last block of queries comes first: it writes all of dk and dv
            for at in range(keys_end - BLOCK, -1, -BLOCK):
                end, rows = at + BLOCK, min(BLOCK, T - at)
                q, do = q_at + at * 3 * C, out_at + at * C
                _pack_rows(q_rows, 1, BLOCK, qkvr, q, 3 * C, rows, BLOCK, HS)
                _pack_columns(q_columns, Hb, qkvr, q, 3 * C, rows, BLOCK, HS)
                _pack_rows(do_rows, 1, BLOCK, datty, do, C, rows, BLOCK, HS)
                _pack_columns(do_columns, Hb, datty, do, C, rows, BLOCK, HS)
                multiply(powers, BLOCK, k_rows, Hb // n, 1, q_rows, BLOCK, end, BLOCK, depth, 0)
                _exponentials(powers, highest, share, end, scale)
                multiply(dp, BLOCK, v_rows, Hb // n, 1, do_rows, BLOCK, end, BLOCK, depth, 0)
                _mean_gradients(delta, powers, dp, share, end)
                _score_gradients(p_values, ds_values, ds_pairs, powers, dp, share, delta, end)
                multiply(dv, Hb, p, BLOCK // n, 1, do_columns, Hb, end, Hb, BLOCK // n, adds)
                multiply(dk, Hb, ds, BLOCK // n, 1, q_columns, Hb, end, Hb, BLOCK // n, adds)
                multiply(block, Hb, ds_pairs, 1, BLOCK, k_columns, Hb, BLOCK, Hb, end // n, 0)
                _write_gradient(dqkvr, q, 3 * C, bias_sums, sums_at, block, Hb, tile_sum, rows, scale)
                adds = 1
            _write_gradient(dqkvr, q_at + C, 3 * C, bias_sums, sums_at + C, dk, Hb, tile_sum, T, scale)
            _write_gradient(dqkvr, q_at + 2 * C, 3 * C, bias_sums, sums_at + 2 * C, dv, Hb, tile_sum, T, F1)


def attention_cpu_forward(atty, qkvr, NH, scratch):
    """Scratch: attention_packed, _scores, _weights, _queries and _block, as the plan has them; of _sums only that it is there."""
    B, T, C = atty.shape
    door.launch(_forward, array(atty), array(qkvr), _rooms(scratch), B, T, NH, C // NH, _workers(scratch, B * NH))


def attention_cpu_backward(dqkvr, dbias, datty, qkvr, NH, scratch, *, accumulate):
    """Scratch: as forward's, and attention_sums and attention_bias."""
    B, T, C = datty.shape
    bias = scratch["attention_bias"]
    arrays = (array(t) for t in (dqkvr, bias, datty, qkvr))
    door.launch(_backward, *arrays, _rooms(scratch), B, T, NH, C // NH, _workers(scratch, B * NH))
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
