"""Softmax, cross-entropy and the logits' gradient, in place: see llmc/layers/fused_classifier.py.

A program keeps one row's running maximum and sum (online softmax: Milakov and Gimelshein 2018), then goes over the row once
more, mostly from cache, and writes its gradient. Most of a row needs no mask. Its tail is read up to Vp, and what lies beyond V
is discarded afterwards: a mask that ends at V, an odd number, would make every load two bytes wide. All threads wait for the
maximum and the sum of a block, and loads do not move across that barrier, so blocks are fetched ahead: as many as a row of
GPT-2's has in bf16. Two programs then fill a multiprocessor; more would have more rows in flight than an H200's L2 holds.
"""

from llmc.kernels import door
from llmc.kernels.door import exp, jit, load, narrow, next_power_of_2, store, tl, widen

BLOCK, AHEAD = 16 << 10, 96 << 10  # bytes of a block, and of the buffers that blocks are fetched into, which fit any GPU's shared memory
WARPS = 16


@jit
def _add_block(largest, total, x):
    """The running maximum, and the sum of exp(logit - maximum), with the block x added."""
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
    largest, total = -1e38, 0.0  # not -inf: if all of a block were -inf too, the difference would be NaN
    for at in tl.range(0, WHOLE, COLUMNS, num_stages=STAGES):
        largest, total = _add_block(largest, total, widen(tl.load(logits + at + tl.arange(0, COLUMNS))))
    largest, total = _add_block(largest, total, last)
    tl.store(losses + row, tl.load(losses + row) + (tl.log(total) - (target_logit - largest)))
    if GRADIENT:
        scale = dloss / total
        for at in tl.range(0, WHOLE, COLUMNS, num_stages=STAGES):
            column = at + tl.arange(0, COLUMNS)
            x = widen(tl.load(logits + column))
            tl.store(logits + column, narrow(exp(x - largest) * scale, logits.dtype.element_ty))
        store(logits + tail, tl.where(tail < V, exp(last - largest) * scale, 0.0), tail < Vp)
        tl.debug_barrier()  # the target's own gradient then overwrites the above
        tl.store(logits + target, narrow(exp(target_logit - largest) * scale - dloss, logits.dtype.element_ty))


def fused_classifier_inplace(logits, losses, targets, scratch, *, V, dloss, rows_at_once):
    n, Vp = logits.shape
    columns = BLOCK // logits.itemsize
    whole = V // columns * columns if V % columns else V - columns  # at least one column is left for the tail, which is masked
    door.launch(
        _classify, (n,), logits, losses, targets, 0.0 if dloss is None else dloss,
        V=V, Vp=Vp, WHOLE=whole, GRADIENT=dloss is not None, COLUMNS=columns, TAIL=next_power_of_2(Vp - whole),
        STAGES=1 + AHEAD // BLOCK, num_warps=WARPS if whole else 4,
    )  # fmt: skip
