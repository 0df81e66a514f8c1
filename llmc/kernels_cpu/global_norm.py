"""The gradient's global norm: see llmc/layers/global_norm.py."""

import numpy as np

from llmc.kernels_cpu import door
from llmc.kernels_cpu.door import F0, array, cdiv, fetch, helper, jit, load, plus, prange

BLOCK = 1024  # squares that are summed in fp32; the sums of blocks in fp64
# How far ahead to prefetch, in numbers, as a core that reads a single stream waits for memory: two cores of a Xeon with AMX read bf16
# gradients at 16 to 18 GB/s without, at 21 to 23 with it (scripts/profile.py -e d12 -b 1 -t 64 --precision bf16)
AHEAD = 4 * BLOCK


@helper
def _sum_of_squares(grads, first, end):
    total = 0.0
    for at in range(first, end, BLOCK):
        fetch(grads, at + AHEAD, BLOCK)
        block_sum = F0
        for i in range(at, min(at + BLOCK, end)):
            x = load(grads, i)
            block_sum = plus(block_sum, x * x)
        total += np.float64(block_sum)
    return total


@jit
def _global_norm(out, grads, partials, each):
    n = len(grads)
    for part in prange(len(partials)):
        first = np.int64(part) * each
        partials[part] = _sum_of_squares(grads, first, min(first + each, n))
    total = 0.0
    for partial in partials:
        total += np.float64(partial)
    out[0] = np.sqrt(total)


def global_norm(out, grads, scratch, *, piece):
    """Scratch: norm_partials (P,) fp32. The number of partials is fixed, each for a range of grads, so `piece` is not used."""
    partials = array(scratch["norm_partials"])
    door.launch(_global_norm, array(out), array(grads), partials, cdiv(cdiv(len(grads), len(partials)), BLOCK) * BLOCK)
