"""The memory plan: tables + options -> where every byte of a run lives. Plain arithmetic; no torch, no device.

Parameters, gradients and optimizer state are one arena each, packed in file order. All activations share one arena:
every tensor has the span of stages it is needed for, and tensors whose spans do not meet may share bytes. The step
itself, evaluation, the update and sampling are all stages on the same line, so they all fit in the same arena.
"""

from bisect import insort
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import prod

from llmc.config import ModelConfig
from llmc.memory.ladder import again_stages, backward_schedule, kept_names, segments, transient_lifetimes
from llmc.memory.layout import divides
from llmc.memory.tables import (
    BLOCK_ACTIVATIONS, BLOCK_GRADIENTS, DTYPE_BYTES, FORWARD_STAGES, PARAMETERS, num_parameters, parameter_shapes, resolve, sizes_of,
)  # fmt: skip

MIB = 1024 * 1024
ALIGNMENT = 256  # bytes; what cudaMalloc gives, and four cache lines
ROUNDING_BLOCK = 512  # elements that share one row of the rounding noise; pieces of the update are whole blocks
# sums over rows, and of the global norm, are fixed numbers of partial sums added in order: the same bits on any card
COLUMN_PARTIALS, CPU_COLUMN_PARTIALS, NORM_PARTIALS = 256, 64, 1024
# of products of numba's kernels: rows of a tile, which has 64 columns at most, or of AMX's how many numbers it adds up at once
TILE_ROWS, TILE_DEPTH = 4, 32
ATTENTION_ROWS = 128  # queries, or keys, of a program of Triton's attention
ATTENTION_BLOCK = 64  # queries at once of numba's attention, and what keys and channels of a head are rounded up to: whole tiles
# of numba's matmuls: rows and columns of factors (an fp32 or two bf16) that a thread packs at once of the right matrix, 128 KiB, beside a
# tile's rows of the left one (by AMX more, where threads are few); rows of the left one that are shared out together; and those that each
# worker has room to add up products of
MATMUL_DEPTH, MATMUL_PANEL, MATMUL_BLOCK, MATMUL_ROWS = 256, 128, 64, 256
MATMUL_WORKSPACE = 32 * MIB  # of cuBLASLt, as NVIDIA advises for Hopper
UPDATE_NUMBERS = 50  # of each tensor its seed, its last seed and its decay; two of the step
CHECKPOINT_ELEMENTS = 1 << 20  # of the arena that a checkpoint handles at a time, where the update itself needs no working room
HEAD_GROUP = 4  # chunks whose bf16 weight gradients are added up in bf16; groups are added up in fp32
SHARDED_FROM = {"parameters": 3, "gradients": 2, "m": 1, "v": 1, "master": 1, "master_bits": 1}  # arena -> ZeRO stage
# that ranks tell each other every step: loss, norms of their gradient and of what all parts have of it, whether to stop, checkpoints
# written
RANK_NUMBERS = 5
LAYER_SLOTS = 2  # whole layers of sharded weights, and of gradients: one in use, one on its way
OFFLOAD_SLOTS = 3  # residuals on the device with --offload-residual: one in use, one on its way in, one on its way out


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
    "cpu": Tuning(100 << 20, 1 << 18, 1 << 19, 1 << 19, 1024, 128, 3 << 18, 64 << 20, 1 << 20, 64),
    # leads, not measured yet; all but the first are for a card without Triton
    "cuda": Tuning(800 << 20, 1 << 24, 1 << 22, 1 << 24, 0),
}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Everything the plan depends on."""

    config: ModelConfig
    B: int
    T: int
    precision: str = "bf16"  # fp32 | bf16, of weights and activations
    recompute: int = 1
    master: str = "fp32"  # of a bf16 model: fp32 | bits16, the 16 bits its weights lack | none
    optimizer_state: str = "fp32"  # fp32 | bf16, of m and v
    grad_dtype: str = ""  # fp32 | bf16; empty: as the weights
    offload_residual: bool = False
    device: str = "cpu"  # cpu | cuda
    kernels: str = ""  # torch | triton | numba, which need working room of their own; empty: triton on CUDA, else torch
    gelu_fusion: int = 0  # 0 | 1 | 2: GELU, and its gradient, inside matmuls
    attention: str = ""  # cpu | flash | cudnn | efficient | triton; empty: the device's default
    head_chunk: int = 0  # rows; 0 = automatic
    sample_length: int = 64
    ranks: int = 1  # that train on data of their own
    zero_stage: int = 0  # what each of them holds only a share of: 1 m, v and master, 2 gradients too, 3 weights too
    tensor_parallel: int = 1  # parts of the model; each of those ranks is then as many
    matmul: str = "native"  # on a CPU native, which is torch's, numba, or widened, which is torch's of bf16 factors in fp32
    factors: str = ""  # bf16 | fp32, what numba's kernels multiply; empty: as the weights
    step_sequences: int = 0  # of each rank in a step; more than B make several micro-steps
    reduce_every_micro_step: bool = False  # of several, gradients are summed over ranks after each, as stages 2 and 3 must
    keep_gathered: bool = False  # of ln1 and ln2 what all parts gathered, for backward; else they gather it again
    processors: int = 132  # of the card, an H100's: flash attention allocates by them
    async_checkpoint: bool = False  # checkpoints are written beside training, from a copy in host memory
    rank: int = 0  # whose plan it is. Only that copy depends on it: the first rank's is the largest, so all choose by that

    @property
    def kernel_set(self) -> str:
        """torch, triton or numba: whose code does what is not a matmul or a GPU's attention."""
        return self.kernels or ("triton" if self.device == "cuda" else "torch")

    @property
    def fused(self) -> bool:
        """Whether kernels do it, in one pass each, or torch's operations piece by piece."""
        return self.kernel_set != "torch"

    @property
    def attention_kind(self) -> str:
        """Whose attention runs. On CUDA flash in bf16, as it repeats its bits; it has no fp32 form."""
        return self.attention or ("cpu" if self.device == "cpu" else "efficient" if self.precision == "fp32" else "flash")

    @property
    def multiplied_in(self) -> str:
        """Type of the factors of matmuls."""
        return {"native": self.precision, "numba": self.factor_type, "widened": "fp32"}[self.matmul]

    @property
    def factor_type(self) -> str:
        """Type of the factors of products within numba's kernels."""
        return self.factors or self.precision

    @property
    def gradients(self) -> str:
        """Type of the gradients."""
        return self.grad_dtype or self.precision

    @property
    def keeps_master(self) -> bool:
        """In fp32 the parameters are their own master copy."""
        return self.master == "fp32" and self.precision != "fp32"

    @property
    def keeps_bits(self) -> bool:
        """Whether the master exists as a bf16 weight and the 16 bits it lacks."""
        return self.master == "bits16" and self.precision != "fp32"

    def ranks_of(self, arena: str) -> int:
        """Over how many ranks an arena of one number for each parameter is shared out."""
        return self.ranks if self.zero_stage >= SHARDED_FROM[arena] else 1

    @property
    def shares(self) -> bool:
        """Whether several ranks sum up the gradient in equal shares; else, at stage 0, as a whole."""
        return self.ranks > 1 and divides(self.config, self.ranks, self.tensor_parallel)

    @property
    def reduces_always(self) -> bool:
        """Whether ranks sum up the gradients of every micro-step, and add up the sums; else those of a step, added up before."""
        if self.zero_stage >= SHARDED_FROM["gradients"]:
            return self.ranks > 1
        return self.reduce_every_micro_step and self.shares and self.step_sequences > self.B

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.ranks * self.tensor_parallel

    @property
    def num_parameters(self) -> int:
        """Of this rank's part of the model."""
        return num_parameters(self.config, self.tensor_parallel)

    @property
    def keeps_gathered(self) -> bool:
        """Whether ln1 and ln2 of all parts are kept for backward, where a part's own would be."""
        return self.keep_gathered and self.tensor_parallel > 1

    @property
    def rounds(self) -> bool:
        """Whether the update rounds anything to bf16, and so needs noise."""
        return "bf16" in (self.precision, self.optimizer_state)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the activation arena. A kept tensor's shape has a leading L, or slots."""

    name: str
    purpose: str  # kept | shared | gradient | head | scratch | sample
    shape: tuple[int, ...]
    dtype: str
    spans: tuple[tuple[str, str], ...]  # (first stage, last stage) it must survive
    offset: int = -1

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class Plan:
    """Where every byte lives, for one set of options.

    arenas       purpose -> bytes
    tensors      name -> PlannedTensor, the activation arena's contents
    schedule     the stages of a block's backward pass
    segments     which blocks run forward again before backward, and where each residual3 lies
    host_bytes   pinned host memory beside the total: of --offload-residual, and on CUDA of --async-checkpoint
    """

    def __init__(self, options: PlanOptions):
        self.options = options
        self.schedule = backward_schedule(options.recompute)
        self.segments = segments(options.recompute, options.config.num_layers)
        self.stages = _stage_line(options.recompute)
        self.tensors = {t.name: t for t in _place(_activation_tensors(options), self.stages)}

    @cached_property
    def arenas(self) -> dict[str, int]:
        o, n = self.options, self.options.num_parameters
        sizes = {arena: n // o.ranks_of(arena) * DTYPE_BYTES[dtype] for arena, dtype in self.flat_types.items()}
        first = {purpose: sizes.pop(purpose) for purpose in ("parameters", "gradients")}
        return first | {"activations": _extent(self.tensors.values())} | sizes

    @property
    def flat_types(self) -> dict[str, str]:
        """Type of every arena that holds one number for each parameter."""
        o = self.options
        types = {"parameters": o.precision, "gradients": o.gradients, "m": o.optimizer_state, "v": o.optimizer_state}
        return types | ({"master": "fp32"} if o.keeps_master else {}) | ({"master_bits": "int16"} if o.keeps_bits else {})

    @property
    def total_bytes(self) -> int:
        """Everything allocated by us on the device, and what library calls allocate meanwhile."""
        return sum(self.arenas.values()) + self.library_bytes + (self.checkpoint_bytes if self.options.device == "cpu" else 0)

    @property
    def kept_bytes(self) -> int:
        """Activations kept from forward to backward, all layers."""
        return sum(t.nbytes for t in self.tensors.values() if t.purpose == "kept")

    @property
    def columns(self) -> dict[str, int]:
        """The total, part by part: parameters, gradients, optimizer, kept, shared, head, scratch, library; of several ranks gathered too,
        and on a CPU the checkpoint that is written beside training.

        The parts of the activation arena take turns in the same bytes. Each byte counts for the first of kept, shared, head, gathered
        and scratch that ever uses it, gaps for scratch, so the parts add up to what is allocated.
        """
        a = self.arenas
        optimizer = sum(n_bytes for name, n_bytes in a.items() if name not in ("parameters", "gradients", "activations"))
        columns = {"parameters": a["parameters"], "gradients": a["gradients"], "optimizer": optimizer}
        ranges, covered = [], 0
        for part, purposes in arena_parts(self.options).items():
            ranges += [(t.offset, t.offset + t.nbytes) for t in self.tensors.values() if t.purpose in purposes]
            so_far = a["activations"] if part == "scratch" else _covered(ranges)
            columns[part], covered = so_far - covered, so_far
        copied = {"checkpoint": self.checkpoint_bytes} if self.options.async_checkpoint and self.options.device == "cpu" else {}
        return columns | {"library": self.library_bytes} | copied

    @property
    def host_bytes(self) -> int:
        """Pinned host memory, beside the total."""
        return self.residual_bytes + (self.checkpoint_bytes if self.options.device == "cuda" else 0)

    @property
    def checkpoint_tensors(self) -> dict[str, tuple[int, str]]:
        """Name -> elements and type of what --async-checkpoint copies, in order: the weights, which rank 0 writes, then this rank's m, v
        and master, in fp32 as in their file."""
        o, n = self.options, num_parameters(self.options.config)
        if not o.async_checkpoint or o.rank % o.tensor_parallel:  # of several parts the first writes
            return {}
        state = ("m", "v") if o.master == "none" else ("m", "v", "master")
        weights = {"parameters": (n, o.precision)} if o.rank == 0 else {}
        return weights | {name: (n // o.ranks_of("m"), "fp32") for name in state}

    @property
    def checkpoint_bytes(self) -> int:
        """Host memory of --async-checkpoint."""
        return sum(elements * DTYPE_BYTES[dtype] for elements, dtype in self.checkpoint_tensors.values())

    @property
    def residual_bytes(self) -> int:
        """Host memory of --offload-residual: the residuals of all layers that do not stay on the device."""
        o = self.options
        return self.offloaded_layers * o.B * o.T // o.tensor_parallel * o.config.channels * DTYPE_BYTES[o.precision]

    @property
    def offloaded_layers(self) -> int:
        """How many residuals go to the host: all but the last, which are still on the device when backward starts."""
        return max(0, self.options.config.num_layers - OFFLOAD_SLOTS) if self.options.offload_residual else 0

    def residual_slot(self, l: int) -> int:
        """Which slot of the tensor residual3 holds the output of layer l."""
        return _residual_slots(self.options)[l]

    @property
    def library_bytes(self) -> int:
        """What a card's attention takes in memory of its own, o and lse forward, more backward; freed at once.

        Backward that is dq, dk and dv, the row sums of do * o, and a sum of dq in fp32, in whole tiles; of torch 2.11.
        """
        o = self.options
        if o.attention_kind in ("cpu", "triton"):
            return 0
        sizes = plan_sizes(o)
        heads, HS = o.B * sizes["h"], sizes["HS"]
        gradients, row_sums, dq = 3 * heads * o.T * HS * DTYPE_BYTES[o.precision], 4 * heads * o.T, 4 * heads * o.T * HS
        if o.attention_kind == "flash":  # sums dq deterministically: in one copy for every part of the card that works on a head
            tiles = 4 * heads * whole(o.T, 128)
            return gradients + tiles + tiles * whole(HS, 32) * -(-o.processors // heads)
        if o.attention_kind == "cudnn":
            return gradients + row_sums + dq  # a guess, as its workspace is not documented
        if o.precision == "fp32":  # sums dq in place, but makes tensors of do * o, its row sums, and these transposed
            return gradients + dq + 2 * row_sums
        return gradients + row_sums + 4 * heads * whole(o.T, 128) * whole(HS, 64)

    @property
    def bytes_per_sequence(self) -> int:
        """Activation bytes per sequence of the batch; llm.c's figure."""
        return self.arenas["activations"] // self.options.B

    def largest_batch(self, budget_bytes: int) -> int:
        """The largest B whose whole plan fits in `budget_bytes`; 0 if not even one sequence does.

        Memory grows with B but for dips: placement is greedy and takes large tensors first, so it may find a better one where a tensor
        gets larger than another; and the fewer heads there are the more copies of dq attention makes. So some B beyond the first that does
        not fit are tried too, and where one fits it goes on from there.
        """

        @cache
        def planned(B):
            return Plan(replace(self.options, B=B))

        def fits(B):
            return planned(B).total_bytes <= budget_bytes

        def reached_from(low):
            """A B at or beyond one that fits, which fits while the next one does not."""
            step = 1
            while fits(low + step):
                low, step = low + step, 2 * step
            high = low + step
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            return low

        if not fits(1):
            return 0
        heads, further = plan_sizes(self.options)["h"], 1
        while further:
            low = reached_from(further)
            tried = {*range(low + 1, max(low + 9, self.options.processors // heads + 2)), *_overtaken(planned(low), planned(low + 1))}
            further = max(filter(fits, tried), default=0)
        return low


def _overtaken(plan: Plan, one_more: Plan) -> set[int]:
    """Each B beyond the plan's, by an eighth at most, from which on a tensor is larger than another that is larger now; and the one before,
    where they may be equally large. one_more: the plan of one sequence more."""
    low, sizes, next_sizes = plan.options.B, *({name: t.nbytes for name, t in each.tensors.items()} for each in (plan, one_more))
    lines = {(nbytes, next_sizes[name] - nbytes) for name, nbytes in sizes.items() if name in next_sizes}  # and what a sequence adds
    overtaken = set()
    for (larger, slope), (smaller, steeper) in product(lines, lines):
        if smaller < larger and slope < steeper:
            ahead = (larger - smaller) // (steeper - slope) + 1
            if ahead <= low // 8:
                overtaken |= {low + ahead - 1, low + ahead} - {low}
    return overtaken


ARENA_PARTS = {
    "kept": ("kept",), "shared": ("shared", "gradient"), "head": ("head",), "gathered": ("gathered",), "scratch": ("scratch", "sample"),
}  # fmt: skip


def arena_parts(o: PlanOptions) -> dict[str, tuple[str, ...]]:
    """Columns of the plan's table that the activation arena is made of -> purposes of tensors."""
    return {part: purposes for part, purposes in ARENA_PARTS.items() if part != "gathered" or o.world > 1}


def _covered(ranges) -> int:
    """Bytes that at least one of the (start, end) ranges covers."""
    total, reach = 0, 0
    for start, end in sorted(ranges):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


@cache
def _stage_line(level) -> tuple[str, ...]:
    """All stages of a run, in the order of time; one block stands for every layer, as they share their transients."""
    again = (prefix + s.name for prefix, stages in again_stages(level) for s in stages)
    return (
        "encoder", *(s.name for s in FORWARD_STAGES), "lnf", "head", "lnf_backward", *again,
        *("backward: " + s.name for s in backward_schedule(level)), "encoder_backward", "update", "sample",
    )  # fmt: skip


def _residual_slots(o: PlanOptions) -> tuple[int, ...]:
    """For every layer, which slot of the tensor residual3 its output takes."""
    L = o.config.num_layers
    return tuple(l % OFFLOAD_SLOTS if o.offload_residual else segments(o.recompute, L).slot(l) for l in range(L))


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


def update_room(options: PlanOptions) -> int:
    """Elements that the update handles at a time. Tensors no longer than a layer's largest bias (4C) are never cut."""
    C, Vp = options.config.channels, options.config.padded_vocab_size
    biggest = max(Vp * C, 4 * C * C) // options.tensor_parallel
    at_once = CHECKPOINT_ELEMENTS if options.fused else TUNING[options.device].update_elements
    room = min(at_once, whole(biggest, ROUNDING_BLOCK))
    return max(room, whole(4 * C, ROUNDING_BLOCK))


def whole(n: int, unit: int) -> int:
    """n, or the next multiple of a unit."""
    return -(-n // unit) * unit


def even_part(n: int, most: int) -> int:
    """The largest of parts of n that are as few and as even as can be, each of at most so much."""
    return -(-n // -(-n // most))


def plan_sizes(o: PlanOptions) -> dict[str, int]:
    """The letters of the tables, and those of working room: R rows of a head chunk, Rc of the classifier, Rn of a layernorm (and a
    quarter of them of GELU), Rw that fit the room of widened factors, U elements of the update, G positions of a sample; of attention on
    a CPU Q queries and Ha heads at once, of HS channels, or numba's Wa workers, of Triton's Ta tiles of a sequence; and what
    _attention_sizes and _matmul_sizes add."""
    tuning = TUNING[o.device]
    rows = o.B * o.T
    lse_multiple = 32 if o.attention_kind == "efficient" else 1  # it pads its row statistics
    return sizes_of(o.config, o.B, o.T, o.tensor_parallel) | _attention_sizes(o) | _matmul_sizes(o) | {
        "Tp": whole(o.T, lse_multiple),
        "R": head_chunk_rows(o),
        "Rc": classifier_rows(o),
        "Rn": max(4, min(rows, tuning.row_elements // o.config.channels)),
        "Pc": COLUMN_PARTIALS if o.kernel_set == "triton" else CPU_COLUMN_PARTIALS,
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


STEP = ("encoder", "encoder_backward")


def _activation_tensors(o: PlanOptions):
    """Every tensor of the activation arena, not yet placed."""
    sizes, types = plan_sizes(o), {"act": o.precision, "grad": o.gradients, "factor": o.factor_type}
    rows = (*_block_rows(o), *_head_rows(o), *_working_rows(o), *_rank_rows(o), *_update_rows(o), *_sample_rows(o))
    for name, purpose, shape, dtype, *spans in rows:
        yield PlannedTensor(name, purpose, resolve(shape, sizes), types.get(dtype, dtype), tuple(spans))


def _block_rows(o: PlanOptions):
    """(name, purpose, shape, dtype, *spans): what the blocks read and write, and what goes into the first."""
    yield "inputs", "scratch", "B T", "int64", STEP
    yield "encoded", "kept", "B s C", "act", STEP
    kept = kept_names(o.recompute)
    lifetimes = transient_lifetimes(o.recompute, o.gelu_fusion)
    for a in (*BLOCK_ACTIVATIONS, *BLOCK_GRADIENTS):
        if a.name == "residual3":
            yield a.name, "kept", f"{1 + max(_residual_slots(o))} {a.shape}", a.dtype, STEP
        elif a.name in kept:
            whole = o.keeps_gathered and a.name in ("ln1", "ln2")
            yield a.name, "kept", "L B T C" if whole else "L " + a.shape, a.dtype, STEP
        else:
            yield a.name, "gradient" if a in BLOCK_GRADIENTS else "shared", a.shape, a.dtype, *lifetimes[a.name]
    yield "dresidual", "gradient", "B s C", "act", ("lnf_backward", "encoder_backward")


def _head_rows(o: PlanOptions):
    """The last layernorm and the classifier. lnf becomes its own gradient, chunk by chunk."""
    head = ("head", "head")
    yield "targets", "scratch", "B T", "int64", ("encoder", "head")
    yield "losses", "scratch", "B T", "fp32", ("encoder", "sample")  # survives micro-steps
    last_norm = ("fcproj", "lnf_backward")  # it is one pass with the last block's last addition
    yield "lnf", "head", "B s C", "act", last_norm
    yield "lnf_mean", "head", "B s", "fp32", last_norm
    yield "lnf_rstd", "head", "B s", "fp32", last_norm
    yield "logits", "head", "R w", "act", head, ("sample", "sample")
    if o.tensor_parallel > 1:
        yield "head_rows", "gathered", "R C", "act", head
        yield "head_targets", "gathered", "R", "int64", head
        yield "all_logits", "gathered", "1 Vp", "act", ("sample", "sample")
    if not o.fused or o.tensor_parallel > 1:
        if o.precision != "fp32":
            yield "classifier_rows", "head", "Rc w", "fp32", head
        yield "classifier_stats", "head", "3 R", "fp32", head
    if head_sums(o):
        yield "dwte_sum", "head", "w C", "fp32", head
        yield "dwte_group", "head", "w C", "bf16", head
    if o.gradients != o.precision and widens(o):
        yield (
            "head_widened",
            "head",
            str(head_chunk_rows(o) * (o.config.padded_vocab_size // o.tensor_parallel + o.config.channels)),
            "fp32",
            head,
        )


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


def _working_rows(o: PlanOptions):
    """Working room of the layers."""
    backward, encoder = ("lnf_backward", "encoder_backward"), ("encoder_backward", "encoder_backward")
    if widens(o):
        yield "widened", "scratch", "Rw 5C", "fp32", STEP if o.matmul == "widened" else backward
    if o.matmul == "numba":
        yield "matmul_panels", "scratch", f"Wm {MATMUL_DEPTH} {MATMUL_PANEL + TILE_ROWS} Nf", "factor", STEP
        yield "matmul_sums", "scratch", f"Rm {MATMUL_PANEL}", "fp32", STEP
        yield "matmul_packed", "scratch", "Pm Nf", "factor", STEP
    if o.attention_kind == "cpu":
        stages = (s for s in _stage_line(o.recompute) if s.rpartition(" ")[2] in ("attention", "attention_backward"))
        spans = [(s, s) for s in stages]
        for name, shape, dtype in NUMBA_ATTENTION if o.kernel_set == "numba" else TORCH_ATTENTION:
            yield f"attention_{name}", "scratch", shape, dtype, *spans
    if o.attention_kind == "triton":
        for name, shape, dtype in TRITON_ATTENTION:
            yield f"attention_{name}", "scratch", shape, dtype, ("backward: attention_backward",) * 2
    if o.gelu_fusion:
        yield "matmul_workspace", "scratch", str(MATMUL_WORKSPACE // 4), "int32", STEP
    if o.fused:
        yield "column_partials", "scratch", "Pc 4C", "fp32", backward
        # there before a step begins, so that all of the step can be one graph
        yield "token_order", "scratch", "B T", "int32", STEP
        yield "token_groups", "scratch", f"2 {o.B * o.T + 1}", "int32", STEP
        yield "token_seed", "scratch", "1", "int32", STEP
        return
    yield "rows", "scratch", "4 Rn C", "fp32", STEP
    yield "row_stats", "scratch", "2 Rn", "fp32", STEP
    yield "column_sums", "scratch", "2 4C", "fp32", backward
    if o.precision != "fp32":
        yield "encoder_rows", "scratch", "B T C", "fp32", encoder
    yield "encoder_sums", "scratch", "T C" if o.gradients == "fp32" else "B T C", "fp32", encoder
    if o.gradients != "fp32":
        yield "encoder_gathered", "scratch", "B T C", "act", encoder


def _rank_rows(o: PlanOptions):
    """With several ranks: layers of what is sharded, whole, and shares of what is not, packed like those that are.

    With tensor parallelism: the stream of all parts, wherever a matmul needs it, in one place; and a layer's tensor, for a checkpoint.
    """
    if o.world == 1:
        return
    update = ("update", "update")
    yield "rank_numbers", "scratch", f"{o.world} {RANK_NUMBERS}", "fp32", update
    if o.tensor_parallel > 1:
        yield "stream", "gathered", "B T C", "act", STEP
        yield "own_inputs", "gathered", "B T", "int64", ("encoder", "encoder")
        # all parts of qkvw, or of another with its padding
        biggest = max(4 * o.config.channels // o.tensor_parallel, 3 * plan_sizes(o)["k"]) * o.config.channels
        yield "whole_tensor", "gathered", str(biggest * o.tensor_parallel), "fp32", update
        yield "part_tensor", "gathered", str(biggest), "fp32", update
    if o.ranks == 1:
        return
    layer, outer = layer_elements(o), outer_elements(o)
    if o.zero_stage >= 3:
        yield "layer_weights", "gathered", f"{LAYER_SLOTS} {layer}", "act", STEP, ("sample", "sample")
        yield "outer_weights", "gathered", str(outer), "act", ("encoder", "lnf_backward"), ("sample", "sample")
    if o.zero_stage >= 2:
        yield "layer_gradients", "gathered", f"{LAYER_SLOTS} {layer}", "grad", ("lnf_backward", "encoder_backward")
        # with the bias whose gradient the last layernorm takes
        yield "outer_gradients", "gathered", str(outer + o.config.channels), "grad", ("head", "encoder_backward")
    share = str(o.num_parameters // o.ranks)
    if o.zero_stage < 2 and o.shares:
        # sums of micro-steps survive them
        yield "gradient_share", "gathered", share, "grad", ("encoder", "update") if o.reduces_always else update
    if 1 <= o.zero_stage < 3:
        yield "parameter_share", "gathered", share, "act", update


def layer_slot(l: int) -> int:
    """In which slot a layer lies of which only shares are kept: they take turns."""
    return l % LAYER_SLOTS


def weight_slot(key):
    """Where a group of sharded weights is gathered."""
    return key if key == "outer" else layer_slot(key)


def layer_elements(o: PlanOptions) -> int:
    """Elements of one layer's tensors."""
    shapes = parameter_shapes(o.config, o.tensor_parallel)
    return sum(prod(shapes[p.name][1:]) for p in PARAMETERS if p.per_layer)


def outer_elements(o: PlanOptions) -> int:
    """Elements of the tensors that belong to no layer."""
    return o.num_parameters - o.config.num_layers * layer_elements(o)


def _update_rows(o: PlanOptions):
    """The global norm, and pieces of what is kept in bf16, widened; fused, the pieces are a checkpoint's alone."""
    update = ("update", "update")
    norm_work = min(TUNING[o.device].update_elements, o.num_parameters)
    if o.rounds:
        yield "noise", "scratch", "U", "int32", ("encoder_backward", "update")
        yield "noise_work", "scratch", "U", "int32", ("encoder_backward", "update")
    yield "grad_norm", "scratch", "1", "fp32", update
    yield "loss_sum", "scratch", "1", "fp32", update
    yield "norm_partials", "scratch", str(NORM_PARTIALS if o.fused else norm_partials(o)), "fp32", update
    if o.precision != "fp32" and not o.keeps_master:
        yield "update_parameter", "scratch", "U", "fp32", update
    if o.optimizer_state != "fp32":  # a checkpoint widens m and v there, whoever updates them
        yield "update_m", "scratch", "U", "fp32", update
        yield "update_v", "scratch", "U", "fp32", update
    if o.fused:
        yield "update_layout", "scratch", "16 5", "int64", update
        yield "update_numbers", "scratch", str(UPDATE_NUMBERS), "int32", update
        return
    if o.gradients != "fp32":
        yield "norm_work", "scratch", str(norm_work), "fp32", update
        yield "update_gradient", "scratch", "U", "fp32", update
    if o.optimizer_state != "fp32":
        yield "noise_moments", "scratch", "U", "int32", update


def _sample_rows(o: PlanOptions):
    """One row through the model, and the keys and values of the positions before it."""
    sample = ("sample", "sample")
    yield "kv_cache", "sample", "L 2 G k", "act", sample
    for name, shape in (("residual", "C"), ("ln", "C"), ("qkvr", "3k"), ("atty", "k"), ("fch", "4f")):
        yield f"sample_{name}", "sample", "1 " + shape, "act", sample
    yield "sample_stats", "sample", "2 1", "fp32", sample
    if not o.fused:
        yield "sample_rows", "sample", "4 1 4C", "fp32", sample


def norm_partials(o: PlanOptions) -> int:
    """Partial sums of the global norm of this rank's gradient: one per piece, summed in order."""
    return -(-(o.num_parameters // (o.ranks if o.shares else 1)) // TUNING[o.device].update_elements)


def _extent(tensors) -> int:
    return max(whole(t.offset + t.nbytes, ALIGNMENT) for t in tensors)


def _place(tensors, stages):
    """Give every tensor an offset: largest first, each at the lowest gap free of tensors it is alive together with."""
    at = {stage: i for i, stage in enumerate(stages)}

    def lifetime(tensor) -> int:
        """A bit for every stage in which it is alive."""
        bits = 0
        for first, last in tensor.spans:
            bits |= (2 << at[last]) - (1 << at[first])
        return bits

    placed, ranges = [], []  # (offset, end, lifetime), by offset
    for tensor, nbytes in sorted(((t, t.nbytes) for t in tensors), key=lambda each: (-each[1], each[0].name)):
        alive, offset = lifetime(tensor), 0
        for start, end, others in ranges:
            if alive & others:
                if offset + nbytes <= start:
                    break
                offset = max(offset, end)
        insort(ranges, (offset, whole(offset + nbytes, ALIGNMENT), alive))
        placed.append(replace(tensor, offset=offset))
    return placed
