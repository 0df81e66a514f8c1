"""Causal multi-head attention on a GPU, flash style: no (T, T) matrix is ever stored, only one log-sum-exp per row.

The kernels are torch's own, called below autograd. They allocate the tensors that they return, which are copied into the arena
and freed at once; the plan counts these as library memory. In bf16 a GPU run uses llmc/kernels/attention.py instead, unless
--attention or --kernels torch asks for these, or heads have more than 128 channels. Attention on a CPU is in attention.py, but for
one row, where torch's kernel serves.
Source: Dao et al. 2022; llm.c llmc/cudnn_att.cpp.
"""

from functools import partial

import torch

from llmc.backend import deterministic
from llmc.layers.matmul import matmul_dbias

aten = torch.ops.aten


def library_attention(kind, pack_gradients) -> dict:
    """Name -> function, for attention by torch's kernel of that kind, with the arguments of attention.py.

    pack_gradients is the function below or its Triton kernel.
    """

    def attention_forward(atty, lse, qkvr, NH, scratch):
        library_forward(atty, lse, qkvr, NH, kind)

    def attention_backward(dqkvr, dbias, datty, qkvr, atty, lse, NH, scratch, *, accumulate):
        gradients = library_gradients(datty, qkvr, atty, lse, NH, kind)
        pack_gradients(dqkvr, dbias, gradients, NH, scratch, accumulate=accumulate)

    functions = {f.__name__: f for f in (attention_forward, attention_backward)}
    return functions | {"attention_one_row": partial(attention_one_row, kind=kind)}


def library_forward(atty, lse, qkvr, NH, kind):
    """atty = softmax(mask(q k^T / sqrt(HS))) v per head.

    atty  (B, T, C)       written
    lse   (B, NH, Tp)     fp32, written; opaque to everything but library_gradients; Tp is T as the kernel pads it
    qkvr  (B, T, 3C)      read: q, k and v of all heads, packed
    kind  flash | cudnn | efficient: whose kernel
    """
    B, T, C = atty.shape
    out, statistics = _forward(*_heads(qkvr, NH), kind, causal=True)
    atty.copy_(out.transpose(1, 2).reshape(B, T, C))
    lse.copy_(statistics.view(lse.shape) if kind == "cudnn" else statistics)


def library_gradients(datty, qkvr, atty, lse, NH, kind):
    """dq, dk and dv, each (B, NH, T, HS), in memory that torch allocates. datty (B, T, C); the others are library_forward's, read here."""
    B, T, C = atty.shape
    q, k, v = _heads(qkvr, NH)
    out, dout = (t.view(B, T, NH, C // NH).transpose(1, 2) for t in (atty, datty))
    return _backward(dout, q, k, v, out, lse, kind)


def pack_gradients(dqkvr, dbias, gradients, NH, scratch, *, accumulate):
    """dqkvr (B, T, 3C) = dq, dk and dv side by side; dbias (3C,) is the sum over its rows, added to what it held if `accumulate`."""
    for target, gradient in zip(_heads(dqkvr, NH), gradients):
        target.copy_(gradient)
    matmul_dbias(dbias, dqkvr, scratch, accumulate=accumulate)


def attention_one_row(out, qkvr, cache, position, NH, kind):
    """Attention of one new token over the cache, which receives its k and v first.

    out    (1, C)      written     qkvr (1, 3C) read
    cache  (2, G, C)   k and v of positions 0..position-1; position is written
    """
    C = out.shape[1]
    cache[:, position] = qkvr.view(3, C)[1:]
    q = qkvr[:, :C].view(1, 1, NH, C // NH).transpose(1, 2)
    k, v = (c[: position + 1].view(1, position + 1, NH, C // NH).transpose(1, 2) for c in cache)
    # cuDNN would build a plan for every length of a sample, and each takes seconds
    result, _ = _forward(q, k, v, "flash" if kind == "cudnn" else kind, causal=False)
    out.copy_(result.transpose(1, 2).reshape(1, C))


def _heads(qkvr, NH):
    """q, k, v as (B, NH, T, HS) strided views of the packed (B, T, 3C)."""
    B, T, C3 = qkvr.shape
    return [t.view(B, T, NH, C3 // 3 // NH).transpose(1, 2) for t in qkvr.split(C3 // 3, 2)]


# one pair of branches per kind of kernel: (B, NH, T, HS) in and out, lse in whatever shape that kernel keeps


def _forward(q, k, v, kind, *, causal):
    if kind == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if kind == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]
    if kind == "efficient":
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
    out, lse, *_ = aten._flash_attention_forward(*_bthd(q, k, v), None, None, q.shape[2], k.shape[2], 0.0, causal, False)
    return out.transpose(1, 2), lse


def _backward(dout, q, k, v, out, lse, kind):
    T = q.shape[2]
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # the dropout generator's state; there is no dropout
    seed, offset = unused
    if kind == "cudnn":  # no switch makes it repeat its bits from run to run
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse[..., None], seed, offset, None, None, None, T, T, 0.0, True
        )
    with deterministic(q.device):
        if kind == "efficient":
            return aten._scaled_dot_product_efficient_attention_backward(
                dout, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], True
            )[:3]
        gradients = aten._flash_attention_backward(
            *_bthd(dout, q, k, v, out), lse, None, None, T, T, 0.0, True, unused.view(torch.uint64), unused
        )
        return _bthd(*gradients)


def _bthd(*tensors):
    """(B, NH, T, HS) <-> (B, T, NH, HS)"""
    return [t.transpose(1, 2) for t in tensors]
