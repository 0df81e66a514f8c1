"""Attention's backward in one kernel: a program computes dq, dk and dv of a whole head. gpu_check.py measures it beside the trainer's own.

The trainer's two kernels take seven products of tiles, of which two, the scores and their gradients, are computed twice. Here they are
computed once, which leaves five products and half of the exponentials. dq is added up in fp32 memory from one tile of keys to the next.
As one program does that for a head, in the order of the keys, the bits repeat, without atomics and without programs that wait for others.
The tiles of that sum are transposed, as they come out of the product, and each is contiguous: nobody else reads them. A tile of queries is
done with at the tile of keys that it is in, the last that it sees, and then written in bf16.

The price is the traffic of that sum, 7168 rows of 256 bytes for a head of 1024 positions with tiles of 128 keys, which should stay in the
L2, and that there are no more programs than heads: 768 for 64 sequences of d12, 800 for 32 of d48.
"""

from functools import cache
from math import e, log2, sqrt

import torch

from llmc.kernels import door
from llmc.kernels.attention import (
    _add_product, _head_of_program, _multiply, _of_heads, _rows, _there, _tile_of_queries, _write_gradient,
)  # fmt: skip
from llmc.kernels.columns import matmul_dbias
from llmc.kernels.door import cdiv, jit, narrow, sum_over_rows, tl, widen


@jit
def _add_tile(
    dk, dv, k, v, q, do, lse, delta, first_query, stride, C, column, position, end, scale,
    HS: tl.constexpr, QUERIES: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """(dk, dv, dq), the first two with their sums over one tile of queries added; dq (CHANNELS, QUERIES) is the sum over the tile of keys
    alone."""
    q, do, p, ds = _tile_of_queries(k, v, q, do, lse, delta, first_query, stride, C, column, position, end, scale, HS, QUERIES, HIDES)
    ds = narrow(ds, q.dtype)
    return _add_product(dk, ds, q), _add_product(dv, narrow(p, do.dtype), do), _multiply(tl.trans(k), ds)


@jit
def _attention_backward_heads(
    dqkvr, sums, dq_sums, delta, datty, atty, lse, qkvr, T, NH, C, scale, root,
    HS: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv of a head, and for each tile of keys the sums over its rows of dk and dv, and of dq of the same positions."""
    tl.static_assert(KEYS % QUERIES == 0)
    stride, blocks, column, end = 3 * C, tl.cdiv(T, KEYS), tl.arange(0, CHANNELS), None if WHOLE else T
    head, sequence, channel = _head_of_program(1, NH, HS)
    at, out_at = sequence * T * stride + channel, sequence * T * C + channel
    qkvr, dqkvr, datty, atty, sums = qkvr + at, dqkvr + at, datty + out_at, atty + out_at, sums + sequence * blocks * stride + channel
    lse, delta, dq_sums = lse + head * T, delta + head * T, dq_sums + head * tl.cdiv(T, QUERIES) * (QUERIES * CHANNELS)
    in_tile = column[:, None] * QUERIES + tl.arange(0, QUERIES)[None, :]  # of the sum of dq, which is transposed
    for start in range(0, T, KEYS):
        row = start + tl.arange(0, KEYS)
        do = _rows(datty, row, C, column, end, HS)
        tl.store(delta + row, tl.sum(widen(do) * widen(_rows(atty, row, C, column, end, HS)), 1), mask=row < T)
    for start in range(0, T, KEYS):
        tl.debug_barrier()  # what other threads of this program have stored is read below
        row = start + tl.arange(0, KEYS)
        k, v = _rows(qkvr + C, row, stride, column, end, HS), _rows(qkvr + 2 * C, row, stride, column, end, HS)
        dk, dv = tl.zeros((KEYS, CHANNELS), tl.float32), tl.zeros((KEYS, CHANNELS), tl.float32)
        dq_sum = tl.zeros((CHANNELS, QUERIES), tl.float32)
        for query in range(start, tl.minimum(start + KEYS, T), QUERIES):
            dk, dv, dq = _add_tile(dk, dv, k, v, qkvr, datty, lse, delta, query, stride, C, column, row, end, scale, HS, QUERIES, True)
            dq = (dq + tl.load(dq_sums + query * CHANNELS + in_tile, mask=(in_tile >= 0) & (start > 0), other=0.0)) * root
            own = query + tl.arange(0, QUERIES)
            out = dqkvr + own[:, None] * stride + column[None, :]
            tl.store(out, narrow(tl.trans(dq), dqkvr.dtype.element_ty), mask=_there(own, column, end, HS))
            dq_sum += dq  # rows beyond T are zeros
        for query in range(start + KEYS, T, QUERIES):
            dk, dv, dq = _add_tile(dk, dv, k, v, qkvr, datty, lse, delta, query, stride, C, column, row, end, scale, HS, QUERIES, False)
            place = dq_sums + query * CHANNELS + in_tile
            tl.store(place, dq + tl.load(place, mask=(in_tile >= 0) & (start > 0), other=0.0))
        tl.store(sums + column, sum_over_rows(tl.trans(dq_sum)), mask=column < HS)
        _write_gradient(dqkvr + C, sums + C, dk * root, row, stride, column, end, HS)
        _write_gradient(dqkvr + 2 * C, sums + 2 * C, dv, row, stride, column, end, HS)
        sums += stride


@cache
def _room(device, elements):
    """fp32 scratch for the sums of dq, which is in no plan: it is there for a trial alone."""
    return torch.empty(elements, device=device)


def forget_room():
    """Give that memory back; nothing that uses it, a graph included, may run again."""
    _room.cache_clear()


def attention_backward(dqkvr, dbias, datty, qkvr, atty, lse, NH, scratch, *, accumulate, keys, queries, warps):
    """As in llmc/kernels/attention.py, with tiles of so many keys and queries, by so many warps. keys is a multiple of queries and of the
    rows of a tile there, for whose number of sums there is room."""
    B, T, C = datty.shape
    HS, tiles = C // NH, cdiv(T, keys)
    constants = _of_heads(HS, keys, T)
    sums = scratch["attention_sums"].view(-1)[: B * tiles * 3 * C].view(B, tiles, 3 * C)
    dq_sums = _room(datty.device, B * NH * cdiv(T, queries) * queries * constants["CHANNELS"])
    door.launch(
        _attention_backward_heads, (B * NH,), dqkvr, sums, dq_sums, scratch["attention_delta"], datty, atty, lse, qkvr,
        T, NH, C, log2(e) / sqrt(HS), 1 / sqrt(HS), KEYS=keys, QUERIES=queries, num_warps=warps, **constants,
    )  # fmt: skip
    matmul_dbias(dbias, sums, scratch, accumulate=accumulate)
