"""Softmax, cross-entropy and the logits' gradient, in place: see llmc/layers/fused_classifier.py.

A program holds one row's running maximum and sum (online softmax: Milakov and Gimelshein 2018), then goes over the row once
more, mostly out of cache, and writes its gradient. Most of a row needs no mask; its tail is read up to Vp and what is beyond
V put aside afterwards, as a mask that ends at V, an odd number, would make every load two bytes wide.
"""

from llmc.kernels import door
from llmc.kernels.door import exp, jit, load, narrow, next_power_of_2, store, tl, widen

COLUMNS = 16384


@jit
def _classify(
    logits, losses, targets, dloss,
    V: tl.constexpr, Vp: tl.constexpr, WHOLE: tl.constexpr, GRADIENT: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows * Vp passes 2^31
    logits += row * Vp
    target = tl.load(targets + row)
    target_logit = widen(tl.load(logits + target))
    tail = WHOLE + tl.arange(0, TAIL)
    last = tl.where(tail < V, load(logits + tail, tail < Vp), -float("inf"))
    largest = tl.maximum(tl.max(last, 0), -3e38)  # where all of the tail is -inf, the difference would be NaN
    total = tl.sum(exp(last - largest), 0)
    for at in range(0, WHOLE, COLUMNS):
        x = widen(tl.load(logits + at + tl.arange(0, COLUMNS)))
        new = tl.maximum(largest, tl.max(x, 0))
        total = total * exp(largest - new) + tl.sum(exp(x - new), 0)
        largest = new
    tl.store(losses + row, tl.load(losses + row) + (tl.log(total) - (target_logit - largest)))
    if GRADIENT:
        scale = dloss / total
        for at in range(0, WHOLE, COLUMNS):
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
        num_warps=16 if whole else 4,
    )  # fmt: skip
