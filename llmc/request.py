"""What a command line asks for: the model, sizes that fit together, a plan, and what auto decides. Nothing is allocated here.

Errors are UserError, one sentence each; NotEnoughMemory where nothing that auto may choose fits.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from llmc import __version__
from llmc.cards import AMPERE, HOPPER, RESERVE, Budget, Device, parse_budget
from llmc.checkpoint.model_file import read_model_header
from llmc.checkpoint.store import extra_path, find_last_step, model_path, state_path
from llmc.config import ModelConfig, config_from_descriptor
from llmc.distributed import World, different_from_first, smallest
from llmc.errors import RESUME_FROM_ANOTHER, RankLost, UserError
from llmc.flags import BY_NAME, FLAGS, Flag, Settings, refuse_contradictions
from llmc.host import available_host_bytes
from llmc.kernels import OLDEST_CAPABILITY, too_old, why_no_kernels
from llmc.kernels_cpu import not_installed, why_no_cpu_kernels
from llmc.memory.choose import choose_batch, choose_recompute, in_mib
from llmc.memory.ladder import can_keep_gathered
from llmc.memory.layout import divides
from llmc.memory.options import MOST_HEAD_CHANNELS, PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.report import does_not_fit, plan_json, plan_table, tensor_rows, tensors_table, ways_text
from llmc.memory.rooms import widens
from llmc.memory.tables import sizes_of
from llmc.memory.traffic import Network
from llmc.memory.tuning import ALIGNMENT, FP8_MULTIPLE
from llmc.processor import CPU_MATMULS, factor_type, likely_device_kind, likely_precision, matmul_kind
from llmc.units import MIB, round_up

ALONE = World()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a run's weights come from."""

    config: ModelConfig
    file: str | os.PathLike | None = None  # none: random weights
    precision: str | None = None  # the file's
    resume_step: int | None = None  # of the checkpoint that the file is of, where the run goes on


def look_only(s: Settings) -> Settings:
    """-x 0 -y 1 looks at the newest checkpoint in -o: as if -e named its model, and there were no -o to write to. The settings for that;
    others stay as they are. Raises UserError where there is no checkpoint."""
    if s.max_steps != 0 or not s.resume:
        return s
    source = newest_checkpoint(s)
    if source is None:
        raise UserError(f"-x 0 -y 1 looks at the newest checkpoint in {s.output_dir}, which has none; leave -y out to look at -e {s.model}")
    return replace(s, model=str(source.file), resume=0, output_dir="")


def choose_model(s: Settings) -> Source:
    """The checkpoint to resume from, if there is one, else what -e says. Raises UserError."""
    named = None if s.model.endswith(".bin") else Source(named_config(s.model))
    if s.resume and (source := newest_checkpoint(s)):
        return source
    if named:
        return named
    if not os.path.exists(s.model):
        from llmc.data.shards import matches

        from_scratch = "train from random weights with -e d12 (or d6, the smallest)"
        if not matches(s.train_data):
            raise UserError(
                f"there is neither a model {s.model} (-e) nor training data {s.train_data} (-i); "
                f"make the data with: python scripts/prepare_tinyshakespeare.py, then {from_scratch}: python train_gpt2.py -e d6 -b 4 -t 64"
            )
        raise UserError(
            f"-e {s.model}: no such file; {from_scratch}, "
            f"or make it from a Hugging Face GPT-2 with: python scripts/convert_hf.py to-bin gpt2 {s.model}"
        )
    config, precision = read_model_header(s.model)
    return Source(config, s.model, precision)


def newest_checkpoint(s: Settings) -> Source | None:
    """The complete checkpoint of the highest step in -o, if there is one. Raises UserError if it is damaged, or not of -e's sizes."""
    if not s.output_dir:
        raise UserError("-y 1 resumes from the folder that -o names, and there is no -o; add -o DIR, or leave -y out")
    step = find_last_step(s.output_dir)
    if step is None:
        return None
    path = model_path(s.output_dir, step)
    try:
        config, precision = read_model_header(path)
    except UserError as error:
        raise UserError(f"{error}, or {RESUME_FROM_ANOTHER}") from None
    if not s.model.endswith(".bin") and (named := named_config(s.model)) != config:
        raise UserError(
            f"{path} is {sizes_in_words(config)}, but -e {s.model} is {sizes_in_words(named)}; "
            "resume with the -e of the run that wrote it, or choose another -o"
        )
    return Source(config, path, precision, step)


def named_config(name: str) -> ModelConfig:
    """The sizes of an -e that is not the name of a file. Raises UserError, for a folder with the model that is meant."""
    try:
        return config_from_descriptor(name)
    except UserError:
        if not os.path.isdir(name):
            raise
    models = sorted(Path(name).glob("model_*.bin"))
    meant = f"name a model in it, such as {models[-1]}" if models else "name a model .bin"
    raise UserError(f"-e {name} is a folder; {meant}")


def sizes_in_words(config: ModelConfig) -> str:
    """All that a model's tensors depend on, but for padding."""
    return f"{config} maxT={config.max_seq_len}"


def check_lengths(s: Settings, config: ModelConfig):
    """Raise UserError unless the model knows as many positions as T and a sample ask for."""
    if s.sequence_length > config.max_seq_len:
        raise UserError(f"-t {s.sequence_length}: the model knows {config.max_seq_len} positions; use -t {config.max_seq_len} or less")
    if s.sample_every > 0 and s.sample_length > config.max_seq_len:
        raise UserError(f"-g {s.sample_length}: the model knows {config.max_seq_len} positions; use -g {config.max_seq_len} or less")


def check_batch(s: Settings, world: World) -> int:
    """Raise UserError unless B and T divide the total batch; gradient accumulation steps."""
    ranks = data_ranks(s, world)
    per_micro_step = s.batch_size * s.sequence_length * ranks
    total = per_micro_step if s.total_batch_size == -1 else s.total_batch_size
    if total % per_micro_step:
        below, above = total // per_micro_step * per_micro_step, round_up(total, per_micro_step)
        choice = f"{below} or {above}" if below else above
        raise UserError(
            f"-d {total} is not a multiple of B*T*processes = {s.batch_size}*{s.sequence_length}*{ranks} = {per_micro_step}; "
            f"use -d {choice}"
        )
    return total // per_micro_step


# flags that every process may say in its own way; on all others ranks must agree
OWN_FLAGS = {
    "device", "threads", "process_rank", "num_processes", "gpus_per_node", "init_method", "server_ip", "fs_path",
    "timeout", "train_data", "val_data", "model", "output_dir", "hellaswag_data", "tokenizer",
}  # fmt: skip


def check_agreement(s: Settings, source: Source, precision: str, world: World):
    """Raise UserError where this rank was started with other flags than rank 0, RankLost where ranks found different checkpoints.

    A checkpoint may have been completed in the meantime, or not be seen on another machine yet, so that is worth another try.
    """
    facts = {name: value for name, value in asdict(s).items() if name not in OWN_FLAGS}
    facts |= {
        "version": __version__, "precision": precision, "model": sizes_in_words(source.config),
        "output_dir": "a folder" if s.output_dir else "empty",
    }  # fmt: skip
    for name, theirs in different_from_first(world, facts, "flags").items():
        title = next((flag.title for flag in FLAGS if flag.field == name), f"--{name}, of which rank 0's program knows,")
        mine = facts.get(name, "unknown")
        raise UserError(f"{title} is {mine} on rank {world.rank} and {theirs} on rank 0; start all ranks with the same program and flags")
    step = -1 if source.resume_step is None else source.resume_step
    first, last = smallest(world, step), -smallest(world, -step)
    if first != last:
        found = "no checkpoint" if first < 0 else f"the checkpoint of step {first}"
        raise RankLost(
            f"-y 1: some ranks found {found} in -o, others that of step {last}; give all of them the same folder, and start them again",
            said_elsewhere=world.rank > 0,
        )


def check_inputs(facts: dict, world: World):
    """Raise UserError where this rank read, or chose, something else than rank 0: title -> what it was, as text or a number."""
    for title, theirs in different_from_first(world, facts, "inputs").items():
        raise UserError(
            f"{title}: rank {world.rank} has {facts.get(title)}, and rank 0 has {theirs}; give all ranks the same files and the same kind "
            "of machine, or name with flags what they chose"
        )


# of the kinds that take bf16 only
HEAD_SIZES = {"flash": range(8, 257, 8), "cudnn": range(8, 129, 8), "triton": range(1, MOST_HEAD_CHANNELS + 1)}


def check_attention(o: PlanOptions):
    """Raise UserError unless the attention of these options takes their type and heads, and what it is written in is there."""
    kind, head_size = o.attention_kind, o.config.head_size
    if kind == "triton" and o.kernel_set != "triton":
        raise UserError(f"--attention triton goes with --kernels triton, and this run has --kernels {o.kernel_set}; leave one of them out")
    sizes = HEAD_SIZES.get(kind)
    if sizes and o.precision == "fp32":
        raise UserError(f"--attention {kind} has no fp32 form; leave it out, or train in bf16")
    if sizes and head_size not in sizes:
        taken = "sizes" if sizes.step == 1 else f"multiples of {sizes.step}"
        repeating = ("flash", "triton") if o.kernel_set == "triton" else ("flash",)
        others = "".join(f"{other} or " for other in repeating if head_size in HEAD_SIZES[other])
        raise UserError(
            f"heads of size {head_size}: {kind} attention takes {taken} up to {sizes[-1]} in bf16; "
            f"use --attention {others}efficient, an fp32 model with --precision fp32, or --device cpu"
        )


OWN_KERNELS = {"cuda": "triton", "cpu": "numba"}
CALLED = {"triton": "Triton", "numba": "numba"}
NEEDS_KERNELS = {"cuda": ("triton", "fp8"), "cpu": ("numba",)}  # of --matmul and --attention


def settle_kernels(s: Settings, kind: str, why_not: str) -> tuple[Settings, list[str]]:
    """The settings with --kernels decided, and a line with the reason where a user may want to know it.

    why_not says what speaks against the kernels there are for that kind of device. Raises UserError where --kernels cannot be
    honoured; so a run never silently takes the slower way.
    """
    own = OWN_KERNELS[kind]
    if s.kernels not in ("auto", "torch", own):
        here, there = ("CPU", "GPU") if kind == "cpu" else ("GPU", "CPU")
        why_not = f"they are for a {there}, and this run is on a {here}"
    if s.kernels not in ("auto", "torch") and why_not:
        raise UserError(f"--kernels {s.kernels}: {why_not}; leave it out")
    for flag, asked in (("matmul", s.matmul), ("attention", s.attention)):
        if asked in NEEDS_KERNELS[kind] and s.kernels == "auto" and why_not:
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


def check_graphs(s: Settings, o: PlanOptions) -> bool:
    """Whether steps run as graphs: CUDA's, on a CPU lists of calls. Raises UserError where --cuda-graph 1 cannot be honoured."""
    why_not, kernels = "", "triton" if o.device == "cuda" else "numba"
    if o.kernel_set != kernels:
        why_not = f"torch's operators ask the host for numbers in the middle of a step; use --kernels {kernels}"
    elif widens(o):
        why_not = "torch's matmuls of widened factors take their precision from the host; use --matmul numba"
    elif o.world > 1:
        why_not = "what several processes tell each other is not captured; use one process"
    elif o.offload_residual:
        why_not = "--offload-residual copies on a stream of its own, which is not captured; leave that out"
    if s.cuda_graph == "1" and why_not:
        raise UserError(f"--cuda-graph 1: {why_not}, or leave --cuda-graph out")
    return s.cuda_graph != "0" and not why_not


def check_gelu_fusion(o: PlanOptions):
    """Raise UserError unless cuBLASLt is there for -ge."""
    if o.gelu_fusion:
        from llmc.kernels.cublaslt import available

        if why_not := available():
            raise UserError(f"-ge {o.gelu_fusion}: {why_not}; use -ge 0, which computes the same function")


def check_sizes(o: PlanOptions):
    """Raise UserError unless -ge can fuse and --matmul fp8 multiply these sizes, and -ge 3 keeps with them the bits that it promises."""
    if o.gelu_fusion:
        for what, width in (("C", o.config.channels), (f"4 C / {o.tensor_parallel}", 4 * o.config.channels // o.tensor_parallel)):
            if width % 8:
                raise UserError(
                    f"-ge {o.gelu_fusion}: cuBLASLt fuses GELU into matmuls of widths that 8 divides, and {what} is {width}; use -ge 0"
                )
        # else how GELU's input of a layer is aligned depends on the level, and cuBLASLt chooses its algorithm by alignment
        if o.gelu_repeats and o.gelu_input_bytes % ALIGNMENT:
            raise UserError(
                f"-ge {o.gelu_fusion} promises the same bits at every -r, for which a layer's B*T*4C inputs of GELU must take a multiple "
                f"of {ALIGNMENT} bytes, and they take {o.gelu_input_bytes}; use a -b or -t with more factors of two, or -ge 0"
            )
    if o.matmul == "fp8":
        sizes = sizes_of(o.config, parts=o.tensor_parallel)
        channels = {"C": sizes["C"], "the channels of a rank's heads": sizes["k"], "a rank's part of 4 C": 4 * sizes["f"]}
        for what, size in ({"B*T": o.B * o.T} | channels).items():
            if size % FP8_MULTIPLE:
                raise UserError(f"--matmul fp8 takes sizes that {FP8_MULTIPLE} divides, and {what} is {size}; leave it out")


FP8_CAPABILITY = HOPPER  # Ada multiplies FP8 too, but Triton 3.6 rounds to it twice there


def check_fp8(o: PlanOptions, device: Device):
    """Raise UserError unless --matmul fp8, where it is asked for, can be honoured on that card."""
    if o.matmul != "fp8":
        return
    if device.capability and device.capability < FP8_CAPABILITY:
        raise UserError(f"--matmul fp8 is for Hopper and later, SM90, and this run is on {device.name}; leave it out")
    if o.precision == "fp32":
        raise UserError("--matmul fp8 is for a bf16 model, and this one is fp32; leave it out, or use a bf16 model")
    if o.kernel_set != "triton":
        raise UserError(f"--matmul fp8 goes with --kernels triton, and this run has --kernels {o.kernel_set}; leave one of them out")
    if o.gelu_fusion:
        raise UserError(f"--matmul fp8 -ge {o.gelu_fusion}: GELU joins matmuls of bf16, and these are FP8; leave one of them out")


def data_ranks(s: Settings, world: World) -> int:
    """Ranks that read different data: all, but for tensor parallelism. Raises UserError where the parts do not come out even."""
    if world.num_processes % s.tensor_parallel:
        raise UserError(
            f"--tensor-parallel {s.tensor_parallel} does not divide the {world.num_processes} processes of this run; "
            f"start a multiple of {s.tensor_parallel}, or use a number that does"
        )
    return world.num_processes // s.tensor_parallel


def check_parts(s: Settings, config: ModelConfig):
    """Raise UserError unless tensor parallelism can split this model."""
    parts = s.tensor_parallel
    split = {"channels": config.channels, "rows of the padded vocabulary": config.padded_vocab_size, "tokens of -t": s.sequence_length}
    for what, count in split.items():
        if count % parts:
            raise UserError(f"--tensor-parallel {parts} does not divide the {count} {what}; use a number that does")
    if parts > config.num_heads:
        raise UserError(f"--tensor-parallel {parts} is more than there are heads, {config.num_heads}; use a smaller number")
    if not s.tp_recompute_allgather and parts == 1:
        raise UserError("--tp-recompute-allgather 0 is about what --tensor-parallel gathers, and there is none; leave it out")
    if not s.tp_recompute_allgather and s.recompute != "auto" and not can_keep_gathered(s.recompute):
        raise UserError(
            f"--tp-recompute-allgather 0 keeps the layernorms of all parts, and -r {s.recompute} does not keep them; "
            "use -r 0 or -r 1, or leave it out"
        )
    if parts > 1 and s.kernels == "torch":
        raise UserError(
            "--tensor-parallel needs kernels that take a part's tokens, which torch's operators do not; use --kernels numba or triton"
        )


def check_forms(s: Settings, precision: str, kind: str):
    """Raise UserError for what a model in that precision, on that kind of device, cannot have."""
    for wish, asked in (("--master bits16", s.master == "bits16"), ("--grad-dtype bf16", s.grad_dtype == "bf16")):
        if asked and precision == "fp32":
            raise UserError(f"{wish} is for a bf16 model, and this one is fp32; leave it out, or use a bf16 model")
    here = "this plan is for a CPU; name a card with --memory-budget, or" if s.plan else "this run is on a CPU;"
    for wish, asked, what in (
        ("--offload-residual", s.offload_residual, "moves residuals from a GPU to host memory"),
        ("--offload-optimizer", s.offload_optimizer, "moves m, v and the master from a GPU to host memory"),
        (f"-ge {s.gelu_fusion}", s.gelu_fusion, "fuses GELU into matmuls of a GPU"),
        (f"--attention {s.attention}", s.attention != "auto", "is a GPU's"),
        (f"--matmul {s.matmul}", s.matmul not in ("auto", *CPU_MATMULS), "is a GPU's"),
    ):
        if asked and kind != "cuda":
            raise UserError(f"{wish} {what}, and {here} leave it out")
    if s.matmul in CPU_MATMULS and kind == "cuda":
        raise UserError(f"--matmul {s.matmul} is a CPU's, and this run is on a GPU; leave it out")
    if s.matmul == "widened" and precision == "fp32":
        raise UserError("--matmul widened is for a bf16 model, and this one is fp32; leave it out, or use a bf16 model")
    if s.matmul == "numba" and s.kernels != "numba":
        raise UserError(f"--matmul numba goes with --kernels numba, and this run has --kernels {s.kernels}; leave one of them out")


def check_shares(s: Settings, config: ModelConfig, ranks: int):
    """Raise UserError unless ZeRO can share every tensor out over so many ranks."""
    parts = s.tensor_parallel
    if s.zero_stage > 0 and not divides(config, ranks, parts):
        sizes = sizes_of(config, parts=parts)
        channels = (
            f"C = {config.channels}" if parts == 1 else f"both C / {parts} = {sizes['f']} and the {sizes['k']} channels of a part's heads"
        )
        raise UserError(
            f"-z {s.zero_stage} shares every tensor out over {ranks} processes, which do not divide {channels}; "
            "use a number that does, or -z 0"
        )


def needs_training_state(s: Settings) -> bool:
    """Whether a run trains, or with -x 0 writes what it begins with as a checkpoint, which holds the optimizer's state."""
    return s.max_steps != 0 or s.checkpoint_every > 0 and bool(s.output_dir)


def plan_options(
    s: Settings, config: ModelConfig, precision: str, kind: str, world: World = ALONE, processors: int | None = None
) -> PlanOptions:
    """What the plan depends on; `processors` of the card, if known. Where -b or -r is still auto, 1 and 0 stand in.

    Raises UserError for a form the model cannot have.
    """
    check_forms(s, precision, kind)
    check_parts(s, config)
    ranks, parts = data_ranks(s, world), s.tensor_parallel
    check_shares(s, config, ranks)
    master = s.master if s.master != "auto" else "fp32" if s.master_weights else "none"
    options = PlanOptions(
        config, 1 if s.batch_size == "auto" else s.batch_size, s.sequence_length, precision=precision,
        recompute=0 if s.recompute == "auto" else s.recompute, master=master, optimizer_state=s.optimizer_state,
        grad_dtype="" if s.grad_dtype == "auto" else s.grad_dtype, offload_residual=s.offload_residual,
        offload_optimizer=s.offload_optimizer, device=kind, head_chunk=s.head_chunk, sample_length=s.sample_length,
        **({"processors": processors} if processors else {}),
        kernels="" if s.kernels == "auto" else s.kernels, gelu_fusion=s.gelu_fusion, attention="" if s.attention == "auto" else s.attention,
        ranks=ranks, zero_stage=s.zero_stage if ranks > 1 else 0, tensor_parallel=parts, keep_gathered=not s.tp_recompute_allgather,
        async_checkpoint=bool(s.async_checkpoint), reduce_every_micro_step=bool(s.reduce_every_micro_step),
        step_sequences=max(0, s.total_batch_size) // (s.sequence_length * ranks),
        matmul=matmul_kind(s.matmul, kind, precision, s.kernels), factors=factor_type(kind, precision),
    )  # fmt: skip
    return options if needs_training_state(s) else options.only_evaluating()


def zero_note(s: Settings, o: PlanOptions) -> list[str]:
    """A line, where -z has nothing to do: no two processes hold the same part of the model."""
    if s.zero_stage == 0 or o.ranks > 1:
        return []
    why = "with one process" if o.world == 1 else f"where --tensor-parallel {o.tensor_parallel} takes all processes"
    return [f"{why} ZeRO has nothing to shard: -z {s.zero_stage} is the same as -z 0"]


def settle(
    s: Settings, source: Source, options: PlanOptions, budget: Budget | None, world: World, shortest_shard=None
) -> tuple[Settings, list[str]]:
    """The settings with -b auto or -r auto decided, and a line with the reason.

    shortest_shard() gives the inputs in the shortest of the shards; None where they are not to be looked at. Raises NotEnoughMemory
    where nothing fits, and UserError where that cannot be known.
    """
    if "auto" not in (s.batch_size, s.recompute):
        return s, []
    if s.batch_size == "auto" and source.resume_step is not None:
        if written := written_number(s, source, "B", BY_NAME["-b"], None):
            reason = f"-b auto takes -b {written}: the checkpoint's, in which its place in the data is counted"
            return replace(s, batch_size=written), [reason]
    if budget is None:
        raise UserError("auto chooses what fits, and --plan asks no device how much it has; say --memory-budget, such as h100-80 or 24GiB")
    if s.recompute == "auto":
        level, reason = choose_recompute(options, budget.auto_bytes, check_batch(s, world))
        return replace(s, recompute=level), [f"-r auto takes {reason} ({budget.auto_name})"]
    sequences = None if s.total_batch_size == -1 else check_batch(replace(s, batch_size=1), world)
    most = None if shortest_shard is None else shortest_shard() // (s.sequence_length * data_ranks(s, world))
    B, reason = choose_batch(options, budget.auto_bytes, sequences, most)
    return replace(s, batch_size=B), [f"-b auto takes {reason} ({budget.auto_name})"]


def written_number(s: Settings, source: Source, name: str, flag: Flag, default: int | None) -> int | None:
    """What the run that wrote the checkpoint to resume from says that the value of a flag was, under `name`; `default` where it does not,
    as in llm.c's. Raises UserError for what the flag would not take."""
    from llmc.checkpoint.state_file import read_extra

    path = extra_path(s.output_dir, source.resume_step, 0)
    value = read_extra(path).get(name, default)
    if value is not default and (type(value) is not int or not flag.at_least <= value <= flag.at_most):
        expected = f"a whole number from {flag.at_least} to {flag.at_most}"
        raise UserError(f"{path} says {name} {value!r}; expected {expected}, so it is damaged; {RESUME_FROM_ANOTHER}")
    return value


@dataclass(frozen=True, slots=True)
class Settled:
    """What a command line comes to, once nothing is left to decide."""

    settings: Settings  # with numbers for auto
    options: PlanOptions
    graphs: bool  # whether steps run as such
    grad_accum_steps: int
    reasons: list[str]  # what was decided, and why


def settle_all(
    s: Settings, source: Source, precision: str, world: World, device: Device, budget: Budget | None, shortest_shard=None
) -> Settled:
    """Decide what is left to decide once the kernels are, and refuse what cannot be honoured: for a run, or a plan, in the same order.
    budget and shortest_shard are as settle takes them."""

    def options_of(settings):
        return plan_options(settings, source.config, precision, device.kind, world, device.processors)

    options = options_of(s)  # with stand-ins for auto
    check_attention(options)
    check_fp8(options, device)
    graphs = check_graphs(s, options)
    s, chosen = settle(s, source, options, budget, world, shortest_shard)
    options = options_of(s)
    check_sizes(options)
    return Settled(s, options, graphs, check_batch(s, world), [*zero_note(s, options), *chosen])


def plan_text(s: Settings) -> str:
    """What --plan prints. No device is touched, so auto means what this machine most likely has, or the card that was named."""
    refuse_contradictions(s)
    s = look_only(s)
    source, ranks = choose_model(s), s.ranks or s.num_processes
    world = World(num_processes=ranks, num_local=min(ranks, s.gpus_per_node))
    check_precision(s, source)
    check_lengths(s, source.config)
    s = settle_seed(s, source)
    budget = parse_budget(s.memory_budget) if s.memory_budget else None
    kind = "cuda" if s.device == "auto" and budget and budget.card else likely_device_kind(s.device)
    card = budget.card if budget and kind == "cuda" else None
    device = Device(kind, budget.name, card.capability, card.processors) if card else Device(kind)
    precision = choose_precision(s, source, device)
    # of a card that nobody named, and of one that has no Triton yet, the best is assumed
    why_not = too_old(device.capability or OLDEST_CAPABILITY) if kind == "cuda" else not_installed()
    s, kernel_notes = settle_kernels(s, kind, why_not)
    if budget is None and kind == "cpu":
        with suppress(UserError):  # elsewhere than on Linux nobody says how much memory is free
            share = f", for each of {world.num_local} processes" if world.num_local > 1 else ""
            budget = Budget(available_host_bytes() // world.num_local, f"free on this machine{share}", reserve=RESERVE[kind])
    settled = settle_all(s, source, precision, world, device, budget)
    options, reasons, network = settled.options, [*kernel_notes, *settled.reasons], Network(s.link, s.node_link, s.gpus_per_node)
    if s.json:
        tensors = {"tensors": tensor_rows(Plan(options))} if s.tensors else {}
        return json.dumps({"reasons": reasons} | plan_json(options, settled.grad_accum_steps, budget, network) | tensors, indent=1)
    plan = Plan(options)
    if s.tensors:
        return "\n".join([*reasons, tensors_table(plan)])
    table = plan_table(options, settled.grad_accum_steps, budget, network)
    if budget and plan.total_bytes > budget.bytes:
        table += f"\n\n{does_not_fit(plan, budget)}\n{ways_text(options, budget.bytes, settled.grad_accum_steps)}"
    return "\n".join([*reasons, table])


def check_precision(s: Settings, source: Source):
    """Raise UserError where --precision is not that of the file; a checkpoint goes on in any if it has a master."""
    if source.precision is None or s.precision in ("auto", source.precision):
        return
    if source.resume_step is None:
        raise UserError(
            f"{source.file} holds {source.precision} weights, but --precision {s.precision} was asked for; "
            f"leave --precision out, or start from a {s.precision} file"
        )
    if not keeps_master(s, source):
        raise UserError(
            f"{state_path(s.output_dir, source.resume_step, 0)} holds no fp32 master weights, from which the {source.precision} checkpoint "
            f"could go on in {s.precision}; leave --precision out"
        )


def keeps_master(s: Settings, source: Source) -> bool:
    """Whether this is a checkpoint to resume from that has fp32 master weights."""
    from llmc.checkpoint.state_file import has_master

    return source.resume_step is not None and has_master(state_path(s.output_dir, source.resume_step, 0))


def choose_precision(s: Settings, source: Source, device: Device) -> str:
    """fp32 or bf16: what was asked for, else that of the file, else bf16 wherever the hardware has it. To be called after check_precision.

    Raises UserError for bf16 on a card that does not compute in it.
    """
    wanted = s.precision if s.precision != "auto" else source.precision or "auto"
    if device.capability is None or device.capability >= AMPERE:
        return likely_precision(wanted, device.kind)
    if wanted != "bf16":
        return "fp32"
    why, advice = "--precision bf16:", "use --precision fp32"
    if source.precision == "bf16":
        why = f"{source.file} holds bf16 weights, and"
        if keeps_master(s, source):
            advice = "use --precision fp32, which goes on from the checkpoint's fp32 master weights"
        elif source.resume_step is None:
            advice = "start from an fp32 file"
        else:
            advice = "go on with --device cpu, or on a card that has"
    raise UserError(f"{why} {device.name} has no bf16 arithmetic (SM80 or later has); {advice}")


def settle_seed(s: Settings, source: Source) -> Settings:
    """The settings with the seed of the checkpoint to resume from, if any: what it decides is decided. Raises UserError where another one
    was asked for."""
    if source.resume_step is None:
        return s
    seed = written_number(s, source, "seed", BY_NAME["--seed"], 0)  # llm.c's checkpoints have its seeds
    if s.seed not in (0, seed):
        raise UserError(
            f"--seed {s.seed}: the checkpoint of step {source.resume_step} in {s.output_dir} is of a run with --seed {seed}, "
            "and goes on with that; leave --seed out"
        )
    return replace(s, seed=seed)


def training_data(s: Settings) -> tuple[str, str]:
    """The shards to train on, and the flag that named them."""
    return (s.val_data, "-j") if s.overfit_single_batch else (s.train_data, "-i")


def shortest_shard(s: Settings) -> int:
    """Inputs in the shortest shard of this run."""
    from llmc.data.shards import inputs_of_shortest

    data = [training_data(s)]
    if s.val_loss_every > 0:
        data.append((s.val_data, "-j"))
    return min(inputs_of_shortest(*each) for each in data)


def run_budget(s: Settings, backend, world: World) -> Budget:
    """What the plan must fit in: --memory-budget, or what the device has free; never more than that. The same on all ranks."""
    mine = backend.free_bytes()
    if backend.kind == "cpu":
        mine //= world.num_local
    free = Budget(smallest(world, mine), f"free on {backend.name}", reserve=RESERVE[backend.kind])
    wish = parse_budget(s.memory_budget) if s.memory_budget else free
    return min(wish, free, key=lambda budget: budget.bytes)


def check_host_memory(plan: Plan, host_bytes: int):
    """Raise UserError for a plan that needs more pinned host memory than there is for this process."""
    if plan.host_bytes <= host_bytes:
        return
    o = plan.options
    takers = {
        "--offload-residual": o.offload_residual, "--offload-optimizer": o.offload_optimizer, "--async-checkpoint 1": o.async_checkpoint
    }  # fmt: skip
    asked = [flag for flag, given in takers.items() if given]
    smaller = "use a smaller -b, or " if o.offload_residual else ""
    raise UserError(
        f"{' with '.join(asked)} needs {in_mib(plan.host_bytes)} MiB of host memory for each process, and there are "
        f"{host_bytes // MIB} MiB; {smaller}leave {'it' if len(asked) == 1 else 'one of them'} out and see --plan"
    )


def host_budget(world: World) -> int:
    """Bytes of host memory for each process of a machine. The same on all ranks."""
    return smallest(world, available_host_bytes() // world.num_local)
