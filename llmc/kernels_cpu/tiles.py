"""Products of matrices within a kernel, tile by tile in registers.

A factor is 32 bits: an fp32, or two bf16 that are neighbours in the dimension that a product sums over, the first in the lower half.
Flat arrays of factors are fp32, or uint32 where they are such pairs. What is added up is fp32.
"""

import platform

from llmc.kernels_cpu.door import (
    FLOAT, INT32, LLVM, alloca_once, for_range, get_or_insert_function, intrinsic, ir, nearest, place_of, processor_features, shared,
    types,
)  # fmt: skip

PROCESSOR = processor_features()
LANES = 16 if "avx512f" in PROCESSOR else 8 if "avx" in PROCESSOR else 4
# 16 totals where there are 32 registers, as with AVX-512 and on Arm, else 8, so that they and the factors at hand all stay in one
ROWS, VECTORS = 4, 4 if LANES == 16 or platform.machine() in ("aarch64", "arm64") else 2
COLUMNS = VECTORS * LANES
# by AVX-512's instruction, which earlier LLVMs have for other types. Processors with AMX, Intel's, have it at half the rate of fp32's:
# there widened factors were measured 1.35 times as fast
MULTIPLIES_PAIRS = {"avx512f", "avx512bf16"} <= PROCESSOR and "amx-bf16" not in PROCESSOR and LLVM >= (16,)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)


class _BFloat(ir.types.Type):
    """LLVM's bf16, for which llvmlite has no name."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


def _add_product(builder, total, a, b, pairs):
    """total + a * b of vectors of factors; of pairs the sum of both products."""
    fma_type = ir.FunctionType(FLOATS, [FLOATS] * 3)
    if not pairs:
        return builder.call(get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{LANES}f32"), [a, b, total])
    if MULTIPLIES_PAIRS:
        bf16s = ir.VectorType(_BFloat(), 2 * LANES)
        kind = ir.FunctionType(FLOATS, [FLOATS, bf16s, bf16s])
        instruction = get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(instruction, [total, builder.bitcast(a, bf16s), builder.bitcast(b, bf16s)])
    low = [builder.bitcast(builder.shl(x, INTS([16] * LANES)), FLOATS) for x in (a, b)]
    high = [builder.bitcast(builder.and_(x, INTS([0xFFFF0000] * LANES)), FLOATS) for x in (a, b)]
    return _add_product(builder, _add_product(builder, total, *low, False), *high, False)


def _everywhere(builder, x, kind):
    """A vector of that type, x in all lanes."""
    alone = builder.insert_element(kind(ir.Undefined), x, INT32(0))
    return builder.shuffle_vector(alone, kind(ir.Undefined), INTS([0] * LANES))


@intrinsic
def multiply_tile(typing, c, c_at, c_row, a, a_at, a_row, a_step, b, b_at, b_step, depth, adds):
    """c[c_at + i c_row + j] = (adds) + sum over k < depth of a[a_at + i a_row + k a_step] * b[b_at + k b_step + j], i < ROWS and
    j < COLUMNS: one tile of a product, which stays in registers.

    c is fp32; a and b are flat arrays of factors, uint32 if those are pairs.
    """

    def emit(context, builder, signature, values):
        c_data, c_at, c_row, a_data, a_at, a_row, a_step, b_data, b_at, b_step, depth, adds = values
        pairs, index = a.dtype == types.uint32, c_at.type
        kind = INTS if pairs else FLOATS
        c_place, a_place, b_place = (
            place_of(context, builder, *which) for which in ((c, c_data, c_at), (a, a_data, a_at), (b, b_data, b_at))
        )
        tile = [(i, j) for i in range(ROWS) for j in range(VECTORS)]
        totals = {at: alloca_once(builder, FLOATS) for at in tile}

        def vector(place, offset, kind):
            return builder.bitcast(builder.gep(place, [offset]), kind.as_pointer())

        def place_in_c(i, j):
            return vector(c_place, builder.add(builder.mul(c_row, index(i)), index(j * LANES)), FLOATS)

        with builder.if_else(builder.icmp_signed("!=", adds, index(0))) as (then, otherwise):
            with then:
                for at in tile:
                    builder.store(builder.load(place_in_c(*at), align=4), totals[at])
            with otherwise:
                for at in tile:
                    builder.store(FLOATS([0.0] * LANES), totals[at])
        with for_range(builder, depth) as loop:
            b_row = builder.gep(b_place, [builder.mul(loop.index, b_step)])
            a_column = builder.gep(a_place, [builder.mul(loop.index, a_step)])
            bs = [builder.load(vector(b_row, index(j * LANES), kind), align=4) for j in range(VECTORS)]
            for i in range(ROWS):
                x = _everywhere(builder, builder.load(builder.gep(a_column, [builder.mul(a_row, index(i))])), kind)
                for j in range(VECTORS):
                    builder.store(_add_product(builder, builder.load(totals[i, j]), x, bs[j], pairs), totals[i, j])
        for at in tile:
            builder.store(builder.load(totals[at]), place_in_c(*at), align=4)
        return context.get_dummy_value()

    at = types.intp
    return types.void(c, at, at, a, at, at, at, b, at, at, at, at), emit


@shared
def multiply(c, c_row, a, a_row, a_step, b, b_step, rows, columns, depth, adds):
    """multiply_tile of all tiles of c (rows, columns), which are whole ones."""
    for i in range(0, rows, ROWS):
        for j in range(0, columns, COLUMNS):
            multiply_tile(c, i * c_row + j, c_row, a, i * a_row, a_row, a_step, b, j, b_step, depth, adds)


@intrinsic
def values_of(typing, factors):
    """How many numbers a factor of that array is: 1 or 2."""
    n = 2 if factors.dtype == types.uint32 else 1
    return types.intp(factors), lambda context, builder, signature, values: context.get_constant(types.intp, n)


@intrinsic
def store_factor(typing, factors, index, first, second):
    """factors[index] = the number `first`, or where factors are pairs both, rounded to nearest even."""

    def emit(context, builder, signature, values):
        x = values[2]
        if factors.dtype == types.uint32:
            low, high = (builder.zext(nearest(builder, number), INT32) for number in values[2:])
            x = builder.or_(low, builder.shl(high, INT32(16)))
        builder.store(x, place_of(context, builder, factors, *values[:2]))
        return context.get_dummy_value()

    return types.void(factors, types.intp, types.float32, types.float32), emit


@intrinsic
def copy_factor(typing, factors, index, array, first):
    """factors[index] = the factor that array[first] begins, of an array of their type."""

    def emit(context, builder, signature, values):
        out = place_of(context, builder, factors, *values[:2])
        builder.store(builder.load(builder.bitcast(place_of(context, builder, array, *values[2:]), out.type), align=2), out)
        return context.get_dummy_value()

    return types.void(factors, types.intp, array, types.intp), emit
