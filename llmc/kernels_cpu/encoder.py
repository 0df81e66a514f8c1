"""Token and position embeddings: see llmc/layers/encoder.py.

Backward adds the rows of one token, in order of position, and writes its gradient once: the loader has grouped the positions.
"""

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.columns import add_row, zero
from llmc.kernels_cpu.door import aligned, array, helper, jit, load, noise_of_row, prange, rounding_noise, store, store_rounded

PARTS = 64  # each takes every 64th token: neighbours are about equally frequent


@helper
def _write_row(grad, first, total, noise_row, seed, add):
    """A row of the gradient = total, plus what it held if `add`: one stochastic rounding where it is bf16."""
    of_row = noise_of_row(noise_row, seed)
    for c in range(len(total)):
        x = load(total, c)
        if add:
            x += load(grad, first + c)
        store_rounded(grad, first + c, x, rounding_noise(c, of_row))


@helper
def _sum_of_two(out, first, wte, wte_first, wpe, wpe_first, C):
    for c in range(C):
        store(out, first + c, load(wte, wte_first + c) + load(wpe, wpe_first + c))


@jit
def _encoder_forward(out, inputs, wte, wpe, T, C):
    for row in prange(len(inputs)):
        _sum_of_two(out, np.int64(row) * C, wte, inputs[row] * C, wpe, np.int64(row) % T * C, C)


@jit
def _encoder_backward(dwte, dwpe, dout, positions, tokens, starts, B, T, C, first_noise_row, seed, in_fp32, accumulate):
    for t in prange(T):
        total = aligned(C)
        zero(total, 0, C)
        for b in range(B):
            add_row(total, 0, dout, (b * T + np.int64(t)) * C, C)
        _write_row(dwpe, np.int64(t) * C, total, first_noise_row + np.int64(t), seed, accumulate)
    for part in prange(PARTS):
        total = aligned(C)
        for group in range(np.int64(part), len(tokens), PARTS):
            token = np.int64(tokens[group])
            zero(total, 0, C)
            if in_fp32:  # the rows go onto the gradient one by one
                for c in range(C):
                    store(total, c, load(dwte, token * C + c))
            for i in range(starts[group], starts[group + 1]):
                add_row(total, 0, dout, np.int64(positions[i]) * C, C)
            _write_row(dwte, token * C, total, token, seed, not in_fp32)


def encoder_forward(out, inputs, wte, wpe):
    B, T, C = out.shape
    assert T <= len(wpe), "positions beyond the last: nothing below would notice"
    door.launch(_encoder_forward, array(out), array(inputs), array(wte), array(wpe), T, C)


def encoder_backward(dwte, dwpe, dout, inputs, order, scratch, *, seed, accumulate):
    """No scratch."""
    B, T, C = dout.shape
    if not accumulate:
        dwpe[T:].zero_()
    arrays = (array(t) for t in (dwte, dwpe, dout))
    door.launch(
        _encoder_backward, *arrays, order.positions, order.tokens, order.starts, B, T, C, len(dwte), np.uint32(seed),
        dwte.element_size() == 4, bool(accumulate),
    )  # fmt: skip
