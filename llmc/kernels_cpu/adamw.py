"""AdamW over the arenas in one pass, in every form of weights and moments: see llmc/layers/adamw.py.

The arithmetic is that of torch's fused CPU kernel, its two fused multiply-adds included, so both give the same bits; but for
the last few elements of a tensor whose size is no multiple of 16, where torch's compiler fuses another one.
"""

from math import sqrt as root

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.door import (
    LOW, S16, array, bits_of, fma, float_of, helper, iadd, iand, ior, ishl, ishr, isub, ixor, jit, load, load_bits, noise_of_row, prange,
    rounding_noise, sqrt, store, store_bits, store_rounded,
)  # fmt: skip
from llmc.layers.adamw import BETA1, BETA2, EPSILON, GRADIENT_CLIP, chunk_layout
from llmc.memory.plan import ROUNDING_BLOCK

CHUNK = 32 * ROUNDING_BLOCK  # elements that a thread does at a time: at most so much work is uneven
M_SHARE, V_DECAY, V_SHARE, EPS = (np.float32(x) for x in (1 - BETA1, BETA2, 1 - BETA2, EPSILON))


@helper
def _update_block(
    params, grads, m_state, v_state, master, master_bits, first, n, column, of_row, of_last_row, decay, rate, v_correction, divisor
):
    """n elements that share a row of the noise, from one of its columns on."""
    for k in range(n):
        i = first + k
        if master is not None:
            p = load(master, i)
        elif master_bits is not None:  # rounding added a carry to the upper half exactly when low + 0xFFFF - threshold overflowed
            low = load_bits(master_bits, i)
            threshold = iand(rounding_noise(column + k, of_last_row), LOW)
            upper = isub(load_bits(params, i), ishr(iadd(low, isub(LOW, threshold)), S16))
            p = float_of(ior(ishl(upper, S16), low))
        else:
            p = load(params, i)
        m, v, g = load(m_state, i), load(v_state, i), load(grads, i) / divisor
        m = fma(M_SHARE, g - m, m)
        v = fma(g * V_SHARE, g, v * V_DECAY)
        p = p * decay + m * rate / (sqrt(v) / v_correction + EPS)

        noise = rounding_noise(column + k, of_row)  # an fp32 array takes none, and then it is not computed
        upper_noise = ishr(noise, S16)
        store_rounded(m_state, i, m, upper_noise)
        store_rounded(v_state, i, v, ixor(upper_noise, noise))
        store_rounded(params, i, p, noise)
        if master is not None:
            store(master, i, p)
        if master_bits is not None:
            store_bits(master_bits, i, bits_of(p))


@helper
def _update_chunk(chunk, params, grads, m_state, v_state, master, master_bits, layout, seeds, decays, rate, v_correction, divisor):
    """layout is chunk_layout's."""
    t = 0
    while t + 1 < len(layout) and chunk >= layout[t + 1, 0]:
        t += 1
    layer = (chunk - layout[t, 0]) // layout[t, 3]
    elements = layout[t, 2]
    first = (chunk - layout[t, 0] - layer * layout[t, 3]) * CHUNK
    layer_start = layout[t, 1] + layer * elements
    k, end = first, min(first + CHUNK, elements)
    while k < end:
        place = layout[t, 4] + k  # in the whole layer
        column = place % ROUNDING_BLOCK
        row, n = place - column + layer, min(ROUNDING_BLOCK - column, end - k)
        _update_block(
            params, grads, m_state, v_state, master, master_bits, layer_start + k, n, column,
            noise_of_row(row, seeds[0, t]), noise_of_row(row, seeds[1, t]), decays[t], rate, v_correction, divisor,
        )  # fmt: skip
        k += n


@jit
def _adamw(params, grads, m_state, v_state, master, master_bits, layout, chunks, seeds, decays, rate, v_correction, divisor):
    for chunk in prange(chunks):
        _update_chunk(
            np.int64(chunk), params, grads, m_state, v_state, master, master_bits, layout, seeds, decays, rate, v_correction, divisor
        )


def adamw_update(flat, tensors, scratch, *, lr, weight_decay, step, grad_norm):
    """Gradients stay as they are. No scratch."""
    layout, chunks = chunk_layout(tensors, CHUNK)
    ratio = np.float32(float(grad_norm)) / np.float32(GRADIENT_CLIP)
    arenas = [array(flat[name]) if name in flat else None for name in ("parameters", "gradients", "m", "v", "master", "master_bits")]
    door.launch(
        _adamw, *arenas, layout, chunks,
        np.array([[t.seed for t in tensors], [t.last_seed for t in tensors]], np.uint32),
        np.array([1 - lr * weight_decay * t.decay for t in tensors], np.float32),
        np.float32(-(lr / (1 - BETA1**step))), np.float32(root(1 - BETA2**step)), ratio if ratio > 1 else np.float32(1),
    )  # fmt: skip
