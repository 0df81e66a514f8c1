"""Causal attention on a CPU: matmuls over blocks of queries of a few heads at a time, in scratch that stays in cache.

torch's own kernel takes up to twice as long in bf16, and returns memory of its own. Backward takes the softmax again, by the
very operations of forward, so of forward it needs qkvr alone. Where numba is installed one kernel does all of this, faster: see
llmc/kernels_cpu/attention.py.
"""

import torch

from llmc.backend import bf16_products
from llmc.layers.rows import finish_column_sums

aten = torch.ops.aten


def attention_cpu_forward(atty, qkvr, NH, scratch):
    """atty = softmax(mask(q k^T / sqrt(HS))) v per head.

    atty     (B, T, C)   written
    qkvr     (B, T, 3C)  read: q, k and v of all heads, packed
    scratch  fp32 views attention_rows (7, heads, T, HS), attention_scores (2, heads, queries, T), attention_mask (queries, queries)
    Scores and probabilities are fp32, whatever the precision; where qkvr is bf16, so are the factors of products.
    """
    (outs,), packed = _by_head(atty, 1, NH), _by_head(qkvr, 3, NH)
    with bf16_products(qkvr.dtype == torch.bfloat16):
        for part, rooms in _groups(packed, scratch):
            (q, k, v), out = map(_pack, rooms, (x[part] for x in packed)), rooms[3]
            for queries, end in _blocks(scratch, q.shape[1]):
                p = _probabilities(q, k, queries, end, scratch)
                torch.bmm(p, v[:, :end], out=out[:, queries])
            _unpack(outs[part], out)


def attention_cpu_backward(dqkvr, dbias, datty, qkvr, NH, scratch, *, accumulate):
    """Gradients of attention_cpu_forward, and of the bias that qkvr has from its matmul.

    dqkvr    (B, T, 3C)  written
    dbias    (3C,)       the sum over rows of what dqkvr is the rounding of; accumulated, or written when accumulate is False
    datty    (B, T, C)   read, and qkvr (B, T, 3C)
    scratch  as in forward, and attention_sums (2, 3C)
    """
    gradients, (douts,), packed = _by_head(dqkvr, 3, NH), _by_head(datty, 1, NH), _by_head(qkvr, 3, NH)
    totals, sums = (s.view(3, NH, -1) for s in scratch["attention_sums"])
    totals.zero_()
    with bf16_products(qkvr.dtype == torch.bfloat16):
        for part, rooms in _groups(packed, scratch):
            q, k, v, dout = map(_pack, rooms, (x[part] for x in (*packed, douts)))
            dq, dk, dv = rooms[4:]
            scale, add = q.shape[2] ** -0.5, 0.0  # the last block of queries comes first: it writes all of dk and dv
            for queries, end in reversed(_blocks(scratch, q.shape[1])):
                p = _probabilities(q, k, queries, end, scratch)
                torch.baddbmm(dv[:, :end], p.transpose(1, 2), dout[:, queries], beta=add, out=dv[:, :end])
                dp = _room(scratch, 1, p.shape)
                torch.bmm(dout[:, queries], v[:, :end].transpose(1, 2), out=dp)
                aten._softmax_backward_data.out(dp, p, 2, torch.float32, grad_input=dp)
                torch.baddbmm(dq[:, queries], dp, k[:, :end], beta=0.0, alpha=scale, out=dq[:, queries])
                torch.baddbmm(dk[:, :end], dp.transpose(1, 2), q[:, queries], beta=add, alpha=scale, out=dk[:, :end])
                add = 1.0
            heads = part[1]
            for out, gradient, total, part_sum in zip(gradients, (dq, dk, dv), totals[:, heads], sums[:, heads]):
                _unpack(out[part], gradient)
                total.add_(torch.sum(gradient.view(out[part].shape), (0, 2), out=part_sum))
    finish_column_sums(dbias, totals.view(-1), accumulate)


def _causal_softmax_inplace(scores, first, mask):
    """Scores (n, queries, keys) fp32 become probabilities: query i, of position first + i, sees the keys up to its own.

    The last keys are the queries' own positions: keys = first + queries. What the mask (>= queries, >= queries) holds does not matter.
    """
    queries = scores.shape[1]
    mask = mask[:queries, :queries].fill_(float("-inf")).triu_(1)
    scores[:, :, first:].add_(mask)
    aten._softmax.out(scores, 2, False, out=scores)


def _by_head(packed, n, NH):
    """A packed (B, T, n C) as (n, B, NH, T, HS)."""
    B, T, width = packed.shape
    return packed.view(B, T, n, NH, width // n // NH).permute(2, 0, 3, 1, 4)


def _groups(packed, scratch):
    """(which sequences and heads, rooms (7, heads of all of them, T, HS)) of one group after the other; packed (3, B, NH, T, HS).

    A group is as many whole sequences as scratch has room for, or some heads of one.
    """
    _, B, NH, _, _ = packed.shape
    rows = scratch["attention_rows"]
    room = rows.shape[1]
    sequences, heads = max(1, room // NH), min(room, NH)
    for b in range(0, B, sequences):
        for h in range(0, NH, heads):
            part = slice(b, min(b + sequences, B)), slice(h, min(h + heads, NH))
            yield part, rows[:, : (part[0].stop - b) * (part[1].stop - h)]


def _pack(room, x):
    """x (sequences, heads, T, HS) as fp32 in a room (n, T, HS)."""
    room.view(x.shape).copy_(x)
    return room


def _unpack(out, x):
    """out (sequences, heads, T, HS) = x (n, T, HS) fp32."""
    out.copy_(x.view(out.shape))


def _blocks(scratch, T):
    """[(block of queries, end of the keys they see)]"""
    size = scratch["attention_scores"].shape[2]
    return [(slice(at, min(at + size, T)), min(at + size, T)) for at in range(0, T, size)]


def _room(scratch, which, shape):
    """A contiguous view, of that shape, of one of the two rooms for scores."""
    heads, queries, keys = shape
    return scratch["attention_scores"][which].view(-1)[: heads * queries * keys].view(shape)


def _probabilities(q, k, queries, end, scratch):
    """softmax of q k^T / sqrt(HS) for a block of queries over the keys before `end`: (n, queries, end)."""
    scores = _room(scratch, 0, (len(q), queries.stop - queries.start, end))
    torch.baddbmm(scores, q[:, queries], k[:, :end].transpose(1, 2), beta=0.0, alpha=q.shape[2] ** -0.5, out=scores)
    _causal_softmax_inplace(scores, queries.start, scratch["attention_mask"])
    return scores
