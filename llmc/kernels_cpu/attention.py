"""Causal attention, one head at a time and within it one block of queries at a time: see llmc/layers/attention.py.

Scores are stored transposed, (keys, queries), so that all of softmax is arithmetic between vectors of queries. Forward computes the scores
of a block of queries for all its keys before it takes their softmax. Backward, which has the log-sum-exp, takes one block of keys after
the other; each stays in the L1 cache until it is finished. Keys and values are packed once per head, and queries once per block, as the
factors that products take (tiles.py). Blocks of atty and dq are computed transposed as well, (channels, queries), so a block of queries
is the columns of the right matrix there too. A thread works on whole heads, in scratch of its own, so the bits do not depend on the
number of threads.

A head's rows lie far apart, so the hardware does not prefetch them. Products do it, a row or two before each tile: the next head's q, k
and v, the next block of datty and atty, and the lines that results are written to. With that, and without products of zeros in the blocks
where queries meet keys of their own positions, d12's attention of 4 x 256 tokens took on two cores of a Zen 4 0.92 of the time forward and
0.90 backward in fp32, and 0.82 to 0.87 and 0.91 in bf16; of 64 tokens it took 0.74 to 0.88, of 1024 0.98.
"""

from collections import namedtuple

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.columns import SUMMED_ROWS, add_row, finish_columns, zero
from llmc.kernels_cpu.door import (
    F0, F1, LINE, LOG2_E, aligned, array, dot, exp2_below_zero, factors, fma, helper, jit, load, plus, prange, select, shared, sqrt, store,
)  # fmt: skip
from llmc.kernels_cpu.packing import join_factors, pack_left, pack_right, round_numbers, streams_lines, transpose_rows, write_row
from llmc.kernels_cpu.tiles import LANES, Ahead, close_tiles, multiply, open_tiles, values_of, whole_depth
from llmc.memory.tuning import ATTENTION_BLOCK as BLOCK

LOWEST, LN2 = np.float32(-np.inf), np.float32(np.log(2))
AT_ONCE = 4  # keys whose scores are compared in pairs first, so that the highest so far is read and written once for all of them

# scratch, each an array (workers, buffers, elements of a buffer): see NUMBA_ATTENTION in llmc/memory/scratch_sizes.py for sizes
Rooms = namedtuple(
    "Rooms",
    (
        "packed",  # factors of left matrices: forward k and the transposed v; backward k, the transposed k, and v
        "scores",  # fp32: scores, which become exponentials or, in backward, probabilities; in backward of one block of keys
        "weights",  # factors of a right matrix: forward exponentials, backward gradients of scores
        "left",  # backward, of one block of keys: probabilities and gradients of scores, as factors of left matrices
        "left_values",  # the same memory as numbers
        "queries",  # factors of right matrices: the transposed q; in backward also q, and datty both transposed and as it is
        "block",  # fp32: a block of atty or dq, transposed and as it is; before dq, gradients of probabilities, then of scores
        "sums",  # fp32: dk and dv
    ),
)


@shared
def _heads_of(worker, workers, heads):
    """(first, end) of a worker's heads: neighbours, as their channels share cache lines, or are prefetched together by the hardware."""
    return worker * heads // workers, (worker + 1) * heads // workers


@shared
def _place_of(head, NH, HS, T):
    """Where a head's first row begins in qkvr, which is where its q does, and in atty."""
    row, column = head // NH * T, head % NH * HS
    return row * 3 * NH * HS + column, row * NH * HS + column


@shared
def _next_head(qkvr, head, NH, HS, T, at, key):
    """The part of the next head's q, k and v that is prefetched while the scores are computed of the queries from `at` on for the keys
    from `key` on: an equal one for each block of scores. After a worker's last head it is of no use, and may lie outside qkvr."""
    C, block, blocks = NH * HS, at // BLOCK, (T + BLOCK - 1) // BLOCK
    which, all_of_them = block * (block + 1) // 2 + key // BLOCK, blocks * (blocks + 1) // 2
    first, end = which * T // all_of_them, (which + 1) * T // all_of_them
    return Ahead(qkvr, _place_of(head + 1, NH, HS, T)[0] + first * 3 * C, end - first, 3 * C, 3, C, HS)


@shared
def _hide_future(scores, at):
    """Scores (BLOCK, BLOCK) from `at` on, whose keys are at the queries' own positions, become -inf where the key is the later one."""
    for key in range(BLOCK):
        for query in range(key):
            store(scores, at + key * BLOCK + query, LOWEST)


@shared
def _find_highest(highest, scores, first, end):
    """highest = for each query, the largest of itself and of the scores (first <= key < end, BLOCK)."""
    for key in range(first, end, AT_ONCE):
        for query in range(BLOCK):
            at, most = key * BLOCK + query, load(highest, query)
            a, b, c, d = load(scores, at), load(scores, at + BLOCK), load(scores, at + 2 * BLOCK), load(scores, at + 3 * BLOCK)
            a, b = select(b > a, b, a), select(d > c, d, c)
            a = select(b > a, b, a)
            store(highest, query, select(a > most, a, most))


@shared
def _exponentials(scores, highest, total, end, scale):
    """Scores (end, BLOCK) become 2^(scale * (score - its query's highest)); total = their sum for each query. highest is scaled."""
    for query in range(BLOCK):
        store(highest, query, load(highest, query) * scale)
        store(total, query, F0)
    for key in range(end):
        for query in range(BLOCK):
            at = key * BLOCK + query
            power = exp2_below_zero(fma(load(scores, at), scale, -load(highest, query)))
            store(scores, at, power)
            store(total, query, load(total, query) + power)


@shared
def _pack_weights(out, at, weights, end):
    """out, from `at` on = the numbers weights (end, BLOCK), fp32, as factors of a right matrix."""
    n = values_of(out)
    for key in range(0, end, n):
        for query in range(0, BLOCK, LANES):
            first = key * BLOCK + query
            join_factors(out, at + key // n * BLOCK + query, weights, first, first + (n - 1) * BLOCK)


@shared
def _transpose(out, x, columns):
    """out (BLOCK, columns) = the transposed x, columns a multiple of BLOCK."""
    for i in range(0, BLOCK, LANES):
        for j in range(0, columns, LANES):
            transpose_rows(out, i * columns + j, columns, x, j * BLOCK + i, BLOCK)


@helper
def _mean_gradients(delta, datty, atty, first, stride, rows, HS):
    """delta = for each query, the mean of its probabilities' gradients, weighted by those: datty * atty, summed over channels."""
    zero(delta, 0, BLOCK)
    for row in range(rows):
        at = first + row * stride
        store(delta, row, dot(datty, at, atty, at, HS))


@shared
def _score_gradients(scores, gradients, lse, delta, scale):
    """For a block of keys, scores become probabilities, and gradients of probabilities become those of the scaled scores."""
    for key in range(BLOCK):
        for query in range(BLOCK):
            at = key * BLOCK + query
            p = exp2_below_zero(fma(load(scores, at), scale, -load(lse, query)))
            store(scores, at, p)
            store(gradients, at, p * (load(gradients, at) - load(delta, query)))


@shared
def _pack_left(out, x):
    """out = x (BLOCK, BLOCK), fp32, rounded to the type of the numbers in a left matrix's factors."""
    for at in range(0, BLOCK * BLOCK, LANES):
        round_numbers(out, at, x, at)


@shared
def _write_gradient(out, first, stride, sums, sums_at, gradient, width, tile_sum, rows, scale, streams):
    """Write rows of a gradient, times scale, to out; and add them, before they are rounded, to its sums over rows."""
    HS = len(tile_sum)
    for tile in range(0, rows, SUMMED_ROWS):
        zero(tile_sum, 0, HS)
        for row in range(tile, min(tile + SUMMED_ROWS, rows)):
            add_row(tile_sum, 0, gradient, row * width, HS)
            write_row(out, first + row * stride, gradient, row * width, HS, scale, streams)
        for i in range(HS):
            store(sums, sums_at + i, load(sums, sums_at + i) + load(tile_sum, i) * scale)


@jit
def _forward(out, lse, qkvr, rooms, B, T, NH, HS, workers, streams):
    C, Hb, n = NH * HS, rooms.block.shape[2] // BLOCK, values_of(rooms.packed)
    keys_end, power_scale = (T + BLOCK - 1) // BLOCK * BLOCK, LOG2_E / sqrt(np.float32(HS))
    depth, keys_row, values_row = whole_depth(rooms.packed, HS), Hb // n, keys_end // n
    for worker in prange(workers):
        w = np.int64(worker)
        keys, values, queries = rooms.packed[w, 0], rooms.packed[w, 1], rooms.queries[w, 0]
        scores, weights, block, block_rows = rooms.scores[w, 0], rooms.weights[w, 0], rooms.block[w, 0], rooms.block[w, 1]
        highest, total, shapes = aligned(BLOCK), aligned(BLOCK), np.empty(LINE, np.uint8)
        open_tiles(keys, shapes)
        first, last = _heads_of(w, workers, B * NH)
        for head in range(first, last):
            q_at, out_at = _place_of(head, NH, HS, T)
            pack_left(keys, 0, keys_row, keys_end, depth, qkvr, q_at + C, 3 * C, 1, T, HS)
            pack_left(values, 0, values_row, Hb, values_row, qkvr, q_at + 2 * C, 1, 3 * C, HS, T)
            for at in range(0, T, BLOCK):
                end, rows = at + BLOCK, min(BLOCK, T - at)
                pack_right(queries, BLOCK, 0, BLOCK, depth, qkvr, q_at + at * 3 * C, 3 * C, 1, rows, HS)
                for query in range(BLOCK):
                    store(highest, query, LOWEST)
                for key in range(0, end, BLOCK):
                    k_at, ahead = key * keys_row, _next_head(qkvr, head, NH, HS, T, at, key)
                    multiply(scores, key * BLOCK, BLOCK, keys, k_at, keys_row, queries, BLOCK, BLOCK, BLOCK, depth, 0, 0, ahead)
                    if key == at:
                        _hide_future(scores, key * BLOCK)
                    _find_highest(highest, scores, key, key + BLOCK)
                _exponentials(scores, highest, total, end, power_scale)
                _pack_weights(weights, 0, scores, end)
                ahead = Ahead(out, out_at + at * C, 0 if streams else rows, C, 1, 0, HS)
                multiply(block, 0, BLOCK, values, 0, values_row, weights, BLOCK, Hb, BLOCK, end // n, 0, 0, ahead)
                _transpose(block_rows, block, Hb)
                for row in range(rows):
                    write_row(out, out_at + (at + row) * C, block_rows, row * Hb, HS, F1 / load(total, row), streams)
                    store(lse, head * T + at + row, load(highest, row) * LN2 + np.log(load(total, row)))
        close_tiles(keys, shapes)


@jit
def _backward(dqkvr, bias_sums, datty, qkvr, atty, lse, rooms, B, T, NH, HS, workers, streams):
    C, Hb, n = NH * HS, rooms.block.shape[2] // BLOCK, values_of(rooms.packed)
    keys_end, root = (T + BLOCK - 1) // BLOCK * BLOCK, sqrt(np.float32(HS))
    scale, power_scale = F1 / root, LOG2_E / root
    depth, keys_row, columns_row, queries_row = whole_depth(rooms.packed, HS), Hb // n, keys_end // n, BLOCK // n
    nothing = Ahead(qkvr, 0, 0, 0, 0, 0, 0)
    for worker in prange(workers):
        w = np.int64(worker)
        k_rows, k_columns, v_rows = rooms.packed[w, 0], rooms.packed[w, 1], rooms.packed[w, 2]
        q_columns, q_rows, do_columns, do_rows = rooms.queries[w, 0], rooms.queries[w, 1], rooms.queries[w, 2], rooms.queries[w, 3]
        p, ds, p_values, ds_values = rooms.left[w, 0], rooms.left[w, 1], rooms.left_values[w, 0], rooms.left_values[w, 1]
        scores, ds_right, dk, dv = rooms.scores[w, 0], rooms.weights[w, 0], rooms.sums[w, 0], rooms.sums[w, 1]
        block, block_rows, gradients = rooms.block[w, 0], rooms.block[w, 1], rooms.block[w, 0]
        row_lse, delta, tile_sum, shapes = aligned(BLOCK), aligned(BLOCK), aligned(HS), np.empty(LINE, np.uint8)
        open_tiles(p, shapes)
        first, last = _heads_of(w, workers, B * NH)
        for head in range(first, last):
            (q_at, out_at), sums_at = _place_of(head, NH, HS, T), head // NH * 3 * C + head % NH * HS
            next_out = _place_of(head + 1, NH, HS, T)[1] + (keys_end - BLOCK) * C
            for which in range(3):
                zero(bias_sums, sums_at + which * C, HS)
            pack_left(k_rows, 0, keys_row, keys_end, depth, qkvr, q_at + C, 3 * C, 1, T, HS)
            pack_left(k_columns, 0, columns_row, Hb, columns_row, qkvr, q_at + C, 1, 3 * C, HS, T)
            pack_left(v_rows, 0, keys_row, keys_end, depth, qkvr, q_at + 2 * C, 3 * C, 1, T, HS)
            adds = 0  # the last block of queries comes first: it writes all of dk and dv
            for at in range(keys_end - BLOCK, -1, -BLOCK):
                rows, q, do = min(BLOCK, T - at), q_at + at * 3 * C, out_at + at * C
                pack_right(q_columns, BLOCK, 0, BLOCK, depth, qkvr, q, 3 * C, 1, rows, HS)
                pack_right(q_rows, Hb, 0, Hb, queries_row, qkvr, q, 1, 3 * C, HS, rows)
                pack_right(do_columns, BLOCK, 0, BLOCK, depth, datty, do, C, 1, rows, HS)
                pack_right(do_rows, Hb, 0, Hb, queries_row, datty, do, 1, C, HS, rows)
                _mean_gradients(delta, datty, atty, do, C, rows, HS)
                zero(row_lse, 0, BLOCK)
                for row in range(rows):
                    store(row_lse, row, load(lse, head * T + at + row) * LOG2_E)
                next_do = do - BLOCK * C if at else next_out
                for key in range(0, at + BLOCK, BLOCK):
                    future, k_at, sum_at = int(key == at), key * keys_row, key * Hb
                    ahead = _next_head(qkvr, head, NH, HS, T, at, key)
                    multiply(scores, 0, BLOCK, k_rows, k_at, keys_row, q_columns, BLOCK, BLOCK, BLOCK, depth, 0, 0, ahead)
                    if future:
                        _hide_future(scores, 0)
                    multiply(gradients, 0, BLOCK, v_rows, k_at, keys_row, do_columns, BLOCK, BLOCK, BLOCK, depth, 0, 0, nothing)
                    _score_gradients(scores, gradients, row_lse, delta, power_scale)
                    _pack_left(p_values, scores)
                    _pack_left(ds_values, gradients)
                    _pack_weights(ds_right, key // n * BLOCK, gradients, BLOCK)
                    row, end = key * BLOCK // (at + BLOCK), (key + BLOCK) * BLOCK // (at + BLOCK)  # of the next block of queries
                    ahead = Ahead(datty, next_do + row * C, end - row, C, 1, 0, HS)
                    multiply(dv, sum_at, Hb, p, 0, queries_row, do_rows, Hb, BLOCK, Hb, queries_row, adds, future, ahead)
                    ahead = Ahead(atty, next_do + row * C, end - row, C, 1, 0, HS)
                    multiply(dk, sum_at, Hb, ds, 0, queries_row, q_rows, Hb, BLOCK, Hb, queries_row, adds, future, ahead)
                ahead = Ahead(dqkvr, q, 0 if streams else rows, 3 * C, 3, C, HS)
                multiply(block, 0, BLOCK, k_columns, 0, columns_row, ds_right, BLOCK, Hb, BLOCK, (at + BLOCK) // n, 0, 0, ahead)
                _transpose(block_rows, block, Hb)
                _write_gradient(dqkvr, q, 3 * C, bias_sums, sums_at, block_rows, Hb, tile_sum, rows, scale, streams)
                adds = 1
            _write_gradient(dqkvr, q_at + C, 3 * C, bias_sums, sums_at + C, dk, Hb, tile_sum, T, scale, streams)
            _write_gradient(dqkvr, q_at + 2 * C, 3 * C, bias_sums, sums_at + 2 * C, dv, Hb, tile_sum, T, F1, streams)
        close_tiles(p, shapes)


@jit
def _one_row(out, qkvr, cache, position, cached, NH, HS):
    """cached: positions that the cache has room for. Its keys come first, then its values."""
    C, scale = NH * HS, LOG2_E / sqrt(np.float32(HS))
    for head in prange(NH):
        first = np.int64(head) * HS
        keys, values = first, cached * C + first
        q, mean, powers = aligned(HS), aligned(HS), aligned(position + 1)
        for c in range(HS):
            store(q, c, load(qkvr, first + c) * scale)
            store(cache, keys + position * C + c, load(qkvr, C + first + c))
            store(cache, values + position * C + c, load(qkvr, 2 * C + first + c))
        highest, total = LOWEST, F0
        for key in range(position + 1):
            score = dot(q, 0, cache, keys + key * C, HS)
            store(powers, key, score)
            highest = select(score > highest, score, highest)
        for key in range(position + 1):
            store(powers, key, exp2_below_zero(load(powers, key) - highest))
            total = plus(total, load(powers, key))
        zero(mean, 0, HS)
        for key in range(position + 1):
            for c in range(HS):
                store(mean, c, fma(load(powers, key), load(cache, values + key * C + c), load(mean, c)))
        for c in range(HS):
            store(out, first + c, load(mean, c) / total)


def attention_forward(atty, lse, qkvr, NH, scratch):
    """Scratch: attention_packed, _scores, _weights, _queries and _block, as in the plan; _left and _sums must exist but are not touched."""
    B, T, C = atty.shape
    rooms, workers, streams = _rooms(scratch), _workers(scratch, B * NH), streams_lines(atty, C // NH, scratch["attention_packed"])
    door.launch(_forward, *(array(t) for t in (atty, lse, qkvr)), rooms, B, T, NH, C // NH, workers, streams)


def attention_backward(dqkvr, dbias, datty, qkvr, atty, lse, NH, scratch, *, accumulate):
    """Scratch: forward's, with attention_left and attention_sums, and attention_bias."""
    B, T, C = datty.shape
    bias = scratch["attention_bias"]
    rooms, workers, streams = _rooms(scratch), _workers(scratch, B * NH), streams_lines(dqkvr, C // NH, scratch["attention_packed"])
    tensors = (array(t) for t in (dqkvr, bias, datty, qkvr, atty, lse))
    door.launch(_backward, *tensors, rooms, B, T, NH, C // NH, workers, streams)
    finish_columns([dbias], bias, B, accumulate)


def attention_one_row(out, qkvr, cache, position, NH):
    """All in fp32 until the end: one query does not fill a tile, and every key and value is read once."""
    C = out.shape[1]
    door.launch(_one_row, array(out), array(qkvr), array(cache), position, cache.shape[1], NH, C // NH)


def _rooms(scratch):
    views = (
        ("packed", factors),
        ("scores", array),
        ("weights", factors),
        ("left", factors),
        ("left", array),
        ("queries", factors),
        ("block", array),
        ("sums", array),
    )
    rooms = [(scratch[f"attention_{name}"], view) for name, view in views]
    return Rooms(*(view(room).reshape(*room.shape[:2], -1) for room, view in rooms))


def _workers(scratch, heads):
    return min(len(scratch["attention_block"]), heads, door.threads())
