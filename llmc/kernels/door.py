"""The one place that imports triton: what the kernels share, and how they are launched.

The arithmetic here is defined to the bit. Elementwise kernels, except GELU in bf16, give the bits of the torch operations in
llmc/layers/, on any GPU and in Triton's interpreter: no multiply and add is contracted unless fma says so, divisions and roots
are correctly rounded, and fp32 becomes bf16 by rounding to nearest even. The interpreter truncates instead and does not fuse
an fma, so both are spelled out for it.
"""

from contextlib import contextmanager

import triton
import triton.language as tl
from triton import cdiv, jit, next_power_of_2  # noqa: F401

from llmc.layers import gelu, rounding

PRIME_Y, (N1, N2, N3, N4, N5) = tl.constexpr(rounding.PRIME_Y), map(tl.constexpr, rounding.NOISE)
LOG2_E, LN2_HIGH, LN2_LOW, TO_WHOLE = map(tl.constexpr, (gelu.LOG2_E, gelu.LN2_HIGH, gelu.LN2_LOW, gelu.TO_WHOLE))
E2, E3, E4, E5, E6, E7 = map(tl.constexpr, gelu.EXP)
ROW_ELEMENTS = 2048  # in a tile of whole rows; 4096 before gpu_check.py --tune had tried others on an H200
TILE_ROWS, TILE_COLUMNS = 16, 256  # of a tile of parts of rows
# Loops over tiles of up to STAGED_BYTES have STAGES of them in flight: three inputs then fit into any GPU's shared memory. On an H200,
# d12 -b 64, layernorm's backward takes 0.152 ms without and 0.132 ms with it, GELU's 0.37 and 0.32
STAGES, STAGED_BYTES = 4, 8192


@jit
def _probe():
    pass


INTERPRETED = tl.constexpr(not isinstance(_probe, triton.runtime.jit.JITFunction))


def stages_of(rows: int, columns: int, of) -> int:
    """The number of pipeline stages of a loop over tiles of the tensor `of`."""
    return STAGES if rows * columns * of.itemsize <= STAGED_BYTES else 1


def launch(kernel, grid, *args, num_warps=8, **constants):
    """Run a kernel on the current stream; `constants` are its constexpr arguments."""
    kernel[grid](*args, **constants, num_warps=num_warps, enable_fp_fusion=False)


@contextmanager
def launched_by(function):
    """Inside, each launch is a call of this function, with the same arguments."""
    global launch
    before, launch = launch, function
    try:
        yield
    finally:
        launch = before


def compile_only(kernel, args, constants, num_warps, capability):
    """The compiled kernel, with .asm and .metadata, for a card of compute capability 80, 90, ...; needs no card.

    args are as launch gets them: tensors, of which only type and alignment count, and numbers. They are bound to the parameters by the
    function that Triton generates for a launch. A kernel with a parameter named `params` broke that, and the interpreter has none.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    keywords = constants | {"num_warps": num_warps, "enable_fp_fusion": False}
    bound, specialization, options = bind(*args, **keywords)
    options, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, specialization, options)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options.__dict__)


# ----------------------------------------------------------------------------
# what kernels are written with


@jit
def widen(x):
    """fp32 of a bf16 or fp32 value."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@jit
def narrow(x, dtype: tl.constexpr):
    """An fp32 value as `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        return tl.where(x != x, tl.full(x.shape, 0x7FC0, tl.uint16), rounded).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@jit
def load(pointer, mask):
    """Load as fp32, zero where masked."""
    return widen(tl.load(pointer, mask=mask, other=0.0))


@jit
def store(pointer, x, mask):
    """Store fp32 x in the pointer's type."""
    tl.store(pointer, narrow(x, pointer.dtype.element_ty), mask=mask)


@jit
def range_of_program(rows_each, n_rows):
    """(first, end) of the rows that this program sums over: the same split on any GPU. int64, as rows * C may pass 2^31."""
    first = tl.program_id(0).to(tl.int64) * rows_each
    return first, tl.minimum(first + rows_each, n_rows)


@jit
def tile(first, end, column, C, ROWS: tl.constexpr):
    """(row numbers from `first` on, mask of the elements whose row and column exist)."""
    row = first + tl.arange(0, ROWS)
    return row, (row < end)[:, None] & (column < C)[None, :]


@jit
def sum_over_rows(x):
    """The sums of fp32 columns. A GPU's thread has few of a tile's rows, and the sums of threads are added in pairs. The interpreter would
    add up all rows one after the other, which is less exact, so there the sum is in fp64."""
    if INTERPRETED:
        return tl.sum(x.to(tl.float64), 0).to(tl.float32)
    return tl.sum(x, 0)


@jit
def fma(a, b, c):
    """a * b + c, rounded once."""
    if INTERPRETED:  # rounded twice, which makes a difference once in 2^29 times
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, b, c)


@jit
def constant(like, value: tl.constexpr):
    """`value` in fp32, in the shape of `like`."""
    return tl.full(like.shape, value, tl.float32)


@jit
def exp(x):
    """exp(x) for x <= 0 by the GPU's own instruction, to about max(2, -x) units of 2^-24. Where it would be subnormal it is zero: tl.exp
    keeps those, for three instructions more."""
    return tl.exp2(x * LOG2_E)


@jit
def reciprocal(x):
    """1 / x, correctly rounded, for 1 <= x < 2^126, without the branch that a division has for the rest of the range.

    Two steps of Newton's method from the GPU's approximation, good to an ulp, end on the nearest number for every significand but
    the one of all ones (Markstein 1990), whose reciprocal is the number above a power of two. A test tries all significands.
    """
    if INTERPRETED:
        return tl.div_rn(constant(x, 1.0), x)
    r = rough_reciprocal(x)
    one = constant(x, 1.0)
    r = tl.fma(tl.fma(-x, r, one), r, r)
    r = tl.fma(tl.fma(-x, r, one), r, r)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7FFFFF) == 0x7FFFFF, (0x7F000000 - bits).to(tl.float32, bitcast=True), r)


@jit
def rough_reciprocal(x):
    """1 / x to an ulp, for 2^-126 < x < 2^126."""
    if INTERPRETED:
        return tl.div_rn(constant(x, 1.0), x)
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def rough_sigmoid_below_zero(x):
    """1 / (1 + exp(-x)) for -87 < x <= 0, as exact as exp, in a third of the instructions of sigmoid_below_zero: for bf16 results."""
    return rough_reciprocal(1.0 + tl.exp2(x * -LOG2_E))  # exp(-x), without an instruction for the minus


@jit
def sigmoid_below_zero(x):
    """1 / (1 + exp(-x)) for -87 < x <= 0: the bits of torch's sigmoid on an x86 CPU, see llmc/layers/gelu.py."""
    d = 0.0 - x
    shifted = d * LOG2_E + TO_WHOLE
    q = shifted - TO_WHOLE
    s = fma(q, constant(x, -LN2_HIGH), d)
    s = fma(q, constant(x, -LN2_LOW), s)
    u = constant(x, E7)
    u = fma(u, s, constant(x, E6))
    u = fma(u, s, constant(x, E5))
    u = fma(u, s, constant(x, E4))
    u = fma(u, s, constant(x, E3))
    u = fma(u, s, constant(x, E2))
    e = 1.0 + fma(s * s, u, s)
    e = (e.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)  # times 2^q
    return reciprocal(1.0 + e)


@jit
def rounding_noise(x, y, seed):
    """SquirrelNoise5 at column x and row y, all uint32: llmc/layers/rounding.py in one expression."""
    n = (x + PRIME_Y * y) * N1 + seed
    n = n ^ (n >> 9)
    n = n + N2
    n = n ^ (n >> 11)
    n = n * N3
    n = n ^ (n >> 13)
    n = n + N4
    n = n ^ (n >> 15)
    n = n * N5
    return n ^ (n >> 17)


@jit
def round_by(x, threshold):
    """An fp32 x rounded to bf16: away from zero where its lower half exceeds threshold's (uint32), else toward zero.

    Nothing is added to a NaN: a GPU's is all ones but for the sign, and the carry into that would make it a zero.
    """
    bits = x.to(tl.uint32, bitcast=True) + tl.where(x == x, 0xFFFF - (threshold & 0xFFFF), 0)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


def rows_at_once(columns: int, of) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile of whole rows of a tensor: powers of two that a program holds in registers, 32 bytes per thread."""
    block = next_power_of_2(columns)
    rows = max(1, ROW_ELEMENTS // block)
    return rows, block, max(4, min(16, rows * block * of.itemsize // 1024))
