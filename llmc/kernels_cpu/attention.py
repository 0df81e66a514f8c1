"""Softmax over the keys a query sees, and its gradient, in place: see llmc/layers/attention_cpu.py."""

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.door import F0, F1, array, exp_below_zero, helper, jit, largest_of, load, plus, prange, store

ROWS = 16  # of a piece that one thread takes


@helper
def _softmax_row(scores, at, seen, keys):
    highest, total = largest_of(scores, at, seen), F0
    for i in range(at, at + seen):
        power = exp_below_zero(load(scores, i) - highest)
        store(scores, i, power)
        total = plus(total, power)
    scale = F1 / total
    for i in range(at, at + seen):
        store(scores, i, load(scores, i) * scale)
    for i in range(at + seen, at + keys):
        store(scores, i, F0)


@helper
def _backward_row(grad, probabilities, at, seen, keys):
    total = F0
    for i in range(at, at + seen):
        total = plus(total, load(grad, i) * load(probabilities, i))
    for i in range(at, at + seen):
        store(grad, i, load(probabilities, i) * (load(grad, i) - total))
    for i in range(at + seen, at + keys):
        store(grad, i, F0)


@jit
def _softmax(scores, n_rows, queries, keys, first, pieces):
    for piece in prange(pieces):
        for row in range(np.int64(piece) * ROWS, min((np.int64(piece) + 1) * ROWS, n_rows)):
            _softmax_row(scores, row * keys, first + row % queries + 1, keys)


@jit
def _softmax_backward(grad, probabilities, n_rows, queries, keys, first, pieces):
    for piece in prange(pieces):
        for row in range(np.int64(piece) * ROWS, min((np.int64(piece) + 1) * ROWS, n_rows)):
            _backward_row(grad, probabilities, row * keys, first + row % queries + 1, keys)


def causal_softmax_inplace(scores, first, scratch):
    n, queries, keys = scores.shape
    door.launch(_softmax, array(scores), n * queries, queries, keys, first, door.cdiv(n * queries, ROWS))


def causal_softmax_backward_inplace(grad, probabilities, first):
    n, queries, keys = grad.shape
    door.launch(_softmax_backward, array(grad), array(probabilities), n * queries, queries, keys, first, door.cdiv(n * queries, ROWS))
