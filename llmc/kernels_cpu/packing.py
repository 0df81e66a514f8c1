"""Packing what tiles.py multiplies: transposed, paired, rounded or widened on the way. And writing results, past the caches or not."""

from llmc.kernels_cpu.door import (
    F0, INT16, INT32, LINE, get_or_insert_function, intrinsic, ir, load, nearest, place_of, shared, store, types,
)  # fmt: skip
from llmc.kernels_cpu.tiles import AMX, FLOATS, HALVES, INTS, LANES, MULTIPLIES_PAIRS, BFloat, everywhere, tile_of, values_of, vector_at

PACKED_ROWS = 16  # of a block of columns are packed, then the next block's: blocks may lie so far apart that all map to the same cache sets


def _widened(builder, x, kind):
    """A bf16 number, or a vector of them, as the bits of the same fp32; kind is the type of as many int32."""
    return builder.shl(builder.zext(x, kind), kind(16 if kind is INT32 else [16] * LANES))


def _widens(factors, array):
    """Whether `array` holds bf16 that become fp32 factors."""
    return factors.dtype == types.float32 and array.dtype == types.uint16


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
    kind = ir.FunctionType(ir.VectorType(BFloat(), LANES), [FLOATS])
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


def _copier(halves, ints):
    """A function that copies a factor, or LANES of them, as integers of type `ints`, or bf16 numbers of type `halves` that it widens."""

    @intrinsic
    def copy(typing, factors, index, array, first):
        def emit(context, builder, signature, values):
            out, place = place_of(context, builder, factors, *values[:2]), place_of(context, builder, array, *values[2:])
            if _widens(factors, array):
                x = _widened(builder, builder.load(builder.bitcast(place, halves.as_pointer()), align=2), ints)
            else:
                x = builder.load(builder.bitcast(place, ints.as_pointer()), align=2)
            builder.store(x, builder.bitcast(out, ints.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(factors, types.intp, array, types.intp), emit

    return copy


# factors[index + i] = factor i of those that begin at array[first]; i = 0, or i < LANES
copy_factor, copy_factors = _copier(INT16, INT32), _copier(HALVES, INTS)


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
def pack_left(out, at, out_row, all_rows, all_depth, x, first, x_row, x_step, rows, depth):
    """out[at + j * out_row + i] = factor i of row j, of the numbers x[first + j * x_row + k * x_step], j < rows and k < depth. x_row or
    x_step is 1. All other rows, up to all_rows, and factors, up to all_depth, are zero."""
    n = values_of(out)
    some_rows, some = 0, depth // n  # rows and factors that are packed many at once
    if x_step == 1:
        some_rows = rows
        for j in range(rows):
            for i in range(0, some // LANES * LANES, LANES):
                copy_factors(out, at + j * out_row + i, x, first + j * x_row + n * i)
            for i in range(some // LANES * LANES, some):
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


@intrinsic
def stream_line(typing, out, at, x, x_at, factor):
    """out[at + i] = factor * x[x_at + i], fp32 rounded to out's type, for a whole cache line, which bypasses the caches and need not be
    read first. out[at] must be at the start of a line; other threads may read it after close_tiles."""

    def emit(context, builder, signature, values):
        out_data, at, x_data, x_at, factor = values
        place, factor = place_of(context, builder, x, x_data, x_at), everywhere(builder, factor, FLOATS)
        vectors = (vector_at(builder, place, x_at.type(0), 0, i, FLOATS) for i in range(0, 8 * LINE // out.dtype.bitwidth, LANES))
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
