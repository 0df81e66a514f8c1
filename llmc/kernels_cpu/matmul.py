"""Matmuls, tile by tile in registers: see llmc/layers/matmul.py.

A panel of columns of the right factor is packed by the thread that multiplies it next, so much of its depth at once that it stays in the
core's own cache. Rows of the left factor are read where they lie; or packed as many at a time as a tile has, where they are to be widened
or end within a pair of bf16. Where what lies together are columns, as in a weight's gradient, they are packed before all threads go on, a
part of the rows at a time. What a thread works on is a panel of the product, or some of its rows, added up in fp32. An element is the sum
over DEPTH factors, added to that over the next: its bits depend on no threads or pieces.
"""

import numpy as np
import torch

from llmc.kernels_cpu import door
from llmc.kernels_cpu.door import F0, array, factors, jit, load, prange, shared, store
from llmc.kernels_cpu.tiles import (
    COLUMNS, LANES, ROWS, copy_factor, join_factor, multiply_row, multiply_tile, prefetch_rows, store_factor, transpose_columns,
    transpose_rows, values_of,
)  # fmt: skip
from llmc.layers.rows import rows_of
from llmc.memory.plan import MATMUL_BLOCK as BLOCK
from llmc.memory.plan import MATMUL_DEPTH as DEPTH
from llmc.memory.plan import MATMUL_PANEL as PANEL

IN_PLACE, BY_TILES, BY_PARTS = range(3)
MOST_ROWS = 1024  # of a panel of the product in fp32: as they are read and written once for each DEPTH, they too should stay in that cache


@shared
def _pack(out, at, out_row, out_step, x, first, x_row, x_step, rows, depth):
    """out[at + j * out_row + i * out_step] = factor i of row j < rows, of the numbers x[first + j * x_row + k * x_step], k < depth."""
    n = values_of(out)
    whole_rows, whole = rows // LANES * LANES, depth // n // LANES * LANES
    if x_step == 1 and out_row == 1:
        for j in range(0, whole_rows, LANES):
            for i in range(0, whole, LANES):
                transpose_rows(out, at + i * out_step + j, out_step, x, first + j * x_row + n * i, x_row)
    elif x_row == 1 and out_step == 1:
        for i in range(0, whole, LANES):
            for j in range(0, whole_rows, LANES):
                transpose_columns(out, at + j * out_row + i, out_row, x, first + n * i * x_step + j, x_step)
    elif x_row == 1 and out_row == 1:
        whole_rows, whole = rows, depth // n
        for i in range(whole):
            for j in range(rows):
                here = first + n * i * x_step + j
                join_factor(out, at + i * out_step + j, x, here, here + (n - 1) * x_step)
    elif x_step == 1 and out_step == 1:
        whole_rows, whole = rows, depth // n
        for j in range(rows):
            for i in range(whole):
                copy_factor(out, at + j * out_row + i, x, first + j * x_row + n * i)
    else:
        whole = 0
    for j in range(rows):
        for i in range(whole if j < whole_rows else 0, (depth + n - 1) // n):
            here = first + j * x_row + n * i * x_step
            store_factor(out, at + j * out_row + i * out_step, load(x, here), load(x, here + x_step) if n * i + 1 < depth else F0)


@shared
def _finish(out, at, out_row, bias, first, sums, sums_at, rows, columns, adds, biased):
    """out[at + i * out_row + j] = (adds: itself +) (biased: bias[first + j] +) a sum."""
    for i in range(rows):
        o, s = at + i * out_row, sums_at + i * PANEL
        if adds:
            for j in range(columns):
                store(out, o + j, load(out, o + j) + load(sums, s + j))
        elif biased:
            for j in range(columns):
                store(out, o + j, load(bias, first + j) + load(sums, s + j))
        else:
            for j in range(columns):
                store(out, o + j, load(sums, s + j))


@jit
def _multiply(out, bias, adds, biased, a, a_factors, a_row, a_step, where, b, b_row, b_step, M, N, K, packed, panels, sums, workers):
    """out (M, N) = (adds: out +) a (M, K) @ b (K, N) (biased: + bias), of a[i * a_row + k * a_step] and b[j * b_row + k * b_step].

    where  a's factors are read from: IN_PLACE, or packed BY_TILES or BY_PARTS
    """
    n = values_of(packed)
    end_k = (K + n - 1) // n  # in factors, as all that is called depth or k
    n_panels, most_rows = (N + PANEL - 1) // PANEL, sums.shape[1] // PANEL
    part_rows = len(packed) // end_k // BLOCK * BLOCK if where == BY_PARTS else M
    for part in range(0, M, part_rows):
        end = min(M, part + part_rows)
        blocks = (end - part + BLOCK - 1) // BLOCK
        left, left_row = a_factors, a_row // n
        if where == BY_PARTS:
            left, left_row = packed, end_k
            for block in prange(blocks):
                row = part + np.int64(block) * BLOCK
                _pack(packed, (row - part) * end_k, end_k, 1, a, row * a_row, a_row, a_step, min(BLOCK, end - row), K)
        # pieces of a panel: that fit the room for sums, and so many that there are two for each worker
        pieces = max((blocks * BLOCK + most_rows - 1) // most_rows, min(blocks, (2 * workers + n_panels - 1) // n_panels))
        piece_rows = (blocks + pieces - 1) // pieces * BLOCK
        pieces = (blocks * BLOCK + piece_rows - 1) // piece_rows
        for worker in prange(workers):
            w = np.int64(worker)
            panel, total = panels[w], sums[w]
            for task in range(w, n_panels * pieces, workers):
                column, row = task // pieces * PANEL, part + task % pieces * piece_rows
                columns, rows = min(PANEL, N - column), min(end - row, piece_rows)
                for k in range(0, end_k, DEPTH):
                    depth, last = min(DEPTH, end_k - k), k + DEPTH >= end_k
                    _pack(panel, 0, 1, PANEL, b, column * b_row + k * n * b_step, b_row, b_step, columns, min(K - k * n, depth * n))
                    for i in range(0, rows, ROWS):
                        at, height = (row + i) * N + column, min(ROWS, rows - i)
                        rows_of_a, first, step = left, (row - part + i) * left_row + k, left_row
                        if where == BY_TILES:
                            rows_of_a, first, step = panel, DEPTH * PANEL, DEPTH
                            _pack(panel, first, step, 1, a, (row + i) * a_row + k * n, a_row, 1, height, min(K - k * n, depth * n))
                        for j in range(0, columns, COLUMNS):
                            if last:
                                prefetch_rows(out, at + j, N)  # while it is added up
                            if height == ROWS:
                                multiply_tile(total, i * PANEL + j, PANEL, rows_of_a, first, step, 1, panel, j, PANEL, depth, k)
                            else:
                                for r in range(height):
                                    sums_r, first_r = (i + r) * PANEL + j, first + r * step
                                    multiply_row(total, sums_r, PANEL, rows_of_a, first_r, step, 1, panel, j, PANEL, depth, k)
                        if last:
                            _finish(out, at, N, bias, column, total, i * PANEL, height, columns, adds, biased)


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
    panels, sums = torch.empty(threads, DEPTH, PANEL + ROWS), torch.empty(threads * MOST_ROWS, PANEL)

    def multiply(out, a, b):
        packed = panels.view(a.dtype)
        matmul_dinput(out, a, b, room={"matmul_panels": packed, "matmul_sums": sums, "matmul_packed": packed})

    return multiply


def _launch(out, bias, adds, a, b, room):
    """out (M, N) = (adds: out +) a (M, K) @ b (K, N) (+ bias); of each of a and b either it or its transpose is contiguous."""
    (M, K), N = a.shape, b.shape[1]
    packed, panels, sums = (room[f"matmul_{name}"] for name in ("packed", "panels", "sums"))
    workers = min(len(panels), door.threads())
    rows = min(MOST_ROWS, len(sums) // workers // BLOCK * BLOCK)
    sums = array(sums)[: workers * rows * PANEL].reshape(workers, -1)
    where = BY_TILES if a.is_contiguous() else BY_PARTS
    if where == BY_TILES and a.dtype == packed.dtype and K % (4 // a.element_size()) == 0:
        where = IN_PLACE
    packed, panels = factors(packed), factors(panels).reshape(len(panels), -1)
    numbers_a, numbers_b = (array(x if x.is_contiguous() else x.t()) for x in (a, b))
    door.launch(
        _multiply, array(out), array(out if bias is None else bias), int(adds), int(bias is not None),
        numbers_a, factors(a) if where == IN_PLACE else packed, *a.stride(), where, numbers_b, *reversed(b.stride()), M, N, K,
        packed, panels, sums, workers,
    )  # fmt: skip
