"""Matmuls, tile by tile in registers: see llmc/layers/matmul.py.

A panel of columns of the right matrix is packed by the thread that multiplies it next, only as much of its depth at once as stays in the
core's own cache. Rows of the left matrix are read where they lie, or packed a tile's rows at a time where they must be widened or do not
fill whole tiles. Where the left matrix is stored by columns, as in a weight's gradient, all threads first pack it together, a part of its
rows at a time and, with AMX, a part of its depth. A thread's task is a panel of the product, or some of the panel's rows, added up in fp32.
An element is summed over DEPTH factors at a time, or with AMX over the depth of a tile, and these sums are added in order: its bits do not
depend on threads, panels or pieces.
"""

from collections import namedtuple
from functools import cache

import numpy as np
import torch

from llmc.kernels_cpu import door
from llmc.kernels_cpu.door import F1, LINE, aligned, array, dot, factors, fetch_to_write, jit, load, prange, shared, store
from llmc.kernels_cpu.packing import pack_left, pack_right, streams_lines, write_row
from llmc.kernels_cpu.tiles import (
    AMX, LARGE, SMALL, by_amx, close_tiles, multiply_tile, open_tiles, tile_columns, tile_of, tile_rows, values_of,
)  # fmt: skip
from llmc.memory.tuning import MATMUL_BLOCK as BLOCK
from llmc.memory.tuning import MATMUL_DEPTH as DEPTH
from llmc.memory.tuning import MATMUL_PANEL as PANEL
from llmc.units import even_part, round_up

IN_PLACE, BY_TILES, BY_PARTS = range(3)  # how the left matrix is read
# out (M, N) = (adds: out +) a (M, K) @ b (K, N) (biased: + bias); all_k is K in factors, rounded up to whole tiles: whatever is called
# depth or k counts factors
Product = namedtuple("Product", ("out", "bias", "adds", "biased", "streams", "M", "N", "K", "all_k"))
# number d of row i is numbers[i * row + d * step]; factors are what is multiplied: the same in place, or packed
Left = namedtuple("Left", ("where", "numbers", "row", "step", "factors", "factors_row"))
# number d of column j is numbers[j * row + d * step]
Right = namedtuple("Right", ("numbers", "row", "step"))
# part_rows, part_depth  of the left matrix: what is packed at once if it is packed by parts
# rows, columns          of the product: one task of a worker
# depth, near            of a panel of the right matrix, and how much of that is multiplied at a time
Sizes = namedtuple("Sizes", ("part_rows", "part_depth", "rows", "columns", "depth", "near"))
# Most rows of a task whose sums are read and written again for every panel's depth: that many sums still stay in the L2 cache, which holds
# 2 MiB, or 1 on most processors with small tiles. Where the left matrix is packed in parts of the depth there may be more. On a Zen 4 that
# shares its host, steps of d12 in fp32 with 512 rows took 0.96 of the time with 1024 while others were busy, 1.00 while they were not (1024
# tokens; 2048 and 4096: 1.00 and 1.01), in bf16 1.00, and with 256 rows 1.01.
MOST_ROWS = 512 if LARGE is SMALL else 1024
# Most columns of a panel with AMX or large tiles, which multiply so fast that factors and sums should be read seldom, and its greatest
# depth with AMX. Both are less if so many threads share the plan's scratch that each has too little. Times of the matmuls of a d12 step
# with 1024 rows, by AMX, in ms, for columns x depth: 256 x 256 541, 384 x 256 493, 384 x 512 457, 384 x 768 471. Later, without the head,
# with 1024 and 4096 rows: 384 x 512 275 and 1203, 384 x 704 276 and 1169, as weight gradients of 4096 rows then take three depths instead
# of four. By large tiles: 192 x 256 2663, 384 x 256 2555, 768 x 256 2549.
MOST_COLUMNS, AMX_DEPTH = 384, 704
# How much of that depth is multiplied at a time, so that a tile's rows of the left matrix stay in the L1 cache: with both matrices packed
# 4.2 TFLOP/s for 256, 3.5 for 384, 2.8 for 512. The smaller one is for products of several depths, whose rows lie farther apart.
AMX_NEAR, AMX_NEAR_IN_PARTS = 384, 256

cdiv = shared(door.cdiv)


@shared
def _finish(out, at, out_row, bias, first, sums, sums_at, sums_row, rows, columns, adds, biased, streams):
    """out[at + i * out_row + j] = (adds: itself +) (biased: bias[first + j] +) a sum; if `streams`, rows are whole cache lines."""
    for i in range(rows):
        o, s = at + i * out_row, sums_at + i * sums_row
        if biased:
            for j in range(columns):
                store(sums, s + j, load(bias, first + j) + load(sums, s + j))
        if adds:
            for j in range(columns):
                store(out, o + j, load(out, o + j) + load(sums, s + j))
        else:
            write_row(out, o, sums, s, columns, F1, streams)


@shared
def _multiply_rows(p, left, sizes, panel, total, sums_at, sums_step, row, packed_row, rows, column, columns, k, packed_k, depth):
    """Multiply each tile of a task's rows by the panel: `depth` factors from k on, added up in `total`; out is written after the last k.

    sums_at, sums_step     where the sums lie in total, and how far apart rows are; 0 if nothing is added later: tiles share one place
    packed_row, packed_k   what row and k are in left.factors
    """
    n, ROWS, COLUMNS = values_of(panel), tile_rows(panel), tile_columns(panel)
    last, numbers = k + depth == p.all_k, min(p.K - k * n, depth * n)
    for i in range(0, rows, ROWS):
        at, height, s = (row + i) * p.N + column, min(ROWS, rows - i), sums_at + i * sums_step
        tile, first, step = left.factors, (packed_row + i) * left.factors_row + packed_k, left.factors_row
        if left.where == BY_TILES or (left.where == IN_PLACE and height < ROWS):
            tile, first, step = panel, sizes.depth * sizes.columns, sizes.depth
            pack_left(panel, first, step, ROWS, depth, left.numbers, (row + i) * left.row + k * n, left.row, left.step, height, numbers)
        for near_k in range(0, depth, sizes.near):
            deep, b_at = min(sizes.near, depth - near_k), near_k * COLUMNS
            for j in range(0, columns, COLUMNS):
                if last and not by_amx(panel):  # prefetch its place in out while it is added up
                    for r in range(height):
                        fetch_to_write(p.out, at + r * p.N + j, COLUMNS)
                multiply_tile(
                    total, s + j, sizes.columns, tile, first + near_k, step, panel, j * sizes.depth + b_at, COLUMNS, deep, k + near_k
                )
        if last:
            _finish(p.out, at, p.N, p.bias, column, total, s, sizes.columns, height, columns, p.adds, p.biased, p.streams)


@jit
def _multiply(p, left, right, packed, panels, sums, sizes):
    """p.out = (p.adds: p.out +) left @ right (p.biased: + bias).

    packed        scratch for left's factors, where all threads pack them
    panels, sums  scratch of each worker; a tile's rows of the left matrix lie behind a panel
    """
    n, COLUMNS = values_of(packed), tile_columns(packed)
    workers, n_panels, at_once = len(panels), cdiv(p.N, sizes.columns), p.all_k <= sizes.depth
    kept = sizes.rows * sizes.columns if sizes.part_depth < p.all_k else 0  # sums of a task, until the last part of the depth is added
    for part in range(0, p.M, sizes.part_rows):
        end = min(p.M, part + sizes.part_rows)
        pieces = cdiv(end - part, sizes.rows)
        for part_k in range(0, p.all_k, sizes.part_depth):
            part_end = min(p.all_k, part_k + sizes.part_depth)
            if left.where == BY_PARTS:
                for block in prange(cdiv(end - part, BLOCK)):
                    row, part_depth = part + np.int64(block) * BLOCK, part_end - part_k
                    height, numbers = min(BLOCK, end - row), min(p.K - part_k * n, part_depth * n)
                    pack_left(
                        packed, (row - part) * left.factors_row, left.factors_row, BLOCK, part_depth,
                        left.numbers, part_k * n * left.step + row * left.row, left.row, left.step, height, numbers,
                    )  # fmt: skip
            for worker in prange(workers):
                w = np.int64(worker)
                panel, total, shapes = panels[w], sums[w], np.empty(LINE, np.uint8)
                open_tiles(panel, shapes)
                for task in range(w, n_panels * pieces, workers):
                    column, row = task // pieces * sizes.columns, part + task % pieces * sizes.rows
                    columns, rows = min(sizes.columns, p.N - column), min(end - row, sizes.rows)
                    for k in range(part_k, part_end, sizes.depth):
                        depth, first = min(sizes.depth, p.all_k - k), column * right.row + k * n * right.step
                        numbers = min(p.K - k * n, sizes.depth * n)
                        pack_right(
                            panel, COLUMNS, COLUMNS * sizes.depth, columns, depth,
                            right.numbers, first, right.row, right.step, columns, numbers,
                        )  # fmt: skip
                        _multiply_rows(
                            p, left, sizes, panel, total, 0 if at_once else task // workers * kept, 0 if at_once else sizes.columns,
                            row, row - part, rows, column, columns, k, k - part_k, depth,
                        )  # fmt: skip
                close_tiles(panel, shapes)


def matmul_forward(out, inp, weight, bias=None, *, scratch):
    """scratch: the plan's matmul_panels, matmul_sums and matmul_packed."""
    N, K = weight.shape
    _launch(out, bias, False, (out.numel() // N, N, K), (inp, K, 1), (weight, K, 1), scratch)


def matmul_dinput(dinp, dout, weight, *, scratch):
    """scratch: as forward's."""
    K, N = weight.shape
    _launch(dinp, None, False, (dinp.numel() // N, N, K), (dout, K, 1), (weight, 1, N), scratch)


def matmul_dweight(dweight, dout, inp, *, accumulate, scratch):
    """scratch: as forward's. The gradient may be fp32 where dout and inp are bf16."""
    M, N = dweight.shape
    _launch(dweight, None, accumulate, (M, N, inp.numel() // N), (dout, 1, M), (inp, 1, N), scratch)


@jit
def _multiply_one_row(out, inp, weight, bias, biased, OC, each):
    C = len(inp)
    for part in prange(cdiv(OC, each)):
        x = aligned(C)
        for c in range(C):
            store(x, c, load(inp, c))
        for row in range(np.int64(part) * each, min(np.int64(part) * each + each, OC)):
            total = dot(x, 0, weight, row * C, C)
            store(out, row, total + load(bias, row) if biased else total)


def matmul_one_row(out, inp, weight, bias=None):
    """Nothing is packed: as each weight is multiplied only once, that would take longer than the products."""
    each = door.cdiv(out.numel(), door.threads())
    door.launch(_multiply_one_row, *map(array, (out, inp, weight, out if bias is None else bias)), int(bias is not None), out.numel(), each)


def square_multiplier():
    """A function of (out, a, b), square matrices that are multiplied without widening, in scratch of its own: for measurements."""
    threads = door.threads()
    panels, sums = torch.empty(threads, AMX_DEPTH, MOST_COLUMNS + AMX.rows), torch.empty(threads * MOST_ROWS, PANEL)

    def multiply(out, a, b):
        packed = panels.view(a.dtype)
        matmul_dinput(out, a, b, scratch={"matmul_panels": packed, "matmul_sums": sums, "matmul_packed": packed})

    return multiply


def _launch(out, bias, adds, shape, left, right, scratch):
    """out (M, N) = (adds: out +) a (M, K) @ b (K, N) (+ bias).

    shape        (M, N, K)
    left, right  for a and b: the contiguous tensor, the step in it to a's next row or b's next column, and the step to the next k
    """
    (M, N, K), (a, a_row, a_step), (b, b_row, b_step) = shape, left, right
    packed, panels, sums = (scratch[f"matmul_{name}"] for name in ("packed", "panels", "sums"))
    workers, tile = min(len(panels), door.threads()), tile_of(packed.element_size() == 2)
    where = BY_TILES if a_step == 1 else BY_PARTS
    if where == BY_TILES and a.dtype == packed.dtype and K * a.element_size() % (4 * tile.depth) == 0:
        where = IN_PLACE
    streams = streams_lines(out, N, packed)
    packed, panels, sums = factors(packed), factors(panels), array(sums)
    values = 2 if packed.dtype == np.uint32 else 1
    all_k = round_up(door.cdiv(K, values), tile.depth)
    sums_room = len(sums) // workers // BLOCK * BLOCK
    sizes = _sizes(M, N, all_k, where, tile, workers, len(packed), len(panels) // workers, sums_room)
    panels = panels[: workers * (sizes.columns + tile.rows) * sizes.depth].reshape(workers, -1)
    sums = sums[: workers * sums_room].reshape(workers, -1)
    left_factors, left_row = (factors(a), a_row // values) if where == IN_PLACE else (packed, sizes.part_depth)
    product = Product(array(out), array(out if bias is None else bias), int(adds), int(bias is not None), streams, M, N, K, all_k)
    left = Left(where, array(a), a_row, a_step, left_factors, left_row)
    door.launch(_multiply, product, left, Right(array(b), b_row, b_step), packed, panels, sums, sizes)


@cache
def _sizes(M, N, all_k, where, tile, workers, packed, panel, sums) -> Sizes:
    """Sizes for a product (M, N), each element of all_k factors. Scratch: `packed` is how many factors of the left matrix all threads can
    pack, `panel` how many a worker's panel can hold, and `sums` how many sums a worker can."""
    columns, depth, near = PANEL, DEPTH, DEPTH
    if tile is AMX:
        columns, depth, near = _amx_panel(N, all_k, workers, panel, sums // BLOCK)
    elif tile is not SMALL:
        columns = _columns(N, workers, tile, panel // depth, sums // BLOCK)
    all_blocks, n_panels = door.cdiv(M, BLOCK), door.cdiv(N, columns)
    shares, two_each = n_panels % workers == 0, door.cdiv(2 * workers, n_panels)
    blocks = even_part(all_blocks, packed // all_k // BLOCK) if where == BY_PARTS else all_blocks
    # tasks are whole panels or, where the workers cannot share these evenly or the left matrix is packed by parts, pieces of them, two for
    # each worker; their sums must fit
    rows = blocks if shares and where != BY_PARTS else door.cdiv(blocks, two_each)
    if all_k > depth:
        rows = min(rows, even_part(blocks, min(MOST_ROWS, sums // columns) // BLOCK))
    if where == BY_PARTS and tile is AMX and all_k > depth:  # with parts of the depth, tasks may have more rows: fewer panels to pack
        pieces = 1 if shares else min(two_each, all_blocks)
        most = min(packed // depth // pieces, sums // columns // door.cdiv(n_panels * pieces, workers)) // BLOCK
        deep_rows = door.cdiv(all_blocks, door.cdiv(all_blocks, most * pieces) * pieces) if most else 0
        if deep_rows >= rows:
            return Sizes(deep_rows * pieces * BLOCK, depth, deep_rows * BLOCK, columns, depth, near)
    return Sizes(blocks * BLOCK, all_k, rows * BLOCK, columns, depth, near)


def _amx_panel(N, all_k, workers, room, most):
    """Columns, depth and near of panels that fit in `room` factors and have at most `most` columns."""
    steps = min(AMX_DEPTH, max(DEPTH, room // (MOST_COLUMNS + AMX.rows))) // AMX.depth
    depth = AMX.depth * even_part(all_k // AMX.depth, steps)
    near = AMX_NEAR if depth == all_k else AMX_NEAR_IN_PARTS
    return _columns(N, workers, AMX, room // depth, most), depth, AMX.depth * even_part(depth // AMX.depth, near // AMX.depth)


def _columns(N, workers, tile, room, most):
    """Columns of panels: at most `most`, and together with a tile's rows at most `room`."""
    most = min(MOST_COLUMNS, most, room - tile.rows) // tile.columns * tile.columns

    def time(columns):
        """The relative time until the last worker has multiplied its panels, and read the left matrix once for each of them."""
        return door.cdiv(door.cdiv(N, columns), workers) * (columns + tile.columns // 2)

    return min(range(most, max(tile.columns, most // 2) - 1, -tile.columns), key=time)
