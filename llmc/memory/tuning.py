"""Sizes that the plan and those who work in its rooms agree on: pieces, blocks and numbers of partial sums."""

from dataclasses import dataclass

from llmc.units import MIB

ALIGNMENT = 256  # bytes; what cudaMalloc gives, and four cache lines
ROUNDING_BLOCK = 512  # elements that share one row of the rounding noise; pieces of the update are whole blocks
# sums over rows, and of the global norm, are fixed numbers of partial sums added in order: the same bits on any card
COLUMN_PARTIALS, CPU_COLUMN_PARTIALS, NORM_PARTIALS = 256, 64, 1024
# of products of numba's kernels: rows of a small tile, which has 64 columns at most, and how many factors AMX's adds up at once
TILE_ROWS, TILE_DEPTH = 4, 32
ATTENTION_ROWS = 64  # queries, or keys, of a program of Triton's attention
ATTENTION_BLOCK = 64  # queries at once of numba's attention, and what keys and channels of a head are rounded up to: whole tiles
# of numba's matmuls: rows and columns of factors (an fp32 or two bf16) that a thread packs at once of the right matrix, 128 KiB, beside a
# tile's rows of the left one (by AMX more, where threads are few); rows of the left one that are shared out together; and those that each
# worker has room to add up products of
MATMUL_DEPTH, MATMUL_PANEL, MATMUL_BLOCK, MATMUL_ROWS = 256, 128, 64, 256
MATMUL_WORKSPACE = 32 * MIB  # of cuBLASLt, as NVIDIA advises for Hopper
FP8_PARTIALS = 1024  # largest elements of parts of a tensor that becomes FP8
FP8_MULTIPLE = 16  # of every dimension but the rows of an output: what FP8 matmuls take
UPDATE_NUMBERS = 50  # of each tensor its seed, its last seed and its decay; two of the step
CHECKPOINT_ELEMENTS = 1 << 20  # of the arena that a checkpoint handles at a time, where the update itself needs no working room
HEAD_GROUP = 4  # chunks whose bf16 weight gradients are added up in bf16; groups are added up in fp32
# that ranks tell each other every step: loss, norms of their gradient and of what all parts have of it, whether to stop, checkpoints
# written
RANK_NUMBERS = 5


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of working pieces on one kind of device: small enough for its caches, large enough to keep it busy."""

    head_bytes: int  # logits that exist at once; with fewer rows the re-reads of wte and of its gradient show
    classifier_elements: int  # fp32 working copy of a few logits rows
    row_elements: int  # fp32 working copies of a few rows, in layernorm and GELU
    update_elements: int  # elements of the arena the update handles at a time
    widened_rows: int  # of bf16 factors, that fit the room to widen them for a matmul; 0: the device never has to
    queries: int = 0  # of torch's attention on a CPU, at once
    score_elements: int = 0  # fp32 scores of these queries, of as many heads as that makes
    worker_bytes: int = 0  # room of all workers of numba's attention: a limit to how many threads work on long sequences
    packed_factors: int = 0  # of the left matrix of a weight's gradient, that numba's matmuls pack at once
    matmul_workers: int = 0  # threads that these keep busy at most


TUNING = {
    # measured on two AVX512 cores with 1 MiB of L2 each, update of 124M parameters: 0.24 s in pieces of 131072 elements
    # (calls cost), 0.19 s of 262144, 0.17 s of 524288, no better beyond. Layernorm of 1024 rows of 768, forward: 0.62, 0.46, 0.39 ms
    # torch's attention of (B, T) = (4, 256) and (1, 1024), 12 heads, bf16, forward and backward, softmax by a kernel, twice: 9.7 and 25 ms
    # with these; with 256 queries 11.0 and 25, with half the elements 9.2 and 29. Keys and values packed transposed as well: faster
    # matmuls, and as much slower packing. numba's workers need 1.3 MiB each at T = 1024 of pairs of bf16, 1.9 of fp32: 48 or 34 of them
    # in less than the head's logits
    # numba's matmuls of d12: with panels of 384 or 512 rows, or half the packed factors, the same within what repeats on AMD. On Intel with
    # panels half as wide 4 to 8% slower; with 384 rows 2% faster, but less exact; with twice as many rows of sums too. 20 MiB in all
    "cpu": Tuning(
        head_bytes=100 << 20, classifier_elements=1 << 18, row_elements=1 << 19, update_elements=1 << 19, widened_rows=1024,
        queries=128, score_elements=3 << 18, worker_bytes=64 << 20, packed_factors=1 << 20, matmul_workers=64,
    ),
    # the head's: on an H200 its matmuls reach 91 to 102% of a large one's rate with it. The others are for a card without Triton, and leads
    "cuda": Tuning(head_bytes=800 << 20, classifier_elements=1 << 24, row_elements=1 << 22, update_elements=1 << 24, widened_rows=0),
}  # fmt: skip
