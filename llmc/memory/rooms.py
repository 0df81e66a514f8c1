"""How large working room is: rows, heads, workers and elements at once, of the options' batch on their device."""

from math import prod

from llmc.memory.options import PlanOptions
from llmc.memory.tables import DTYPE_BYTES, PARAMETERS, parameter_shapes, resolve, sizes_of
from llmc.memory.tuning import (
    ATTENTION_BLOCK, ATTENTION_ROWS, CHECKPOINT_ELEMENTS, COLUMN_PARTIALS, CPU_COLUMN_PARTIALS, HEAD_GROUP, MATMUL_BLOCK, MATMUL_PANEL,
    MATMUL_ROWS, NORM_PARTIALS, ROUNDING_BLOCK, TILE_DEPTH, TUNING, even_part, whole,
)  # fmt: skip

# working room of attention on a CPU, and of Triton's: (name, shape, dtype)
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


def plan_sizes(o: PlanOptions) -> dict[str, int]:
    """The letters of the tables, and those of working room: R rows of a head chunk, Rc of the classifier, Rn of a layernorm (and a
    quarter of them of GELU), Pc and Np partial sums of columns and of the norm, Rw rows that fit the room of widened factors, U elements
    of the update, G positions of a sample; of attention on a CPU Q queries and Ha heads at once, of HS channels, or numba's Wa workers,
    of Triton's Ta tiles of a sequence; and what _attention_sizes and _matmul_sizes add."""
    tuning = TUNING[o.device]
    rows = o.B * o.T
    lse_multiple = 32 if o.attention_kind == "efficient" else 1  # it pads its row statistics
    return sizes_of(o.config, o.B, o.T, o.tensor_parallel) | _attention_sizes(o) | _matmul_sizes(o) | {
        "Tp": whole(o.T, lse_multiple),
        "R": head_chunk_rows(o),
        "Rc": classifier_rows(o),
        "Rn": max(4, min(rows, tuning.row_elements // o.config.channels)),
        "Pc": COLUMN_PARTIALS if o.kernel_set == "triton" else CPU_COLUMN_PARTIALS,
        "Np": NORM_PARTIALS if o.fused else norm_partials(o),
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
    """Of numba's matmuls: Wm workers, Rm rows for their sums in all, Nf numbers in a factor, and Pm factors of a left matrix, of columns,
    that are packed at once: of as many of its rows as fit, but at least of a block's, each filled up to TILE_DEPTH."""
    tuning, sizes, rows = TUNING[o.device], sizes_of(o.config, parts=o.tensor_parallel), o.B * o.T
    widest = max(sizes["C"], sizes["k"], 3 * sizes["k"], 4 * sizes["f"], sizes["w"])
    workers, depth = max(1, min(tuning.matmul_workers, -(-widest // MATMUL_PANEL))), whole(rows, TILE_DEPTH)
    return {
        "Wm": workers,
        "Rm": workers * min(MATMUL_ROWS, whole(max(rows, widest), MATMUL_BLOCK)),
        "Nf": 4 // DTYPE_BYTES[o.factor_type],
        "Pm": MATMUL_BLOCK * depth * max(1, min(tuning.packed_factors // (MATMUL_BLOCK * depth), -(-widest // MATMUL_BLOCK))),
    }


def head_chunk_rows(options: PlanOptions) -> int:
    """Rows of logits per chunk, the wish or the device's tuning; never fewer for a larger batch.

    With tensor parallelism as many of each part's, at least one.
    """
    parts = options.tensor_parallel
    rows = TUNING[options.device].head_bytes // (options.config.padded_vocab_size // parts * DTYPE_BYTES[options.precision])
    automatic = rows // 256 * 256 if rows > 256 else max(1, rows)  # a matmul likes whole tiles
    rows = min(options.head_chunk or automatic, options.B * options.T)
    return max(1, rows // parts) * parts


def head_sums(options: PlanOptions) -> bool:
    """Whether the head's weight gradient is added up in fp32 first: bf16 would lose bits over more than a few chunks."""
    return options.gradients == "bf16" and options.B * options.T > HEAD_GROUP * head_chunk_rows(options)


def classifier_rows(options: PlanOptions) -> int:
    """Rows of logits the classifier works on at once."""
    return max(
        1,
        min(
            head_chunk_rows(options),
            TUNING[options.device].classifier_elements * options.tensor_parallel // options.config.padded_vocab_size,
        ),
    )


def widens(options: PlanOptions) -> bool:
    """Whether bf16 factors of weight gradients are widened: all matmuls' are, or torch has none on this device for gradients in fp32."""
    needed = options.gradients != options.precision and TUNING[options.device].widened_rows > 0 and options.matmul != "numba"
    return options.matmul == "widened" or needed


def attention_queries(o: PlanOptions) -> int:
    """Queries that torch's attention on a CPU works on at once."""
    return max(1, min(o.T, TUNING[o.device].queries))


def attention_heads(o: PlanOptions) -> int:
    """Heads that it works on at once: those of some whole sequences, or an even part of one's."""
    heads = max(1, TUNING[o.device].score_elements // (attention_queries(o) * o.T))
    NH = sizes_of(o.config, parts=o.tensor_parallel)["h"]
    if heads >= NH:
        return min(o.B, heads // NH) * NH
    return even_part(NH, heads)


def attention_workers(o: PlanOptions) -> int:
    """Threads that numba's attention keeps busy at most, each with a head."""
    sizes = _attention_sizes(o) | {"Wa": 1}
    rooms = (row for row in NUMBA_ATTENTION if row[1].startswith("Wa"))
    each = sum(prod(resolve(shape, sizes)) * DTYPE_BYTES[o.factor_type if dtype == "factor" else dtype] for _, shape, dtype in rooms)
    heads = o.B * sizes_of(o.config, parts=o.tensor_parallel)["h"]
    return max(1, min(heads, TUNING[o.device].worker_bytes // each))


def _attention_sizes(o: PlanOptions) -> dict[str, int]:
    """Of numba's attention: Tb tokens and Hb channels of a head in whole blocks."""
    tokens, channels = (whole(n, ATTENTION_BLOCK) for n in (o.T, o.config.head_size))
    return {"Tb": tokens, "Hb": channels}


def update_room(options: PlanOptions) -> int:
    """Elements that the update handles at a time. Tensors no longer than a layer's largest bias (4C) are never cut."""
    C, Vp = options.config.channels, options.config.padded_vocab_size
    biggest = max(Vp * C, 4 * C * C) // options.tensor_parallel
    at_once = CHECKPOINT_ELEMENTS if options.fused else TUNING[options.device].update_elements
    room = min(at_once, whole(biggest, ROUNDING_BLOCK))
    return max(room, whole(4 * C, ROUNDING_BLOCK))


def norm_partials(o: PlanOptions) -> int:
    """Partial sums of the global norm of this rank's gradient: one per piece, summed in order."""
    return -(-(o.num_parameters // (o.ranks if o.shares else 1)) // TUNING[o.device].update_elements)


def layer_elements(o: PlanOptions) -> int:
    """Elements of one layer's tensors."""
    shapes = parameter_shapes(o.config, o.tensor_parallel)
    return sum(prod(shapes[p.name][1:]) for p in PARAMETERS if p.per_layer)


def outer_elements(o: PlanOptions) -> int:
    """Elements of the tensors that belong to no layer."""
    return o.num_parameters - o.config.num_layers * layer_elements(o)
