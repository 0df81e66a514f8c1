"""The memory plan: tables + options -> where every byte of a run lives. Plain arithmetic; no torch, no device.

Parameters, gradients and optimizer state are one arena each, packed in file order. All activations share one arena:
every tensor has the span of stages it is needed for, and tensors whose spans do not meet may share bytes. The step
itself, evaluation, the update and sampling are all stages on the same line, so they all fit in the same arena.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from llmc.config import ModelConfig
from llmc.memory.ladder import backward_schedule, kept_names, transient_lifetimes
from llmc.memory.tables import (
    BLOCK_ACTIVATIONS, BLOCK_GRADIENTS, DTYPE_BYTES, FORWARD_STAGES, num_parameters, resolve, sizes_of,
)  # fmt: skip

MIB = 1024 * 1024
ALIGNMENT = 256  # bytes; what cudaMalloc gives, and four cache lines
# below this T a CPU's bf16 attention backward, many tiny matmuls, takes twice as long as widening its inputs to fp32 does:
# 2.7 ms against 1.5 at (4, 64, 768), 29 against 16 at (16, 128, 768); at T = 256 it is the other way round
CPU_FP32_ATTENTION_BELOW = 256
CUDA_PROCESSORS = 132  # of an H100 or H200, for what flash attention allocates; other cards have about as many
ROUNDING_BLOCK = 512  # elements that share one row of the rounding noise; pieces of the update are whole blocks


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of working pieces on one kind of device: small enough for its caches, large enough to keep it busy."""

    head_rows: int  # rows of logits that exist at once; below it the wte gradient's re-reads show
    classifier_elements: int  # fp32 working copy of a few logits rows
    norm_elements: int  # fp32 working copies in layernorm
    update_elements: int  # elements of the arena the update handles at a time
    fp32_lse_multiple: int  # CUDA's fp32 attention pads its row statistics


TUNING = {
    # measured on two AVX512 cores with 1 MiB of L2 each, update of 124M parameters: 0.24 s in pieces of 131072 elements
    # (calls cost), 0.19 s of 262144, 0.17 s of 524288, no better beyond
    "cpu": Tuning(512, 1 << 18, 1 << 17, 1 << 19, 1),
    # leads, not measured yet
    "cuda": Tuning(8192, 1 << 24, 1 << 22, 1 << 24, 32),
}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Everything the plan depends on."""

    config: ModelConfig
    B: int
    T: int
    precision: str = "bf16"  # fp32 | bf16
    recompute: int = 1
    master_weights: bool = True
    device: str = "cpu"  # cpu | cuda
    head_chunk: int = 0  # rows; 0 = automatic
    sample_length: int = 64

    @property
    def keeps_master(self) -> bool:
        """In fp32 the parameters are their own master copy."""
        return self.master_weights and self.precision != "fp32"


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the activation arena. A kept tensor's shape has a leading L."""

    name: str
    purpose: str  # kept | shared | head | gradient | scratch | sample
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
    """

    def __init__(self, options: PlanOptions):
        self.options = options
        self.schedule = backward_schedule(options.recompute)
        self.stages = _stage_line(self.schedule)
        self.tensors = {t.name: t for t in _place(_activation_tensors(options), self.stages)}

    @cached_property
    def arenas(self) -> dict[str, int]:
        o, n = self.options, num_parameters(self.options.config)
        element = DTYPE_BYTES[o.precision]
        arenas = {
            "parameters": n * element,
            "gradients": n * element,
            "activations": _extent(self.tensors.values()),
            "m": n * 4,
            "v": n * 4,
        }
        return arenas | ({"master": n * 4} if o.keeps_master else {})

    @property
    def total_bytes(self) -> int:
        """Everything allocated by us, and what library calls allocate meanwhile."""
        return sum(self.arenas.values()) + self.library_bytes

    @property
    def kept_bytes(self) -> int:
        """Activations kept from forward to backward, all layers."""
        return sum(t.nbytes for t in self.tensors.values() if t.purpose == "kept")

    @property
    def library_bytes(self) -> int:
        """What attention returns in memory of its own, o and lse forward, dq, dk and dv backward, or widens; freed at once."""
        o = self.options
        BTC = o.B * o.T * o.config.channels
        if o.device == "cpu" and o.precision == "bf16" and o.T < CPU_FP32_ATTENTION_BELOW:
            return 8 * BTC * DTYPE_BYTES["fp32"]  # q, k, v, o and do widened, and dq, dk, dv
        gradients = 3 * BTC * DTYPE_BYTES[o.precision] + 4 * o.B * o.T * o.config.num_heads
        if o.device == "cuda" and o.precision == "bf16":
            # flash attention sums dq in fp32, deterministically in one copy for every part of the card that works on a head
            copies = -(-CUDA_PROCESSORS // (o.B * o.config.num_heads))
            gradients += 4 * BTC * copies
        return gradients

    @property
    def bytes_per_sequence(self) -> int:
        """Activation bytes per sequence of the batch; llm.c's figure."""
        return self.arenas["activations"] // self.options.B

    def largest_batch(self, budget_bytes: int) -> int:
        """The largest B whose whole plan fits in `budget_bytes`; 0 if not even one sequence does."""

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
        return low


def _stage_line(schedule) -> tuple[str, ...]:
    """All stages of a run, in the order of time; one block stands for every layer, as they share their transients."""
    return (
        "encoder", *(s.name for s in FORWARD_STAGES), "lnf", "head", "lnf_backward",
        *("backward: " + s.name for s in schedule), "encoder_backward", "update", "sample",
    )  # fmt: skip


def head_chunk_rows(options: PlanOptions) -> int:
    """Rows of logits per chunk, the wish or the device's tuning; never fewer for a larger batch, so that memory grows with it."""
    return min(options.head_chunk or TUNING[options.device].head_rows, options.B * options.T)


def classifier_rows(options: PlanOptions) -> int:
    """Rows of logits the classifier works on at once."""
    return max(1, min(head_chunk_rows(options), TUNING[options.device].classifier_elements // options.config.padded_vocab_size))


def _activation_tensors(o: PlanOptions):
    """Every tensor of the activation arena, not yet placed."""
    tuning = TUNING[o.device]
    sizes = sizes_of(o.config, o.B, o.T)
    C = sizes["C"]
    rows = o.B * o.T
    sizes["R"] = head_chunk_rows(o)
    lse_multiple = tuning.fp32_lse_multiple if o.precision == "fp32" else 1
    sizes["Tp"] = -(-o.T // lse_multiple) * lse_multiple
    sizes["Rc"] = classifier_rows(o)
    sizes["Rn"] = max(1, min(rows, tuning.norm_elements // C))
    sizes["G"] = max(1, min(o.sample_length, o.config.max_seq_len))
    # a piece of the update is at least one whole tensor of a layer that is smaller than a block
    biggest = max(prod(shape) for shape in (resolve("Vp C", sizes), resolve("4C C", sizes)))
    sizes["U"] = min(tuning.update_elements, -(-biggest // ROUNDING_BLOCK) * ROUNDING_BLOCK)
    sizes["U"] = max(sizes["U"], -(-4 * C // ROUNDING_BLOCK) * ROUNDING_BLOCK)

    def tensor(name, purpose, shape, dtype, *spans):
        return PlannedTensor(name, purpose, resolve(shape, sizes), o.precision if dtype == "act" else dtype, spans)

    step = ("encoder", "encoder_backward")
    yield tensor("inputs", "scratch", "B T", "int64", step)
    yield tensor("targets", "scratch", "B T", "int64", ("encoder", "head"))
    yield tensor("losses", "scratch", "B T", "fp32", ("encoder", "sample"))  # survives micro-steps
    yield tensor("encoded", "kept", "B T C", "act", step)

    kept = kept_names(o.recompute)
    lifetimes = transient_lifetimes(o.recompute)
    for a in (*BLOCK_ACTIVATIONS, *BLOCK_GRADIENTS):
        if a.name in kept:
            yield tensor(a.name, "kept", "L " + a.shape, a.dtype, step)
        else:
            yield tensor(a.name, "gradient" if a in BLOCK_GRADIENTS else "shared", a.shape, a.dtype, *lifetimes[a.name])

    yield tensor("lnf", "head", "B T C", "act", ("lnf", "lnf_backward"))  # becomes its own gradient, chunk by chunk
    yield tensor("lnf_mean", "head", "B T", "fp32", ("lnf", "lnf_backward"))
    yield tensor("lnf_rstd", "head", "B T", "fp32", ("lnf", "lnf_backward"))
    yield tensor("logits", "head", "R Vp", "act", ("head", "head"))
    if o.precision != "fp32":
        yield tensor("classifier_rows", "head", "Rc Vp", "fp32", ("head", "head"))
    yield tensor("classifier_stats", "head", "3 R", "fp32", ("head", "head"))
    yield tensor("dresidual", "gradient", "B T C", "act", ("lnf_backward", "encoder_backward"))

    yield tensor("norm_rows", "scratch", "3 Rn C", "fp32", ("encoder", "encoder_backward"))
    yield tensor("norm_sums", "scratch", "3 C", "fp32", ("encoder", "encoder_backward"))
    yield tensor("norm_stats", "scratch", "2 Rn", "fp32", ("encoder", "encoder_backward"))
    yield tensor("bias_sum", "scratch", "4C", "act", ("lnf_backward", "encoder_backward"))
    if o.precision == "fp32":
        yield tensor("encoder_sums", "scratch", "T C", "fp32", ("encoder_backward", "encoder_backward"))
    else:
        yield tensor("encoder_rows", "scratch", "B T C", "fp32", ("encoder_backward", "encoder_backward"))
        yield tensor("encoder_sums", "scratch", "B T C", "fp32", ("encoder_backward", "encoder_backward"))
        yield tensor("encoder_gathered", "scratch", "B T C", "act", ("encoder_backward", "encoder_backward"))
        yield tensor("noise", "scratch", "U", "int32", ("encoder_backward", "update"))
        yield tensor("noise_work", "scratch", "U", "int32", ("encoder_backward", "update"))
        yield tensor("update_gradient", "scratch", "U", "fp32", ("update", "update"))
        if not o.keeps_master:
            yield tensor("update_parameter", "scratch", "U", "fp32", ("update", "update"))
    yield tensor("norm_partials", "scratch", str(norm_partials(o)), "fp32", ("update", "update"))
    if o.precision != "fp32":
        yield tensor("norm_work", "scratch", str(min(tuning.update_elements, num_parameters(o.config))), "fp32", ("update", "update"))

    sample = ("sample", "sample")
    yield tensor("kv_cache", "sample", "L 2 G C", "act", sample)
    for name, shape in (("residual", "C"), ("ln", "C"), ("qkvr", "3C"), ("atty", "C"), ("fch", "4C"), ("logits", "Vp")):
        yield tensor(f"sample_{name}", "sample", "1 " + shape, "act", sample)
    yield tensor("sample_stats", "sample", "2 1", "fp32", sample)
    yield tensor("sample_rows", "sample", "3 1 C", "fp32", sample)


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
