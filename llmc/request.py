"""What a command line asks for: sizes that fit together, a plan, and what auto decides. Nothing is allocated here.

Errors are UserError, one sentence each; NotEnoughMemory where nothing that auto may choose fits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from llmc.cards import RESERVE, Budget, Device, parse_budget
from llmc.checkpoint.extra_file import read_number
from llmc.checkpoint.store import extra_path
from llmc.config import ModelConfig
from llmc.distributed.world import World, smallest
from llmc.errors import UserError
from llmc.flags import BY_NAME, Settings
from llmc.host import available_host_bytes
from llmc.kernels import why_no_kernels
from llmc.kernels_cpu import why_no_cpu_kernels
from llmc.memory.choose import choose_batch, choose_recompute
from llmc.memory.options import PlanOptions
from llmc.memory.scratch_sizes import widens
from llmc.processor import factor_type, matmul_kind
from llmc.refusals import check_attention, check_forms, check_fp8, check_parts, check_shares, check_sizes
from llmc.source import Source
from llmc.units import round_up

ALONE = World()


# ----------------------------------------------------------------------------
# steps


def data_ranks(s: Settings, world: World) -> int:
    """How many ranks read different data: all or, with tensor parallelism, one of each group. Raises UserError if groups do not come out
    even."""
    if world.num_processes % s.tensor_parallel:
        raise UserError(
            f"--tensor-parallel {s.tensor_parallel} does not divide the {world.num_processes} processes of this run; "
            f"start a multiple of {s.tensor_parallel}, or use a number that does"
        )
    return world.num_processes // s.tensor_parallel


def micro_steps(s: Settings, world: World) -> int:
    """Gradient accumulation steps of a step. Raises UserError unless B and T divide the total batch."""
    ranks = data_ranks(s, world)
    per_micro_step = s.batch_size * s.sequence_length * ranks
    total = per_micro_step if s.total_batch_size == -1 else s.total_batch_size
    if total % per_micro_step:
        below, above = total // per_micro_step * per_micro_step, round_up(total, per_micro_step)
        choice = f"{below} or {above}" if below else above
        raise UserError(
            f"-d {total} is not a multiple of B*T*{'processes' if s.tensor_parallel == 1 else 'groups'} = "
            f"{s.batch_size}*{s.sequence_length}*{ranks} = {per_micro_step}; use -d {choice}"
        )
    return total // per_micro_step


def training_data(s: Settings) -> tuple[str, str]:
    """The shards to train on, and the flag that named them. An evaluation takes those that it validates on, or has at hand; a sample alone
    too, as they show what kind of tokens the model knows."""
    from llmc.data.shards import matches

    evaluates = s.max_steps == 0 and (s.val_loss_every > 0 or matches(s.val_data) or not matches(s.train_data))
    return (s.val_data, "-j") if s.overfit_single_batch or evaluates else (s.train_data, "-i")


def shortest_shard(s: Settings) -> int:
    """Inputs in the shortest shard of this run."""
    from llmc.data.shards import inputs_of_shortest

    data = [training_data(s)]
    if s.val_loss_every > 0:
        data.append((s.val_data, "-j"))
    return min(inputs_of_shortest(*each) for each in data)


# ----------------------------------------------------------------------------
# kernels, and whether steps run as graphs


OWN_KERNELS = {"cuda": "triton", "cpu": "numba"}
CALLED = {"triton": "Triton", "numba": "numba"}
NEEDS_KERNELS = {"cuda": ("triton", "fp8"), "cpu": ("numba",)}  # of --matmul and --attention


def settle_kernels(s: Settings, device_kind: str, why_not: str) -> tuple[Settings, list[str]]:
    """The settings with --kernels decided, and a line with the reason where a user may want to know it.

    why_not says what speaks against the kernels there are for that kind of device. Raises UserError where --kernels cannot be
    honoured; so a run never silently takes the slower way.
    """
    own = OWN_KERNELS[device_kind]
    if s.kernels not in ("auto", "torch", own):
        here, there = ("CPU", "GPU") if device_kind == "cpu" else ("GPU", "CPU")
        why_not = f"they are for a {there}, and this run is on a {here}"
    if s.kernels not in ("auto", "torch") and why_not:
        raise UserError(f"--kernels {s.kernels}: {why_not}; leave it out")
    for flag, asked in (("matmul", s.matmul), ("attention", s.attention)):
        if asked in NEEDS_KERNELS[device_kind] and s.kernels == "auto" and why_not:
            raise UserError(f"--{flag} {asked} needs {CALLED[own]}'s kernels, and {why_not}; leave it out")
    if s.kernels != "auto":
        return s, []
    if why_not:
        return replace(s, kernels="torch"), [f"note: torch's operators run, not {CALLED[own]}'s faster kernels: {why_not}"]
    return replace(s, kernels=own), []


def settle_kernels_of(s: Settings, backend) -> tuple[Settings, list[str]]:
    """settle_kernels for a device that was opened, which is asked what it can do; but not if --kernels torch goes round its kernels."""
    why_not = ""
    if s.kernels != "torch":
        why_not = why_no_kernels(backend.capability()) if backend.kind == "cuda" else why_no_cpu_kernels()
    return settle_kernels(s, backend.kind, why_not)


def settle_graphs(s: Settings, o: PlanOptions) -> bool:
    """Whether steps run as graphs: CUDA's, on a CPU lists of calls. Raises UserError where --cuda-graph 1 cannot be honoured."""
    why_not, kernels = "", OWN_KERNELS[o.device]
    if o.kernels != kernels:
        why_not = f"torch's operators ask the host for numbers in the middle of a step; use --kernels {kernels}"
    elif widens(o):
        why_not = "torch's matmuls of widened factors take their precision from the host; use --matmul numba"
    elif o.ranks > 1:
        why_not = "what several processes tell each other is not captured; use one process"
    elif o.offload_residual:
        why_not = "--offload-residual copies on a stream of its own, which is not captured; leave that out"
    if s.cuda_graph == "1" and why_not:
        raise UserError(f"--cuda-graph 1: {why_not}, or leave --cuda-graph out")
    return s.cuda_graph != "0" and not why_not


# ----------------------------------------------------------------------------
# the plan, and what auto decides


def needs_training_state(s: Settings) -> bool:
    """Whether a run trains, or with -x 0 writes what it begins with as a checkpoint, which holds the optimizer's state."""
    return s.max_steps != 0 or s.checkpoint_every > 0 and bool(s.output_dir)


def plan_options(
    s: Settings, config: ModelConfig, precision: str, device_kind: str, world: World = ALONE, processors: int | None = None
) -> PlanOptions:
    """What the plan depends on; `processors` of the card, if known. Where -b or -r is still auto, 1 and 0 stand in.

    Raises UserError for a form the model cannot have.
    """
    check_forms(s, precision, device_kind)
    check_parts(s, config)
    ranks, parts = data_ranks(s, world), s.tensor_parallel
    check_shares(s, config, ranks)
    master = s.master if s.master != "auto" else "fp32" if s.master_weights else "none"
    options = PlanOptions(
        config, 1 if s.batch_size == "auto" else s.batch_size, s.sequence_length, precision=precision,
        recompute=0 if s.recompute == "auto" else s.recompute, master=master, optimizer_state=s.optimizer_state,
        grad_dtype="" if s.grad_dtype == "auto" else s.grad_dtype, offload_residual=s.offload_residual,
        offload_optimizer=s.offload_optimizer, device=device_kind, head_chunk=s.head_chunk, sample_length=s.sample_length,
        **({"processors": processors} if processors else {}),
        kernels="" if s.kernels == "auto" else s.kernels, gelu_fusion=s.gelu_fusion, attention="" if s.attention == "auto" else s.attention,
        data_ranks=ranks, zero_stage=s.zero_stage if ranks > 1 else 0, tensor_parallel=parts, keep_gathered=not s.tp_recompute_allgather,
        async_checkpoint=bool(s.async_checkpoint), reduce_every_micro_step=bool(s.reduce_every_micro_step),
        step_sequences=max(0, s.total_batch_size) // (s.sequence_length * ranks),
        matmul=matmul_kind(s.matmul, device_kind, precision, s.kernels), factors=factor_type(device_kind, precision),
    )  # fmt: skip
    return options if needs_training_state(s) else options.only_evaluating()


def zero_note(s: Settings, o: PlanOptions) -> list[str]:
    """A line, where -z has nothing to do: no two processes hold the same part of the model."""
    if s.zero_stage == 0 or o.data_ranks > 1:
        return []
    why = "with one process" if o.ranks == 1 else f"where --tensor-parallel {o.tensor_parallel} takes all processes"
    return [f"{why} ZeRO has nothing to shard: -z {s.zero_stage} is the same as -z 0"]


def settle_auto(
    s: Settings, source: Source, options: PlanOptions, budget: Budget | None, world: World, inputs_at_most: Callable[[], int] | None = None
) -> tuple[Settings, list[str]]:
    """The settings with -b auto or -r auto decided, and a line with the reason.

    inputs_at_most() are those in the shortest of the shards; None where these are not to be looked at. Raises NotEnoughMemory where nothing
    fits, and UserError where that cannot be known.
    """
    if "auto" not in (s.batch_size, s.recompute):
        return s, []
    sequences = None  # of a step, on each rank, which -b must divide
    if s.batch_size == "auto" and s.total_batch_size != -1:
        sequences = micro_steps(replace(s, batch_size=1), world)
    if s.batch_size == "auto" and source.resume_step is not None:
        written = read_number(extra_path(s.output_dir, source.resume_step, 0), "B", BY_NAME["-b"])
        if written and (sequences is None or sequences % written == 0):
            reason = f"-b auto takes -b {written}: the checkpoint's, in which its place in the data is counted"
            return replace(s, batch_size=written), [reason]
    if budget is None:
        raise UserError("auto chooses what fits, and --plan asks no device how much it has; say --memory-budget, such as h100-80 or 24GiB")
    if s.recompute == "auto":
        level, reason = choose_recompute(options, budget.auto_bytes, micro_steps(s, world))
        return replace(s, recompute=level), [f"-r auto takes {reason} ({budget.auto_name})"]
    most = None if inputs_at_most is None else inputs_at_most() // (s.sequence_length * data_ranks(s, world))
    B, reason = choose_batch(options, budget.auto_bytes, sequences, most)
    return replace(s, batch_size=B), [f"-b auto takes {reason} ({budget.auto_name})"]


@dataclass(frozen=True, slots=True)
class Settled:
    """What a command line comes to, once nothing is left to decide."""

    settings: Settings  # with numbers for auto
    options: PlanOptions
    graphs: bool  # whether steps run as such
    grad_accum_steps: int
    notes: list[str]  # what was decided, and why


def settle_all(
    s: Settings, source: Source, precision: str, world: World, device: Device, budget: Budget | None, inputs_at_most=None
) -> Settled:
    """Decide what is left to decide once the kernels are, and refuse what cannot be honoured: for a run, or a plan, in the same order.
    budget and inputs_at_most are as settle_auto takes them."""

    def options_of(settings):
        return plan_options(settings, source.config, precision, device.kind, world, device.processors)

    options = options_of(s)  # with stand-ins for auto
    check_attention(options)
    check_fp8(options, device)
    graphs = settle_graphs(s, options)
    s, chosen = settle_auto(s, source, options, budget, world, inputs_at_most)
    options = options_of(s)
    check_sizes(options)
    return Settled(s, options, graphs, micro_steps(s, world), [*zero_note(s, options), *chosen])


# ----------------------------------------------------------------------------
# memory for the plan


def run_budget(s: Settings, backend, world: World) -> Budget:
    """What the plan must fit in: --memory-budget, or what the device has free; never more than that. The same on all ranks."""
    mine = backend.free_bytes()
    if backend.kind == "cpu":
        mine //= world.num_local
    free = Budget(smallest(world, mine), f"free on {backend.name}", reserve=RESERVE[backend.kind])
    wish = parse_budget(s.memory_budget) if s.memory_budget else free
    return min(wish, free, key=lambda budget: budget.bytes)


def host_budget(world: World) -> int:
    """Bytes of host memory for each process of a machine. The same on all ranks."""
    return smallest(world, available_host_bytes() // world.num_local)
