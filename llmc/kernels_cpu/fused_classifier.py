"""Softmax, cross-entropy and the logits' gradient, in place: see llmc/layers/fused_classifier.py.

A thread takes a row at a time. It finds the row's maximum, then the exponentials, which stay in the core's cache in fp32 while the next
row is fetched, and from these the gradient.
"""

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.door import (
    F0, aligned, array, exp_below_zero, fetch, helper, jit, larger, load, load_order, number_of, plus, prange, store,
)  # fmt: skip

BLOCK = 1024  # exponentials that are summed in fp32; the sums of blocks in fp64
PARTS = 64  # of the rows, about: even shares for many threads, but not more than that, as each part makes an array for a row


@helper
def _largest_of(logits, first, V):
    """The largest of V logits. A NaN counts as larger than any or, with the sign set, as smaller: the exponentials then sum to NaN."""
    largest = load_order(logits, first)
    for i in range(first, first + V):
        largest = larger(largest, load_order(logits, i))
    return number_of(largest)


@helper
def _exponentials(powers, logits, first, V, Vp, largest):
    """powers (V,) = exp(logit - largest); returns their sum, fp64."""
    total = 0.0
    for at in range(0, V, BLOCK):
        fetch(logits, first + Vp + at, BLOCK)
        block_sum = F0
        for c in range(at, min(at + BLOCK, V)):
            power = exp_below_zero(load(logits, first + c) - largest)
            store(powers, c, power)
            block_sum = plus(block_sum, power)
        total += np.float64(block_sum)
    return total


@helper
def _gradient(logits, powers, first, V, Vp, scale):
    for c in range(V):
        store(logits, first + c, load(powers, c) * scale)
    for c in range(V, Vp):
        store(logits, first + c, F0)


@jit
def _classify(logits, losses, targets, dloss, n, rows_each, parts, V, Vp):
    for part in prange(parts):
        powers = aligned(V)
        for row in range(np.int64(part) * rows_each, min((np.int64(part) + 1) * rows_each, n)):
            first, target = row * Vp, targets[row]
            target_logit = load(logits, first + target)
            largest = _largest_of(logits, first, V)
            total = _exponentials(powers, logits, first, V, Vp, largest)
            losses[row] += np.float32(np.log(total) - (np.float64(target_logit) - np.float64(largest)))
            if dloss is not None:
                scale = np.float32(np.float64(dloss) / total)
                _gradient(logits, powers, first, V, Vp, scale)
                store(logits, first + target, powers[target] * scale - dloss)


def fused_classifier_inplace(logits, losses, targets, scratch, *, V, dloss, rows_at_once):
    """scratch and rows_at_once are not used: each part of the rows allocates one in fp32."""
    n, Vp = logits.shape
    rows_each = max(1, n // PARTS)
    door.launch(
        _classify, array(logits), array(losses), array(targets), None if dloss is None else np.float32(dloss),
        n, rows_each, door.cdiv(n, rows_each), V, Vp,
    )  # fmt: skip
