"""Operands of FP8 matmuls, from bf16: one pass for the largest element, one that casts and, where asked for, transposes.

See llmc/layers/matmul_fp8.py.
"""

from llmc.kernels import door
from llmc.kernels.door import INTERPRETED, cdiv, constant, jit, load, tile, tl, widen
from llmc.layers.matmul_fp8 import LARGEST, SMALLEST_TOP
from llmc.layers.rows import rows_of

ELEMENTS = 4096  # of a turn of a program, 16 to a thread: 32 bytes of bf16. gpu_check.py --tune tries others of all three
ROWS, COLUMNS = 128, 128  # of a tile: written in either layout, its lines are 128 bytes, a whole cache line of a GPU
LARGEST, SMALLEST_TOP = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_TOP)


@jit
def _fp8_largest(partials, x, n, each, ELEMENTS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * each
    top = tl.zeros((ELEMENTS,), tl.float32)
    for i in range(0, each, ELEMENTS):
        at = first + i + tl.arange(0, ELEMENTS)
        top = tl.maximum(top, tl.abs(load(x + at, at < n)))
    tl.store(partials + tl.program_id(0), tl.max(top, 0))


@jit
def _in_e4m3(x):
    """An fp32 value in e4m3, rounded to nearest even; beyond the largest it becomes that, and NaN stays NaN. The interpreter truncates."""
    if INTERPRETED:
        magnitude = tl.abs(x)
        bits = magnitude.to(tl.uint32, bitcast=True)
        code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # the exponent's bias is 120 less
        whole = magnitude * 512.0 + 8388608.0  # subnormal, in units of 2^-9: adding 2^23 rounds it to a whole number
        code = tl.where(magnitude < 0.015625, whole.to(tl.uint32, bitcast=True) & 0x7FFFFF, code)
        code = tl.where(x == x, tl.minimum(code, 0x7E), 0x7F) | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@jit
def _fp8_cast(
    rows, columns, scale, partials, x, n_rows, C,
    PARTIALS: tl.constexpr, BY_ROWS: tl.constexpr, BY_COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row, mask = tile(tl.program_id(0).to(tl.int64) * ROWS, n_rows, column, C, ROWS)
    at = row[:, None] * C + column[None, :]
    found = tl.load(x + at, mask=mask, other=0.0)  # loaded first, as all threads then wait for the largest element
    top = tl.maximum(tl.max(tl.load(partials + tl.arange(0, PARTIALS)), 0), SMALLEST_TOP)
    factor = tl.div_rn(constant(top, LARGEST), top)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale, tl.div_rn(top, constant(top, LARGEST)))
    if BY_ROWS:
        tl.store(rows + at, _in_e4m3(widen(found) * factor), mask=mask)
    if BY_COLUMNS:  # transposed before the cast: Hopper has an instruction for that, for 16 bits
        turned = column[:, None].to(tl.int64) * n_rows + row[None, :]
        tl.store(columns + turned, _in_e4m3(widen(tl.trans(found)) * factor), mask=tl.trans(mask))


def fp8_operand(scale, x, scratch, *, rows=None, columns=None):
    """Scratch: fp8_partials (a power of two,) fp32."""
    (n_rows, C), partials = rows_of(x).shape, scratch["fp8_partials"]
    n, written = x.numel(), columns if rows is None else rows
    each = cdiv(cdiv(n, len(partials)), ELEMENTS) * ELEMENTS
    door.launch(_fp8_largest, (len(partials),), partials, x, n, each, ELEMENTS=ELEMENTS)
    door.launch(
        _fp8_cast, (cdiv(n_rows, ROWS), cdiv(C, COLUMNS)), written, written if columns is None else columns, scale, partials, x, n_rows, C,
        PARTIALS=len(partials), BY_ROWS=rows is not None, BY_COLUMNS=columns is not None, ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
