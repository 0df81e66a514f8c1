"""Every tensor of the activation arena: what it is for, how large it is, and in which stages it must survive."""

from dataclasses import dataclass
from math import prod

from llmc.memory.ladder import kept_names, segments, stage_line, transient_lifetimes
from llmc.memory.options import PlanOptions
from llmc.memory.scratch_sizes import (
    FP8_DOUT, FP8_DWEIGHT, FP8_FCPROJ, FP8_MATMULS, NUMBA_ATTENTION, TORCH_ATTENTION, TRITON_ATTENTION, head_sums, plan_sizes, widens,
)  # fmt: skip
from llmc.memory.slots import LAYER_SLOTS, offload_slot
from llmc.memory.tables import BACKWARD_STAGES, BLOCK_ACTIVATIONS, BLOCK_GRADIENTS, DTYPE_BYTES, FORWARD_STAGES, PARAMETERS, resolve
from llmc.memory.tuning import (
    MATMUL_DEPTH, MATMUL_PANEL, MATMUL_WORKSPACE, NUMBA_TILE_ROWS, NUMBERS_OF_STEP, NUMBERS_OF_TENSOR, RANK_NUMBERS, UPDATE_COLUMNS,
)  # fmt: skip

STEP = ("encoder", "encoder_backward")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the activation arena. The shape of one that is kept for every layer has a leading L; residual3 has slots instead."""

    name: str
    purpose: str  # batch | kept | shared | gradient | head | head scratch | gathered | scratch | sample
    shape: tuple[int, ...]
    dtype: str
    spans: tuple[tuple[str, str], ...]  # (first stage, last stage) of each span that it must survive
    offset: int = -1

    @property
    def is_scratch(self) -> bool:
        """Whether it is for the inside of operations, and means nothing between those that use it."""
        return self.purpose in ("scratch", "head scratch")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def activation_tensors(o: PlanOptions):
    """Every tensor of the activation arena, not yet placed."""
    sizes, types = plan_sizes(o), {"act": o.precision, "grad": o.grad_dtype, "factor": o.factors}
    rows = (*_block_rows(o), *_head_rows(o), *_working_rows(o), *_rank_rows(o), *_update_rows(o), *_sample_rows(o))
    for name, purpose, shape, dtype, *spans in rows:
        if spans := spans if o.trains else _of_evaluation(spans, stage_line(o.recompute)):
            yield PlannedTensor(name, purpose, resolve(shape, sizes), types.get(dtype, dtype), tuple(spans))


def _of_evaluation(spans, line) -> list[tuple[str, str]]:
    """What is left of spans where forward ends at the head, and only sampling follows."""
    head = line.index("head")
    return [
        (first, last if first == "sample" else line[min(line.index(last), head)])
        for first, last in spans
        if first == "sample" or line.index(first) <= head
    ]


def _block_rows(o: PlanOptions):
    """(name, purpose, shape, dtype, *spans): what the blocks read and write, and the input of the first."""
    yield "inputs", "batch", "B T", "int64", STEP
    yield "encoded", "kept", "B s C", "act", STEP
    kept = kept_names(o.recompute)
    lifetimes = transient_lifetimes(o.recompute, o.gelu_fusion)
    for a in (*BLOCK_ACTIVATIONS, *BLOCK_GRADIENTS):
        if a.name == "residual3":
            yield a.name, "kept", f"{1 + max(residual_slots(o))} {a.shape}", a.dtype, STEP
        elif a.name in kept:
            all_rows = o.keeps_all_rows and a.name in ("ln1", "ln2")
            yield a.name, "kept", "L B T C" if all_rows else "L " + a.shape, a.dtype, STEP
        else:
            yield a.name, "gradient" if a in BLOCK_GRADIENTS else "shared", a.shape, a.dtype, *lifetimes[a.name]
    yield "dresidual", "gradient", "B s C", "act", ("lnf_backward", "encoder_backward")


def _head_rows(o: PlanOptions):
    """The last layernorm and the classifier. lnf becomes its own gradient, chunk by chunk."""
    head = ("head", "head")
    yield "targets", "batch", "B T", "int64", ("encoder", "head")
    yield "losses", "batch", "B T", "fp32", ("encoder", "sample")  # survives micro-steps
    last_norm = ("fcproj", "lnf_backward")  # computed in one pass with the last block's last addition
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
            yield "classifier_rows", "head scratch", "Rc w", "fp32", head
        yield "classifier_stats", "head scratch", "3 R", "fp32", head
    if head_sums(o):
        yield "dwte_sum", "head", "w C", "fp32", head
        yield "dwte_group", "head", "w C", "bf16", head
    if o.trains and o.grad_dtype != o.precision and widens(o):
        yield "head_widened", "head scratch", "Hw", "fp32", head


def _working_rows(o: PlanOptions):
    """Scratch of the layers."""
    backward, encoder = ("lnf_backward", "encoder_backward"), ("encoder_backward", "encoder_backward")
    if widens(o):  # Rw rows of both factors of fc's weight gradient, the largest: C and 4C wide
        yield "widened", "scratch", "Rw 5C", "fp32", STEP if o.matmul == "widened" else backward
    if o.matmul == "numba":
        yield "matmul_panels", "scratch", f"Wm {MATMUL_DEPTH} {MATMUL_PANEL + NUMBA_TILE_ROWS} Nf", "factor", STEP
        yield "matmul_sums", "scratch", f"Rm {MATMUL_PANEL}", "fp32", STEP
        yield "matmul_packed", "scratch", "Pm Nf", "factor", STEP
    if o.matmul == "fp8":
        yield from _fp8_rows(o)
    if o.attention == "cpu":
        spans = _spans_of(o, ("attention", "attention_backward"))
        for name, shape, dtype in NUMBA_ATTENTION if o.kernels == "numba" else TORCH_ATTENTION:
            yield f"attention_{name}", "scratch", shape, dtype, *spans
    if o.attention == "triton":
        for name, shape, dtype in TRITON_ATTENTION:
            yield f"attention_{name}", "scratch", shape, dtype, ("backward: attention_backward",) * 2
    if o.gelu_fusion:
        yield "matmul_workspace", "scratch", str(MATMUL_WORKSPACE // 4), "int32", STEP
    if o.fused:
        yield "column_partials", "scratch", "Pc 4C", "fp32", backward
        # filled in before a step begins, so that all of the step can be one graph
        yield "token_order", "scratch", "B T", "int32", STEP
        yield "token_groups", "scratch", f"2 {o.B * o.T + 1}", "int32", STEP
        yield "token_seed", "scratch", "1", "int32", STEP
        return
    yield "rows", "scratch", "4 Rn C", "fp32", STEP
    yield "row_stats", "scratch", "2 Rn", "fp32", STEP
    yield "column_sums", "scratch", "2 4C", "fp32", backward
    if o.precision != "fp32":
        yield "encoder_rows", "scratch", "B T C", "fp32", encoder
    yield "encoder_sums", "scratch", "T C" if o.grad_dtype == "fp32" else "B T C", "fp32", encoder
    if o.grad_dtype != "fp32":
        yield "encoder_gathered", "scratch", "B T C", "act", encoder


def _spans_of(o: PlanOptions, names):
    """Spans of a buffer that these stages of a block use, each stage for itself, wherever they run."""
    return [(s, s) for s in stage_line(o.recompute) if s.rpartition(" ")[2] in names]


def _fp8_rows(o: PlanOptions):
    """Buffers in which the layers' matmuls convert their factors to FP8."""
    matmuls = [s for s in (*FORWARD_STAGES, *BACKWARD_STAGES) if s.is_matmul]
    between = [("backward: fcproj_dinput", "backward: fcproj_dweight")]
    for rooms, spans in (
        (FP8_MATMULS, _spans_of(o, [s.name for s in matmuls])),
        (FP8_DWEIGHT, _spans_of(o, [s.name for s in matmuls if s.grads])),
        (FP8_DOUT, _spans_of(o, [s.name for s in matmuls if s.weights and s.grads])),
        (FP8_FCPROJ, between),
    ):
        for name, shape, dtype in rooms:
            yield f"fp8_{name}", "scratch", shape, dtype, *spans


def _rank_rows(o: PlanOptions):
    """With several ranks: whole layers of what is sharded; and shares of what is held whole, packed as in a sharded arena.

    With tensor parallelism: one buffer for the stream of all parts, wherever a matmul needs it; and a layer's tensor, for a checkpoint.
    """
    if o.ranks == 1:
        return
    update = ("update", "update")
    yield "rank_numbers", "scratch", f"{o.ranks} {RANK_NUMBERS}", "fp32", update
    if o.tensor_parallel > 1:
        yield "stream", "gathered", "B T C", "act", STEP
        yield "own_inputs", "gathered", "B T", "int64", ("encoder", "encoder")
        # a part of a layer's largest tensor: fcw or fcprojw, or qkvw with its padded heads; whole_tensor has room for all parts
        biggest = max(4 * o.config.channels // o.tensor_parallel, 3 * o.heads * o.config.head_size) * o.config.channels
        yield "whole_tensor", "gathered", str(biggest * o.tensor_parallel), "fp32", update
        yield "part_tensor", "gathered", str(biggest), "fp32", update
    if o.data_ranks == 1:
        return
    layer, outer = o.layer_elements, o.outer_elements
    if o.zero_stage >= 3:
        yield "layer_weights", "gathered", f"{LAYER_SLOTS} {layer}", "act", STEP, ("sample", "sample")
        yield "outer_weights", "gathered", str(outer), "act", ("encoder", "lnf_backward"), ("sample", "sample")
    if o.zero_stage >= 2:
        yield "layer_gradients", "gathered", f"{LAYER_SLOTS} {layer}", "grad", ("lnf_backward", "encoder_backward")
        # with one fcprojb, whose gradient the last layernorm computes
        yield "outer_gradients", "gathered", str(outer + o.config.channels), "grad", ("head", "encoder_backward")
    share = str(o.part_parameters // o.data_ranks)
    if o.trains and o.zero_stage < 2 and o.shares:
        # if micro-steps are summed into it, it must survive them
        yield "gradient_share", "gathered", share, "grad", ("encoder", "update") if o.reduces_always else update
    if 1 <= o.zero_stage < 3:
        yield "parameter_share", "gathered", share, "act", update


def _update_rows(o: PlanOptions):
    """Scratch of the global norm, and widened pieces of what is kept in bf16; with fused kernels only checkpoints use the pieces."""
    update = ("update", "update")
    if o.rounds:
        yield "noise", "scratch", "U", "int32", ("encoder_backward", "update")
        yield "noise_work", "scratch", "U", "int32", ("encoder_backward", "update")
    yield "grad_norm", "scratch", "1", "fp32", update
    yield "loss_sum", "scratch", "1", "fp32", update
    yield "norm_partials", "scratch", "Np", "fp32", update
    if o.precision != "fp32" and not o.keeps_master:
        yield "update_parameter", "scratch", "U", "fp32", update
    if o.optimizer_state != "fp32":  # a checkpoint widens m and v there, whichever kernels update them
        yield "update_m", "scratch", "U", "fp32", update
        yield "update_v", "scratch", "U", "fp32", update
    if o.fused:
        yield "update_layout", "scratch", f"{len(PARAMETERS)} {UPDATE_COLUMNS}", "int64", update
        yield "update_numbers", "scratch", str(NUMBERS_OF_TENSOR * len(PARAMETERS) + NUMBERS_OF_STEP), "int32", update
        return
    if o.grad_dtype != "fp32":
        yield "norm_work", "scratch", "Nw", "fp32", update
        yield "update_gradient", "scratch", "U", "fp32", update
    if o.optimizer_state != "fp32":
        yield "noise_moments", "scratch", "U", "int32", update


def _sample_rows(o: PlanOptions):
    """Sampling: one row on its way through the model, and the keys and values of earlier positions."""
    sample = ("sample", "sample")
    yield "kv_cache", "sample", "L 2 G k", "act", sample
    for name, shape in (("residual", "C"), ("ln", "C"), ("qkvr", "3k"), ("atty", "k"), ("fch", "4f")):
        yield f"sample_{name}", "sample", "1 " + shape, "act", sample
    yield "sample_stats", "sample", "2 1", "fp32", sample
    if not o.fused:
        yield "sample_rows", "sample", "4 1 4C", "fp32", sample


def residual_slots(o: PlanOptions) -> tuple[int, ...]:
    """For every layer, which slot of the tensor residual3 its output takes. Where no backward comes, layers take turns in two."""
    L = o.config.num_layers
    if not o.trains:
        return tuple(l % 2 for l in range(L))
    return tuple(offload_slot(l) if o.offload_residual else segments(o.recompute, L).slot(l) for l in range(L))
