"""Linear layers. Weights are (out_features, in_features), as in llm.c. Source: llm.c llmc/matmul.cuh.

On CUDA these are cuBLAS and, with a bias, cuBLASLt and its epilogue. The gradient of a bias is summed where its rows are
at hand anyway: see gelu, attention and layernorm.

On a CPU bf16 factors may be widened: `widened`, fp32 scratch of three elements or more, takes pieces of them, and of sums that bf16 cannot
hold. That is for fp32 gradients, which no CPU matmul makes from bf16 factors; and for all matmuls on processors without bf16 arithmetic.
"""

from math import isqrt

import torch

from llmc.backend import bf16_products
from llmc.layers.rows import add_column_sums, finish_column_sums, rows_of


def matmul_forward(out, inp, weight, bias=None, widened=None):
    """out = inp @ weight.T + bias.

    out     (..., OC)  written     inp  (..., C)  read     all contiguous, one dtype
    weight  (OC, C)    read        bias (OC,)     read, or None
    Cost 2*rows*C*OC FLOP.
    """
    if widened is not None:
        _matmul_widened(rows_of(out), rows_of(inp), weight.t(), widened, start=bias)
    elif bias is None:
        torch.mm(rows_of(inp), weight.t(), out=rows_of(out))
    else:
        torch.addmm(bias, rows_of(inp), weight.t(), out=rows_of(out))


def matmul_dinput(dinp, dout, weight, widened=None):
    """dinp (..., C) = dout (..., OC) @ weight (OC, C). Cost 2*rows*C*OC FLOP."""
    if widened is not None:
        _matmul_widened(rows_of(dinp), rows_of(dout), weight, widened)
    else:
        torch.mm(rows_of(dout), weight, out=rows_of(dinp))


def matmul_dweight(dweight, dout, inp, *, accumulate, widened=None):
    """The weight's gradient: dout.T @ inp.

    dweight  (OC, C)    accumulated, or written when accumulate is False (then what it held does not matter)
    dout     (..., OC), inp (..., C)  read
    Cost 2*rows*C*OC FLOP.
    """
    dy, x = rows_of(dout).t(), rows_of(inp)
    if widened is not None:
        _matmul_widened(dweight, dy, x, widened, start=dweight if accumulate else None)
    elif dout.dtype == dweight.dtype:
        torch.addmm(dweight, dy, x, beta=float(accumulate), out=dweight)
    else:
        torch.addmm(dweight, dy, x, out_dtype=dweight.dtype, beta=float(accumulate), out=dweight)


def matmul_dbias(dbias, dout, scratch, *, accumulate):
    """The bias' gradient dbias (OC,), the sum over rows of dout (..., OC): for where no other pass has those rows at hand.

    Scratch: rows (4, ...) and column_sums (2, >= OC), fp32.
    """
    total = scratch["column_sums"][0][: len(dbias)].zero_()
    add_column_sums(total, rows_of(dout), scratch)
    finish_column_sums(dbias, total, accumulate)


def _matmul_widened(out, a, b, room, start=None):
    """out (M, N) = start + a (M, K) @ b (K, N) of bf16 factors. start is out, a row (N,), or None for zeros.

    It is added up in fp32: in out itself where that is fp32 and the room takes a column of a beside a row of b, else piece by piece in
    the room.
    """
    room, (M, K), N = room.view(-1), a.shape, b.shape[1]
    in_place = out.dtype == room.dtype and len(room) >= M + N and (start is None or start is out)
    rows, columns, depth = (M, N, len(room) // (M + N)) if in_place else _piece_sizes(len(room), M, N, K)
    with bf16_products(True):
        for i in range(0, M, rows):
            for j in range(0, N, columns):
                piece = out[i : i + rows, j : j + columns]
                sums = piece if in_place else room[: piece.numel()].view(piece.shape)
                if start is not None and not in_place:
                    sums.copy_(piece if start is out else start[j : j + columns])
                at = 0 if in_place else piece.numel()
                for k in range(0, K, depth):
                    x, y = a[i : i + rows, k : k + depth], b[k : k + depth, j : j + columns]
                    x, y = _widen(x, room[at:]), _widen(y, room[at + x.numel() :])
                    torch.addmm(sums, x, y, beta=float(k > 0 or start is not None), out=sums)
                if not in_place:
                    piece.copy_(sums)


def _piece_sizes(room, M, N, K):
    """Rows, columns and depth of equal pieces of a product, all three about as large: then most is done between widenings."""
    side = isqrt(room // 3)
    rows, columns = _even_part(M, side), _even_part(N, side)
    return rows, columns, _even_part(K, (room - rows * columns) // (rows + columns))


def _even_part(n, most):
    return -(-n // -(-n // most))


def _widen(factor, room):
    """A bf16 matrix in fp32, in the order in which it lies in memory."""
    if factor.stride(1) != 1:
        return _widen(factor.t(), room).t()
    return room[: factor.numel()].view(factor.shape).copy_(factor)
