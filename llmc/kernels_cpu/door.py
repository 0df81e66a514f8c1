"""What the kernels share, and how they are launched. They import numba's names from here; how they are compiled: compiler.py.

The arithmetic here is defined to the bit. Elementwise kernels give the bits of the torch operations in llmc/layers/: no multiply and
add is contracted unless fma says so, divisions and roots are correctly rounded, and fp32 becomes bf16 by rounding to nearest even.
Only additions by plus may be reordered, so that the compiler can sum in vectors.

Python's operators would make uint32 arithmetic 64 bits wide, and halve a vector's lanes, so integers are combined by functions
that emit a single instruction. Kernels see flat arrays, with bf16 as uint16; load widens from it, and store narrows to it.

Two habits of numba's shape the kernels. The index of a prange loop is a uint64, and min() of that and an int64 is an fp64: so kernels take
np.int64 of the index first. And an argument that is None has a type of its own, for which a kernel is compiled by itself, without the
branches that need the argument: so None stands for what a form lacks (a master, a residual, a table).
"""

from contextlib import contextmanager
from functools import cache, wraps

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types  # noqa: F401
from numba.core.cgutils import alloca_once, for_range, get_or_insert_function, global_constant  # noqa: F401
from numba.extending import intrinsic

from llmc.kernels_cpu.compiler import AMX_FEATURES, helper, jit, processor_features, shared  # noqa: F401
from llmc.layers import gelu
from llmc.layers.rounding import NOISE, PRIME_Y

LLVM = llvmlite.binding.llvm_version_info
LINE = 64  # bytes of a cache line
_instead = None  # what is done with a launch instead of running it, if anything


def launch(kernel, *args):
    """Run a kernel on as many threads as torch uses; or else add the call to the list of recorded() or noted()."""
    if _instead:
        _instead(kernel, args)
        return
    use_threads()
    kernel(*args)


@contextmanager
def _listed(entry):
    """A list to which launches inside add entry(kernel, args), instead of being run."""
    global _instead
    calls = []

    def add(kernel, args):
        calls.append(entry(kernel, args))

    _instead = add
    try:
        yield calls
    finally:
        _instead = None


def recorded():
    """A context with a list to which launches are added, as (compiled code, args), instead of run. They have run before with such args."""
    return _listed(lambda kernel, args: (compiled_code(kernel, args), args))


def noted():
    """A context with a list to which launches are added, as (kernel, types of args), instead of run. What they compute is not there."""
    return _listed(lambda kernel, args: (kernel, types_of(args)))


def types_of(args) -> tuple:
    """numba's types of a call's arguments."""
    return tuple(map(numba.typeof, args))


def compiled_code(kernel, args):
    """What a call with these arguments runs, without the dispatch; RuntimeError if there was none before."""
    compiled = kernel.overloads.get(types_of(args))
    if compiled is None:
        raise RuntimeError(f"the kernel {kernel.__name__} has not run with such arguments before")
    return compiled.entry_point


def use_threads():
    """Have kernels run on as many threads as torch uses."""
    start_threads()
    if threads() != numba.get_num_threads():
        numba.set_num_threads(threads())


@cache
def start_threads():
    """Have numba start its threads. It sets OpenMP's number of threads, which is torch's too, to that of the processors: set it back."""
    count = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(count)


def threads() -> int:
    """The number of threads that a kernel runs on."""
    return min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)


def cdiv(a, b):
    return -(-a // b)


class _Kept:
    """Kept with a tensor: a numpy array of its memory, and the address where that starts. A copied or pickled tensor has lost it."""

    def __init__(self, place=None, array=None):
        self.place, self.array = place, array

    def __reduce__(self):  # copying and pickling both call it
        return _Kept, ()


NOT_KEPT = _Kept()


def _made_once(view):
    """view(tensor), a numpy array of its memory, made once and kept with the tensor: making one takes longer than many a kernel. The
    tensor's shape must not be changed in place."""
    name = f"numpy_{view.__name__}"

    @wraps(view)
    def look_up(tensor):
        kept = getattr(tensor, name, NOT_KEPT)
        if kept.place != tensor.data_ptr():
            kept = _Kept(tensor.data_ptr(), view(tensor))
            setattr(tensor, name, kept)
        return kept.array

    return look_up


@_made_once
def array(tensor):
    """The memory of a contiguous tensor as a flat numpy array; bf16 and int16 as uint16."""
    flat = tensor.view(-1)
    if flat.element_size() == 2:
        return flat.view(torch.int16).numpy().view(np.uint16)
    return flat.numpy()


@_made_once
def factors(tensor):
    """The same memory as the factors of products: see tiles.py."""
    return tensor.view(-1).view(torch.int32).numpy().view(np.uint32) if tensor.element_size() == 2 else array(tensor)


# ----------------------------------------------------------------------------
# single instructions

FLOAT, INT32, INT16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)


def _unary(result, operand, emit):
    """A function of one argument whose code is what emit(builder, a) writes."""

    @intrinsic
    def function(typing, a):
        return result(operand), lambda context, builder, signature, values: emit(builder, *values)

    return function


def _binary(result, operand, emit):
    @intrinsic
    def function(typing, a, b):
        return result(operand, operand), lambda context, builder, signature, values: emit(builder, *values)

    return function


def _uint32(name):
    return _binary(types.uint32, types.uint32, lambda builder, a, b: getattr(builder, name)(a, b))


iadd, isub, imul, ishl, ishr, iand, ior, ixor = (_uint32(n) for n in ("add", "sub", "mul", "shl", "lshr", "and_", "or_", "xor"))
bits_of = _unary(types.uint32, types.float32, lambda builder, x: builder.bitcast(x, INT32))
float_of = _unary(types.float32, types.uint32, lambda builder, x: builder.bitcast(x, FLOAT))
plus = _binary(types.float32, types.float32, lambda builder, a, b: builder.fadd(a, b, flags=("reassoc", "nsz")))


@intrinsic
def larger(typing, a, b):
    """The larger of two integers of one type."""

    def emit(context, builder, signature, values):
        return builder.select(builder.icmp_signed(">", *values), *values)

    return a(a, a), emit


@intrinsic
def fma(typing, a, b, c):
    """a * b + c, rounded once."""
    kind = types.float32
    return kind(kind, kind, kind), lambda context, builder, signature, values: builder.fma(*values)


@intrinsic
def select(typing, condition, a, b):
    """a where the condition holds, else b; both of one type."""
    return a(types.boolean, a, a), lambda context, builder, signature, values: builder.select(*values)


sqrt = _unary(types.float32, types.float32, lambda builder, x: builder.call(_sqrt_of(builder), [x]))


def _sqrt_of(builder):
    return builder.module.declare_intrinsic("llvm.sqrt", [FLOAT])


# ----------------------------------------------------------------------------
# memory


def place_of(context, builder, kind, array, index):
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [index], inbounds=True)


@intrinsic
def load(typing, array, index):
    """array[index] as fp32. The index is not checked, and a negative one does not count from the end."""

    def emit(context, builder, signature, values):
        x = builder.load(place_of(context, builder, array, *values))
        if array.dtype == types.uint16:
            x = builder.bitcast(builder.shl(builder.zext(x, INT32), INT32(16)), FLOAT)
        return x

    return types.float32(array, types.intp), emit


@intrinsic
def store(typing, array, index, x):
    """array[index] = x, an fp32, rounded to nearest even where the array is bf16."""

    def emit(context, builder, signature, values):
        place, x = place_of(context, builder, array, *values[:2]), values[2]
        builder.store(nearest(builder, x) if array.dtype == types.uint16 else x, place)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), emit


def emit_fetch(builder, place, writes=False):
    """Prefetch the cache line at `place`, a pointer to bytes."""
    kind = ir.FunctionType(ir.VoidType(), [place.type, INT32, INT32, INT32])
    instruction = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8" if LLVM < (15,) else "llvm.prefetch.p0")
    builder.call(instruction, [place, INT32(int(writes)), INT32(3), INT32(1)])  # 3: into all caches, 1: data


def _prefetcher(writes):
    """A function of (array, at) that prefetches the cache line of array[at], to be read or to be written. It may lie outside the array."""

    @intrinsic
    def prefetch(typing, array, at):
        def emit(context, builder, signature, values):
            start = place_of(context, builder, array, values[0], values[1].type(0))
            emit_fetch(builder, builder.bitcast(builder.gep(start, values[1:]), ir.IntType(8).as_pointer()), writes)
            return context.get_dummy_value()

        return types.void(array, types.intp), emit

    return prefetch


prefetch, prefetch_to_write = _prefetcher(False), _prefetcher(True)


@shared
def fetch(array, first, n):
    """Prefetch n numbers that are read soon: where a core calculates much for each of them, the hardware by itself does not read far
    enough ahead."""
    for i in range(first, first + n, LINE // array.itemsize):
        prefetch(array, i)


@shared
def fetch_to_write(array, first, n):
    """The same for numbers that are written soon."""
    for i in range(first, first + n, LINE // array.itemsize):
        prefetch_to_write(array, i)


def nearest(builder, x):
    """An fp32, or a vector of them, rounded to the nearest bf16, ties to even."""
    lanes = getattr(x.type, "count", 0)

    def wide(n):
        return ir.VectorType(INT32, lanes)([n] * lanes) if lanes else INT32(n)

    bits = builder.bitcast(x, wide(0).type)
    odd = builder.and_(builder.lshr(bits, wide(16)), wide(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, wide(0x7FFF))), wide(16))
    chosen = builder.select(builder.fcmp_unordered("uno", x, x), wide(0x7FC0), rounded)
    return builder.trunc(chosen, ir.VectorType(INT16, lanes) if lanes else INT16)


@intrinsic
def store_rounded(typing, array, index, x, noise):
    """array[index] = x, an fp32; rounded where the array is bf16: away from zero if its lower half exceeds the noise's, else toward zero.

    Nothing is added to a NaN: in one that is all ones, the carry would run into the sign and make it a zero.
    """

    def emit(context, builder, signature, values):
        place, x, noise = place_of(context, builder, array, *values[:2]), *values[2:]
        if array.dtype == types.uint16:
            bits, low = builder.bitcast(x, INT32), INT32(0xFFFF)
            carry = builder.sub(low, builder.and_(noise, low))
            carry = builder.select(builder.fcmp_unordered("uno", x, x), INT32(0), carry)
            x = builder.trunc(builder.lshr(builder.add(bits, carry), INT32(16)), INT16)
        builder.store(x, place)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32, types.uint32), emit


@helper
def aligned(n):
    """A thread's own array (n,) fp32 that starts at a cache line: otherwise every vector that fills a line would straddle two."""
    room = np.empty(n + LINE // 4, np.float32)
    first = -room.ctypes.data % LINE // 4
    return room[first : first + n]


@intrinsic
def load_bits(typing, array, index):
    """array[index], 16 bits, as uint32."""

    def emit(context, builder, signature, values):
        return builder.zext(builder.load(place_of(context, builder, array, *values)), INT32)

    return types.uint32(array, types.intp), emit


@intrinsic
def store_bits(typing, array, index, x):
    """array[index] = the lower 16 bits of x, a uint32."""

    def emit(context, builder, signature, values):
        builder.store(builder.trunc(values[2], INT16), place_of(context, builder, array, *values[:2]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint32), emit


@intrinsic
def load_order(typing, array, index):
    """array[index] as an integer of the same width and order: a larger number gives a larger integer."""

    def emit(context, builder, signature, values):
        bits = builder.load(place_of(context, builder, array, *values))
        return _fold(builder, bits if array.dtype == types.uint16 else builder.bitcast(bits, INT32))

    return (types.int16 if array.dtype == types.uint16 else types.int32)(array, types.intp), emit


@intrinsic
def number_of(typing, order):
    """The fp32 number for which load_order gave `order`."""

    def emit(context, builder, signature, values):
        bits = _fold(builder, *values)
        return builder.bitcast(builder.shl(builder.zext(bits, INT32), INT32(16)) if order == types.int16 else bits, FLOAT)

    return types.float32(order), emit


def _fold(builder, bits):
    """Reverse the order of negative numbers, whose bits as integers ascend away from zero; applied twice, it changes nothing."""
    sign = builder.ashr(bits, bits.type(bits.type.width - 1))
    return builder.xor(bits, builder.lshr(sign, bits.type(1)))


# ----------------------------------------------------------------------------
# arithmetic

N1, N2, N3, N4, N5 = map(np.uint32, NOISE)
ROW_STRIDE = np.uint32(PRIME_Y * NOISE[0] & 0xFFFFFFFF)
S9, S11, S13, S15, S17 = (np.uint32(n) for n in (9, 11, 13, 15, 17))
LOW, S16 = np.uint32(0xFFFF), np.uint32(16)
F0, F1 = np.float32(0), np.float32(1)


@helper
def noise_of_row(row, seed):
    """The part of the rounding noise that all places of a row have in common."""
    return iadd(imul(np.uint32(row), ROW_STRIDE), seed)


@helper
def rounding_noise(column, of_row):
    """SquirrelNoise5 at a column of the row that noise_of_row gave, all uint32: see llmc/layers/rounding.py."""
    n = iadd(imul(np.uint32(column), N1), of_row)
    n = iadd(ixor(n, ishr(n, S9)), N2)
    n = imul(ixor(n, ishr(n, S11)), N3)
    n = iadd(ixor(n, ishr(n, S13)), N4)
    n = imul(ixor(n, ishr(n, S15)), N5)
    return ixor(n, ishr(n, S17))


@helper
def dot(x, x_first, y, y_first, n):
    """The sum of x[x_first + i] * y[y_first + i], i < n."""
    total = F0
    for i in range(n):
        total = plus(total, load(x, x_first + i) * load(y, y_first + i))
    return total


LOG2_E, LN2_HIGH, LN2_LOW, TO_WHOLE = map(np.float32, (gelu.LOG2_E, gelu.LN2_HIGH, gelu.LN2_LOW, gelu.TO_WHOLE))
E2, E3, E4, E5, E6, E7 = map(np.float32, gelu.EXP)
ONE_BITS, S23, LEAST_EXPONENT = np.uint32(0x3F800000), np.uint32(23), np.float32(-87)


@helper
def exp(d):
    """exp(d) for -87 <= d <= 88, within an ulp: the bits of torch's on an x86 CPU, see llmc/layers/gelu.py. A NaN stays one."""
    shifted = d * LOG2_E + TO_WHOLE
    q = shifted - TO_WHOLE
    s = fma(q, -LN2_LOW, fma(q, -LN2_HIGH, d))
    u = fma(fma(fma(fma(fma(E7, s, E6), s, E5), s, E4), s, E3), s, E2)
    return (F1 + fma(s * s, u, s)) * float_of(iadd(ishl(bits_of(shifted), S23), ONE_BITS))


# 2^f for |f| <= 1/2, within 2e-9: fitted for the least relative error
P0, P1, P2, P3, P4, P5, P6 = (
    np.float32(x)
    for x in (1.0, 0.693147182464599609375, 0.24022646248340606689453125, 0.05550328642129898071289, 0.009618489071726799011230,
              0.00133999309036880731582642, 0.00015345812425948679447)
)  # fmt: skip
LEAST_POWER = np.float32(-125)


@helper
def exp2_below_zero(t):
    """2^t for t <= 0, within two ulps; 0 below -125, shortly before it would be subnormal. A t that rounding made positive gives 1. A NaN
    stays one."""
    t = select(t > F0, F0, t)
    shifted = t + TO_WHOLE
    f = t - (shifted - TO_WHOLE)
    u = fma(fma(fma(fma(fma(fma(P6, f, P5), f, P4), f, P3), f, P2), f, P1), f, P0)
    return select(t < LEAST_POWER, F0, u * float_of(iadd(ishl(bits_of(shifted), S23), ONE_BITS)))


@helper
def exp_below_zero(d):
    """exp(d) for d <= 0; 0 below -87, shortly before it would be subnormal."""
    return select(d < LEAST_EXPONENT, F0, exp(d))
