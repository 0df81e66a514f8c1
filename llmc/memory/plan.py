"""The memory plan: tables + options -> where every byte of a run lives. Plain arithmetic; no torch, no device.

Parameters, gradients and optimizer state are one arena each, packed in file order. All activations share one arena:
every tensor has the span of stages it is needed for, and tensors whose spans do not meet may share bytes. The step
itself, evaluation, the update and sampling are all stages on the same line, so they all fit in the same arena.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from llmc.config import ModelConfig
from llmc.memory.ladder import again_stages, backward_schedule, kept_names, segments, transient_lifetimes
from llmc.memory.tables import (
    BLOCK_ACTIVATIONS, BLOCK_GRADIENTS, DTYPE_BYTES, FORWARD_STAGES, num_parameters, resolve, sizes_of,
)  # fmt: skip

MIB = 1024 * 1024
ALIGNMENT = 256  # bytes; what cudaMalloc gives, and four cache lines
ROUNDING_BLOCK = 512  # elements that share one row of the rounding noise; pieces of the update are whole blocks
# sums over rows, and of the global norm, are fixed numbers of partial sums added in order: the same bits on any card
COLUMN_PARTIALS, CPU_COLUMN_PARTIALS, NORM_PARTIALS = 256, 64, 1024
MATMUL_WORKSPACE = 32 * MIB  # of cuBLASLt, as NVIDIA advises for Hopper
UPDATE_NUMBERS = 50  # of each tensor its seed, its last seed and its decay; two of the step
CHECKPOINT_ELEMENTS = 1 << 20  # of the arena that a checkpoint handles at a time, where the update itself needs no working room
HEAD_GROUP = 4  # chunks whose bf16 weight gradients are added up in bf16; groups are added up in fp32
OFFLOAD_SLOTS = 3  # residuals on the device with --offload-residual: one in use, one on its way in, one on its way out


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of working pieces on one kind of device: small enough for its caches, large enough to keep it busy."""

    head_bytes: int  # logits that exist at once; with fewer rows the re-reads of wte and of its gradient show
    classifier_elements: int  # fp32 working copy of a few logits rows
    row_elements: int  # fp32 working copies of a few rows, in layernorm and GELU
    update_elements: int  # elements of the arena the update handles at a time
    widened_rows: int  # rows of bf16 operands that are widened for an fp32 gradient at a time; 0: the matmul itself can
    queries: int = 0  # of attention on a CPU, at once
    score_elements: int = 0  # fp32 scores of these queries, of as many heads as that makes


TUNING = {
    # measured on two AVX512 cores with 1 MiB of L2 each, update of 124M parameters: 0.24 s in pieces of 131072 elements
    # (calls cost), 0.19 s of 262144, 0.17 s of 524288, no better beyond. Layernorm of 1024 rows of 768, forward: 0.62, 0.46, 0.39 ms
    # attention of (B, T) = (4, 256) and (1, 1024), 12 heads, bf16, forward and backward: 9.7 and 25 ms with these; with 256 queries 11.0
    # and 25, with half the elements 9.2 and 29. Keys and values packed transposed as well: faster matmuls, and as much slower packing
    "cpu": Tuning(100 << 20, 1 << 18, 1 << 19, 1 << 19, 1024, 128, 3 << 18),
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
    attention: str = ""  # cpu | flash | cudnn | efficient; empty: the device's default
    head_chunk: int = 0  # rows; 0 = automatic
    sample_length: int = 64
    processors: int = 132  # of the card, an H100's: flash attention allocates by them

    @property
    def kernel_set(self) -> str:
        """torch, triton or numba: whose code does what is not a matmul or attention."""
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

    arenas       purpose -> bytes, in the order they are allocated
    tensors      name -> PlannedTensor, the activation arena's contents
    schedule     the stages of a block's backward pass
    segments     which blocks run forward again before backward, and where each residual3 lies
    host_bytes   pinned host memory of --offload-residual, beside the total
    """

    def __init__(self, options: PlanOptions):
        self.options = options
        self.schedule = backward_schedule(options.recompute)
        self.segments = segments(options.recompute, options.config.num_layers)
        self.stages = _stage_line(options.recompute)
        self.tensors = {t.name: t for t in _place(_activation_tensors(options), self.stages)}

    @cached_property
    def arenas(self) -> dict[str, int]:
        n = num_parameters(self.options.config)
        sizes = {purpose: n * DTYPE_BYTES[dtype] for purpose, dtype in self.flat_types.items()}
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
        """Everything allocated by us, and what library calls allocate meanwhile."""
        return sum(self.arenas.values()) + self.library_bytes

    @property
    def kept_bytes(self) -> int:
        """Activations kept from forward to backward, all layers."""
        return sum(t.nbytes for t in self.tensors.values() if t.purpose == "kept")

    @property
    def columns(self) -> dict[str, int]:
        """The total, part by part: parameters, gradients, optimizer, kept, shared, head, scratch, library.

        The parts of the activation arena take turns in the same bytes. Each byte counts for the first of kept, shared, head
        and scratch that ever uses it, gaps for scratch, so the parts add up to what is allocated.
        """
        a = self.arenas
        optimizer = sum(n_bytes for name, n_bytes in a.items() if name not in ("parameters", "gradients", "activations"))
        columns = {"parameters": a["parameters"], "gradients": a["gradients"], "optimizer": optimizer}
        ranges, covered = [], 0
        for part, purposes in ARENA_PARTS.items():
            ranges += [(t.offset, t.offset + t.nbytes) for t in self.tensors.values() if t.purpose in purposes]
            so_far = a["activations"] if part == "scratch" else _covered(ranges)
            columns[part], covered = so_far - covered, so_far
        return columns | {"library": self.library_bytes}

    @property
    def host_bytes(self) -> int:
        """Pinned host memory: the residuals of all layers that do not stay on the device."""
        o = self.options
        return self.offloaded_layers * o.B * o.T * o.config.channels * DTYPE_BYTES[o.precision]

    @property
    def offloaded_layers(self) -> int:
        """How many residuals go to the host: all but the last, which are still on the device when backward starts."""
        return max(0, self.options.config.num_layers - OFFLOAD_SLOTS) if self.options.offload_residual else 0

    def residual_slot(self, l: int) -> int:
        """Which slot of the tensor residual3 holds the output of layer l."""
        return _residual_slots(self.options)[l]

    @property
    def library_bytes(self) -> int:
        """What a card's attention returns in memory of its own, o and lse forward, dq, dk and dv backward; freed at once."""
        o = self.options
        if o.attention_kind == "cpu":
            return 0
        BTC = o.B * o.T * o.config.channels
        gradients = 3 * BTC * DTYPE_BYTES[o.precision] + 4 * o.B * o.T * o.config.num_heads
        if o.attention_kind == "cudnn":
            gradients += 4 * BTC  # dq summed in fp32; a guess, as its workspace is not documented
        if o.attention_kind == "flash":
            # it sums dq in fp32, deterministically in one copy for every part of the card that works on a head
            copies = -(-o.processors // (o.B * o.config.num_heads))
            gradients += 4 * BTC * copies
        return gradients

    @property
    def bytes_per_sequence(self) -> int:
        """Activation bytes per sequence of the batch; llm.c's figure."""
        return self.arenas["activations"] // self.options.B

    def largest_batch(self, budget_bytes: int) -> int:
        """The largest B whose whole plan fits in `budget_bytes`; 0 if not even one sequence does.

        Memory grows with B but for small dips: placement is greedy, and the fewer heads there are the more copies of dq attention
        makes. So a few B beyond the first that does not fit are tried too.
        """

        def fits(B):
            return Plan(replace(self.options, B=B)).total_bytes <= budget_bytes

        if not fits(1):
            return 0
        low, high = 1, 2  # low fits, high is not known to
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        beyond = range(low + 1, max(low + 9, self.options.processors // self.options.config.num_heads + 2))
        return max((B for B in beyond if fits(B)), default=low)


# columns of the plan's table -> purposes of tensors
ARENA_PARTS = {"kept": ("kept",), "shared": ("shared", "gradient"), "head": ("head",), "scratch": ("scratch", "sample")}


def _covered(ranges) -> int:
    """Bytes that at least one of the (start, end) ranges covers."""
    total, reach = 0, 0
    for start, end in sorted(ranges):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


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
    """Rows of logits per chunk, the wish or the device's tuning; never fewer for a larger batch."""
    rows = TUNING[options.device].head_bytes // (options.config.padded_vocab_size * DTYPE_BYTES[options.precision])
    automatic = rows // 256 * 256 if rows > 256 else max(1, rows)  # a matmul likes whole tiles
    return min(options.head_chunk or automatic, options.B * options.T)


def head_sums(options: PlanOptions) -> bool:
    """Whether the head's weight gradient is added up in fp32 first: bf16 would lose bits over more than a few chunks."""
    return options.gradients == "bf16" and options.B * options.T > HEAD_GROUP * head_chunk_rows(options)


def classifier_rows(options: PlanOptions) -> int:
    """Rows of logits the classifier works on at once."""
    return max(1, min(head_chunk_rows(options), TUNING[options.device].classifier_elements // options.config.padded_vocab_size))


def widens(options: PlanOptions) -> bool:
    """Whether bf16 operands are widened for a gradient in fp32, as the device's matmul has no such form."""
    return options.gradients != options.precision and TUNING[options.device].widened_rows > 0


def update_room(options: PlanOptions) -> int:
    """Elements that the update handles at a time: at least one whole tensor of a layer that is smaller than a block."""
    C, Vp = options.config.channels, options.config.padded_vocab_size
    biggest = max(Vp * C, 4 * C * C)
    at_once = CHECKPOINT_ELEMENTS if options.fused else TUNING[options.device].update_elements
    room = min(at_once, -(-biggest // ROUNDING_BLOCK) * ROUNDING_BLOCK)
    return max(room, -(-4 * C // ROUNDING_BLOCK) * ROUNDING_BLOCK)


def plan_sizes(o: PlanOptions) -> dict[str, int]:
    """The letters of the tables, and those of working room: R rows of a head chunk, Rc of the classifier, Rn of a layernorm (and a
    quarter of them of GELU), Rw widened, U elements of the update, G positions of a sample; of attention on a CPU Q queries and Ha heads
    at once, of HS channels."""
    tuning = TUNING[o.device]
    rows = o.B * o.T
    lse_multiple = 32 if o.attention_kind == "efficient" else 1  # it pads its row statistics
    return sizes_of(o.config, o.B, o.T) | {
        "Tp": -(-o.T // lse_multiple) * lse_multiple,
        "R": head_chunk_rows(o),
        "Rc": classifier_rows(o),
        "Rn": max(4, min(rows, tuning.row_elements // o.config.channels)),
        "Pc": COLUMN_PARTIALS if o.kernel_set == "triton" else CPU_COLUMN_PARTIALS,
        "Rw": max(1, min(rows, tuning.widened_rows)),
        "U": update_room(o),
        "G": max(1, min(o.sample_length, o.config.max_seq_len)),
        "Q": attention_queries(o),
        "Ha": attention_heads(o),
        "HS": o.config.channels // o.config.num_heads,
    }


def attention_queries(o: PlanOptions) -> int:
    """Queries that attention on a CPU works on at once."""
    return max(1, min(o.T, TUNING[o.device].queries))


def attention_heads(o: PlanOptions) -> int:
    """Heads that it works on at once: those of some whole sequences, or an even part of one's."""
    heads = max(1, TUNING[o.device].score_elements // (attention_queries(o) * o.T))
    NH = o.config.num_heads
    if heads >= NH:
        return min(o.B, heads // NH) * NH
    return -(-NH // -(-NH // heads))


STEP = ("encoder", "encoder_backward")


def _activation_tensors(o: PlanOptions):
    """Every tensor of the activation arena, not yet placed."""
    sizes, types = plan_sizes(o), {"act": o.precision, "grad": o.gradients}
    for name, purpose, shape, dtype, *spans in (*_block_rows(o), *_head_rows(o), *_working_rows(o), *_update_rows(o), *_sample_rows(o)):
        yield PlannedTensor(name, purpose, resolve(shape, sizes), types.get(dtype, dtype), tuple(spans))


def _block_rows(o: PlanOptions):
    """(name, purpose, shape, dtype, *spans): what the blocks read and write, and what goes into the first."""
    yield "inputs", "scratch", "B T", "int64", STEP
    yield "encoded", "kept", "B T C", "act", STEP
    kept = kept_names(o.recompute)
    lifetimes = transient_lifetimes(o.recompute, o.gelu_fusion)
    for a in (*BLOCK_ACTIVATIONS, *BLOCK_GRADIENTS):
        if a.name == "residual3":
            yield a.name, "kept", f"{1 + max(_residual_slots(o))} {a.shape}", a.dtype, STEP
        elif a.name == "lse" and o.attention_kind == "cpu":
            continue  # it takes the softmax again
        elif a.name in kept:
            yield a.name, "kept", "L " + a.shape, a.dtype, STEP
        else:
            yield a.name, "gradient" if a in BLOCK_GRADIENTS else "shared", a.shape, a.dtype, *lifetimes[a.name]
    yield "dresidual", "gradient", "B T C", "act", ("lnf_backward", "encoder_backward")


def _head_rows(o: PlanOptions):
    """The last layernorm and the classifier. lnf becomes its own gradient, chunk by chunk."""
    head = ("head", "head")
    yield "targets", "scratch", "B T", "int64", ("encoder", "head")
    yield "losses", "scratch", "B T", "fp32", ("encoder", "sample")  # survives micro-steps
    last_norm = ("fcproj", "lnf_backward")  # it is one pass with the last block's last addition
    yield "lnf", "head", "B T C", "act", last_norm
    yield "lnf_mean", "head", "B T", "fp32", last_norm
    yield "lnf_rstd", "head", "B T", "fp32", last_norm
    yield "logits", "head", "R Vp", "act", head, ("sample", "sample")
    if not o.fused:
        if o.precision != "fp32":
            yield "classifier_rows", "head", "Rc Vp", "fp32", head
        yield "classifier_stats", "head", "3 R", "fp32", head
    if head_sums(o):
        yield "dwte_sum", "head", "Vp C", "fp32", head
        yield "dwte_group", "head", "Vp C", "bf16", head
    if widens(o):
        yield "head_widened", "head", str(head_chunk_rows(o) * (o.config.padded_vocab_size + o.config.channels)), "fp32", head


def _working_rows(o: PlanOptions):
    """Working room of the layers."""
    backward, encoder = ("lnf_backward", "encoder_backward"), ("encoder_backward", "encoder_backward")
    if widens(o):
        yield "widened", "scratch", "Rw 5C", "fp32", backward
    if o.attention_kind == "cpu":
        stages = (s for s in _stage_line(o.recompute) if s.rpartition(" ")[2] in ("attention", "attention_backward"))
        spans = [(s, s) for s in stages]
        mask = () if o.kernel_set == "numba" else (("mask", "Q Q"),)
        for name, shape in (("rows", "7 Ha T HS"), ("scores", "2 Ha Q T"), ("sums", "2 3C"), *mask):
            yield f"attention_{name}", "scratch", shape, "fp32", *spans
    if o.gelu_fusion:
        yield "matmul_workspace", "scratch", str(MATMUL_WORKSPACE // 4), "int32", STEP
    if o.fused:
        yield "column_partials", "scratch", "Pc 4C", "fp32", backward
    if o.kernel_set == "triton":  # on the device before a step begins, so that all of the step can be one graph
        yield "token_order", "scratch", "B T", "int32", STEP
        yield "token_groups", "scratch", f"2 {o.B * o.T + 1}", "int32", STEP
        yield "token_seed", "scratch", "1", "int32", STEP
    if o.fused:
        return
    yield "rows", "scratch", "4 Rn C", "fp32", STEP
    yield "row_stats", "scratch", "2 Rn", "fp32", STEP
    yield "column_sums", "scratch", "2 4C", "fp32", backward
    if o.precision != "fp32":
        yield "encoder_rows", "scratch", "B T C", "fp32", encoder
    yield "encoder_sums", "scratch", "T C" if o.gradients == "fp32" else "B T C", "fp32", encoder
    if o.gradients != "fp32":
        yield "encoder_gathered", "scratch", "B T C", "act", encoder


def _update_rows(o: PlanOptions):
    """The global norm, and pieces of what is kept in bf16, widened; fused, the pieces are a checkpoint's alone."""
    update = ("update", "update")
    norm_work = min(TUNING[o.device].update_elements, num_parameters(o.config))
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
    if o.kernel_set == "triton":
        yield "update_layout", "scratch", "16 4", "int64", update
        yield "update_numbers", "scratch", str(UPDATE_NUMBERS), "int32", update
    if o.fused:
        return
    if o.gradients != "fp32":
        yield "norm_work", "scratch", str(norm_work), "fp32", update
        yield "update_gradient", "scratch", "U", "fp32", update
    if o.optimizer_state != "fp32":
        yield "noise_moments", "scratch", "U", "int32", update


def _sample_rows(o: PlanOptions):
    """One row through the model, and the keys and values of the positions before it."""
    sample = ("sample", "sample")
    yield "kv_cache", "sample", "L 2 G C", "act", sample
    for name, shape in (("residual", "C"), ("ln", "C"), ("qkvr", "3C"), ("atty", "C"), ("fch", "4C")):
        yield f"sample_{name}", "sample", "1 " + shape, "act", sample
    yield "sample_stats", "sample", "2 1", "fp32", sample
    if not o.fused:
        yield "sample_rows", "sample", "4 1 4C", "fp32", sample


def norm_partials(o: PlanOptions) -> int:
    """Partial sums of the global norm: one per piece, summed in order."""
    return -(-num_parameters(o.config) // TUNING[o.device].update_elements)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _extent(tensors) -> int:
    return max(_aligned(t.offset + t.nbytes) for t in tensors)


def _place(tensors, stages):
    """Give every tensor an offset: largest first, each at the lowest gap free of tensors it is alive together with."""
    at = {stage: i for i, stage in enumerate(stages)}

    def meet(a, b):
        return any(at[f1] <= at[l2] and at[f2] <= at[l1] for f1, l1 in a.spans for f2, l2 in b.spans)

    placed = []
    for tensor in sorted(tensors, key=lambda t: (-t.nbytes, t.name)):
        offset = 0
        for other in sorted((p for p in placed if meet(tensor, p)), key=lambda p: p.offset):
            if offset + tensor.nbytes <= other.offset:
                break
            offset = max(offset, _aligned(other.offset + other.nbytes))
        placed.append(replace(tensor, offset=offset))
    return placed
