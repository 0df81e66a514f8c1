"""What a step costs on paper: floating-point operations of its matmuls, and bytes moved. From the same tables as the plan.

A stage is taken to read what it reads once and to write what it writes once. That is the floor of a kernel that is one
pass; caches can beat it where a tensor is small, and nothing else can.
"""

from dataclasses import dataclass, replace
from math import prod

from llmc.memory.ladder import backward_schedule, segments
from llmc.memory.plan import PlanOptions, head_chunk_rows, plan_sizes
from llmc.memory.tables import BLOCK_ACTIVATIONS, BLOCK_GRADIENTS, DTYPE_BYTES, FORWARD_STAGES, PARAMETERS, STREAM, num_parameters, resolve

ACTIVATION = {a.name: a for a in (*BLOCK_ACTIVATIONS, *BLOCK_GRADIENTS, *STREAM)}
PARAMETER = {p.name: p for p in PARAMETERS}
LAYERNORM_PASSES = 3  # lnf: read, write, read again for its statistics


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one step, all micro-steps and the update."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte: above a card's own ratio of FLOP/s to bytes/s, matmuls set the time, below it memory does."""
        return self.flops / self.bytes


def step_cost(o: PlanOptions, grad_accum_steps: int = 1) -> Cost:
    """The cost of a step of `grad_accum_steps` micro-steps of B sequences."""
    L = o.config.num_layers
    again = sum(map(len, segments(o.recompute, L).again))
    flops, n_bytes = _head(o)
    for stages, times in ((FORWARD_STAGES, L + again), (backward_schedule(o.recompute), L)):
        for stage in stages:
            stage_flops, stage_bytes = _stage(o, stage)
            flops += times * stage_flops
            n_bytes += times * stage_bytes
    return Cost(grad_accum_steps * flops, grad_accum_steps * n_bytes + _update_bytes(o))


def extra_flops_percent(o: PlanOptions) -> float:
    """FLOPs of a step at this recompute level, in percent above the same step at level 0."""
    return 100 * (step_cost(o).flops / step_cost(replace(o, recompute=0)).flops - 1)


def _stage(o, stage) -> tuple[int, int]:
    sizes = plan_sizes(o)
    types = {"act": o.precision}
    n_bytes = 0
    for name in (*stage.reads, *stage.writes):
        a = ACTIVATION[name]
        n_bytes += prod(resolve(a.shape, sizes)) * DTYPE_BYTES[types.get(a.dtype, a.dtype)]
    for name in stage.weights:
        n_bytes += prod(resolve(PARAMETER[name].shape, sizes)[1:]) * DTYPE_BYTES[o.precision]
    for name in stage.grads:  # read and written: micro-steps add up
        n_bytes += 2 * prod(resolve(PARAMETER[name].shape, sizes)[1:]) * DTYPE_BYTES[o.gradients]
    return prod(resolve(stage.flops, sizes)), n_bytes


def _head(o) -> tuple[int, int]:
    """Embedding, last layernorm and classifier, both ways. Logits are written, read and written as their gradient, and read twice."""
    sizes = plan_sizes(o)
    element, grad = DTYPE_BYTES[o.precision], DTYPE_BYTES[o.gradients]
    rows, C, Vp = o.B * o.T, o.config.channels, o.config.padded_vocab_size
    chunks = -(-rows // head_chunk_rows(o))
    logits = 5 * rows * Vp * element
    weight = chunks * (2 * element + 2 * grad) * Vp * C
    stream = (2 + 3 * LAYERNORM_PASSES + 4) * rows * C * element  # encoder both ways, lnf both ways, lnf as the head's operand
    return prod(resolve("6 B T Vp C", sizes)), logits + weight + stream


def _update_bytes(o) -> int:
    """Gradient read for the norm and for the update; weights, m, v and the master read and written, each in its own type."""
    n = num_parameters(o.config)
    kept = 2 * DTYPE_BYTES[o.optimizer_state] + DTYPE_BYTES[o.precision] + 4 * o.keeps_master + 2 * o.keeps_bits
    return n * (2 * DTYPE_BYTES[o.gradients] + 2 * kept)
