"""Tensor parallelism: each rank of a group has a part of every layer's heads and channels, and of the vocabulary.

Between the matmuls each rank has a part of the rows of the stream (Korthikanti et al. 2022). Where a matmul needs the rows of all
parts, they are gathered into one buffer in the arena, which all layers take turns in. Where a matmul gives a partial sum for all rows,
it writes that buffer, which is then summed over parts into each rank's own rows. Gathered rows are not kept for backward, unless the
plan says so: they are gathered again.
"""

from bisect import bisect_left

import torch

from llmc.data.order import TokenOrder


class Undivided:
    """The only part: all of the model is here."""

    rank, size = 0, 1

    def attach(self, model):
        """Take over the model that is divided. Its arenas exist already."""

    def own_rows(self, x):
        """This part's rows (B, s, C) of x (B, T, C): B*s consecutive ones of all B*T, as a view."""
        return x

    def encode(self, ops, out, inputs, wte, wpe):
        """out (B, s, C), this part's rows, = wte[inputs] + wpe[position], for inputs (B, T) of the whole vocabulary."""
        ops.encoder_forward(out, inputs, wte, wpe)

    def gathered(self, x):
        """The rows of all parts (B, T, C), given x (B, s, C), this part's."""
        return x

    def still_gathered(self, x):
        """The same, but gathered again only if the stream was used for something else since. x must not have changed."""
        return x

    def gather_in_place(self, rows):
        """Fill rows (B, T, C) with those of all parts; this part's are in their place already."""

    def partial(self, out):
        """Where to write this part's partial sum (B, T, C), which sum_partial(out) is to sum into out (B, s, C)."""
        return out

    def sum_partial(self, out):
        """out becomes this part's rows of the sum of what all parts wrote to partial(out)."""

    def bias(self, bias):
        """The bias for a matmul whose results are summed over parts: only the first part adds it, the others get None."""
        return bias

    def own_order(self, order):
        """The part of a batch's TokenOrder for the tokens in this part's vocabulary, numbered from its first one."""
        return order

    def head_rows(self, lnf, chunk):
        """The rows (n, C) of all parts in a chunk, which is the same slice of each part's rows of lnf."""
        return lnf.view(-1, lnf.shape[2])[chunk]

    def classify(self, ops, logits, losses, targets, chunk, scratch, *, V, dloss, rows_at_once):
        """fused_classifier_inplace of the rows of all parts in a chunk.

        logits  (n, w)  of those rows, this part's columns     losses   (B, T)  fp32, to which all parts add the same
        V       of the whole vocabulary                        targets  (B, T)  int64
        """
        losses, targets = losses.view(-1)[chunk], targets.view(-1)[chunk]
        ops.fused_classifier_inplace(logits, losses, targets, scratch, V=V, dloss=dloss, rows_at_once=rows_at_once)

    def sum_head_rows(self, lnf, chunk):
        """This part's rows of the chunk in lnf become the sum of what all parts wrote over head_rows."""

    def embedding(self, wte, token):
        """A token's row of the whole wte."""
        return wte[token]

    def sum_row(self, x):
        """x becomes its sum over all parts."""

    def whole_row(self, logits):
        """The logits (1, Vp) of one row, from all parts' logits (1, w)."""
        return logits


class Divided:
    """One of several parts, given the Group of their ranks. What the calls mean is said at Undivided's, which are the same."""

    def __init__(self, group):
        self.group, self.rank, self.size = group, group.rank, group.size
        self._holds = None  # the address of the tensor that was gathered into the stream

    def attach(self, model):
        assert self.size == model.plan.options.tensor_parallel
        self._acts, self._stream, self._own = model.acts, model.acts["stream"], model.acts["own_inputs"]
        self.vocabulary = model.config.padded_vocab_size // self.size
        self.first_token = self.rank * self.vocabulary

    def own_rows(self, x):
        B, T, C = x.shape
        return x.view(self.size, B, T // self.size, C)[self.rank]

    def gathered(self, x):
        self.group.gather_shares([self._stream.view(-1)], [x.view(-1)]).wait()
        self._holds = x.data_ptr()
        return self._stream

    def still_gathered(self, x):
        return self._stream if self._holds == x.data_ptr() else self.gathered(x)

    def gather_in_place(self, rows):
        self.group.gather_shares([rows.view(-1)]).wait()

    def partial(self, out):
        self._holds = None
        return self._stream

    def sum_partial(self, out):
        self.group.sum_shares([self._stream.view(-1)], [out.view(-1)]).wait()

    def bias(self, bias):
        return bias if self.rank == 0 else None

    def sum_row(self, x):
        self.group.sum_whole([x.view(-1)]).wait()

    def head_rows(self, lnf, chunk):
        own = lnf.view(-1, lnf.shape[2])[chunk]
        rows = self._acts["head_rows"][: self.size * len(own)]
        self.group.gather_shares([rows.view(-1)], [own.view(-1)]).wait()
        return rows

    def sum_head_rows(self, lnf, chunk):
        own = lnf.view(-1, lnf.shape[2])[chunk]
        rows = self._acts["head_rows"][: self.size * len(own)]
        self.group.sum_shares([rows.view(-1)], [own.view(-1)]).wait()

    # ------------------------------------------------------------------------
    # vocabulary: this part has its rows of wte

    def encode(self, ops, out, inputs, wte, wpe):
        own, stream = self._own, self.partial(out)
        torch.sub(inputs, self.first_token, out=own)
        others = (own < 0) | (own >= self.vocabulary)
        own.masked_fill_(others, 0)
        rows = stream.view(-1, stream.shape[2])
        torch.index_select(wte, 0, own.view(-1), out=rows)
        rows.masked_fill_(others.view(-1, 1), 0)  # all other parts add zero, so the sum is exact
        self.sum_partial(out)
        out, positions = out.view(-1, out.shape[2]), own.view(-1)[: len(rows) // self.size]  # both buffers are free again
        torch.arange(self.rank * len(out), (self.rank + 1) * len(out), out=positions).remainder_(inputs.shape[1])
        out.add_(torch.index_select(wpe, 0, positions, out=rows[: len(out)]))

    def own_order(self, order):
        first, last = (bisect_left(order.tokens, self.first_token + n) for n in (0, self.vocabulary))
        begin, end = order.starts[first], order.starts[last]
        return TokenOrder(order.positions[begin:end], order.tokens[first:last] - self.first_token, order.starts[first : last + 1] - begin)

    def embedding(self, wte, token):
        row = torch.zeros_like(wte[0])
        if self.first_token <= token < self.first_token + self.vocabulary:
            row.copy_(wte[token - self.first_token])
        self.sum_row(row)
        return row

    def whole_row(self, logits):
        row = self._acts["all_logits"]
        self.group.gather_shares([row.view(-1)], [logits.view(-1)]).wait()
        return row

    def classify(self, ops, logits, losses, targets, chunk, scratch, *, V, dloss, rows_at_once):
        own = self._acts["head_targets"][: len(logits)]
        own.view(self.size, -1).copy_(targets.view(self.size, -1)[:, chunk])
        V = min(V - self.first_token, self.vocabulary)
        more = sliced_classifier_inplace(
            logits, own.sub_(self.first_token), self.group, scratch, V=V, dloss=dloss, rows_at_once=rows_at_once
        )  # fmt: skip
        losses.view(self.size, -1)[:, chunk] += more.view(self.size, -1)


def sliced_classifier_inplace(logits, targets, group, scratch, *, V, dloss, rows_at_once):
    """fused_classifier_inplace for logits whose columns are split over several ranks. Returns the losses (n,), in scratch, the same on all.

    logits   (n, w)  this rank's slice of columns; they become their gradient, or undefined, as there
    targets  (n,)    int64, counted from the slice's first column: 0 <= target < w is in this slice, others are elsewhere; destroyed
    group    the Group of these ranks, of which largest() and sum_whole() are called with lists of tensors
    scratch  as there, with classifier_rows (rows_at_once, w)
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

    row_max.fill_(float("-inf"))
    row_sum.zero_()
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
