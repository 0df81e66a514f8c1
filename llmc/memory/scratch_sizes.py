"""How large scratch buffers are: how many rows, heads, workers and elements at once, for the options' batch on their device."""

from math import prod

from llmc.memory.options import PlanOptions
from llmc.memory.tables import DTYPE_BYTES, resolve, sizes_of
from llmc.memory.tuning import (
    ATTENTION_BLOCK, ATTENTION_ROWS, CHECKPOINT_ELEMENTS, COLUMN_PARTIALS, CPU_COLUMN_PARTIALS, FP8_PARTIALS, HEAD_GROUP, MATMUL_BLOCK,
    MATMUL_PANEL, MATMUL_ROWS, NORM_PARTIALS, ROUNDING_BLOCK, TILE_DEPTH, TUNING,
)  # fmt: skip
from llmc.units import even_part, round_up

# scratch of attention on a CPU, and of Triton's attention: (name, shape, dtype)
TORCH_ATTENTION = (
    ("rows", "7 Ha T HS", "fp32"), ("scores", "2 Ha Q T", "fp32"), ("stats", "2 Ha T", "fp32"), ("sums", "2 3k", "fp32"),
    ("mask", "Q Q", "fp32"),
)  # fmt: skip
NUMBA_ATTENTION = (
    ("packed", "Wa 3 Tb Hb", "factor"), ("scores", f"Wa 1 Tb {ATTENTION_BLOCK}", "fp32"),
    ("weights", f"Wa 1 Tb {ATTENTION_BLOCK}", "factor"), ("left", f"Wa 2 {ATTENTION_BLOCK} {ATTENTION_BLOCK}", "factor"),
    ("queries", f"Wa 4 {ATTENTION_BLOCK} Hb", "factor"), ("block", f"Wa 2 {ATTENTION_BLOCK} Hb", "fp32"),
    ("sums", "Wa 2 Tb Hb", "fp32"), ("bias", "B 3k", "fp32"),
)  # fmt: skip
TRITON_ATTENTION = (("delta", "B h T", "fp32"), ("sums", "B Ta 3k", "fp32"))
# scratch of matmuls in FP8: of all; of those that compute a weight's gradient; for dout, which these share with those that compute an
# input's gradient; and for fcproj's dout, which is narrower than the widest one and must survive longer, while GELU runs between the two
FP8_MATMULS = (
    ("inp", "B T Fc", "fp8"), ("inp_scale", "1", "fp32"), ("weight", "Fw", "fp8"), ("weight_scale", "1", "fp32"),
    ("partials", "Pf", "fp32"),
)  # fmt: skip
FP8_DWEIGHT = (("sum", "Fw", "fp32"),)
FP8_DOUT = (("dout", "2 B T Fc", "fp8"), ("dout_scale", "1", "fp32"))
FP8_FCPROJ = (("fcproj_dout", "2 B T C", "fp8"), ("fcproj_dout_scale", "1", "fp32"))
LIBRARY_TILE_ROWS = 128  # of torch's attention on a GPU


def plan_sizes(o: PlanOptions) -> dict[str, int]:
    """The letters of the tables, see tables.py, and those of scratch buffers:

    R   rows of logits in a chunk of the head      Rc  rows of logits that the classifier works on at once
    Hw  elements of a chunk of logits, and of its rows of the stream, widened for the weight's gradient
    Rn  rows of layernorm at once; GELU a quarter  Rw  rows that fit the scratch for widened factors
    Pc  partial sums of columns                    Np  partial sums of the norm   Nw  elements of a piece of the norm
    U   elements of the update at a time           G   positions of a sample
    Q   queries, and Ha heads of HS channels, that torch's attention on a CPU works on at once
    Wa  workers of numba's attention               Ta  tiles of a sequence in Triton's attention
    Tp  T as memory-efficient attention pads its row statistics

    and what _attention_sizes, _matmul_sizes and _fp8_sizes add.
    """
    tuning = TUNING[o.device]
    rows = o.B * o.T
    return sizes_of(o.config, o.B, o.T, o.tensor_parallel) | _attention_sizes(o) | _matmul_sizes(o) | _fp8_sizes(o) | {
        "Tp": round_up(o.T, 32 if o.attention == "efficient" else 1),
        "R": head_chunk_rows(o),
        "Rc": classifier_rows(o),
        "Hw": head_chunk_rows(o) * (o.config.padded_vocab_size // o.tensor_parallel + o.config.channels),
        "Rn": max(4, min(rows, tuning.row_elements // o.config.channels)),
        "Pc": COLUMN_PARTIALS if o.kernels == "triton" else CPU_COLUMN_PARTIALS,
        "Np": NORM_PARTIALS if o.fused else norm_partials(o),
        "Nw": min(tuning.update_elements, o.part_parameters),
        "Rw": max(1, min(rows, tuning.widened_rows)),
        "U": update_room(o),
        "G": max(1, min(o.sample_length, o.config.max_seq_len)),
        "Q": attention_queries(o),
        "Ha": attention_heads(o),
        "HS": o.config.head_size,
        "Wa": attention_workers(o),
        "Ta": -(-o.T // ATTENTION_ROWS),
    }  # fmt: skip


def _matmul_sizes(o: PlanOptions) -> dict[str, int]:
    """For numba's matmuls: Wm workers, Rm rows for the sums of all workers, Nf numbers in a factor, and Pm factors that are packed at once
    of a left matrix stored by columns: as many of its rows as fit, but at least a block's, each padded to a multiple of TILE_DEPTH."""
    tuning, sizes, rows = TUNING[o.device], sizes_of(o.config, parts=o.tensor_parallel), o.B * o.T
    widest = max(sizes["C"], 3 * sizes["k"], 4 * sizes["f"], sizes["w"])
    workers, depth = max(1, min(tuning.matmul_workers, -(-widest // MATMUL_PANEL))), round_up(rows, TILE_DEPTH)
    return {
        "Wm": workers,
        "Rm": workers * min(MATMUL_ROWS, round_up(max(rows, widest), MATMUL_BLOCK)),
        "Nf": 4 // DTYPE_BYTES[o.factors],
        "Pm": MATMUL_BLOCK * depth * max(1, min(tuning.packed_factors // (MATMUL_BLOCK * depth), -(-widest // MATMUL_BLOCK))),
    }


def _fp8_sizes(o: PlanOptions) -> dict[str, int]:
    """For matmuls in FP8: Fc columns of a layer's widest input or output, Fw elements of its largest weight, and Pf parts of a tensor, in
    each of which the largest element is found."""
    sizes = sizes_of(o.config, parts=o.tensor_parallel)
    features = max(3 * sizes["k"], 4 * sizes["f"])
    return {"Fc": max(sizes["C"], features), "Fw": features * sizes["C"], "Pf": FP8_PARTIALS}


def head_chunk_rows(o: PlanOptions) -> int:
    """Rows of logits per chunk, from --head-chunk or the device's tuning; never fewer for a larger batch.

    With tensor parallelism a chunk has equally many rows of each part, at least one.
    """
    parts = o.tensor_parallel
    rows = TUNING[o.device].head_bytes // (o.config.padded_vocab_size // parts * DTYPE_BYTES[o.precision])
    automatic = rows // 256 * 256 if rows > 256 else rows  # matmuls work best in whole tiles
    rows = min(o.head_chunk or automatic, o.B * o.T)
    return max(1, rows // parts) * parts


def head_sums(o: PlanOptions) -> bool:
    """Whether the head's weight gradient is added up in fp32 first: bf16 would lose bits over more than a few chunks."""
    return o.trains and o.grad_dtype == "bf16" and o.B * o.T > HEAD_GROUP * head_chunk_rows(o)


def classifier_rows(o: PlanOptions) -> int:
    """Rows of logits the classifier works on at once."""
    fitting = TUNING[o.device].classifier_elements * o.tensor_parallel // o.config.padded_vocab_size
    return max(1, min(head_chunk_rows(o), fitting))


def widens(o: PlanOptions) -> bool:
    """Whether bf16 factors of weight gradients are widened: either all matmuls widen, or torch's on this device cannot make fp32 gradients
    from them."""
    needed = o.grad_dtype != o.precision and TUNING[o.device].widened_rows > 0 and o.matmul != "numba"
    return o.matmul == "widened" or needed


def attention_queries(o: PlanOptions) -> int:
    """Queries that torch's attention on a CPU works on at once."""
    return max(1, min(o.T, TUNING[o.device].queries))


def attention_heads(o: PlanOptions) -> int:
    """Heads that it works on at once: all heads of some sequences, or an even part of one sequence's."""
    heads = max(1, TUNING[o.device].score_elements // (attention_queries(o) * o.T))
    if heads >= o.heads:
        return min(o.B, heads // o.heads) * o.heads
    return even_part(o.heads, heads)


def attention_workers(o: PlanOptions) -> int:
    """The most threads that numba's attention keeps busy, each with a head."""
    sizes = _attention_sizes(o) | {"Wa": 1}
    rooms = (row for row in NUMBA_ATTENTION if row[1].startswith("Wa"))
    each = sum(prod(resolve(shape, sizes)) * DTYPE_BYTES[o.factors if dtype == "factor" else dtype] for _, shape, dtype in rooms)
    return max(1, min(o.B * o.heads, TUNING[o.device].worker_bytes // each))


def _attention_sizes(o: PlanOptions) -> dict[str, int]:
    """For numba's attention: Tb tokens, and Hb channels of a head, rounded up to whole blocks."""
    tokens, channels = (round_up(n, ATTENTION_BLOCK) for n in (o.T, o.config.head_size))
    return {"Tb": tokens, "Hb": channels}


def update_room(o: PlanOptions) -> int:
    """Elements that the update handles at a time: no more than the largest tensor has."""
    C, Vp = o.config.channels, o.config.padded_vocab_size
    biggest = max(Vp * C, 4 * C * C) // o.tensor_parallel
    at_once = CHECKPOINT_ELEMENTS if o.fused else TUNING[o.device].update_elements
    return min(at_once, round_up(biggest, ROUNDING_BLOCK))


def norm_partials(o: PlanOptions) -> int:
    """Partial sums of the global norm of this rank's gradient: one per piece, summed in order."""
    return -(-(o.part_parameters // (o.data_ranks if o.shares else 1)) // TUNING[o.device].update_elements)


def attention_library_bytes(o: PlanOptions) -> int:
    """What torch's attention on a GPU allocates by itself, o and lse in forward, more in backward; freed at once.

    In backward it is dq, dk and dv, the row sums of do * o, and a sum of dq in fp32, in whole tiles; as of torch 2.11.
    """
    if o.attention in ("cpu", "triton"):
        return 0
    HS, heads = o.config.head_size, o.B * o.heads
    if not o.trains:
        return heads * o.T * HS * DTYPE_BYTES[o.precision] + 4 * heads * round_up(o.T, 32)
    gradients, row_sums, dq = 3 * heads * o.T * HS * DTYPE_BYTES[o.precision], 4 * heads * o.T, 4 * heads * o.T * HS
    rows_of_tiles = 4 * heads * round_up(o.T, LIBRARY_TILE_ROWS)
    if o.attention == "flash":  # sums dq deterministically: one copy for each multiprocessor that works on the same head
        return gradients + rows_of_tiles + rows_of_tiles * round_up(HS, 32) * -(-o.processors // heads)
    if o.attention == "cudnn":
        return gradients + row_sums + dq  # a guess, as its workspace is not documented
    if o.precision == "fp32":  # sums dq in place, but allocates do * o, its row sums, and these transposed
        return gradients + dq + 2 * row_sums
    return gradients + row_sums + rows_of_tiles * round_up(HS, 64)
