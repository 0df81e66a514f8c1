"""The gradient's global norm, left on the device: see llmc/layers/global_norm.py."""

from llmc.kernels import door
from llmc.kernels.door import cdiv, jit, load, tl

ELEMENTS = 2048  # of a turn of a program, 8 to a thread: 16 bytes of bf16, a load as wide as there is. gpu_check.py --tune tries others


@jit
def _norm_partials(partials, grads, n, each, ELEMENTS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * each
    total = tl.zeros((ELEMENTS,), tl.float32)
    for i in range(0, each, ELEMENTS):
        at = first + i + tl.arange(0, ELEMENTS)
        x = load(grads + at, at < n)
        total += x * x
    tl.store(partials + tl.program_id(0), tl.sum(total, 0))


@jit
def _finish_norm(out, partials, PARTIALS: tl.constexpr):
    total = tl.sum(tl.load(partials + tl.arange(0, PARTIALS)).to(tl.float64), 0)
    tl.store(out, tl.sqrt_rn(total.to(tl.float32)))


def global_norm(out, grads, scratch, *, piece):
    """Scratch: norm_partials (a power of two,) fp32. The number of partials is fixed, each for a range of grads, so `piece` is not used."""
    n, partials = len(grads), scratch["norm_partials"]
    each = cdiv(cdiv(n, len(partials)), ELEMENTS) * ELEMENTS
    door.launch(_norm_partials, (len(partials),), partials, grads, n, each, ELEMENTS=ELEMENTS)
    door.launch(_finish_norm, (1,), out, partials, PARTIALS=len(partials))
