#!/usr/bin/env python3
"""Train GPT-2 and GPT-3 models: llm.c's flags, files and printed lines, from Python.

    python train_gpt2.py --help

The program, top to bottom: opening what the flags ask for, building it, the loop, what is due between steps, how a run is stopped.
What it uses of llmc/, where each package names its modules in its first lines:

what is asked  flags, source (the model), request (the plan, and what auto decides), plan_command (--plan), refusals, agreement (of all
               ranks), config, preamble, backend, processor, host, spinning, cards
the plan       memory/
the model      gpt2 (stages over named views, forward and backward), operations (which functions run), graphs, rehearsal
its functions  layers/ in torch, kernels/ in Triton, kernels_cpu/ in numba; staging (what kernels read from the plan's memory)
several ranks  distributed/
files          data/, checkpoint/, files
beside a step  schedulers, outlier, clock, sampler, logger, mfu, gpu_info, rand, interrupt, errors, units, text_table
"""

import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

# --help and --plan take a second, and torch another: what needs it is imported where it is first used
from llmc import __version__, lacks
from llmc.agreement import check_agreement, check_inputs
from llmc.backend import Backend, measure_matmul_tflops, open_backend
from llmc.cards import Budget
from llmc.checkpoint.extra_file import NO_FILE, Extra, changes_since, optimisation
from llmc.checkpoint.model_file import open_weights
from llmc.checkpoint.store import extra_path, first_without_room, held_folder, steps_done
from llmc.clock import StepClock
from llmc.distributed.place import find_place
from llmc.distributed.world import (
    World, anybody, bound_note, check_shared, close_world, connect_groups, connect_world, device_of, meet_world, prepare_torch, smallest,
    told,
)  # fmt: skip
from llmc.errors import (
    INPUT_CODE, INTERRUPT_CODE, MEMORY_CODE, Interrupted, NotEnoughMemory, RankLost, UserError, end_with, fill_closed_streams,
    is_out_of_memory, leave, tell, tell_lost_output,
)  # fmt: skip
from llmc.files import Numbers, digest_of
from llmc.flags import Settings, check_contradictions, format_help, parse
from llmc.gpu_info import device_line
from llmc.interrupt import StopRequest, early_sigint_kept
from llmc.kernels_cpu.notice import told_when_compiling
from llmc.logger import LOG_NAME, SPEED_NAME, Logger, format_step_line
from llmc.memory.plan import Plan
from llmc.memory.record import MemoryRecord
from llmc.memory.report import allocation_lines, does_not_fit, not_enough_memory, usage_lines
from llmc.memory.tables import num_parameters
from llmc.mfu import flops_per_token, model_flops_utilization, promised_tflops
from llmc.operations import other_matmuls
from llmc.outlier import WINDOW_SIZE, OutlierDetector
from llmc.plan_command import plan_text
from llmc.preamble import chosen_line, flag_notes, print_device, print_model, print_rows, print_settings, print_sizes
from llmc.processor import likely_device_kind
from llmc.rand import XorShift
from llmc.refusals import check_gelu_fusion, check_host_memory, check_parts
from llmc.request import data_ranks, host_budget, run_budget, settle_all, settle_kernels_of, shortest_shard, training_data
from llmc.schedulers import learning_rate
from llmc.source import Source, choose_precision, find_source, look_only
from llmc.spinning import sleep_soon_where_busy
from llmc.units import MIB, ceil_mib

if TYPE_CHECKING:
    from llmc.checkpoint.keeper import Checkpoints
    from llmc.data.evals import EvalLoader
    from llmc.data.loader import TokenLoader
    from llmc.data.tokenizer import Tokenizer
    from llmc.distributed.group import Groups
    from llmc.gpt2 import GPT2

LESS_AFTER_FAILURE = 0.9  # ways to fit are then sought in this share of the plan that should have fitted and did not
# evaluations ask whether some rank heard a signal every so many calls of the model: to ask, the host waits for a GPU
CALLS_PER_STOP_CHECK = {"cpu": 1, "cuda": 8}
SAMPLE_STATE = 1337  # of the random numbers of --seed 0, anew for every sample, so that samples of different steps can be compared


def main(argv=None) -> int:
    """Run the command line; the exit code, one of llmc.flags.EXIT_CODES."""
    fill_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path or sample that a terminal cannot show must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    code = 0
    try:
        with early_sigint_kept():
            settings = parse(sys.argv[1:] if argv is None else argv)
            if settings.help:
                print(format_help(shutil.get_terminal_size().columns), end="")
            elif settings.version:
                print(f"llmc {__version__}")
            elif settings.plan:
                print(plan_text(settings))
            else:
                stop = train(settings)
                if stop.lost_output:
                    return tell_lost_output(stop.lost_output)
                if stop.number == signal.SIGINT:
                    code = INTERRUPT_CODE
            print(end="", flush=True)  # here, where a failure is ours to name
            return code
    except (UserError, KeyboardInterrupt, OSError) as error:
        return tell(error, on_interrupt="interrupted before the first step; no checkpoint has changed")
    except NotEnoughMemory as error:
        return end_with(f"error: {error}\n\n{not_enough_memory(error)}", MEMORY_CODE)
    except RankLost as error:
        return end_with("" if error.said_elsewhere else f"error: {error}", error.code)
    except ModuleNotFoundError as error:
        return end_with(f"error: {lacks(error.name)}", INPUT_CODE)


# ----------------------------------------------------------------------------
# everything that training needs, from the device to the last file


@dataclass(frozen=True, slots=True)
class Data:
    """What a run reads, and how much of it. Where nothing is evaluated there is no loader for that."""

    train_loader: "TokenLoader"
    val_loader: "TokenLoader | None"
    eval_loader: "EvalLoader | None"
    tokenizer: "Tokenizer | None"
    prompt: list[int]  # tokens that samples go on from
    max_steps: int
    val_batches: int


@dataclass(slots=True)
class Run:
    """What a run holds, in the order in which it comes to it: what build adds is not there before, and to ask for it is an error."""

    # open_run: what was asked, and what follows from it
    settings: Settings
    world: World
    groups: "Groups | None"  # None for one process
    backend: Backend
    source: Source
    weights: Numbers | None  # the model file to start from, open since it was found: the run that wrote it may delete it meanwhile
    plan: Plan
    graphs: bool  # whether steps run as such
    budget: Budget  # device memory for the plan
    host_bytes: int  # of host memory for the plan
    grad_accum_steps: int
    total_batch_size: int  # tokens of a step, on all ranks
    flops_per_token: int
    peak_tflops: float  # that MFU is relative to
    notes: list[str]  # what was decided, and why
    # build: what it reads, trains and writes
    data: Data = field(init=False)
    record: MemoryRecord = field(init=False)
    model: "GPT2" = field(init=False)
    checkpoints: "Checkpoints" = field(init=False)
    loss_outliers: OutlierDetector = field(default_factory=OutlierDetector)
    norm_outliers: OutlierDetector = field(default_factory=OutlierDetector)
    last_batch: tuple | None = None  # inputs and targets that were trained on last
    stop: StopRequest = field(init=False)  # from when it is there a signal waits for the end of a step
    log: Logger = field(init=False)
    speed_log: Logger = field(init=False)

    @property
    def resume_step(self) -> int | None:
        """Of the checkpoint that it goes on from, if any."""
        return self.source.resume_step

    @property
    def max_steps(self) -> int:
        """Those of -x, or of an epoch."""
        return self.data.max_steps

    @property
    def log_folder(self) -> str | None:
        """Where this rank writes logs, if it does: rank 0 does."""
        return self.settings.output_dir if self.world.rank == 0 else None


def open_run(s: Settings, until_end: ExitStack) -> Run:
    """Open the device, meet the other ranks, and settle the run; prints llm.c's table on the way. Nothing is allocated that stays."""
    check_contradictions(s)
    if sys.platform != "linux":
        raise UserError(
            f"training needs Linux, and this is {sys.platform}; use a Linux machine, or WSL 2 on Windows; --plan works anywhere"
        )
    place = find_place(s)
    prepare_torch(place)
    alone_on_cpu = place.num_processes == 1 and likely_device_kind(s.device) == "cpu"
    notes = sleep_soon_where_busy(s.threads) if alone_on_cpu else []
    world = meet_world(place, s.timeout)
    if world.rank > 0:
        sys.stdout = open(os.devnull, "w", errors="backslashreplace")  # rank 0 speaks for all
    until_end.enter_context(told_when_compiling(partial(print, flush=True)))
    with told(world):
        notes += bound_note(world)
        s = look_only(s)
        if s.output_dir and world.rank == 0:
            until_end.enter_context(held_folder(s.output_dir))  # before a checkpoint is looked for: another run may be writing one there
        s, source = find_source(s)
        weights = None
        if source.file and source.resume_step is None:
            weights = until_end.enter_context(open_weights(source.file, source.precision))
        backend = open_backend(device_of(place, s.device), s.threads or world.threads, bool(s.tf32), s.matmul)
        connect_world(world, backend.kind, s.timeout)
        return settle_run(s, source, weights, backend, world, notes)


def settle_run(s: Settings, source: Source, weights: Numbers | None, backend: Backend, world: World, notes: list[str]) -> Run:
    """Decide what is left to decide, plan, and print llm.c's table, with the peak that MFU is relative to. notes: those so far."""
    world.progress("planning")
    config, device = source.config, backend.facts()
    precision = choose_precision(s, source, device)
    check_agreement(s, source, precision, world)
    check_parts(s, config)
    groups = connect_groups(world, backend.kind, s.timeout, data_ranks(s, world))  # before free memory is counted, of which they take some
    s, kernel_notes = settle_kernels_of(s, backend)
    budget, host_bytes = run_budget(s, backend, world), host_budget(world)
    settled = settle_all(s, source, precision, world, device, budget, partial(shortest_shard, s))
    s, options = settled.settings, settled.options
    check_gelu_fusion(options)
    total_batch_size = s.batch_size * s.sequence_length * data_ranks(s, world) * settled.grad_accum_steps

    print_settings(s, total_batch_size)
    peak_tflops = promised_tflops(backend.name, precision, s.tf32) if backend.kind == "cuda" else None
    measured = peak_tflops is None
    if measured:
        peak_tflops = measure_matmul_tflops(backend, options.multiplied_in, other_matmuls(options.matmul))
    print_device(backend.name, peak_tflops, "TF32" if precision == "fp32" and s.tf32 and backend.has_tf32() else precision.upper())
    print_model(config, "intermediate checkpoint" if source.resume_step is not None else s.model)
    notes = [*notes, *kernel_notes, *settled.notes]
    if measured:
        notes.append(
            f"no published peak for {backend.name}: MFU is relative to a matmul measured now, "
            f"{peak_tflops:.3f} TFLOP/s in {options.multiplied_in}"
        )
    plan = Plan(replace(options, rank=world.rank))
    notes.append(chosen_line(s, plan.options, settled.graphs))
    return Run(
        settings=s, world=world, groups=groups, backend=backend, source=source, weights=weights, plan=plan, graphs=settled.graphs,
        budget=budget, host_bytes=host_bytes, grad_accum_steps=settled.grad_accum_steps, total_batch_size=total_batch_size,
        flops_per_token=flops_per_token(num_parameters(config), config.num_layers, config.channels, s.sequence_length),
        peak_tflops=peak_tflops, notes=notes,
    )  # fmt: skip


def build(run: Run, until_end: ExitStack):
    """Add to an opened run its data, the model and its files. Data, memory and what the checkpoint says are looked at before anything that
    takes time."""
    s, world, plan = run.settings, run.world, run.plan
    data = run.data = open_data(run, until_end)
    check_same_inputs(run)
    print_data(run)
    found = None if run.resume_step is None else open_checkpoint(run)
    resumes, has_tokenizer = found is not None, data.tokenizer is not None
    of_flags = flag_notes(s, plan.options, run.grad_accum_steps, data.max_steps, has_tokenizer=has_tokenizer, resumes=resumes)
    print(*run.notes, *validation_notes(data), *of_flags, sep="\n")
    check_fits(run)
    print_sizes(plan, run.total_batch_size, run.grad_accum_steps)
    if s.log_gpu_every > 0:
        device_line(run.backend)  # learn now, not after -lg steps, that there is nothing to ask
    if s.output_dir:
        check_shared(world, s.output_dir)
        print_disk_note(run)
    world.progress("building the model")
    compile_kernels(run)
    build_model(run)
    if found:
        world.progress("resuming")
        resume(run, *found)
    run.stop = StopRequest(alone=world.num_processes == 1)
    open_logs(run)
    world.wait_for_all("the start of training")


def open_data(run: Run, until_end: ExitStack) -> Data:
    """Open shards, evaluations and tokenizer, and settle how many steps and validation batches they are."""
    s, o = run.settings, run.plan.options
    run.world.progress("opening the data")
    from llmc.data.evals import EvalLoader
    from llmc.data.loader import TokenLoader
    from llmc.data.shards import matches
    from llmc.data.tokenizer import find_tokenizer

    rank = run.world.rank // o.tensor_parallel  # among those that read different data
    batch = dict(B=s.batch_size, T=s.sequence_length, rank=rank, data_ranks=o.data_ranks, vocab_size=o.config.vocab_size)

    def opened(pattern, **how):
        return until_end.enter_context(closing(TokenLoader(pattern, **how, **batch)))

    train_data, train_flag = training_data(s)
    train_loader = opened(train_data, shuffle=not s.overfit_single_batch, flag=train_flag, seed=s.seed)
    val_loader = opened(s.val_data, flag="-j") if s.val_loss_every > 0 else None
    eval_loader = EvalLoader(s.hellaswag_data, **batch) if s.hellaswag else None
    beside = [Path(path).parent for path in (*sorted(matches(s.train_data))[:1], train_loader.paths[0])]
    tokenizer = find_tokenizer(s.tokenizer, (".", *beside) if s.sample_every > 0 else (), o.config.vocab_size)
    prompt = encode_prompt(s, tokenizer, train_loader.paths[0]) if s.prompt else []
    max_steps = train_loader.num_tokens // run.total_batch_size if s.max_steps == -1 else s.max_steps
    if max_steps == 0 and s.max_steps == -1:
        raise UserError(
            f"{train_flag} {train_data} has {train_loader.num_tokens} tokens, less than one step of {run.total_batch_size}; "
            "use a smaller -d or -b, or say -x"
        )
    val_batches = 0
    if val_loader:
        val_batches = val_loader.num_batches if s.val_max_steps == -1 else s.val_max_steps
    return Data(train_loader, val_loader, eval_loader, tokenizer, prompt, max_steps, val_batches)


def check_same_inputs(run: Run):
    """Raise UserError unless all ranks have the same data and the same model, and compute in the same way."""
    s, world, o, data = run.settings, run.world, run.plan.options, run.data
    if world.num_processes > 1:
        model = run.weights.digest() if run.weights else run.source.file and digest_of(run.source.file)
        check_inputs({
            "-b": s.batch_size, "-r": s.recompute, "--kernels": s.kernels, "multiprocessors of the card": o.processors,
            "--matmul": o.matmul, "the model": model or "random weights",
            data.train_loader.flag: data.train_loader.summary(), "validation with -j": data.val_loader and data.val_loader.summary(),
            "steps to train": data.max_steps, "--hellaswag-data": data.eval_loader and f"{data.eval_loader.num_examples} examples",
            "tokens of --prompt": " ".join(map(str, data.prompt)),
        }, world)  # fmt: skip


def print_data(run: Run):
    """The data's part of the table, and that of the processes that read them."""
    s, data = run.settings, run.data
    print_rows({"train_num_batches": data.max_steps, "val_num_batches": data.val_batches})
    print_rows({"run hellaswag": "yes" if data.eval_loader else "no"})
    print_rows({"num_processes": run.world.num_processes, "zero_stage": s.zero_stage})
    if s.tensor_parallel > 1:
        print_rows({"tensor_parallel": s.tensor_parallel})


def validation_notes(data: Data):
    """Notes on what may mislead in the validation loss."""
    if not data.val_loader:
        return
    from llmc.data.shards import first_tokens
    from llmc.data.tokenizer import are_single_bytes

    batches = data.val_loader.num_batches
    if data.val_batches > batches:
        yield f"note: -m {data.val_batches} takes some of -j's batches more than once, as there are {batches}; -m -1 takes each once"
    bytes_alone = [are_single_bytes(first_tokens(loader.paths[0])) for loader in (data.train_loader, data.val_loader)]
    if len(set(bytes_alone)) == 2:
        one, other = ("-i", "-j") if bytes_alone[0] else ("-j", "-i")
        yield f"note: the tokens of {one} are single bytes and those of {other} are not: their losses do not compare"


def encode_prompt(s: Settings, tokenizer, shard: str) -> list[int]:
    """The tokens of --prompt, of the kind that a shard of the data has. Raises UserError where there is no tokenizer, or no room after
    them."""
    from llmc.data.shards import first_tokens

    if tokenizer is None:
        raise UserError(
            "--prompt needs the tokenizer that the data were made with, and there is no gpt2_tokenizer.bin of this model's vocabulary "
            "here or beside the data; name it with --tokenizer"
        )
    tokens = tokenizer.encode(s.prompt, like=first_tokens(shard))
    if len(tokens) + 2 > s.sample_length:
        raise UserError(
            f"--prompt and the end-of-text before it are {len(tokens) + 1} tokens, which leaves none of -g {s.sample_length} to generate; "
            "use a larger -g, or a shorter prompt"
        )
    return tokens


def check_fits(run: Run):
    """Raise NotEnoughMemory, or UserError where it is the host's, for a plan that will not fit, before kernels are compiled for it."""
    plan, budget = run.plan, run.budget
    if plan.total_bytes > budget.bytes:
        raise NotEnoughMemory(does_not_fit(plan, budget), plan.options, budget.bytes, run.grad_accum_steps)
    check_host_memory(plan, run.host_bytes)


def print_disk_note(run: Run):
    """Say so if the disk has no room for all the checkpoints to come."""
    s, o = run.settings, run.plan.options
    try:
        room = shutil.disk_usage(s.output_dir).free // o.checkpoint_file_bytes
    except OSError:  # nobody knows
        return
    first = partial(first_without_room, room, run.resume_step or 0, run.max_steps, steps_done(s.output_dir), every=s.checkpoint_every)
    step = first(keep=s.checkpoints_keep, major_every=s.major_checkpoint_every)
    if step is not None:
        advice = "make room" if first(keep=1, major_every=0) is not None else "-nk 1 keeps the newest alone"
        size = ceil_mib(o.checkpoint_file_bytes)
        print(f"note: a checkpoint takes {size} MiB, and {s.output_dir} has no room for that of step {step}; {advice}")


def compile_kernels(run: Run):
    """Have numba's kernels compiled, where they run, and say so if that takes long."""
    if run.plan.options.kernels != "numba":
        return
    from llmc.rehearsal import compile_kernels as compile_all

    start = time.perf_counter()
    compile_all(run.plan.options)
    if (seconds := time.perf_counter() - start) > 2:
        print(f"compiled numba's kernels: {seconds:.0f} s", flush=True)
    run.world.moved()


def build_model(run: Run):
    """Allocate the plan, fill in the weights, and make room for checkpoints; prints llm.c's allocation lines."""
    plan, backend = run.plan, run.backend
    run.record = MemoryRecord(run.log_folder, plan, run.settings, backend)
    print(*allocation_lines(plan), sep="\n", flush=True)
    from llmc.checkpoint.keeper import Checkpoints
    from llmc.checkpoint.snapshot import load_weights
    from llmc.distributed.sharing import Sharing
    from llmc.distributed.tensor_parallel import Divided, Undivided
    from llmc.gpt2 import GPT2
    from llmc.graphs import graphs_on

    sharing = None
    if run.groups:
        same_part, same_data, everyone = run.groups
        sharing = Sharing(plan, same_part, Divided(same_data) if same_data.size > 1 else Undivided(), everyone, run.world)
    graphs = graphs_on(run.backend.kind) if run.graphs else None
    run.model = GPT2(plan, run.backend.device, sharing, graphs, run.settings.seed)
    if run.source.file is None:
        run.model.init_random()
    elif run.weights:
        load_weights(run.weights, run.model)
    run.checkpoints = Checkpoints(run.settings, run.model, run.record, run.resume_step)
    more_bytes = min(backend.free_bytes(), run.budget.bytes - plan.total_bytes)
    print(*usage_lines(plan, *backend.memory_bytes(), more_bytes), sep="\n", flush=True)
    run.record.phase("build", 0)


@contextmanager
def memory_explained(run: Run):
    """Turn an allocator's refusal inside into NotEnoughMemory, whose ways to fit take less than the plan that was refused."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        plan = run.plan
        raise NotEnoughMemory(
            f"{run.backend.name} ran out of memory within a plan of {plan.total_bytes // MIB} MiB; "
            "something else takes memory there, so these are ways to need less",
            plan.options, min(run.budget.bytes, int(plan.total_bytes * LESS_AFTER_FAILURE)), run.grad_accum_steps,
        ) from error  # fmt: skip


def open_checkpoint(run: Run):
    """Open the checkpoint to go on from, whatever its number of ranks and its -b were, and take up all but its tensors and its place in the
    data. Returns the SavedState that has the ones, and a llmc.data.resume.Continued that is the other."""
    from llmc.checkpoint.saved_state import SavedState
    from llmc.data.resume import plan_resume

    s, loader = run.settings, run.data.train_loader
    saved = SavedState(s.output_dir, run.resume_step, run.source.config)
    ranks = range(saved.num_processes)
    states, extras = [saved.state_of(r).loader for r in ranks], [saved.extra_of(r) for r in ranks]
    try:
        loader.check_shuffle(states[0].should_shuffle)  # before the shards are compared: -a 1 trains on others
        continued = plan_resume(states, extras, geometry=loader.geometry, rank=loader.rank, shards=loader.shards)
    except UserError as error:
        raise UserError(f"step {run.resume_step} in {s.output_dir}: {error}") from None
    adopt(run, extras[0])
    return saved, continued


def resume(run: Run, saved, continued):
    """Take up the tensors, and the place in the data."""
    from llmc.checkpoint.snapshot import load_snapshot

    s = run.settings
    with closing(saved):
        load_snapshot(s.output_dir, run.resume_step, run.model, saved)
    run.data.train_loader.go_on(continued)
    for note in continued.notes:
        print(note)
    print(f"resuming at step {run.resume_step} from {s.output_dir}")
    if run.resume_step > run.max_steps:
        print(f"note: step {run.resume_step} is beyond -x {run.max_steps}, so there is nothing left to do")
    elif run.resume_step == run.max_steps:
        print(f"note: step {run.resume_step} is the last of -x {run.max_steps}, so there is nothing left to train")
    run.record.phase("resume", run.resume_step)


def adopt(run: Run, extra: Extra):
    """Take over the outlier windows, and tell of flags that have changed. Raises UserError where the extra file is damaged."""
    path = extra_path(run.settings.output_dir, run.resume_step, 0)
    if extra is NO_FILE:
        print(f"note: there is no {path}, as in a checkpoint of llm.c: z-scores of loss and norm begin anew")
        return
    run.loss_outliers.restore(extra.loss_outliers, source=str(path))
    run.norm_outliers.restore(extra.norm_outliers, source=str(path))
    for line in changes_since(extra.optimisation, optimisation(run.settings, run.total_batch_size), path):
        print(line)


def open_logs(run: Run):
    """From here on what is trained is logged; a log that cannot be written stops the run."""
    fails = run.stop.cannot_go_on
    run.log, run.speed_log = (Logger(run.log_folder, run.resume_step, name, fails) for name in (LOG_NAME, SPEED_NAME))
    run.record.go_ahead(fails)


# ----------------------------------------------------------------------------
# the loop


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a training step gave, once the host knows it."""

    loss: float
    norm: float  # of the gradient, before clipping
    loss_z: float  # z-scores, as OutlierDetector has them
    norm_z: float
    checkpoints_written: int  # by all ranks, when the step ran


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A training step that was given to the device, which may be at work on it."""

    step: int
    started: object  # marks of the device, as StepClock has them
    ended: object
    lr: float
    read: Callable[[], list[float]]  # waits for the step's numbers, for read_result
    result: StepResult | None  # already, where the update depended on it
    skipped: bool  # whether the update was left out


def train(s: Settings) -> StopRequest:
    """Train as the flags say, from opening the device to the last checkpoint. Returns what may have ended it before."""
    with ExitStack() as until_end:
        run = open_run(s, until_end)
        with told(run.world), memory_explained(run):
            build(run, until_end)
            with checkpoint_kept(run):
                loop(run)
        close_world(run.world)
    return run.stop


def loop(run: Run):
    """Train for -x steps: every evaluation that is due, and a checkpoint, then the step.

    A GPU is given the next step before the loss and the norm of the last one are read, so it never waits for the host.
    """
    stop, launched = run.stop, None
    clock = StepClock(run.backend, tokens=run.total_batch_size, setting_up=steps_of_setting_up(run))
    evaluations = ((validation_due, validate), (hellaswag_due, score_hellaswag), (sample_due, sample))
    step = start = 0 if run.resume_step is None else run.resume_step
    if start > run.max_steps:  # resume has printed that nothing is left to do; what the folder holds stays as it is
        return
    look_ahead(run, start - 1)
    agree_to_stop(run)
    for step in range(start, run.max_steps + 1):  # one extra turn, so the final weights are evaluated too
        last = step == run.max_steps
        for is_due, evaluate in evaluations:
            if is_due(run, step, last) and not stop.agreed:
                between_steps(run, clock, launched, evaluate, step)
                launched = None
        stopping = stop.agreed  # a signal may come at any time, and a run must not stop without a checkpoint of this step
        if stopping and step == 0:
            end_untrained(run)
        if run.checkpoints.due(step, last, stopping):
            between_steps(run, clock, launched, checkpoint, step)
            launched, stopping = None, stop.agreed
        if last or stopping:
            break
        launched = step_ahead(run, clock, step, launched)
    finish_step(run, clock, launched)
    end_run(run, clock, step)


def end_untrained(run: Run):
    """Asked to stop before the first step, so a checkpoint has nothing to keep: end as at start-up, by a signal or an error. A run whose
    output was lost ends as it does after any step."""
    if not anybody(run.world, run.stop.lost_output is not None):
        end_on_failure(run)
        interrupted = Interrupted(run.stop.number or signal.SIGTERM)
        end_alike(run, interrupted, interrupted.code)


def between_steps(run: Run, clock: StepClock, launched: LaunchedStep | None, act: Callable[[Run, int], None], step: int):
    """Finish the step that was launched, if one was, then evaluate, or write a checkpoint, with the weights that it left."""
    finish_step(run, clock, launched)
    run.world.progress(f"step {step}, {act.__name__}")
    act(run, step)
    agree_to_stop(run)
    clock.pause()


def step_ahead(run: Run, clock: StepClock, step: int, before: LaunchedStep | None) -> LaunchedStep | None:
    """Launch a step, then finish the one before, if that is still to do. Returns what was launched if a GPU now works on it; a CPU is done
    with it, so it is finished here too."""
    if may_skip(run.settings):  # "skipping update" of this step is printed at once, and belongs after the line of the step before
        finish_step(run, clock, before)
        before = None
    run.world.progress(f"step {step + 1}")  # as its line counts
    try:
        launched = launch_step(run, clock, step)
    except BaseException:  # the step before is done and is logged if possible; the error to tell is this one
        with suppress(Exception):
            finish_step(run, clock, before)
        raise
    finish_step(run, clock, before)
    if run.backend.asynchronous:
        return launched
    finish_step(run, clock, launched)
    return None


def launch_step(run: Run, clock: StepClock, step: int) -> LaunchedStep:
    """Give the device one training step."""
    run.checkpoints.check()
    s, model, loader, accum = run.settings, run.model, run.data.train_loader, run.grad_accum_steps
    if s.overfit_single_batch:
        loader.rewind(accum)
    started = clock.start()
    for micro_step in range(accum):
        run.world.moved()
        run.last_batch = inputs, targets = loader.next_batch()  # (B, T) int64
        model.train(inputs, targets, accum, micro_step, loader.token_order())
    look_ahead(run, step)
    model.sharing.tell_with_norm(wants_to_stop=run.stop.requested, checkpoints_written=run.checkpoints.written)
    grad_norm = model.grad_norm()
    read = run.backend.read_later(model.acts["loss_sum"], grad_norm, model.sharing.stops, model.sharing.written_by_all)
    lr = learning_rate(
        s.lr_scheduler, step, lr=s.learning_rate, warmup=s.warmup_steps, total_steps=run.max_steps, final_fraction=s.final_lr_fraction
    )
    result = read_result(run, read) if may_skip(s) else None  # the update then waits until loss and norm are known here
    skips = result is not None and skip_update(run, result)
    if not skips:
        model.update(lr, s.weight_decay, step + 1, grad_norm)
    return LaunchedStep(step, started, clock.end(), lr, read, result, skips)


def look_ahead(run: Run, step: int):
    """Check the data of the next step while the device is busy with this one: if they cannot be used, the run writes a checkpoint and ends.

    Several ranks agree to stop when they read this step's numbers. Where the next one is launched before that, two steps' data are checked.
    """
    loader, steps = run.data.train_loader, 2 if run.backend.asynchronous and run.world.num_processes > 1 else 1
    with bad_data_stops(run):
        if not run.settings.overfit_single_batch:
            loader.look_ahead(min(steps, run.max_steps - 1 - step) * run.grad_accum_steps)
        elif run.last_batch is None and step + 1 < run.max_steps:  # every step takes what the first one does
            loader.rewind(run.grad_accum_steps)


def may_skip(s: Settings) -> bool:
    """Whether -sl or -sg are given, so that an update depends on its loss and norm."""
    return s.skip_loss_z > 0 or s.skip_grad_z > 0


def read_result(run: Run, read: Callable[[], list[float]]) -> StepResult:
    """Wait for a step's numbers. With them comes whether a rank was asked to stop, which all ranks then agree on."""
    loss_sum, norm, stops, written = read()
    run.stop.agreed |= stops > 0
    loss = loss_sum / run.model.tokens(run.grad_accum_steps)
    loss_z, norm_z = run.loss_outliers.update(loss), run.norm_outliers.update(norm)
    return StepResult(loss, norm, loss_z, norm_z, checkpoints_written=int(written))


def skip_update(run: Run, result: StepResult) -> bool:
    """Whether -sl or -sg leave this update out, as its loss or norm is too many deviations up, or no number. If so it is printed, and the
    step's values are taken out of the outlier windows again."""
    s = run.settings
    for what, x, z, limit in (("loss", result.loss, result.loss_z, s.skip_loss_z), ("grad", result.norm, result.norm_z, s.skip_grad_z)):
        if limit > 0 and (z > limit or not isfinite(x)):  # a z-score is nan until its window is full
            print(f"skipping update due to {what} " + (f"z-score of {z:f}" if isfinite(x) else f"of {x:f}"))
            run.loss_outliers.undo()
            run.norm_outliers.undo()
            return True
    return False


def finish_step(run: Run, clock: StepClock, launched: LaunchedStep | None):
    """Wait for a step that was launched, if any, print it and log it."""
    if launched is None:
        return
    s, step = run.settings, launched.step
    result = launched.result or read_result(run, launched.read)
    dt = clock.count(launched.started, launched.ended)
    mfu = model_flops_utilization(run.flops_per_token, run.total_batch_size // run.world.num_processes, dt, run.peak_tflops)
    print(format_step_line(
        step, run.max_steps, loss=result.loss, loss_z=result.loss_z, norm=result.norm, norm_z=result.norm_z, lr=launched.lr,
        dt_ms=dt * 1e3, mfu=mfu, tokens_per_s=clock.tokens_per_s
    ), flush=True)  # fmt: skip
    if s.log_gpu_every > 0 and (step + 1) % s.log_gpu_every == 0:
        print_device_state(run)
    run.log.train(step, result.loss, launched.lr, result.norm)
    run.speed_log.speed(step, dt * 1e3, run.total_batch_size / dt)
    run.record.phase("first step", step)
    run.checkpoints.complete_if(result.checkpoints_written)
    if isfinite(result.loss) and isfinite(result.norm):
        run.checkpoints.prove(step)
    elif not launched.skipped:
        found = f"the loss is {result.loss:f} and the gradient's norm {result.norm:f}, which leaves no weight a number"
        refuse_numbers_lost(run, step + 1, found)
    elif max(run.loss_outliers.lost, run.norm_outliers.lost) == WINDOW_SIZE:
        refuse_numbers_lost(run, step + 1, f"{WINDOW_SIZE} losses or norms in a row were nan or infinite, and no update was made")


def print_device_state(run: Run):
    """-lg's line. The library that answered at the start may fail later, which is no reason to end the run."""
    try:
        print(device_line(run.backend), flush=True)
    except UserError as error:
        print(f"note: {error}", flush=True)


def steps_of_setting_up(run: Run) -> int:
    """How many steps at the start are left out of the averages: the first, and with CUDA graphs the second, which captures them. A CPU's
    recording costs only milliseconds."""
    return 2 if run.graphs and run.backend.asynchronous else 1


def end_run(run: Run, clock: StepClock, step: int):
    """Complete the checkpoint, the record and the logs of a run that ends at this step, stopped or done."""
    run.checkpoints.complete()
    if run.checkpoints.unproven is not None or run.loss_outliers.lost:
        prove_last(run, step)
    if clock.average_ms is not None:
        print(f"total average iteration time: {clock.average_ms:f} ms")
    peak_bytes = run.record.end(step, clock.average_ms, run.total_batch_size)
    print(f"peak memory: {peak_bytes // MIB} MiB more than before the model was made, {run.plan.total_bytes // MIB} MiB planned")
    run.log.close()
    run.speed_log.close()
    agree_to_stop(run)  # one of these files may have failed
    if run.stop.agreed:
        end_on_failure(run)
        if step < run.max_steps:
            kept = run.checkpoints.kept() if run.settings.output_dir else "nothing is kept without -o, a folder for checkpoints"
            print("; ".join(filter(None, (f"stopped at step {step} of {run.max_steps}", kept))), flush=True)


def prove_last(run: Run, step: int):
    """Compute one more loss, to prove the checkpoint, or weights whose last update was skipped, after which nothing was trained or
    validated: on the batch trained last, or the next."""
    run.world.progress(f"step {step}, one more loss")
    if run.last_batch is None:
        with bad_data_stops(run):
            run.data.train_loader.look_ahead(1)
        if anybody(run.world, run.stop.error is not None):
            run.stop.agreed = True
            return
    batch = run.last_batch or run.data.train_loader.next_batch()
    loss = mean_over_ranks(run, [run.model.token_losses(*batch).mean()])
    if not isfinite(loss):
        refuse_numbers_lost(run, step, f"the loss is now {loss:f}, so these weights are of no use")
    run.checkpoints.prove(step)


# ----------------------------------------------------------------------------
# what is due between steps: evaluations, which are left out once the run was asked to stop, and checkpoints


def on_period(period: int, step: int, last: bool) -> bool:
    """Whether this is the end, or a multiple of the period, if there is one, and not the start."""
    return last or period > 0 and step > 0 and step % period == 0


def validation_due(run: Run, step: int, last: bool) -> bool:
    """On -v's period, the start included, and at the end."""
    return bool(run.data.val_loader) and (last or step % run.settings.val_loss_every == 0)


def validate(run: Run, step: int):
    """Mean loss over the validation batches, always the same ones. Data are checked ahead for as many batches as lie between two stop
    checks."""
    loader, batches = run.data.val_loader, run.data.val_batches
    with bad_data_stops(run):
        loader.reset()
    means, at_once = [], CALLS_PER_STOP_CHECK[run.backend.kind]
    for batch in range(batches):
        if batch % at_once == 0:
            with bad_data_stops(run):
                loader.look_ahead(min(at_once, batches - batch))
        if evaluation_ends(run, f"step {step}, validate", batch):
            return
        means.append(run.model.token_losses(*loader.next_batch()).mean())  # read after the loop, so no batch waits for another
    loss = mean_over_ranks(run, means)
    print(f"val loss {loss:f}", flush=True)
    run.log.val(step, loss)
    run.record.phase("evaluation", step)
    if not isfinite(loss):
        refuse_numbers_lost(run, step, f"the validation loss is {loss:f}, so these weights are of no use")
    run.checkpoints.prove(step)


def mean_over_ranks(run: Run, means) -> float:
    """The mean over all ranks' means, as many on each."""
    sharing = run.model.sharing
    return sharing.total(sum(mean.item() for mean in means)) / (len(means) * sharing.size)


def hellaswag_due(run: Run, step: int, last: bool) -> bool:
    """On -v's period, but not at the start, and at the end."""
    return bool(run.data.eval_loader) and on_period(run.settings.val_loss_every, step, last)


class Stopped(Exception):
    """A signal stopped an evaluation before its end."""


def score_hellaswag(run: Run, step: int):
    """Print how many of HellaSwag's examples the model gets right."""
    loader, batches = run.data.eval_loader, count()  # the same number of batches on all ranks
    shows = sys.stdout.isatty()

    def token_losses(inputs, targets):
        batch = next(batches)
        if evaluation_ends(run, f"step {step}, score_hellaswag", batch):  # the whole of it can take an hour on a CPU
            raise Stopped
        if shows and batch % 10 == 0:
            print(f"evaluating HellaSwag: {batch}/{loader.num_batches}", end="\r", flush=True)
        return run.model.token_losses(inputs, targets).cpu().numpy()

    try:
        correct = int(run.model.sharing.total(loader.evaluate(token_losses)))
    except Stopped:
        return
    finally:
        if shows:
            print(end="\r\x1b[K")  # else its end stays behind a shorter line
    accuracy = correct / loader.num_examples
    print(f"HellaSwag: {correct}/{loader.num_examples} = {accuracy:f}", flush=True)
    run.log.eval(step, accuracy)
    run.record.phase("HellaSwag", step)


def sample_due(run: Run, step: int, last: bool) -> bool:
    """On -s's period and at the end."""
    return run.settings.sample_every > 0 and on_period(run.settings.sample_every, step, last)


def sample(run: Run, step: int):
    """Print a text the model makes up, from end-of-text, or --prompt, on."""
    from llmc.sampler import sample_softmax

    rng, tokens = XorShift(SAMPLE_STATE + (run.settings.seed << 32)), [run.plan.options.config.end_of_text, *run.data.prompt]
    print("generating:\n---")
    for position in range(run.settings.sample_length - 1):
        if evaluation_ends(run, f"step {step}, sample", position):
            break
        logits = run.model.next_logits(tokens[position], position)
        if position + 1 == len(tokens):  # past the prompt
            tokens.append(sample_softmax(logits, rng.f32(), run.settings.temperature))
    del tokens[0]
    if tokenizer := run.data.tokenizer:
        text = tokenizer.decode(tokens).decode("utf-8", errors="replace")
        print("".join(c for c in text if c.isprintable() or c.isspace()))
    else:
        print(*tokens)
    print("---", flush=True)
    run.record.phase("sampling", step)


def evaluation_ends(run: Run, what: str, call: int) -> bool:
    """Whether a signal ends an evaluation or a sample before this call of the model, on all ranks alike: all make the same calls."""
    run.world.progress(f"{what}, call {call}")
    if call % CALLS_PER_STOP_CHECK[run.backend.kind] == 0:
        agree_to_stop(run)
    return run.stop.agreed


def checkpoint(run: Run, step: int):
    """Write everything a resumed run needs: now, or beside the next steps."""
    s, loader = run.settings, run.data.train_loader
    run.checkpoints.write(step, loader, Extra(
        run.loss_outliers.state(), run.norm_outliers.state(), B=s.batch_size, T=s.sequence_length, data=loader.data_state(), seed=s.seed,
        optimisation=optimisation(s, run.total_batch_size),
    ), doubtful=run.loss_outliers.lost > 0)  # fmt: skip


# ----------------------------------------------------------------------------
# how a run is stopped, by a signal or by what it cannot go on with


def agree_to_stop(run: Run):
    """Tell all ranks whether one of them was asked to stop. Collective: all ranks must call it."""
    if anybody(run.world, run.stop.requested):
        run.stop.agreed = True


@contextmanager
def bad_data_stops(run: Run):
    """A UserError inside asks the run to stop, which all ranks have yet to agree on, instead of ending it at once."""
    try:
        yield
    except UserError as error:
        run.stop.cannot_go_on(error)


def end_on_failure(run: Run):
    """End all ranks if any of them met an error that it cannot go on with: the lowest such rank prints its error."""
    world, error = run.world, run.stop.error
    speaker = smallest(world, world.rank if error else world.num_processes)
    if speaker == world.rank:
        kept = run.checkpoints.kept(once_mended=True)
        raise UserError(f"{error}; {kept}") if kept else error
    if speaker < world.num_processes:
        raise RankLost(f"rank {speaker} met something that it cannot go on with", INPUT_CODE, said_elsewhere=True)


def refuse_numbers_lost(run: Run, step: int, found: str):
    """End the run: weights that give no finite loss must neither replace a good checkpoint nor be what -y 1 finds."""
    kept = run.checkpoints.disown()
    advice = "look at the data and at the weights that it began with"
    if step > (run.resume_step or 0):  # an update may have brought it about
        advice = f"lower -l, raise -u, {'' if may_skip(run.settings) else 'skip such updates with -sg, '}or {advice}"
    end_alike(run, UserError("; ".join(filter(None, (f"step {step}: {found}", advice, kept)))), INPUT_CODE)


def end_alike(run: Run, error: BaseException, code: int):
    """End all ranks, which come here for the same reason: rank 0 prints it."""
    raise error if run.world.rank == 0 else RankLost(str(error), code, said_elsewhere=True)


@contextmanager
def checkpoint_kept(run: Run):
    """Whatever ends a run of one rank, a checkpoint that is being written beside training is completed first, and counts.

    One rank of several does not wait: the others should hear at once why it ends, and without their files its own count for nothing. The
    watch may end it in the middle of a file, which then has only its temporary name; the checkpoint before stands.
    """
    try:
        yield
    except BaseException:
        if run.world.num_processes == 1:
            with suppress(OSError):  # printing may be what failed
                try:
                    run.checkpoints.complete_alone()
                except UserError as error:
                    print(f"note: {error}")
        raise


if __name__ == "__main__":
    leave(main())
