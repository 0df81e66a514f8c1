"""Softmax, cross-entropy and the logits' gradient in one function, in place. Source: llm.c llmc/fused_classifier.cuh."""

import torch


def fused_classifier_inplace(logits, losses, targets, scratch, *, V, dloss, rows_at_once):
    """losses += cross-entropy of each row; logits become their own gradient when dloss is not None.

    logits   (n, Vp)  read; with dloss then written: dlogits = (softmax - onehot) * dloss, zero in columns V..Vp; without it undefined
    losses   (n,)     fp32, accumulated: micro-steps add up; the caller zeroes
    targets  (n,)     int64 in [0, V)
    scratch  views classifier_stats (3 * >=n,) and, unless the logits are fp32, classifier_rows (rows_at_once, Vp), fp32
    The arithmetic is fp32, on rows_at_once rows that stay in cache; bf16 logits are read and written once each.
    """
    n = len(logits)
    row_max, row_sum, target_logit = (s[:n] for s in scratch["classifier_stats"].view(3, -1))
    rows = scratch.get("classifier_rows")
    for at in range(0, n, rows_at_once):
        part = slice(at, min(at + rows_at_once, n))
        if rows is None:
            x = logits[part, :V]
        else:
            x = rows[: part.stop - at, :V]
            x.copy_(logits[part, :V])
        index = targets[part, None]
        torch.amax(x, 1, out=row_max[part])
        x.sub_(row_max[part, None])
        torch.gather(x, 1, index, out=target_logit[part, None])
        torch.sum(x.exp_(), 1, out=row_sum[part])
        if dloss is not None:
            # dlogits = exp(x) * dloss / sum - onehot * dloss
            torch.reciprocal(row_sum[part], out=row_max[part]).mul_(dloss)
            x.mul_(row_max[part, None])
            x.scatter_add_(1, index, row_max[part, None].fill_(-dloss))  # one element per row: no order to depend on
            if rows is not None:
                logits[part, :V].copy_(x)
    if dloss is not None:
        logits[:, V:].zero_()
    losses.add_(row_sum.log_()).sub_(target_logit)


def sliced_classifier_inplace(logits, targets, group, scratch, *, V, dloss, rows_at_once):
    """The same for logits whose columns are split over several ranks. Returns the losses (n,), in scratch, the same on all of them.

    logits   (n, w)  this rank's slice of columns; they become their gradient, or undefined, as above
    targets  (n,)    int64, counted from the slice's first column: 0 <= target < w is in this slice, others are elsewhere; destroyed
    group    the Group of these ranks, of which largest() and sum_whole() are called with lists of tensors
    scratch  as above, with classifier_rows (rows_at_once, w)
    V        number of columns of the slice that are not padding; a negative number means none
    """
    n, V, in_fp32 = len(logits), max(0, V), logits.dtype == torch.float32
    row_max, row_sum, target_logit = (s[:n] for s in scratch["classifier_stats"].view(3, -1))
    here = (targets >= 0) & (targets < V)
    index = targets.mul_(here)[:, None]
    pieces = [slice(at, min(at + rows_at_once, n)) for at in range(0, n, rows_at_once)] if V else []

    def widened(part):
        x = logits[part, :V]
        return x if in_fp32 else scratch["classifier_rows"][: part.stop - part.start, :V].copy_(x)

    for s, start in ((row_max, float("-inf")), (row_sum, 0.0), (target_logit, 0.0)):
        s.fill_(start)
    for part in pieces:
        torch.amax(widened(part), 1, out=row_max[part])
    group.largest([row_max]).wait()
    for part in pieces:
        x = widened(part).sub_(row_max[part, None])
        torch.gather(x, 1, index[part], out=target_logit[part, None])
        torch.sum(x.exp_(), 1, out=row_sum[part])
    target_logit.masked_fill_(here.logical_not(), 0.0)
    group.sum_whole([row_sum, target_logit]).wait()
    if dloss is not None:
        for part in pieces:
            x = widened(part) if in_fp32 else widened(part).sub_(row_max[part, None]).exp_()  # fp32 logits hold exp(x) already
            x.mul_((dloss / row_sum[part])[:, None])
            x.scatter_add_(1, index[part], (here[part] * -dloss)[:, None])  # one element per row: no order to depend on
            if not in_fp32:
                logits[part, :V].copy_(x)
        logits[:, V:].zero_()
    return row_sum.log_().sub_(target_logit)
