"""Matmuls, tile by tile in registers: see llmc/layers/matmul.py.

A panel of columns of the right factor is packed by the thread that multiplies it next, so much of its depth at once that it stays in the
core's own cache. Rows of the left factor are read where they lie; or packed as many at a time as a tile has, where they are to be widened,
or are no whole tiles. Where what lies together are columns, as in a weight's gradient, they are packed before all threads go on, a part of
the rows at a time. What a thread works on is a panel of the product, or some of its rows, added up in fp32. An element is the sum over
DEPTH factors, added to that over the next, or with AMX over what a tile is deep: its bits depend on no threads, panels or pieces.
"""

import numpy as np
import torch

from llmc.kernels_cpu import door
from llmc.kernels_cpu.door import LINE, array, factors, fetch_to_write, jit, load, prange, shared, store
from llmc.kernels_cpu.tiles import (
    AMX, LANES, by_amx, close_tiles, multiply_tile, open_tiles, pack_left, pack_right, stream, tile_columns, tile_of, tile_rows,
    values_of, whole_depth,
)  # fmt: skip
from llmc.layers.rows import rows_of
from llmc.memory.plan import MATMUL_BLOCK as BLOCK
from llmc.memory.plan import MATMUL_DEPTH as DEPTH
from llmc.memory.plan import MATMUL_PANEL as PANEL

IN_PLACE, BY_TILES, BY_PARTS = range(3)
MOST_ROWS = 1024  # of a panel of the product in fp32: as they are read and written once for each depth, they too should stay in that cache
# AMX multiplies so fast that factors and sums should be read seldom: so the most columns and depth, where fewer threads than the plan has
# room for leave each as much. Matmuls of d12 at 1024 rows, in ms of a step: 256 x 256 541, 384 x 256 493, 384 x 512 457, 384 x 768 471
AMX_PANEL, AMX_DEPTH = 384, 512
# and of that depth so much at a time that a tile's rows of the left factor stay in the core's first cache: 4.7 TFLOP/s, beyond it 3.3
AMX_NEAR = 384

cdiv = shared(door.cdiv)


@shared
def _finish(out, at, out_row, bias, first, sums, sums_at, sums_row, rows, columns, adds, biased, streams):
    """out[at + i * out_row + j] = (adds: itself +) (biased: bias[first + j] +) a sum; if it streams, rows are whole lines of cache."""
    for i in range(rows):
        o, s = at + i * out_row, sums_at + i * sums_row
        if adds:
            for j in range(columns):
                store(out, o + j, load(out, o + j) + load(sums, s + j))
        elif streams:
            if biased:
                for j in range(columns):
                    store(sums, s + j, load(bias, first + j) + load(sums, s + j))
            for j in range(0, columns, LANES):
                stream(out, o + j, sums, s + j)
        elif biased:
            for j in range(columns):
                store(out, o + j, load(bias, first + j) + load(sums, s + j))
        else:
            for j in range(columns):
                store(out, o + j, load(sums, s + j))


@jit
def _multiply(out, bias, adds, biased, streams, a, a_factors, a_row, a_step, where, b, b_row, b_step, M, N, K, packed, panels, size, sums):
    """out (M, N) = (adds: out +) a (M, K) @ b (K, N) (biased: + bias), of a[i * a_row + k * a_step] and b[j * b_row + k * b_step].

    where         a's factors are read from: IN_PLACE, or packed BY_TILES or BY_PARTS
    size          columns and depth of a panel, and how deep tiles are that are multiplied at once
    panels, sums  of each worker; a tile's rows of the left factor lie behind a panel
    """
    n, ROWS, COLUMNS = values_of(packed), tile_rows(packed), tile_columns(packed)
    end_k = whole_depth(packed, K)  # in factors, as all that is called depth or k
    panel_columns, panel_depth, near = size
    workers, n_panels, at_once = len(panels), cdiv(N, panel_columns), end_k <= panel_depth
    part_rows = len(packed) // end_k // BLOCK * BLOCK if where == BY_PARTS else M
    for part in range(0, M, part_rows):
        end = min(M, part + part_rows)
        blocks = cdiv(end - part, BLOCK)
        left, left_row = a_factors, a_row // n
        if where == BY_PARTS:
            left, left_row = packed, end_k
            for block in prange(blocks):
                row = part + np.int64(block) * BLOCK
                pack_left(packed, (row - part) * end_k, end_k, BLOCK, end_k, a, row * a_row, a_row, a_step, min(BLOCK, end - row), K)
        # pieces of a panel: that fit the room for sums, and if panels cannot be shared out, or the left factor had better be, two a worker
        pieces = 1 if where != BY_PARTS and n_panels % workers == 0 else min(blocks, cdiv(2 * workers, n_panels))
        if not at_once:
            pieces = max(pieces, cdiv(blocks, sums.shape[1] // panel_columns // BLOCK))
        piece_rows = cdiv(blocks, pieces) * BLOCK
        pieces = cdiv(blocks * BLOCK, piece_rows)
        for worker in prange(workers):
            w = np.int64(worker)
            panel, total, shapes = panels[w], sums[w], np.empty(LINE, np.uint8)
            open_tiles(panel, shapes)
            for task in range(w, n_panels * pieces, workers):
                column, row = task // pieces * panel_columns, part + task % pieces * piece_rows
                columns, rows = min(panel_columns, N - column), min(end - row, piece_rows)
                for k in range(0, end_k, panel_depth):
                    depth, last, numbers = min(panel_depth, end_k - k), k + panel_depth >= end_k, min(K - k * n, panel_depth * n)
                    first_b = column * b_row + k * n * b_step
                    pack_right(panel, COLUMNS, COLUMNS * panel_depth, columns, depth, b, first_b, b_row, b_step, columns, numbers)
                    for i in range(0, rows, ROWS):
                        at, height = (row + i) * N + column, min(ROWS, rows - i)
                        sums_at = 0 if at_once else i * panel_columns
                        tile, first, step = left, (row - part + i) * left_row + k, left_row
                        if where == BY_TILES or (where == IN_PLACE and height < ROWS):
                            tile, first, step = panel, panel_depth * panel_columns, panel_depth
                            pack_left(panel, first, step, ROWS, depth, a, (row + i) * a_row + k * n, a_row, a_step, height, numbers)
                        for at_k in range(0, depth, near):
                            for j in range(0, columns, COLUMNS):
                                if last and not by_amx(packed):  # its place is fetched while it is added up
                                    for r in range(height):
                                        fetch_to_write(out, at + r * N + j, COLUMNS)
                                multiply_tile(
                                    total, sums_at + j, panel_columns, tile, first + at_k, step,
                                    panel, j * panel_depth + at_k * COLUMNS, COLUMNS, min(near, depth - at_k), k + at_k,
                                )  # fmt: skip
                        if last:
                            _finish(out, at, N, bias, column, total, sums_at, panel_columns, height, columns, adds, biased, streams)
            close_tiles(panel, shapes)


def matmul_forward(out, inp, weight, bias=None, *, room):
    """room: the plan's matmul_panels, matmul_sums and matmul_packed."""
    _launch(rows_of(out), bias, False, rows_of(inp), weight.t(), room)


def matmul_dinput(dinp, dout, weight, *, room):
    """room: as forward's."""
    _launch(rows_of(dinp), None, False, rows_of(dout), weight, room)


def matmul_dweight(dweight, dout, inp, *, accumulate, room):
    """room: as forward's. The gradient may be fp32 of bf16 factors."""
    _launch(dweight, None, accumulate, rows_of(dout).t(), rows_of(inp), room)


def square_multiplier():
    """A function of (out, a, b), square matrices whose factors are as they are, in room of its own: for measurements."""
    threads = door.threads()
    panels, sums = torch.empty(threads, AMX_DEPTH, AMX_PANEL + AMX.rows), torch.empty(threads * MOST_ROWS, PANEL)

    def multiply(out, a, b):
        packed = panels.view(a.dtype)
        matmul_dinput(out, a, b, room={"matmul_panels": packed, "matmul_sums": sums, "matmul_packed": packed})

    return multiply


def _launch(out, bias, adds, a, b, room):
    """out (M, N) = (adds: out +) a (M, K) @ b (K, N) (+ bias); of each of a and b either it or its transpose is contiguous."""
    (M, K), N = a.shape, b.shape[1]
    packed, panels, sums = (room[f"matmul_{name}"] for name in ("packed", "panels", "sums"))
    workers, tile = min(len(panels), door.threads()), tile_of(packed.element_size() == 2)
    where = BY_TILES if a.is_contiguous() else BY_PARTS
    if where == BY_TILES and a.dtype == packed.dtype and K * a.element_size() % (4 * tile.depth) == 0:
        where = IN_PLACE
    streams = tile is AMX and (out.data_ptr() | N * out.element_size()) % LINE == 0
    packed, panels, sums = factors(packed), factors(panels), array(sums)
    columns, depth, near = PANEL, DEPTH, DEPTH
    if tile is AMX:
        columns, depth, near = _amx_panel(K, N, workers, len(panels) // workers, len(sums) // workers // BLOCK)
    panels = panels[: workers * (columns + tile.rows) * depth].reshape(workers, -1)
    sums_each = min(MOST_ROWS * columns, len(sums) // workers // BLOCK * BLOCK)
    sums = sums[: workers * sums_each].reshape(workers, -1)
    numbers_a, numbers_b = (array(x if x.is_contiguous() else x.t()) for x in (a, b))
    door.launch(
        _multiply, array(out), array(out if bias is None else bias), int(adds), int(bias is not None), int(streams),
        numbers_a, factors(a) if where == IN_PLACE else packed, *a.stride(), where, numbers_b, *reversed(b.stride()), M, N, K,
        packed, panels, (columns, depth, near), sums,
    )  # fmt: skip


def _amx_panel(K, N, workers, room, most):
    """The sizes of each worker's panels: that fit its room, of so many factors, and are at most so many columns."""

    def part(depth, most):
        """Of a depth in parts that are as even as can be, and at most so deep."""
        return AMX.depth * door.cdiv(depth, AMX.depth * door.cdiv(depth, most))

    depth = part(door.cdiv(K, 2), min(AMX_DEPTH, max(DEPTH, room // (AMX_PANEL + AMX.rows) // AMX.depth * AMX.depth)))
    most = min(AMX_PANEL, most, room // depth - AMX.rows) // AMX.columns * AMX.columns

    def time(columns):
        """Until the last worker has multiplied its panels, and for each read the left factor once."""
        return door.cdiv(door.cdiv(N, columns), workers) * (columns + AMX.columns // 2)

    return min(range(most, max(AMX.columns, most // 2) - 1, -AMX.columns), key=time), depth, part(depth, AMX_NEAR)
