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
    AMX_FEATURES, FLOAT, INT16, INT32, LINE, LLVM, alloca_once, emit_fetch, fetch, for_range, get_or_insert_function, global_constant,
    intrinsic, ir, place_of, processor_features, shared, types,
)  # fmt: skip
from llmc.memory.tuning import NUMBA_TILE_ROWS

PROCESSOR = processor_features()
LANES = 16 if "avx512f" in PROCESSOR else 8 if "avx" in PROCESSOR else 4
# by AVX-512's instruction, which LLVM before 16 has for other types; else as two products of widened numbers. Whether it pays: processor.py
MULTIPLIES_PAIRS = {"avx512f", "avx512bf16"} <= PROCESSOR and LLVM >= (16,)
FLOATS, INTS, HALVES = (ir.VectorType(number, LANES) for number in (FLOAT, INT32, INT16))


class BFloat(ir.types.Type):
    """LLVM's bf16, which llvmlite does not have."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash(BFloat)


# what is multiplied at once: rows of the left matrix, columns of the right one, and factors that a step adds to each sum. With AMX a step
# is four products: of the eight registers, each of 16 rows of 16 factors, four hold sums, two the left matrix and two the right one
Tile = namedtuple("Tile", ("rows", "columns", "depth"))
AMX_ROWS = 16
AMX = Tile(2 * AMX_ROWS, 2 * AMX_ROWS, AMX_ROWS)
MULTIPLIES_TILES = AMX_FEATURES <= PROCESSOR
BYTE, INT64 = ir.IntType(8), ir.IntType(64)
# with vectors, 16 totals where there are 32 registers, as with AVX-512 and on Arm, else 8, so that totals and the factors in use all stay
# in registers. Its sizes divide those of attention's blocks, which stay in the L1 cache
SMALL = Tile(NUMBA_TILE_ROWS, (4 if LANES == 16 or platform.machine() in ("aarch64", "arm64") else 2) * LANES, 1)
# In a matmul the right matrix is read from the L2 cache again for each tile, and Intel's cores multiply faster than it arrives: two cores
# of Granite Rapids reached 0.26 TFLOP/s in fp32 with tiles of 4 x 64, 0.30 with 8 x 32, 0.33 with 8 x 48, and with factors prefetched
# some rows ahead 0.29, 0.34 and 0.35. On a Zen 4, whose steps with 4 x 64 run at nine tenths of the peak, d12's matmuls took 0.96 to 1.04
# of that time with 8 x 48, prefetched or not: from one process to the next it varies as much. With AVX2's 16 registers 12 totals, three
# vectors of the right matrix and a number of the left one fill them all: d12's matmuls took 0.93 of the time of 4 x 16 on a Zen 3, 0.95
# with 6 x 16, and 0.96 with rows prefetched.
if LANES == 16 and "avx512fp16" in PROCESSOR:
    LARGE, AHEAD = Tile(8, 3 * LANES, 1), 8  # AHEAD: rows of the right matrix that are prefetched ahead
elif LANES == 8:
    LARGE, AHEAD = Tile(NUMBA_TILE_ROWS, 3 * LANES, 1), 0
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
        bf16s = ir.VectorType(BFloat(), 2 * LANES)
        kind = ir.FunctionType(FLOATS, [FLOATS, bf16s, bf16s])
        instruction = get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(instruction, [total, builder.bitcast(a, bf16s), builder.bitcast(b, bf16s)])
    low = [builder.bitcast(builder.shl(x, INTS([16] * LANES)), FLOATS) for x in (a, b)]
    high = [builder.bitcast(builder.and_(x, INTS([0xFFFF0000] * LANES)), FLOATS) for x in (a, b)]
    return _add_product(builder, _add_product(builder, total, *low, False), *high, False)


def everywhere(builder, x, kind):
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


def vector_at(builder, place, row, i, j, kind):
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
        bs = {j: builder.load(vector_at(builder, b_place, b[1], 0, j, kind), align=4) for j in columns}
        for j in columns if AHEAD and tile is LARGE else ():
            emit_fetch(builder, vector_at(builder, b_place, b[1], AHEAD, j, BYTE))
        for i in range(tile.rows):
            x = everywhere(builder, builder.load(builder.gep(a_place, [builder.mul(a[1], a[1].type(i))])), kind)
            for j in columns:
                builder.store(_add_product(builder, builder.load(totals[i, j]), x, bs[j], pairs), totals[i, j])
    places = {(i, j): vector_at(builder, *c, i, j, FLOATS) for i, j in totals}
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
        _x86(builder, instruction, BYTE(register), vector_at(builder, place, row, i, j, BYTE), builder.mul(row, row.type(4)))

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


# rows of `pieces` times n numbers, to be prefetched: number i of a piece is numbers[at + which row * row + which piece * piece + i]
Ahead = namedtuple("Ahead", ("numbers", "at", "rows", "row", "pieces", "piece", "n"))


@shared
def multiply(c, c_at, c_row, a, a_at, a_row, b, b_row, rows, columns, depth, adds, upper, ahead):
    """As multiply_tile, for all tiles of a block c (rows, columns), which are whole ones.

    upper  whether row i of the left matrix begins with i zeros; most of them are not multiplied
    ahead  what is prefetched meanwhile, some of it before each tile: a core can wait for only so many cache lines at once
    """
    tiles, begun, fetched = rows // block_tile_rows(a) * (columns // block_tile_columns(a)), 0, 0
    for i in range(0, rows, block_tile_rows(a)):
        k = upper * (i // values_of(a) // tile_depth(a) * tile_depth(a))
        for j in range(0, columns, block_tile_columns(a)):
            begun += 1
            while fetched * tiles < begun * ahead.rows:
                for piece in range(ahead.pieces):
                    fetch(ahead.numbers, ahead.at + fetched * ahead.row + piece * ahead.piece, ahead.n)
                fetched += 1
            _multiply_block_tile(c, c_at + i * c_row + j, c_row, a, a_at + i * a_row + k, a_row, b, j + k * b_row, b_row, depth - k, adds)


@shared
def whole_depth(factors, depth):
    """How many factors `depth` numbers take, with the zeros that fill up whole tiles."""
    unit = tile_depth(factors)
    return (depth + unit * values_of(factors) - 1) // (unit * values_of(factors)) * unit
