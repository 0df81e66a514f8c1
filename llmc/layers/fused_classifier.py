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
            # dlogits = exp(x) * dloss / sum - onehot * dloss; both factors take the place of row_max, which is no longer needed
            factor = torch.reciprocal(row_sum[part], out=row_max[part]).mul_(dloss)
            x.mul_(factor[:, None])
            x.scatter_add_(1, index, factor.fill_(-dloss)[:, None])  # one element per row: no order to depend on
            if rows is not None:
                logits[part, :V].copy_(x)
    if dloss is not None:
        logits[:, V:].zero_()
    losses.add_(row_sum.log_()).sub_(target_logit)
