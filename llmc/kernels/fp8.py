"""Operands of FP8 matmuls, from bf16: one pass for the largest element, one that casts and, where asked for, transposes.

See llmc/layers/matmul_fp8.py.
"""

from llmc.kernels import door
from llmc.kernels.door import INTERPRETED, cdiv, constant, jit, load, tile, tl
from llmc.layers.matmul_fp8 import LARGEST, SMALLEST_TOP
from llmc.layers.rows import rows_of

ELEMENTS = 4096
ROWS, COLUMNS = 128, 128
SMALLEST_TOP = tl.constexpr(SMALLEST_TOP)


@jit
def _fp8_largest(partials, x, n, each, ELEMENTS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * each
    top = tl.zeros((ELEMENTS,), tl.float32)
    for i in range(0, each, ELEMENTS):
        at = first + i + tl.arange(0, ELEMENTS)
        top = tl.maximum(top, tl.abs(load(x + at, at < n)))
    tl.store(partials + tl.program_id(0), tl.max(top, 0))


@jit
def _in_eight_bits(x, dtype: tl.constexpr):
    """An fp32 value as e4m3 or e5m2, rounded to nearest even; beyond the largest it is that, and NaN stays NaN."""
    if INTERPRETED:
        MANTISSA: tl.constexpr = 3 if dtype == tl.float8e4nv else 2
        BIAS: tl.constexpr = 7 if dtype == tl.float8e4nv else 15
        LAST: tl.constexpr = 0x7E if dtype == tl.float8e4nv else 0x7B
        magnitude = tl.abs(x)
        bits = magnitude.to(tl.uint32, bitcast=True)
        code = ((bits + ((1 << (22 - MANTISSA)) - 1) + ((bits >> (23 - MANTISSA)) & 1)) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
        whole = magnitude * 2.0 ** (BIAS - 1 + MANTISSA) + 8388608.0  # 2^23: what is added is rounded to a whole number
        code = tl.where(magnitude < 2.0 ** (1 - BIAS), whole.to(tl.uint32, bitcast=True) & 0x7FFFFF, code)
        code = tl.where(x == x, tl.minimum(code, LAST), 0x7F) | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80)
        return code.to(tl.uint8).to(dtype, bitcast=True)
    return x.to(dtype)


@jit
def _fp8_cast(
    rows, columns, scale, partials, x, n_rows, C,
    LARGEST: tl.constexpr, PARTIALS: tl.constexpr, BY_ROWS: tl.constexpr, BY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    top = tl.maximum(tl.max(tl.load(partials + tl.arange(0, PARTIALS)), 0), SMALLEST_TOP)
    factor = tl.div_rn(constant(top, LARGEST), top)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale, tl.div_rn(top, constant(top, LARGEST)))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row, mask = tile(tl.program_id(0).to(tl.int64) * ROWS, n_rows, column, C, ROWS)
    at = row[:, None] * C + column[None, :]
    small = _in_eight_bits(load(x + at, mask) * factor, rows.dtype.element_ty)
    if BY_ROWS:
        tl.store(rows + at, small, mask=mask)
    if BY_COLUMNS:
        tl.store(columns + column[:, None].to(tl.int64) * n_rows + row[None, :], tl.trans(small), mask=tl.trans(mask))


def fp8_operand(scale, x, scratch, *, rows=None, columns=None):
    """Scratch: fp8_partials (a power of two,) fp32."""
    (n_rows, C), partials = rows_of(x).shape, scratch["fp8_partials"]
    n, written = x.numel(), columns if rows is None else rows
    each = cdiv(cdiv(n, len(partials)), ELEMENTS) * ELEMENTS
    door.launch(_fp8_largest, (len(partials),), partials, x, n, each, ELEMENTS=ELEMENTS)
    door.launch(
        _fp8_cast, (cdiv(n_rows, ROWS), cdiv(C, COLUMNS)), written, written if columns is None else columns, scale, partials, x, n_rows, C,
        LARGEST=LARGEST[written.dtype], PARTIALS=len(partials), BY_ROWS=rows is not None, BY_COLUMNS=columns is not None,
        ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
