"""Softmax, cross-entropy and the logits' gradient, in place: see llmc/layers/fused_classifier.py.

A program holds one row's running maximum and sum (online softmax: Milakov and Gimelshein 2018), then goes over the row once
more, mostly out of cache, and writes its gradient. Most of a row needs no mask; its tail is read up to Vp and what is beyond
V put aside afterwards, as a mask that ends at V, an odd number, would make every load two bytes wide. Between two blocks all
threads wait for one maximum and one sum, so the blocks after it, which no load would overtake these for, are fetched ahead.
"""

from llmc.kernels import door
from llmc.kernels.door import exp, jit, load, narrow, next_power_of_2, store, tl, widen

COLUMNS, WARPS = 8192, 8
AHEAD = 48 << 10  # bytes of a row under way at a time, in any card's shared memory


@jit
def _add(largest, total, x):
    """The running maximum, and the sum of powers of what lies below it, with those of x."""
    new = tl.maximum(largest, tl.max(x, 0))
    return new, total * exp(largest - new) + tl.sum(exp(x - new), 0)


@jit
def _classify(
    logits, losses, targets, dloss,
    V: tl.constexpr, Vp: tl.constexpr, WHOLE: tl.constexpr, GRADIENT: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows * Vp passes 2^31
    logits += row * Vp
    target = tl.load(targets + row)
    target_logit = widen(tl.load(logits + target))
    tail = WHOLE + tl.arange(0, TAIL)
    last = tl.where(tail < V, load(logits + tail, tail < Vp), -float("inf"))
    largest, total = -1e38, 0.0  # not -inf: where all of a block is that, the difference would be NaN
    for at in tl.range(0, WHOLE, COLUMNS, num_stages=STAGES):
        largest, total = _add(largest, total, widen(tl.load(logits + at + tl.arange(0, COLUMNS))))
    largest, total = _add(largest, total, last)
    tl.store(losses + row, tl.load(losses + row) + (tl.log(total) - (target_logit - largest)))
    if GRADIENT:
        scale = dloss / total
        for at in tl.range(0, WHOLE, COLUMNS, num_stages=STAGES):
            column = at + tl.arange(0, COLUMNS)
            x = widen(tl.load(logits + column))
            tl.store(logits + column, narrow(exp(x - largest) * scale, logits.dtype.element_ty))
        store(logits + tail, tl.where(tail < V, exp(last - largest) * scale, 0.0), tail < Vp)
        tl.debug_barrier()  # the target's own gradient goes on top
        tl.store(logits + target, narrow(exp(target_logit - largest) * scale - dloss, logits.dtype.element_ty))


def fused_classifier_inplace(logits, losses, targets, scratch, *, V, dloss, rows_at_once):
    n, Vp = logits.shape
    whole = V // COLUMNS * COLUMNS if V % COLUMNS else V - COLUMNS  # at least one column is left for the tail, which is masked
    door.launch(
        _classify, (n,), logits, losses, targets, 0.0 if dloss is None else dloss,
        V=V, Vp=Vp, WHOLE=whole, GRADIENT=dloss is not None, COLUMNS=COLUMNS, TAIL=next_power_of_2(Vp - whole),
        STAGES=1 + AHEAD // (COLUMNS * logits.itemsize), num_warps=WARPS,
    )  # fmt: skip
