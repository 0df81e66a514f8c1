"""Linear layers. Weights are (out_features, in_features), as in llm.c. Source: llm.c llmc/matmul.cuh.

On CUDA these call cuBLAS or, with a bias, cuBLASLt and its epilogue. The gradient of a bias is summed by a pass that reads
its rows anyway: see gelu, attention and layernorm.

With scratch None, factors are multiplied as they are. With scratch["widened"] (fp32, three elements or more) bf16 factors are widened there
piece by piece, and sums that bf16 cannot hold are taken there. Only a CPU needs that: for fp32 gradients, which torch's matmuls cannot make
from bf16 factors on it, and for every matmul where bf16 is no faster than fp32. llmc/kernels_cpu/matmul.py has the same functions, which
add up products of bf16 factors in fp32.
"""

from math import isqrt

import torch

from llmc.backend import bf16_products
from llmc.layers.rows import finish_column_sums, row_pieces, rows_of, widened
from llmc.units import even_part


def matmul_forward(out, inp, weight, bias=None, scratch=None):
    """out = inp @ weight.T + bias.

    out     (..., OC)  written     inp  (..., C)  read     all contiguous, one dtype
    weight  (OC, C)    read        bias (OC,)     read, or None
    Cost 2*rows*C*OC FLOP.
    """
    if scratch is not None:
        _matmul_widened(rows_of(out), rows_of(inp), weight.t(), scratch["widened"], start=bias)
    elif bias is None:
        torch.mm(rows_of(inp), weight.t(), out=rows_of(out))
    else:
        torch.addmm(bias, rows_of(inp), weight.t(), out=rows_of(out))


def matmul_one_row(out, inp, weight, bias=None):
    """matmul_forward of a single row, as in sampling: out (1, OC), inp (1, C). All it takes is to read each weight once."""
    matmul_forward(out, inp, weight, bias)


def matmul_dinput(dinp, dout, weight, scratch=None):
    """dinp (..., C) = dout (..., OC) @ weight (OC, C). Cost 2*rows*C*OC FLOP."""
    if scratch is not None:
        _matmul_widened(rows_of(dinp), rows_of(dout), weight, scratch["widened"])
    else:
        torch.mm(rows_of(dout), weight, out=rows_of(dinp))


def matmul_dweight(dweight, dout, inp, *, accumulate, scratch=None):
    """The weight's gradient: dout.T @ inp.

    dweight  (OC, C)    accumulated, or written when accumulate is False (then what it held does not matter)
    dout     (..., OC), inp (..., C)  read
    Cost 2*rows*C*OC FLOP.
    """
    dy, x = rows_of(dout).t(), rows_of(inp)
    if scratch is not None:
        _matmul_widened(dweight, dy, x, scratch["widened"], start=dweight if accumulate else None)
    elif dout.dtype == dweight.dtype:
        torch.addmm(dweight, dy, x, beta=float(accumulate), out=dweight)
    else:
        torch.addmm(dweight, dy, x, out_dtype=dweight.dtype, beta=float(accumulate), out=dweight)


def matmul_dbias(dbias, dout, scratch, *, accumulate):
    """The gradient of the bias: dbias (OC,) = sum over rows of dout (..., OC). For where no other pass reads those rows anyway.

    Scratch: rows (4, ...) and column_sums (2, >= OC), fp32.
    """
    dy, (total, piece_sum) = rows_of(dout), scratch["column_sums"][:, : len(dbias)]
    total.zero_()
    for part, work, *_ in row_pieces(dy, scratch):
        total.add_(torch.sum(widened(dy[part], work), 0, out=piece_sum))
    finish_column_sums(dbias, total, accumulate)


def _matmul_widened(out, a, b, room, start=None):
    """out (M, N) = start + a (M, K) @ b (K, N) for bf16 factors. start is out, a row (N,), or None for zeros.

    The sum is taken in fp32: in out itself where that is fp32, start is no row, and `room` holds a column of a and a row of b; else piece
    by piece in `room`.
    """
    room, (M, K), N = room.view(-1), a.shape, b.shape[1]
    if out.dtype == room.dtype and len(room) >= M + N and (start is None or start is out):
        _add_product_widened(out, a, b, room, len(room) // (M + N), start is out)
        return
    rows, columns, depth = _piece_sizes(len(room), M, N, K)
    for i in range(0, M, rows):
        for j in range(0, N, columns):
            piece = out[i : i + rows, j : j + columns]
            sums = room[: piece.numel()].view(piece.shape)
            if start is not None:
                sums.copy_(piece if start is out else start[j : j + columns])
            _add_product_widened(sums, a[i : i + rows], b[:, j : j + columns], room[piece.numel() :], depth, start is not None)
            piece.copy_(sums)


def _add_product_widened(sums, a, b, room, depth, accumulate):
    """sums (fp32) = a @ b, plus what they held if `accumulate`; `depth` columns of a and rows of b are widened at a time."""
    with bf16_products(True):
        for k in range(0, a.shape[1], depth):
            x, y = a[:, k : k + depth], b[k : k + depth]
            x, y = _widen(x, room), _widen(y, room[x.numel() :])
            torch.addmm(sums, x, y, beta=float(k > 0 or accumulate), out=sums)


def _piece_sizes(room, M, N, K):
    """Rows, columns and depth of even pieces of a product, all three about equal: that does the most work per widened element."""
    side = isqrt(room // 3)
    rows, columns = even_part(M, side), even_part(N, side)
    return rows, columns, even_part(K, (room - rows * columns) // (rows + columns))


def _widen(factor, room):
    """An fp32 copy, in `room`, of a bf16 matrix, in the order in which that lies in memory."""
    if factor.stride(1) != 1:
        return _widen(factor.t(), room).t()
    return room[: factor.numel()].view(factor.shape).copy_(factor)
