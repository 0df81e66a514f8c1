"""Products of matrices within a kernel, tile by tile in registers.

A factor is 32 bits: an fp32, or two bf16 that are neighbours in the dimension that a product sums over, the first in the lower half.
Flat arrays of factors are fp32, or uint32 where they are such pairs. Sums are fp32. bf16 numbers can become either kind: where the plan's
scratch is fp32, they are widened to that as they are packed.

A left matrix is packed, or lies in memory, row by row, with the factors of a row's sums next to each other. A right one is packed in
blocks of columns, each block row by row. Pairs are multiplied by Intel's AMX where the processor has it: its registers are matrices.
"""

import platform
from collections import namedtuple

from llmc.kernels_cpu.door import (
    AMX_FEATURES, F0, FLOAT, INT16, INT32, LINE, LLVM, alloca_once, emit_fetch, for_range, get_or_insert_function, global_constant,
    intrinsic, ir, load, nearest, place_of, processor_features, shared, store, types,
)  # fmt: skip
from llmc.memory.tuning import TILE_ROWS

PROCESSOR = processor_features()
LANES = 16 if "avx512f" in PROCESSOR else 8 if "avx" in PROCESSOR else 4
PACKED_ROWS = 16  # of a block of columns are packed, then the next block's: blocks may lie so far apart that all map to the same cache sets
# by AVX-512's instruction, which LLVM before 16 has for other types; else as two products of widened numbers. Whether it pays: processor.py
MULTIPLIES_PAIRS = {"avx512f", "avx512bf16"} <= PROCESSOR and LLVM >= (16,)
FLOATS, INTS, HALVES = (ir.VectorType(number, LANES) for number in (FLOAT, INT32, INT16))


class _BFloat(ir.types.Type):
    """LLVM's bf16, which llvmlite does not have."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


# what is multiplied at once: rows of the left matrix, columns of the right one, and factors that a step adds to each sum. With AMX a step
# is four products: of the eight registers, each of 16 rows of 16 factors, four hold sums, two the left matrix and two the right one
Tile = namedtuple("Tile", ("rows", "columns", "depth"))
AMX_ROWS = 16
AMX = Tile(2 * AMX_ROWS, 2 * AMX_ROWS, AMX_ROWS)
MULTIPLIES_TILES = AMX_FEATURES <= PROCESSOR
BYTE, INT64 = ir.IntType(8), ir.IntType(64)
# with vectors, 16 totals where there are 32 registers, as with AVX-512 and on Arm, else 8, so that totals and the factors in use all stay
# in registers. Its sizes divide those of attention's blocks, which stay in the L1 cache
SMALL = Tile(TILE_ROWS, (4 if LANES == 16 or platform.machine() in ("aarch64", "arm64") else 2) * LANES, 1)
# In a matmul the right matrix is read from the L2 cache again for each tile, and Intel's cores multiply faster than it arrives: two cores
# of Granite Rapids reached 0.26 TFLOP/s in fp32 with tiles of 4 x 64, 0.30 with 8 x 32, 0.33 with 8 x 48, and with factors prefetched
# some rows ahead 0.29, 0.34 and 0.35. On a Zen 4, whose steps with 4 x 64 run at nine tenths of the peak, d12's matmuls took 0.96 to 1.04
# of that time with 8 x 48, prefetched or not: from one process to the next it varies as much. With AVX2's 16 registers 12 totals, three
# vectors of the right matrix and a number of the left one fill them all: d12's matmuls took 0.93 of the time of 4 x 16 on a Zen 3, 0.95
# with 6 x 16, and 0.96 with rows prefetched.
if LANES == 16 and "avx512fp16" in PROCESSOR:
    LARGE, AHEAD = Tile(8, 3 * LANES, 1), 8  # AHEAD: rows of the right matrix that are prefetched ahead
elif LANES == 8:
    LARGE, AHEAD = Tile(TILE_ROWS, 3 * LANES, 1), 0
else:
    LARGE, AHEAD = SMALL, 0


def tile_of(pairs) -> Tile:
    """The tile by which a matmul multiplies factors, which are pairs of bf16 or not."""
    return AMX if pairs and MULTIPLIES_TILES else LARGE


def block_tile_of(pairs) -> Tile:
    """The same for attention's blocks."""
    return AMX if pairs and MULTIPLIES_TILES else SMALL


def _known(number):
    """A function of an array of factors whose value is a compile-time constant: number(whether they are pairs)."""

    @intrinsic
    def known(typing, factors):
        n = int(number(factors.dtype == types.uint32))
        return types.intp(factors), lambda context, builder, signature, values: context.get_constant(types.intp, n)

    return known


values_of = _known(lambda pairs: 2 if pairs else 1)  # how many numbers a factor has
by_amx = _known(lambda pairs: tile_of(pairs) is AMX)
tile_rows, tile_columns, tile_depth = (_known(lambda pairs, name=name: getattr(tile_of(pairs), name)) for name in Tile._fields)
block_tile_rows, block_tile_columns = (_known(lambda pairs, name=name: getattr(block_tile_of(pairs), name)) for name in Tile._fields[:2])


def _add_product(builder, total, a, b, pairs):
    """total + a * b for vectors of factors; for pairs, a * b is the sum of both products."""
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
    """A bf16 number, or a vector of them, as the bits of the same fp32; kind is the type of as many int32."""
    return builder.shl(builder.zext(x, kind), kind(16 if kind is INT32 else [16] * LANES))


def _widens(factors, array):
    """Whether `array` holds bf16 that become fp32 factors."""
    return factors.dtype == types.float32 and array.dtype == types.uint16


def _everywhere(builder, x, kind):
    """A vector of type `kind` with x in all lanes."""
    alone = builder.insert_element(kind(ir.Undefined), x, INT32(0))
    return builder.shuffle_vector(alone, kind(ir.Undefined), INTS([0] * LANES))


def _multiplier(tile_of):
    """A function that multiplies one tile, of the sizes that tile_of gives."""

    @intrinsic
    def multiply_tile(typing, c, c_at, c_row, a, a_at, a_row, b, b_at, b_row, depth, adds):
        def emit(context, builder, signature, values):
            c_data, c_at, c_row, a_data, a_at, a_row, b_data, b_at, b_row, depth, adds = values
            places = (place_of(context, builder, *which) for which in ((c, c_data, c_at), (a, a_data, a_at), (b, b_data, b_at)))
            pairs = a.dtype == types.uint32
            tile = tile_of(pairs)
            write = _multiply_by_amx if tile is AMX else _multiply_by_vectors
            write(builder, tile, *zip(places, (c_row, a_row, b_row)), depth, builder.icmp_signed("!=", adds, adds.type(0)), pairs)
            return context.get_dummy_value()

        at = types.intp
        return types.void(c, at, at, a, at, at, b, at, at, at, at), emit

    return multiply_tile


# c[c_at + i c_row + j] = (adds: itself +) the sum over k < depth of a[a_at + i a_row + k] * b[b_at + k b_row + j]: one tile of a product,
# which stays in registers. c is fp32, a and b are factors of one kind. The tile is a whole one, and depth a multiple of the tile's depth
multiply_tile, _multiply_block_tile = _multiplier(tile_of), _multiplier(block_tile_of)


def _at(builder, place, row, i, j, kind):
    """A pointer to something of type `kind`, i rows and j numbers on from `place`."""
    index = row.type
    return builder.bitcast(builder.gep(place, [builder.add(builder.mul(row, index(i)), index(j))]), kind.as_pointer())


def _multiply_by_vectors(builder, tile, c, a, b, depth, adds, pairs):
    """Emit multiply_tile with vectors. c, a and b are each (a place, the step to the next row)."""
    kind, columns = INTS if pairs else FLOATS, range(0, tile.columns, LANES)
    totals = {(i, j): alloca_once(builder, FLOATS) for i in range(tile.rows) for j in columns}
    for total in totals.values():
        builder.store(FLOATS([0.0] * LANES), total)
    with for_range(builder, depth) as loop:
        b_place, a_place = builder.gep(b[0], [builder.mul(loop.index, b[1])]), builder.gep(a[0], [loop.index])
        bs = {j: builder.load(_at(builder, b_place, b[1], 0, j, kind), align=4) for j in columns}
        for j in columns if AHEAD and tile is LARGE else ():
            emit_fetch(builder, _at(builder, b_place, b[1], AHEAD, j, BYTE))
        for i in range(tile.rows):
            x = _everywhere(builder, builder.load(builder.gep(a_place, [builder.mul(a[1], a[1].type(i))])), kind)
            for j in columns:
                builder.store(_add_product(builder, builder.load(totals[i, j]), x, bs[j], pairs), totals[i, j])
    places = {(i, j): _at(builder, *c, i, j, FLOATS) for i, j in totals}
    with builder.if_then(adds):
        for at, total in totals.items():
            builder.store(builder.fadd(builder.load(places[at], align=4), builder.load(total)), total)
    for at, total in totals.items():
        builder.store(builder.load(total), places[at], align=4)


def _x86(builder, name, *operands):
    """Emit an x86 instruction; AMX's registers are compile-time constants."""
    function = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    builder.call(get_or_insert_function(builder.module, function, f"llvm.x86.{name}"), operands)


def _multiply_by_amx(builder, tile, c, a, b, depth, adds, pairs):
    """The same with AMX. Sums are in registers 0 to 3, the left matrix in 4 and 5, the right one in 6 and 7."""

    def move(instruction, register, matrix, i, j):
        place, row = matrix
        _x86(builder, instruction, BYTE(register), _at(builder, place, row, i, j, BYTE), builder.mul(row, row.type(4)))

    sums = [(2 * i + j, c, i * AMX_ROWS, j * AMX_ROWS) for i in range(2) for j in range(2)]
    with builder.if_else(adds) as (more, first):
        with more:
            for at in sums:
                move("tileloadd64", *at)
        with first:
            for register, *_ in sums:
                _x86(builder, "tilezero", BYTE(register))
    with for_range(builder, builder.udiv(depth, depth.type(AMX.depth))) as loop:
        done = builder.mul(loop.index, depth.type(AMX.depth))
        left, right = (builder.gep(a[0], [done]), a[1]), (builder.gep(b[0], [builder.mul(done, b[1])]), b[1])
        move("tileloadd64", 4, left, 0, 0)
        for j in range(2):
            move("tileloaddt164", 6 + j, right, 0, j * AMX_ROWS)
            _x86(builder, "tdpbf16ps", BYTE(j), BYTE(4), BYTE(6 + j))
        move("tileloadd64", 5, left, AMX_ROWS, 0)
        for j in range(2):
            _x86(builder, "tdpbf16ps", BYTE(2 + j), BYTE(5), BYTE(6 + j))
    for at in sums:
        move("tilestored64", *at)


# AMX's tile configuration: all eight registers have 16 rows of 64 bytes
SHAPES = bytes([1] + 15 * [0] + 8 * [LINE, 0] + 16 * [0] + 8 * [AMX_ROWS] + 8 * [0])


def _shapes_of_registers(write):
    """A function of (factors, memory of 64 bytes) to be called before, or after, a thread multiplies such factors; it acts only for AMX."""

    @intrinsic
    def prepare(typing, factors, kept):
        def emit(context, builder, signature, values):
            if tile_of(factors.dtype == types.uint32) is AMX:
                write(builder, builder.bitcast(place_of(context, builder, kept, values[1], INT64(0)), BYTE.as_pointer()))
            return context.get_dummy_value()

        return types.void(factors, kept), emit

    return prepare


def _set_shapes(builder, kept):
    _x86(builder, "sttilecfg", kept)
    shapes = global_constant(builder, "shapes", ir.Constant(ir.ArrayType(BYTE, len(SHAPES)), bytearray(SHAPES)))
    _x86(builder, "ldtilecfg", builder.bitcast(shapes, BYTE.as_pointer()))


def _reset_shapes(builder, kept):
    _x86(builder, "ldtilecfg", kept)
    _x86(builder, "sse.sfence")


# a library on the same thread, such as oneDNN, may go on to use the shapes that it has set, so these are saved, and restored at the end.
# After close_tiles everything that was streamed is visible to other threads
open_tiles, close_tiles = _shapes_of_registers(_set_shapes), _shapes_of_registers(_reset_shapes)


@intrinsic
def stream_line(typing, out, at, x, x_at, factor):
    """out[at + i] = factor * x[x_at + i], fp32 rounded to out's type, for a whole cache line, which bypasses the caches and need not be
    read first. out[at] must be at the start of a line; other threads may read it after close_tiles."""

    def emit(context, builder, signature, values):
        out_data, at, x_data, x_at, factor = values
        place, factor = place_of(context, builder, x, x_data, x_at), _everywhere(builder, factor, FLOATS)
        vectors = (_at(builder, place, x_at.type(0), 0, i, FLOATS) for i in range(0, 8 * LINE // out.dtype.bitwidth, LANES))
        line = [builder.fmul(builder.load(vector, align=4), factor) for vector in vectors]
        line = [nearest(builder, numbers) if out.dtype == types.uint16 else numbers for numbers in line]
        while len(line) > 1:
            both = list(range(2 * line[0].type.count))
            line = [builder.shuffle_vector(*pair, ir.VectorType(INT32, len(both))(both)) for pair in zip(line[::2], line[1::2])]
        line_place = builder.bitcast(place_of(context, builder, out, out_data, at), line[0].type.as_pointer())
        written = builder.store(line[0], line_place, align=LINE)
        written.set_metadata("nontemporal", builder.module.add_metadata([INT32(1)]))
        return context.get_dummy_value()

    at = types.intp
    return types.void(out, at, x, at, types.float32), emit


@shared
def write_row(out, at, x, x_at, n, factor, streams):
    """out[at + i] = factor * x[x_at + i], i < n, fp32 rounded to out's type; streamed if `streams`, as streams_lines allows."""
    if streams:
        for i in range(0, n, LINE // out.itemsize):
            stream_line(out, at + i, x, x_at + i, factor)
    else:
        for i in range(n):
            store(out, at + i, load(x, x_at + i) * factor)


def streams_lines(out, width, packed) -> int:
    """Whether to stream pieces of a contiguous tensor, each of `width` neighbours: if they are whole cache lines, and AMX multiplies such
    factors, so that close_tiles fences."""
    return int(tile_of(packed.element_size() == 2) is AMX and (out.data_ptr() | width * out.element_size()) % LINE == 0)


def _transposer(neighbours):
    """A function that transposes blocks of LANES x LANES factors, whose pairs are neighbours in a row, or in a column."""

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
            while step:  # exchange the two blocks beside the diagonal, then do the same within each quarter
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


# out[out_at + j out_row + i] = the factor of n numbers, i and j < LANES: by transpose_rows x[x_at + i x_row + n j] and, if n = 2, its
# neighbour in the row; by transpose_columns x[x_at + n i x_row + j] and, if n = 2, the number below it
transpose_rows, transpose_columns = _transposer("in a row"), _transposer("in a column")


@intrinsic
def store_factor(typing, factors, index, first, second):
    """factors[index] = the number `first` or, where factors are pairs, `first` and `second`, rounded to nearest even."""

    def emit(context, builder, signature, values):
        x = values[2]
        if factors.dtype == types.uint32:
            low, high = (builder.zext(nearest(builder, number), INT32) for number in values[2:])
            x = builder.or_(low, builder.shl(high, INT32(16)))
        builder.store(x, place_of(context, builder, factors, *values[:2]))
        return context.get_dummy_value()

    return types.void(factors, types.intp, types.float32, types.float32), emit


def _as_factor_of_products(builder, numbers):
    """A vector of fp32 as bf16: by the processor's instruction where products use its own too. Both take numbers below 2^-126 for zero."""
    if not MULTIPLIES_PAIRS:
        return nearest(builder, numbers)
    kind = ir.FunctionType(ir.VectorType(_BFloat(), LANES), [FLOATS])
    instruction = get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtneps2bf16.512")
    return builder.bitcast(builder.call(instruction, [numbers]), HALVES)


@intrinsic
def round_numbers(typing, out, at, x, x_at):
    """out[at + i] = x[x_at + i], i < LANES, fp32 rounded to out's type; it will be a factor of products."""

    def emit(context, builder, signature, values):
        numbers = builder.load(builder.bitcast(place_of(context, builder, x, *values[2:]), FLOATS.as_pointer()), align=4)
        numbers = _as_factor_of_products(builder, numbers) if out.dtype == types.uint16 else numbers
        builder.store(numbers, builder.bitcast(place_of(context, builder, out, *values[:2]), numbers.type.as_pointer()), align=2)
        return context.get_dummy_value()

    at = types.intp
    return types.void(out, at, x, at), emit


@intrinsic
def copy_factor(typing, factors, index, array, first):
    """factors[index] = the factor that begins at array[first]."""

    def emit(context, builder, signature, values):
        out, place = place_of(context, builder, factors, *values[:2]), place_of(context, builder, array, *values[2:])
        if _widens(factors, array):
            builder.store(builder.bitcast(_widened(builder, builder.load(place), INT32), FLOAT), out)
        else:
            builder.store(builder.load(builder.bitcast(place, out.type), align=2), out)
        return context.get_dummy_value()

    return types.void(factors, types.intp, array, types.intp), emit


@intrinsic
def join_factors(typing, factors, index, array, first, second):
    """factors[index + i] = the number array[first + i] or, where factors are pairs, that and array[second + i], i < LANES. fp32 numbers
    are rounded to bf16 where factors are pairs."""

    def emit(context, builder, signature, values):
        def numbers(at, kind):
            return builder.load(builder.bitcast(place_of(context, builder, array, values[2], at), kind.as_pointer()), align=2)

        out = builder.bitcast(place_of(context, builder, factors, *values[:2]), INTS.as_pointer())
        if array.dtype == factors.dtype:
            x = numbers(values[3], INTS)
        elif _widens(factors, array):
            x = _widened(builder, numbers(values[3], HALVES), INTS)
        elif array.dtype == types.float32:
            low, high = (builder.zext(_as_factor_of_products(builder, numbers(at, FLOATS)), INTS) for at in values[3:])
            x = builder.or_(low, builder.shl(high, INTS([16] * LANES)))
        else:
            x = builder.or_(builder.zext(numbers(values[3], HALVES), INTS), _widened(builder, numbers(values[4], HALVES), INTS))
        builder.store(x, out, align=4)
        return context.get_dummy_value()

    at = types.intp
    return types.void(factors, at, array, at, at), emit


@shared
def multiply(c, c_at, c_row, a, a_at, a_row, b, b_row, rows, columns, depth, adds):
    """As multiply_tile, for all tiles of a block c (rows, columns), which are whole ones."""
    for i in range(0, rows, block_tile_rows(a)):
        for j in range(0, columns, block_tile_columns(a)):
            _multiply_block_tile(c, c_at + i * c_row + j, c_row, a, a_at + i * a_row, a_row, b, j, b_row, depth, adds)


@shared
def whole_depth(factors, depth):
    """How many factors `depth` numbers take, with the zeros that fill up whole tiles."""
    unit = tile_depth(factors)
    return (depth + unit * values_of(factors) - 1) // (unit * values_of(factors)) * unit


@shared
def pack_left(out, at, out_row, all_rows, all_depth, x, first, x_row, x_step, rows, depth):
    """out[at + j * out_row + i] = factor i of row j, of the numbers x[first + j * x_row + k * x_step], j < rows and k < depth. x_row or
    x_step is 1. All other rows, up to all_rows, and factors, up to all_depth, are zero."""
    n = values_of(out)
    some_rows, some = 0, depth // n  # rows and factors that are packed many at once
    if x_step == 1:
        some_rows = rows
        for j in range(rows):
            for i in range(some):
                copy_factor(out, at + j * out_row + i, x, first + j * x_row + n * i)
    elif x_row == 1:
        some_rows, some = rows // LANES * LANES, some // LANES * LANES
        for i in range(0, some, LANES):
            for j in range(0, some_rows, LANES):
                transpose_columns(out, at + j * out_row + i, out_row, x, first + n * i * x_step + j, x_step)
    for j in range(rows):
        for i in range(some if j < some_rows else 0, (depth + n - 1) // n):
            _pack_factor(out, at + j * out_row + i, x, first + j * x_row + n * i * x_step, x_step, depth - n * i)
        for i in range((depth + n - 1) // n, all_depth):
            store_factor(out, at + j * out_row + i, F0, F0)
    for j in range(rows, all_rows):
        for i in range(all_depth):
            store_factor(out, at + j * out_row + i, F0, F0)


@shared
def pack_right(out, width, block, all_columns, all_depth, x, first, x_row, x_step, columns, depth):
    """out[j // width * block + i * width + j % width] = factor i of column j, of the numbers x[first + j * x_row + k * x_step], j < columns
    and k < depth. x_row or x_step is 1. All other columns, up to all_columns, and factors, up to all_depth, are zero. width is a multiple
    of LANES."""
    n = values_of(out)
    some_columns, some = columns // LANES * LANES, depth // n  # columns and factors that are packed many at once
    if x_step == 1:
        some = some // LANES * LANES
        for j in range(0, some_columns, LANES):
            at = j // width * block + j % width
            for i in range(0, some, LANES):
                transpose_rows(out, at + i * width, width, x, first + j * x_row + n * i, x_row)
    elif x_row == 1:
        for few in range(0, some, PACKED_ROWS):
            for start in range(0, some_columns, width):
                for i in range(few, min(few + PACKED_ROWS, some)):
                    at, here = start // width * block + i * width - start, first + n * i * x_step
                    for j in range(start, min(start + width, some_columns), LANES):
                        join_factors(out, at + j, x, here + j, here + j + (n - 1) * x_step)
    for j in range(columns):
        at = j // width * block + j % width
        for i in range(some if j < some_columns else 0, (depth + n - 1) // n):
            _pack_factor(out, at + i * width, x, first + j * x_row + n * i * x_step, x_step, depth - n * i)
    for i in range(all_depth):
        for j in range(0 if i * n >= depth else columns, all_columns):
            store_factor(out, j // width * block + i * width + j % width, F0, F0)


@shared
def _pack_factor(out, at, x, first, step, left):
    """out[at] = the factor of the number x[first] and, if factors are pairs and another number is left, x[first + step]."""
    store_factor(out, at, load(x, first), load(x, first + step) if left > 1 and values_of(out) > 1 else F0)
