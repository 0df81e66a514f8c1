"""Causal attention on a CPU: matmuls over blocks of queries of a few heads at a time, in scratch that stays in cache.

torch's own kernel takes up to twice as long in bf16, and allocates what it returns. Forward keeps the log-sum-exp of each row of scores,
from which backward recomputes the probabilities in one step, as flash attention does. Where numba is installed, one kernel does all of
this faster: see llmc/kernels_cpu/attention.py. Source: Dao et al. 2022.
"""

import torch

from llmc.backend import bf16_products
from llmc.layers.rows import finish_column_sums

aten = torch.ops.aten


def attention_forward(atty, lse, qkvr, NH, scratch):
    """atty = softmax(mask(q k^T / sqrt(HS))) v per head.

    atty     (B, T, C)   written
    lse      (B, NH, T)  fp32, written: the log-sum-exp of each row of masked scores
    qkvr     (B, T, 3C)  read: q, k and v of all heads, packed
    scratch  fp32 views attention_rows (7, heads, T, HS), attention_scores (2, heads, queries, T), attention_stats (2, heads, T) and
             attention_mask (queries, queries)
    Scores and probabilities are fp32, whatever the precision. Where qkvr is bf16, matmuls round their factors to bf16 if that is faster.
    """
    (outs,), packed = _by_head(atty, 1, NH), _by_head(qkvr, 3, NH)
    with bf16_products(qkvr.dtype == torch.bfloat16):
        for part, rooms, stats in _groups(packed, scratch):
            (q, k, v), out, (highest, largest) = map(_pack, rooms, (x[part] for x in packed)), rooms[3], stats
            for queries, end in _blocks(scratch, q.shape[1]):
                scores = _room(scratch, 0, q, queries, end)
                torch.baddbmm(scores, q[:, queries], k[:, :end].transpose(1, 2), beta=0.0, alpha=q.shape[2] ** -0.5, out=scores)
                _hide_future(scores, queries, scratch)
                torch.amax(scores, 2, out=highest[:, queries])
                torch.amax(aten._softmax.out(scores, 2, False, out=scores), 2, out=largest[:, queries])
                torch.bmm(scores, v[:, :end], out=out[:, queries])
            _unpack(outs[part], out)
            _unpack(lse[part], highest.sub_(largest.log_()))  # the largest probability is exp(highest - lse)


def attention_backward(dqkvr, dbias, datty, qkvr, atty, lse, NH, scratch, *, accumulate):
    """Gradients of attention_forward, and of the bias in the matmul that made qkvr.

    dqkvr    (B, T, 3C)  written
    dbias    (3C,)       the sum over rows of dqkvr before it is rounded; accumulated, or written when accumulate is False
    datty    (B, T, C)   read, as are qkvr (B, T, 3C) and what forward wrote: atty (B, T, C) and lse (B, NH, T)
    scratch  as in forward, and attention_sums (2, 3C)
    """
    gradients, packed = _by_head(dqkvr, 3, NH), _by_head(qkvr, 3, NH)
    (outs,), (douts,) = _by_head(atty, 1, NH), _by_head(datty, 1, NH)
    totals, sums = (s.view(3, NH, -1) for s in scratch["attention_sums"])
    totals.zero_()
    with bf16_products(qkvr.dtype == torch.bfloat16):
        for part, rooms, stats in _groups(packed, scratch):
            q, k, v, dout, out = map(_pack, rooms, (x[part] for x in (*packed, douts, outs)))
            row_lse, delta = _pack(stats[0], lse[part]), torch.sum(out.mul_(dout), 2, out=stats[1])  # delta: sum over keys of p * dp
            dq, dk, dv = rooms[4:]
            scale, add = q.shape[2] ** -0.5, 0.0  # the last block of queries comes first: it writes all of dk and dv
            for queries, end in reversed(_blocks(scratch, q.shape[1])):
                p, ds = (_room(scratch, which, q, queries, end) for which in (0, 1))
                p.copy_(row_lse[:, queries, None])
                torch.baddbmm(p, q[:, queries], k[:, :end].transpose(1, 2), beta=-1.0, alpha=scale, out=p)
                _hide_future(p, queries, scratch)
                torch.baddbmm(dv[:, :end], p.exp_().transpose(1, 2), dout[:, queries], beta=add, out=dv[:, :end])
                ds.copy_(delta[:, queries, None])
                torch.baddbmm(ds, dout[:, queries], v[:, :end].transpose(1, 2), beta=-1.0, out=ds).mul_(p)
                torch.baddbmm(dq[:, queries], ds, k[:, :end], beta=0.0, alpha=scale, out=dq[:, queries])
                torch.baddbmm(dk[:, :end], ds.transpose(1, 2), q[:, queries], beta=add, alpha=scale, out=dk[:, :end])
                add = 1.0
            heads = part[1]
            for out, gradient, total, part_sum in zip(gradients, (dq, dk, dv), totals[:, heads], sums[:, heads]):
                _unpack(out[part], gradient)
                total.add_(torch.sum(gradient.view(out[part].shape), (0, 2), out=part_sum))
    finish_column_sums(dbias, totals.view(-1), accumulate)


def _hide_future(scores, queries, scratch):
    """Scores (n, queries, keys) fp32 become -inf where a query does not see a key. The last keys are at the queries' own positions: of
    these a query sees those up to its own."""
    n = queries.stop - queries.start
    scores[:, :, queries.start :].add_(scratch["attention_mask"][:n, :n].fill_(float("-inf")).triu_(1))


def _by_head(packed, n, NH):
    """A packed (B, T, n C) as (n, B, NH, T, HS)."""
    B, T, width = packed.shape
    return packed.view(B, T, n, NH, width // n // NH).permute(2, 0, 3, 1, 4)


def _groups(packed, scratch):
    """Yield ((sequences, heads) as slices, rooms (7, n, T, HS), stats (2, n, T)) for one group after the other of packed
    (3, B, NH, T, HS). n is the group's number of heads, over all its sequences.

    A group is as many whole sequences as scratch has room for, or some heads of one.
    """
    _, B, NH, _, _ = packed.shape
    rows, stats = scratch["attention_rows"], scratch["attention_stats"]
    room = rows.shape[1]
    sequences, heads = max(1, room // NH), min(room, NH)
    for b in range(0, B, sequences):
        for h in range(0, NH, heads):
            part = slice(b, min(b + sequences, B)), slice(h, min(h + heads, NH))
            n = (part[0].stop - b) * (part[1].stop - h)
            yield part, rows[:, :n], stats[:, :n]


def _pack(room, x):
    """Copy x (sequences, heads, T, ...) into fp32 scratch `room` (n, T, ...), which is returned."""
    room.view(x.shape).copy_(x)
    return room


def _unpack(out, x):
    """out (sequences, heads, T, ...) = x (n, T, ...) fp32."""
    out.copy_(x.view(out.shape))


def _blocks(scratch, T):
    """A list of (slice of a block of queries, end of the keys that they see)."""
    size = scratch["attention_scores"].shape[2]
    return [(slice(at, min(at + size, T)), min(at + size, T)) for at in range(0, T, size)]


def _room(scratch, which, q, queries, end):
    """A contiguous view (heads, queries, keys before `end`) of one of the two scratch buffers for scores."""
    shape = len(q), queries.stop - queries.start, end
    return scratch["attention_scores"][which].view(-1)[: torch.Size(shape).numel()].view(shape)
