"""AdamW over the arenas in one pass, in every form of weights and moments: see llmc/layers/adamw.py.

The arithmetic is that of torch's fused CPU kernel on x86, its two fused multiply-adds included, so both give the same bits, except
in the last few elements of a tensor whose size is no multiple of 16: there torch's compiler fuses another one. On Arm torch's v is
rounded otherwise: up to a quarter of its elements are a unit in the last place off.
"""

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.door import (
    F1, LOW, S16, array, bits_of, fma, float_of, helper, iadd, iand, ior, ishl, ishr, isub, ixor, jit, load, load_bits, noise_of_row,
    prange, rounding_noise, select, sqrt, store, store_bits, store_rounded,
)  # fmt: skip
from llmc.layers.adamw import BETA1, BETA2, EPSILON, GRADIENT_CLIP
from llmc.memory.tuning import ROUNDING_BLOCK
from llmc.staging import stage_chunks

CHUNK = 32 * ROUNDING_BLOCK  # elements that a thread updates at a time: the threads' shares differ by at most this much
M_SHARE, V_DECAY, V_SHARE, EPS, CLIP = (np.float32(x) for x in (1 - BETA1, BETA2, 1 - BETA2, EPSILON, GRADIENT_CLIP))


@helper
def _update_block(
    params, grads, m_state, v_state, master, master_bits, first, n, column, of_row, of_last_row, decay, rate, v_correction, divisor
):
    """Update n elements that share one row of the noise, from its column `column` on."""
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

        noise = rounding_noise(column + k, of_row)  # fp32 arrays need none: if all are fp32, it is not computed
        upper_noise = ishr(noise, S16)
        store_rounded(m_state, i, m, upper_noise)
        store_rounded(v_state, i, v, ixor(upper_noise, noise))
        store_rounded(params, i, p, noise)
        if master is not None:
            store(master, i, p)
        if master_bits is not None:
            store_bits(master_bits, i, bits_of(p))


@helper
def _number(numbers, i):
    """numbers[i], an int32, as the fp32 number of the same bits."""
    return float_of(np.uint32(numbers[i]))


@helper
def _update_chunk(chunk, params, grads, m_state, v_state, master, master_bits, layout, numbers, divisor):
    """Update one chunk. layout and numbers are what stage_chunks stages."""
    t, tensors = 0, len(layout)
    while t + 1 < tensors and chunk >= layout[t + 1, 0]:
        t += 1
    first_chunk, start, elements, chunks, whole_first = layout[t, 0], layout[t, 1], layout[t, 2], layout[t, 3], layout[t, 4]
    layer = (chunk - first_chunk) // chunks
    first = (chunk - first_chunk - layer * chunks) * CHUNK
    layer_start = start + layer * elements
    seed, last_seed, decay = np.uint32(numbers[t]), np.uint32(numbers[tensors + t]), _number(numbers, 2 * tensors + t)
    rate, v_correction = _number(numbers, 3 * tensors), _number(numbers, 3 * tensors + 1)
    k, end = first, min(first + CHUNK, elements)
    while k < end:
        place = whole_first + k
        column = place % ROUNDING_BLOCK
        row, n = place - column + layer, min(ROUNDING_BLOCK - column, end - k)
        _update_block(
            params, grads, m_state, v_state, master, master_bits, layer_start + k, n, column,
            noise_of_row(row, seed), noise_of_row(row, last_seed), decay, rate, v_correction, divisor,
        )  # fmt: skip
        k += n


@jit
def _adamw(params, grads, m_state, v_state, master, master_bits, layout, chunks, numbers, grad_norm):
    ratio = load(grad_norm, 0) / CLIP
    divisor = select(ratio > F1, ratio, F1)
    for chunk in prange(chunks):
        _update_chunk(np.int64(chunk), params, grads, m_state, v_state, master, master_bits, layout, numbers, divisor)


def stage_adamw_update(tensors, scratch, *, lr, weight_decay, step, grad_norm):
    """Stage the update and return the number of chunks, which is the same for the same tensors. Scratch: see stage_chunks."""
    _, chunks = stage_chunks(tensors, CHUNK, scratch, lr=lr, weight_decay=weight_decay, step=step, grad_norm=grad_norm)
    return chunks


def launch_adamw_update(flat, staged, scratch):
    """Launch the update that was staged, with the same scratch. The gradients stay as they are."""
    arenas = [array(flat[name]) if name in flat else None for name in ("parameters", "gradients", "m", "v", "master", "master_bits")]
    layout, numbers, norm = (array(scratch[name]) for name in ("update_layout", "update_numbers", "grad_norm"))
    door.launch(_adamw, *arenas, layout.reshape(scratch["update_layout"].shape), staged, numbers, norm)
