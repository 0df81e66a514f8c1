"""The memory plan: tables + options -> where every byte of a run lives. Plain arithmetic; no torch, no device.

Parameters, gradients and optimizer state are one arena each, packed in file order. All activations share one arena:
every tensor has the spans of stages it is needed for, and tensors whose spans do not overlap may share bytes. The step
itself, evaluation, the update and sampling are all stages on the same time line, so they all fit in the same arena.
"""

from dataclasses import replace
from functools import cached_property

from llmc.memory.activations import activation_tensors, residual_slots
from llmc.memory.ladder import backward_schedule, segments, stage_line
from llmc.memory.options import PlanOptions
from llmc.memory.placement import bytes_covered, place
from llmc.memory.scratch_sizes import attention_library_bytes
from llmc.memory.slots import OFFLOAD_SLOTS
from llmc.memory.tables import DTYPE_BYTES, num_parameters

# column for a part of the activation arena -> purposes of its tensors; a shared byte counts for the first column that uses it
ARENA_PARTS = {
    "kept": ("kept",), "shared": ("shared", "gradient"), "head": ("head", "head scratch"), "gathered": ("gathered",),
    "scratch": ("batch", "scratch", "sample"),
}  # fmt: skip

OPTIMIZER_ARENAS = ("m", "v", "master", "master_bits")  # what the update alone needs


class Plan:
    """Where every byte lives, for one set of options.

    arenas       purpose -> bytes
    tensors      name -> PlannedTensor, the activation arena's contents
    schedule     the stages of a block's backward pass
    stages       all stages in which a tensor may be alive, in order
    segments     which blocks run forward again before backward, and where each residual3 lies
    host_bytes   pinned host memory, not in the total: for --offload-residual and --offload-optimizer, and on CUDA for --async-checkpoint
    """

    def __init__(self, options: PlanOptions):
        self.options = options
        self.schedule = backward_schedule(options.recompute) if options.trains else ()
        self.segments = segments(options.recompute, options.config.num_layers)
        self.stages = stage_line(options.recompute)
        self._not_placed = {t.name: t for t in activation_tensors(options)}
        self._offsets, self._activation_bytes = place(self._not_placed.values(), self.stages)

    @cached_property
    def tensors(self) -> dict:
        return {name: replace(self._not_placed[name], offset=offset) for name, offset in self._offsets.items()}

    @cached_property
    def arenas(self) -> dict[str, int]:
        o, n = self.options, self.options.part_parameters
        sizes = {arena: n // o.ranks_of(arena) * DTYPE_BYTES[dtype] for arena, dtype in self.flat_types.items()}
        first = {purpose: sizes.pop(purpose) for purpose in ("parameters", "gradients") if purpose in sizes}
        return first | {"activations": self._activation_bytes} | sizes

    @property
    def flat_types(self) -> dict[str, str]:
        """Type of every arena that holds one number for each parameter."""
        o = self.options
        if not o.trains:
            return {"parameters": o.precision}
        types = {"parameters": o.precision, "gradients": o.grad_dtype, "m": o.optimizer_state, "v": o.optimizer_state}
        return types | ({"master": "fp32"} if o.keeps_master else {}) | ({"master_bits": "int16"} if o.keeps_bits else {})

    @property
    def total_bytes(self) -> int:
        """Everything that we allocate on the device, and what library calls allocate there temporarily."""
        arenas = sum(self.arenas.values()) - self.arena_bytes_on_host
        return arenas + self.library_bytes + (self.checkpoint_bytes if self.options.device == "cpu" else 0)

    @property
    def columns(self) -> dict[str, int]:
        """The total, part by part: parameters, gradients, optimizer, kept, shared, head, scratch, library; with several ranks also
        gathered, and on a CPU checkpoint, the copy from which one is written while training goes on.

        The parts of the activation arena take turns in the same bytes. Each byte counts for the first of kept, shared, head, gathered
        and scratch that ever uses it, and gaps count for scratch, so the parts add up to what is allocated.
        """
        a = self.arenas
        columns = {
            "parameters": a["parameters"], "gradients": a.get("gradients", 0), "optimizer": self.optimizer_bytes - self.arena_bytes_on_host,
        }  # fmt: skip
        ranges, covered = [], 0
        for part, purposes in ARENA_PARTS.items():
            if part == "gathered" and self.options.ranks == 1:
                continue
            ranges += [(t.offset, t.offset + t.nbytes) for t in self.tensors.values() if t.purpose in purposes]
            so_far = a["activations"] if part == "scratch" else bytes_covered(ranges)
            columns[part], covered = so_far - covered, so_far
        copied = {"checkpoint": self.checkpoint_bytes} if self.options.async_checkpoint and self.options.device == "cpu" else {}
        return columns | {"library": self.library_bytes} | copied

    @property
    def host_bytes(self) -> int:
        """Pinned host memory, which is not in the total."""
        return self.residual_bytes + self.arena_bytes_on_host + (self.checkpoint_bytes if self.options.device == "cuda" else 0)

    @property
    def optimizer_bytes(self) -> int:
        """Memory of the optimizer state and the master, wherever it is."""
        return sum(self.arenas.get(arena, 0) for arena in OPTIMIZER_ARENAS)

    def on_host(self, arena: str) -> bool:
        """Whether an arena lies in pinned host memory, which a GPU reads and writes over the bus."""
        return self.options.offload_optimizer and arena in OPTIMIZER_ARENAS

    @property
    def arena_bytes_on_host(self) -> int:
        """What those arenas take."""
        return sum(n_bytes for arena, n_bytes in self.arenas.items() if self.on_host(arena))

    @property
    def checkpoint_tensors(self) -> dict[str, tuple[int, str]]:
        """Name -> elements and type of what --async-checkpoint copies, in order: the weights, which rank 0 writes, then this rank's m, v
        and master, in fp32 as in their file."""
        o, n = self.options, num_parameters(self.options.config)
        if not o.async_checkpoint or o.rank % o.tensor_parallel:  # of several parts only the first writes
            return {}
        weights = {"parameters": (n, o.precision)} if o.rank == 0 else {}
        return weights | {name: (n // o.ranks_of("m"), "fp32") for name in o.state_tensors}

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
        """How many residuals go to the host: all but the last few, which are still on the device when backward starts."""
        return max(0, self.options.config.num_layers - OFFLOAD_SLOTS) if self.options.offload_residual else 0

    def residual_slot(self, l: int) -> int:
        """Which slot of the tensor residual3 holds the output of layer l."""
        return residual_slots(self.options)[l]

    @property
    def library_bytes(self) -> int:
        """What library calls allocate temporarily: torch's attention on a GPU does."""
        return attention_library_bytes(self.options)

    @property
    def bytes_per_sequence(self) -> int:
        """Activation bytes per sequence of the batch; llm.c's figure."""
        return self.arenas["activations"] // self.options.B
