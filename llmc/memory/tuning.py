"""Sizes that the plan and the code that uses its scratch agree on: pieces, blocks and numbers of partial sums."""

from dataclasses import dataclass

from llmc.units import MIB

ALIGNMENT = 256  # bytes; what cudaMalloc gives, and four cache lines
ROUNDING_BLOCK = 512  # elements that share one row of the rounding noise; pieces of the update are whole blocks
# sums over rows, and the global norm's, are fixed numbers of partial sums added in order: the same bits on any card
COLUMN_PARTIALS, CPU_COLUMN_PARTIALS, NORM_PARTIALS = 256, 64, 1024
# numba's kernels: rows of a small tile of a product, which has 64 columns at most; and how many bf16 numbers a tile of AMX adds up at once
NUMBA_TILE_ROWS, TILE_DEPTH = 4, 32
ATTENTION_ROWS = 64  # queries, or keys, that a program of Triton's attention handles
ATTENTION_BLOCK = 64  # queries that numba's attention handles at once; keys, and channels of a head, are rounded up to it: whole tiles
# numba's matmuls. At a time, a thread packs a panel of the right matrix, MATMUL_DEPTH factors (each an fp32 or two bf16) by MATMUL_PANEL
# columns: 128 KiB, or more with AMX or large tiles, if threads are few. Behind it there is room for a tile's rows of the left matrix
MATMUL_DEPTH, MATMUL_PANEL = 256, 128
MATMUL_BLOCK = 64  # rows of the left matrix that threads are given together
MATMUL_ROWS = 256  # rows whose sums each worker has room for
MATMUL_WORKSPACE = 32 * MIB  # cuBLASLt's, as NVIDIA advises for Hopper
FP8_PARTIALS = 1024  # parts of a tensor, in each of which the largest element is found before the tensor is converted to FP8
FP8_MULTIPLE = 16  # FP8 matmuls need multiples of it in every dimension but the rows of an output
# what the update's kernels read: for each tensor a row of chunk_layout, which never changes, and numbers that do; and numbers of the step
UPDATE_COLUMNS, NUMBERS_OF_TENSOR, NUMBERS_OF_STEP = 5, 3, 2
CHECKPOINT_ELEMENTS = 1 << 20  # of the arena that a checkpoint handles at a time, where the update itself needs no scratch
HEAD_GROUP = 4  # chunks whose weight gradients are added up in bf16; groups are added up in fp32
# what ranks tell one another every step, a number each, and its column in rank_numbers
LOSS, NORM, UNDIVIDED_NORM, STOPS, WRITTEN = range(RANK_NUMBERS := 5)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of working pieces on one kind of device: small enough for its caches, large enough to keep it busy."""

    head_bytes: int  # of logits that exist at once; with fewer rows, reading wte and its gradient again takes noticeable time
    classifier_elements: int  # fp32 working copy of a few logits rows
    row_elements: int  # fp32 working copies of a few rows, in layernorm and GELU
    update_elements: int  # elements of the arena the update handles at a time
    widened_rows: int  # of bf16 factors that fit the scratch where a matmul widens them; 0: the device never has to
    queries: int = 0  # that torch's attention on a CPU handles at once
    score_elements: int = 0  # fp32 scores of these queries at once, for as many heads as that makes
    worker_bytes: int = 0  # scratch of all workers of numba's attention: limits how many threads work on long sequences
    packed_factors: int = 0  # of a weight gradient's left matrix that numba's matmuls pack at once
    matmul_workers: int = 0  # the most threads that these keep busy


TUNING = {
    # measured on two AVX512 cores with 1 MiB of L2 each. Update of 124M parameters: 0.24 s in pieces of 131072 elements (calls cost
    # time), 0.19 s of 262144, 0.17 s of 524288, no better beyond. Layernorm forward of 1024 rows of 768: 0.62, 0.46, 0.39 ms
    # torch's attention of (B, T) = (4, 256) and (1, 1024), 12 heads, bf16, forward and backward, softmax by a kernel, twice: 9.7 and 25 ms
    # with these; with 256 queries 11.0 and 25, with half the elements 9.2 and 29. Packing keys and values transposed as well makes matmuls
    # faster, and packing slower by as much. Each of numba's workers needs 1.3 MiB at T = 1024 for pairs of bf16, 1.9 MiB for fp32: 48 or
    # 34 of them fit in less than the head's logits
    # numba's matmuls of d12: on AMD panels of 384 or 512 rows, or half the packed factors, make no repeatable difference. On Intel panels
    # half as wide are 4 to 8% slower; with 384 rows 2% faster, but less exact; with twice as many rows of sums too. 20 MiB in all
    "cpu": Tuning(
        head_bytes=100 << 20, classifier_elements=1 << 18, row_elements=1 << 19, update_elements=1 << 19, widened_rows=1024,
        queries=128, score_elements=3 << 18, worker_bytes=64 << 20, packed_factors=1 << 20, matmul_workers=64,
    ),
    # with these head_bytes the head's matmuls reach 91 to 102% of a large one's rate on an H200. The others are for a card without Triton,
    # and are not measured
    "cuda": Tuning(head_bytes=800 << 20, classifier_elements=1 << 24, row_elements=1 << 22, update_elements=1 << 24, widened_rows=0),
}  # fmt: skip
