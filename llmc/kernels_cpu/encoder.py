"""Token and position embeddings: see llmc/layers/encoder.py.

Backward adds the rows of one token, in order of position, and writes its gradient once: the loader has grouped the positions by token.
"""

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.columns import add_row, zero
from llmc.kernels_cpu.door import aligned, array, helper, jit, load, noise_of_row, prange, rounding_noise, store, store_rounded

PARTS = 64  # each takes every 64th token, an even share: neighbours are about equally frequent


@helper
def _write_row(grad, first, total, noise_row, seed, add):
    """A row of the gradient = total, plus what it held if `add`, with one stochastic rounding where it is bf16."""
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
def _encoder_backward(dwte, dwpe, dout, positions, groups, B, T, C, first_noise_row, seeds, in_fp32, accumulate):
    """positions, groups and seeds are the token_order, token_groups and token_seed of stage_encoder_backward, flat."""
    seed, tokens = np.uint32(seeds[0]), len(groups) // 2
    for t in prange(T):
        total = aligned(C)
        zero(total, 0, C)
        for b in range(B):
            add_row(total, 0, dout, (b * T + np.int64(t)) * C, C)
        _write_row(dwpe, np.int64(t) * C, total, first_noise_row + np.int64(t), seed, accumulate)
    for part in prange(PARTS):
        total = aligned(C)
        for group in range(np.int64(part), tokens - 1, PARTS):
            start, end = groups[group], groups[group + 1]
            if start < end:
                token = np.int64(groups[tokens + group])
                zero(total, 0, C)
                if in_fp32:  # the rows are added to the gradient one by one
                    for c in range(C):
                        store(total, c, load(dwte, token * C + c))
                for i in range(start, end):
                    add_row(total, 0, dout, np.int64(positions[i]) * C, C)
                _write_row(dwte, token * C, total, token, seed, not in_fp32)


def encoder_forward(out, inputs, wte, wpe):
    _, T, C = out.shape
    assert T <= len(wpe), "positions beyond the last: nothing below would notice"
    door.launch(_encoder_forward, array(out), array(inputs), array(wte), array(wpe), T, C)


def launch_encoder_backward(dwte, dwpe, dout, inputs, staged, scratch, *, accumulate):
    B, T, C = dout.shape
    if not accumulate:
        dwpe[T:].zero_()
    positions, groups, seed = (array(scratch[name]) for name in ("token_order", "token_groups", "token_seed"))
    arrays, in_fp32 = (array(t) for t in (dwte, dwpe, dout)), dwte.element_size() == 4
    door.launch(_encoder_backward, *arrays, positions, groups, B, T, C, len(dwte), seed, in_fp32, bool(accumulate))
