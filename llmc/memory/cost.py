"""What a step costs on paper: floating-point operations of its matmuls, and bytes moved. From the same tables as the plan.

A stage is assumed to read each of its inputs once and to write each of its outputs once. That is the least a kernel of one
pass can move; only caches can beat it, where a tensor is small. With several ranks the cost is that of one of them, without
what their collectives read and write.
"""

from dataclasses import dataclass, replace
from math import prod

from llmc.cards import PEAKS, Budget
from llmc.memory.ladder import backward_schedule, segments
from llmc.memory.options import PlanOptions
from llmc.memory.scratch_sizes import head_chunk_rows, plan_sizes
from llmc.memory.tables import BLOCK_ACTIVATIONS, BLOCK_GRADIENTS, DTYPE_BYTES, FORWARD_STAGES, MATRICES, PARAMETERS, STREAM, resolve

ACTIVATION = {a.name: a for a in (*BLOCK_ACTIVATIONS, *BLOCK_GRADIENTS, *STREAM)}
PARAMETER = {p.name: p for p in PARAMETERS}
# what is moved outside the blocks, how often in (forward, backward). Of the stream: the encoder reads and writes a tensor, and reads its
# gradient; lnf reads and writes one, and of the residual's gradient, which is zeroed first, backward reads three and writes one; the head
# reads lnf for the logits and for its weight's gradient, and writes lnf's gradient
ENCODER_PASSES, LNF_PASSES, HEAD_PASSES = (2, 1), (2, 1 + 4), (1, 2)
LOGITS_PASSES = (2, 3)  # written and read; overwritten by their gradient, which is read twice
WTE_PASSES, WTE_GRADIENT_PASSES = (1, 1), (0, 2)  # of each chunk of the head
HEAD_MATMULS = (1, 2)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one step: all micro-steps and the update. Bytes are those of the device's own memory."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte. Above a card's own ratio of FLOP/s to bytes/s, matmuls set the time; below it, memory does."""
        return self.flops / self.bytes


def step_cost(o: PlanOptions, grad_accum_steps: int = 1) -> Cost:
    """The cost of a step of `grad_accum_steps` micro-steps of B sequences; where nothing is trained, of as many evaluations."""
    L, sizes = o.config.num_layers, plan_sizes(o)
    flops, n_bytes = _head(o, sizes)
    for stage, times in _stages(o):
        stage_flops, stage_bytes = _stage(o, sizes, stage)
        flops += times * stage_flops
        n_bytes += times * stage_bytes
    n_bytes *= grad_accum_steps
    if not o.trains:
        return Cost(grad_accum_steps * flops, n_bytes)
    if o.matmul == "fp8" and not o.reduces_always:  # later micro-steps write what they add in fp32 first, and read it again
        n_bytes += (grad_accum_steps - 1) * L * 2 * DTYPE_BYTES["fp32"] * sum(_layer_elements(name, sizes) for name in MATRICES)
    return Cost(grad_accum_steps * flops, n_bytes + _update_bytes(o))


def _stages(o: PlanOptions):
    """Yields (stage, how often a micro-step runs it) for all blocks, forward and backward."""
    L = o.config.num_layers
    if not o.trains:
        yield from ((stage, L) for stage in FORWARD_STAGES)
        return
    again = sum(map(len, segments(o.recompute, L).again))
    yield from ((stage, L + again) for stage in FORWARD_STAGES)
    yield from ((stage, L) for stage in backward_schedule(o.recompute))


def extra_flops_percent(o: PlanOptions) -> float:
    """FLOPs of a step at this recompute level, in percent more than the same step at level 0."""
    return 100 * (step_cost(o).flops / step_cost(replace(o, recompute=0)).flops - 1)


def _stage(o, sizes, stage) -> tuple[int, int]:
    """FLOPs and bytes of a stage of one block."""
    n_bytes = 0
    for name in (*stage.reads, *stage.writes):
        dtype = ACTIVATION[name].dtype
        n_bytes += _elements(o, sizes, stage, name) * DTYPE_BYTES[o.precision if dtype == "act" else dtype]
    for name in stage.weights:
        n_bytes += _layer_elements(name, sizes) * DTYPE_BYTES[o.precision]
    for name in stage.grads:  # read and written: micro-steps add up
        n_bytes += 2 * _layer_elements(name, sizes) * DTYPE_BYTES[o.grad_dtype]
    if o.matmul == "fp8" and stage.is_matmul:
        n_bytes += _fp8_bytes(o, sizes, stage)
    return prod(resolve(stage.flops, sizes)), n_bytes


def _elements(o, sizes, stage, name) -> int:
    """Elements of an activation that a stage reads or writes; those of all parts where the stage takes all rows."""
    of_all_parts = name == stage.gathers or stage.sums and name in stage.writes
    return prod(resolve(ACTIVATION[name].shape, sizes)) * (o.tensor_parallel if of_all_parts else 1)


def _layer_elements(name, sizes) -> int:
    """Elements of a parameter in one layer."""
    return prod(resolve(PARAMETER[name].shape, sizes)[1:])


def _fp8_bytes(o, sizes, stage) -> int:
    """Bytes that a layer's matmul moves in FP8 beyond those of bf16, which reads each factor once: the bf16 factor is read once more, and
    its FP8 form is written and read. dout is converted to two layouts, fcproj's by the first of its two stages."""
    weights = sum(_layer_elements(name, sizes) for name in MATRICES.intersection(stage.weights))
    first, *second = (_elements(o, sizes, stage, name) for name in stage.reads)
    if stage in FORWARD_STAGES:
        return 4 * (weights + first)
    of_dout = {"fcproj_dinput": 5, "fcproj_dweight": -1}.get(stage.name, 6)
    return 4 * (weights + sum(second)) + of_dout * first


def _head(o, sizes) -> tuple[int, int]:
    """Embedding, last layernorm and classifier: FLOPs and bytes, of forward alone where nothing is trained."""

    def times(passes) -> int:
        forward, backward = passes
        return forward + backward if o.trains else forward

    element, grad = DTYPE_BYTES[o.precision], DTYPE_BYTES[o.grad_dtype]
    rows, C, w = o.B * o.T, o.config.channels, sizes["w"]
    own_rows = rows // o.tensor_parallel  # lnf's are this part's alone
    chunks = -(-rows // head_chunk_rows(o))
    stream = ((times(ENCODER_PASSES) + times(HEAD_PASSES)) * rows + times(LNF_PASSES) * own_rows) * C * element
    logits = times(LOGITS_PASSES) * rows * w * element
    weight = chunks * (times(WTE_PASSES) * element + times(WTE_GRADIENT_PASSES) * grad) * w * C
    return times(HEAD_MATMULS) * 2 * rows * w * C, stream + logits + weight


def _update_bytes(o) -> int:
    """Gradient read for the norm and for the update; weights, m, v and the master read and written, each in its own type. Where there is an
    fp32 master, the bf16 weights are only written. m, v and the master do not count where they are in host memory.

    With several ranks, each takes the norm of its share where gradients are summed in shares, and from ZeRO stage 1 on updates its share.
    """
    normed, updated = o.part_parameters // (o.data_ranks if o.shares else 1), o.part_parameters // o.ranks_of("m")
    weights = DTYPE_BYTES[o.precision] * (1 if o.keeps_master else 2)
    state = 0 if o.offload_optimizer else optimizer_traffic(o)
    return DTYPE_BYTES[o.grad_dtype] * (normed + updated) + updated * weights + state


def optimizer_traffic(o: PlanOptions) -> int:
    """Bytes of m, v and the master that an update reads and writes, wherever they lie; half of them each way."""
    kept = 2 * DTYPE_BYTES[o.optimizer_state] + 4 * o.keeps_master + 2 * o.keeps_bits
    return 2 * kept * (o.part_parameters // o.ranks_of("m"))


# ----------------------------------------------------------------------------
# time


def peak_flops(o: PlanOptions, budget: Budget | None) -> float | None:
    """FLOP/s of the card, its dense peak; None without a card whose rates are known, and for a plan on a CPU.

    With FP8 it is the mean rate over a step's FLOPs, where those of the layers' matmuls run at twice the peak of the others.
    """
    peak = PEAKS[budget.card.peak][0 if o.precision == "bf16" else 1] if budget and budget.card and o.device == "cuda" else None
    return peak * 1e12 / (1 - _fp8_share(o) / 2) if peak else None


def _fp8_share(o: PlanOptions) -> float:
    """The fraction of a step's FLOPs that are done in FP8."""
    if o.matmul != "fp8":
        return 0.0
    sizes = plan_sizes(o)
    return sum(times * _stage(o, sizes, stage)[0] for stage, times in _stages(o) if stage.is_matmul) / step_cost(o).flops


def ridge(o: PlanOptions, budget: Budget | None) -> float | None:
    """FLOPs that a card can do in the time it takes to move a byte; None where peak_flops is None."""
    peak = peak_flops(o, budget)
    return peak / (budget.card.bandwidth_gb_s * 1e9) if peak else None


def least_ms(cost, o: PlanOptions, budget: Budget | None) -> float | None:
    """Time to compute a step at the card's peak, or to move its bytes where that takes longer; None where peak_flops is None."""
    peak = peak_flops(o, budget)
    return 1e3 * max(cost.flops / peak, cost.bytes / (budget.card.bandwidth_gb_s * 1e9)) if peak else None


def bound(cost, o: PlanOptions, budget: Budget | None) -> str | None:
    """What sets the time of a step on a card, the bus to the host left out: "compute" or "memory"; None where peak_flops is None."""
    limit = ridge(o, budget)
    return None if limit is None else "compute" if cost.intensity >= limit else "memory"
