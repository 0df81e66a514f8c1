"""Products of matrices within a kernel, tile by tile in registers.

A factor is 32 bits: an fp32, or two bf16 that are neighbours in the dimension that a product sums over, the first in the lower half.
Flat arrays of factors are fp32, or uint32 where they are such pairs. What is added up is fp32. Numbers in bf16 become either: widened
to fp32 as they are packed, where the plan has room for that.
"""

import platform

from llmc.kernels_cpu.door import (
    FLOAT, INT16, INT32, LLVM, alloca_once, for_range, get_or_insert_function, intrinsic, ir, nearest, place_of, processor_features, shared,
    types,
)  # fmt: skip
from llmc.memory.plan import TILE_ROWS as ROWS

PROCESSOR = processor_features()
LANES = 16 if "avx512f" in PROCESSOR else 8 if "avx" in PROCESSOR else 4
# of 4 rows 16 totals where there are 32 registers, as with AVX-512 and on Arm, else 8, so that they and the factors at hand all stay in one
VECTORS = 4 if LANES == 16 or platform.machine() in ("aarch64", "arm64") else 2
COLUMNS = VECTORS * LANES
LINE = 64  # bytes of a line of cache
# by AVX-512's instruction, which earlier LLVMs have for other types; else as two products of widened numbers. Whether it pays: backend.py
MULTIPLIES_PAIRS = {"avx512f", "avx512bf16"} <= PROCESSOR and LLVM >= (16,)
FLOATS, INTS, HALVES = (ir.VectorType(number, LANES) for number in (FLOAT, INT32, INT16))


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


def _widened(builder, x, kind):
    """bf16 numbers, or vectors of them, as the fp32 they are; kind is that of as many int32."""
    return builder.shl(builder.zext(x, kind), kind(16 if kind is INT32 else [16] * LANES))


def _widens(factors, array):
    """Whether factors of numbers in that array are those in fp32."""
    return factors.dtype == types.float32 and array.dtype == types.uint16


def _everywhere(builder, x, kind):
    """A vector of that type, x in all lanes."""
    alone = builder.insert_element(kind(ir.Undefined), x, INT32(0))
    return builder.shuffle_vector(alone, kind(ir.Undefined), INTS([0] * LANES))


def _tile_multiplier(rows):
    """A function for tiles of so many rows."""

    @intrinsic
    def multiply(typing, c, c_at, c_row, a, a_at, a_row, a_step, b, b_at, b_step, depth, adds):
        def emit(context, builder, signature, values):
            c_data, c_at, c_row, a_data, a_at, a_row, a_step, b_data, b_at, b_step, depth, adds = values
            index = depth.type
            c_place, a_place, b_place = (
                place_of(context, builder, *which) for which in ((c, c_data, c_at), (a, a_data, a_at), (b, b_data, b_at))
            )
            kind = INTS if a.dtype == types.uint32 else FLOATS
            tile = [(i, j) for i in range(rows) for j in range(VECTORS)]
            totals = {at: alloca_once(builder, FLOATS) for at in tile}

            def vector(place, offset, kind):
                return builder.bitcast(builder.gep(place, [offset]), kind.as_pointer())

            def place_in_c(i, j):
                return vector(c_place, builder.add(builder.mul(c_row, index(i)), index(j * LANES)), FLOATS)

            for at in tile:
                builder.store(FLOATS([0.0] * LANES), totals[at])
            with for_range(builder, depth) as loop:
                b_row = builder.gep(b_place, [builder.mul(loop.index, b_step)])
                a_column = builder.gep(a_place, [builder.mul(loop.index, a_step)])
                bs = [builder.load(vector(b_row, index(j * LANES), kind), align=4) for j in range(VECTORS)]
                for i in range(rows):
                    x = _everywhere(builder, builder.load(builder.gep(a_column, [builder.mul(a_row, index(i))])), kind)
                    for j in range(VECTORS):
                        builder.store(_add_product(builder, builder.load(totals[i, j]), x, bs[j], kind is INTS), totals[i, j])
            with builder.if_then(builder.icmp_signed("!=", adds, index(0))):
                for at in tile:
                    builder.store(builder.fadd(builder.load(place_in_c(*at), align=4), builder.load(totals[at])), totals[at])
            for at in tile:
                builder.store(builder.load(totals[at]), place_in_c(*at), align=4)
            return context.get_dummy_value()

        at = types.intp
        return types.void(c, at, at, a, at, at, at, b, at, at, at, at), emit

    return multiply


# c[c_at + i c_row + j] = (adds: itself +) sum over k < depth of a[a_at + i a_row + k a_step] * b[b_at + k b_step + j], i < ROWS, or one
# row, and j < COLUMNS: one tile of a product, which stays in registers. c is fp32; a and b are arrays of factors, uint32 if those are pairs
multiply_tile, multiply_row = _tile_multiplier(ROWS), _tile_multiplier(1)


@intrinsic
def prefetch_rows(typing, array, at, row):
    """Have ROWS x COLUMNS elements from array[at] on fetched into cache, to be written; row from one to the next. None need exist."""

    def emit(context, builder, signature, values):
        (data, at, row), byte = values, ir.IntType(8).as_pointer()
        place = place_of(context, builder, array, data, at)
        kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
        prefetch = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8" if LLVM < (15,) else "llvm.prefetch.p0")
        for i in range(ROWS):
            for j in range(0, COLUMNS, 8 * LINE // array.dtype.bitwidth):
                line = builder.bitcast(builder.gep(place, [builder.add(builder.mul(row, row.type(i)), row.type(j))]), byte)
                builder.call(prefetch, [line, INT32(1), INT32(3), INT32(1)])  # to write, for all caches, data
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), emit


def _transposer(neighbours):
    """A function for blocks of LANES x LANES factors, whose pairs are neighbours in a row, or in a column."""

    @intrinsic
    def transpose(typing, out, out_at, out_row, x, x_at, x_row):
        def emit(context, builder, signature, values):
            out_data, out_at, out_row, x_data, x_at, x_row = values
            out_place, x_place = place_of(context, builder, out, out_data, out_at), place_of(context, builder, x, x_data, x_at)
            joined = out.dtype == types.uint32 and neighbours == "in a column"

            def line(place, row, i, kind=INTS):
                return builder.bitcast(builder.gep(place, [builder.mul(row, row.type(i))]), kind.as_pointer())

            def read(i):
                if _widens(out, x):
                    return _widened(builder, builder.load(line(x_place, x_row, i, HALVES), align=2), INTS)
                if not joined:
                    return builder.load(line(x_place, x_row, i), align=2)
                halves = (builder.load(line(x_place, x_row, 2 * i + half, HALVES), align=2) for half in (0, 1))
                low, high = (builder.zext(half, INTS) for half in halves)
                return builder.or_(low, builder.shl(high, INTS([16] * LANES)))

            lines, step = [read(i) for i in range(LANES)], LANES // 2
            while step:  # exchange the two blocks beside the diagonal, then those within each quarter
                upper = INTS([lane if not lane & step else LANES + lane - step for lane in range(LANES)])
                lower = INTS([lane + step if not lane & step else LANES + lane for lane in range(LANES)])
                for i in (i for i in range(LANES) if not i & step):
                    pair = lines[i], lines[i + step]
                    lines[i], lines[i + step] = builder.shuffle_vector(*pair, upper), builder.shuffle_vector(*pair, lower)
                step //= 2
            for i in range(LANES):
                builder.store(lines[i], line(out_place, out_row, i), align=4)
            return context.get_dummy_value()

        at = types.intp
        return types.void(out, at, at, x, at, at), emit

    return transpose


# out[out_at + j out_row + i] = the factor that x[x_at + i x_row + n j] begins, with its neighbour in the row if they are n = 2; or the
# number x[x_at + n i x_row + j] with the one below it; i and j < LANES
transpose_rows, transpose_columns = _transposer("in a row"), _transposer("in a column")


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
    """factors[index] = the factor that array[first] begins."""

    def emit(context, builder, signature, values):
        out, place = place_of(context, builder, factors, *values[:2]), place_of(context, builder, array, *values[2:])
        if _widens(factors, array):
            builder.store(builder.bitcast(_widened(builder, builder.load(place), INT32), FLOAT), out)
        else:
            builder.store(builder.load(builder.bitcast(place, out.type), align=2), out)
        return context.get_dummy_value()

    return types.void(factors, types.intp, array, types.intp), emit


@intrinsic
def join_factor(typing, factors, index, array, first, second):
    """factors[index] = the number array[first], or where factors are pairs that and array[second]."""

    def emit(context, builder, signature, values):
        x = builder.load(place_of(context, builder, array, values[2], values[3]))
        if _widens(factors, array):
            x = builder.bitcast(_widened(builder, x, INT32), FLOAT)
        if factors.dtype == types.uint32:
            high = builder.zext(builder.load(place_of(context, builder, array, values[2], values[4])), INT32)
            x = builder.or_(builder.zext(x, INT32), builder.shl(high, INT32(16)))
        builder.store(x, place_of(context, builder, factors, *values[:2]))
        return context.get_dummy_value()

    at = types.intp
    return types.void(factors, at, array, at, at), emit
