#!/usr/bin/env python3
"""Where the time of a training step goes, operation by operation, and how near each is to what the machine can do.

    python scripts/profile.py -e d12 -b 4 -t 64                          a table
    python scripts/profile.py -e d12 -b 4 -t 64 -r 3 --output step.png   and a picture of it
    python scripts/profile.py -e d12 --trace step.json                   one step for chrome://tracing or ui.perfetto.dev
    nsys profile python scripts/profile.py -e d12 -b 16 -t 1024 --nvtx   ranges named as the rows, on CUDA

A row is a stage of the model and a layer function called in it, over all layers; `again` marks a stage of forward that backward
reruns. Weights and tokens are random; of a model .bin only the sizes are used. A step is forward, backward, norm and update.

ms        per step: the mean over the middle half of the steps, ordered by their time, so that rows add up to the step
GB/s      each tensor among the arguments and results counts once, or twice if it is read and written in place or added to; scratch
          buffers do not count; of an embedding only the rows of tokens that occur. For the update: what it reads and writes
TFLOP/s   matmuls from their shapes; causal attention counts the half it computes: 2 B T T C forward, 5 B T T C backward
of limit  the least possible time over the time taken. The least is that of its bytes at the speed of a large copy, or of its FLOPs at
          that of a large matmul (in FP8 at twice that), whichever is longer. Above 100%: what it reads was in a cache, or is written in
          place, which spares what a copy waits for
rest      what no operation covers: Python between operations, a device that waits for it, copies in, fills
"""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
# torch.compile imports cProfile, which imports the standard library's profile: scripts/ leaves the path, so that they do not find this file
sys.path[:] = [str(REPO), *(p for p in sys.path if Path(p).resolve() != REPO / "scripts")]
if __name__ == "profile":  # found all the same, from a script in this folder: put the standard library's module in its place
    del sys.modules["profile"]
    __import__("profile")

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, groupby

import train_gpt2
from llmc.backend import measure_matmul_tflops
from llmc.checkpoint.model_file import read_model_header
from llmc.errors import NotEnoughMemory, UserError, is_out_of_memory, run_script
from llmc.files import write_atomically
from llmc.flags import BY_NAME, FLAGS, parse
from llmc.memory.choose import in_mib
from llmc.memory.ladder import passes
from llmc.memory.tables import FORWARD_STAGES, num_parameters
from llmc.mfu import flops_per_token, model_flops_utilization, promised_tflops
from llmc.refusals import check_host_memory
from llmc.text_table import in_columns
from llmc.units import MIB
from scripts.plotting import check_picture, new_figure, save_picture

# flags of train_gpt2.py that decide what a step does, and defaults that differ from its
TAKEN = (
    "model", "batch_size", "sequence_length", "recompute", "precision", "device", "kernels", "attention", "matmul", "gelu_fusion", "tf32",
    "master_weights", "master", "optimizer_state", "grad_dtype", "offload_residual", "offload_optimizer",
    "head_chunk", "threads",
)  # fmt: skip
DEFAULTS = {"model": "d12", "sequence_length": "64", "recompute": "0"}

OWN = {"-h", "--help", "-o", "--steps", "--output", "--json", "--trace", "--nvtx"}  # this script's flags, some of them train_gpt2.py's too

# matmul -> positions of an argument with a row for every token, and of the weight or its gradient
MATMULS = {"matmul_forward": (0, 2), "matmul_dinput": (0, 2), "matmul_dweight": (1, 0),
           "matmul_gelu_forward": (0, 3), "matmul_gelu_backward": (0, 2)}  # fmt: skip
# with --matmul fp8, position of an argument -> bytes per element beyond bf16's two: it is read again, and written and read in FP8. dout is
# written in two layouts by matmul_dout, and after that only read in FP8, hence -1
FP8_BYTES = {"matmul_forward": {1: 4, 2: 4}, "matmul_dout": {0: 4}, "matmul_dinput": {1: -1, 2: 4}, "matmul_dweight": {1: -1, 2: 4}}
FP8_SPEED = 2  # of a card's matmuls, relative to bf16
CALLED_BY_NAME = ("residual_",)  # prefixes of functions that llmc.gpt2 calls by name, not through model.ops
# operation -> how many of its first tensors it both reads and overwrites
IN_PLACE = {"residual_layernorm_forward": 1, "residual_add_inplace": 1, "gelu_backward_inplace": 1, "layernorm_backward": 1,
            "fused_classifier_inplace": 2, "encoder_backward": 1}  # fmt: skip
EMBEDDINGS = {"encoder_forward": (2, 3), "encoder_backward": (0, 1)}  # positions of wte and wpe, or of their gradients
# methods of the model -> the stage they are, for those that the lists of passes do not name
STAGES = {"_ln1_forward": "ln1_forward", "_fcproj": "fcproj", "_head_backward": "head", "_norm_backward": "lnf_backward",
          "grad_norm": "norm", "update": "update"}  # fmt: skip

MATMUL, ATTENTION, ELEMENTWISE, CLASSIFIER, UPDATE, REST = "matmul", "attention", "elementwise, norms", "classifier", "update", "rest"
COLOURS = {  # kind -> colour of the time it took, colour of what the limit would need
    MATMUL: ("#9dc3e6", "#1f4e79"), ATTENTION: ("#f4a261", "#b5520b"), ELEMENTWISE: ("#b5d6a4", "#3f7d2a"),
    CLASSIFIER: ("#d3b3dc", "#7b3f8c"), UPDATE: ("#ffd966", "#a67c00"), REST: ("#c8c8c8", "#8c8c8c"),
}  # fmt: skip


def main(argv=None):
    args, words = read_arguments(argv)
    outputs = {"--output": args.output, "--trace": args.trace, "--json": args.json}
    for flag, path in outputs.items():
        if path:
            check_output(flag, path)
    if args.output:
        check_picture(args.output)
    run = open_run(words)
    if args.nvtx and run.backend.kind != "cuda":
        raise UserError(f"--nvtx marks ranges for a GPU's profiler, and this run is on {run.backend.name}; leave it out, or use --trace")
    try:
        profile = profile_step(run, args)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{run.backend.name} ran out of memory within a plan of {run.plan.total_bytes // MIB} MiB; "
                        "use a smaller -b or a higher -r, or end what else takes memory there") from error  # fmt: skip
    print(*report_lines(profile), sep="\n")
    if args.json:
        write_atomically(args.json, [json.dumps(as_json(profile), indent=1).encode()], doing="writing the rows")
        print(f"wrote {args.json}")
    if args.trace:
        print(f"wrote {args.trace}")
    if args.output:
        save_picture(draw(profile), args.output)


# ----------------------------------------------------------------------------
# the command line


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; see --help")


def read_arguments(argv) -> tuple[argparse.Namespace, list[str]]:
    """This script's arguments, and the words for train_gpt2.py's parser, from whose table the shared flags are taken."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    own = parser.add_argument_group("what to measure and write")
    own.add_argument("--steps", metavar="N", default="5", help="steps to measure, and as many without hooks, after two to warm up [5]")
    own.add_argument("-o", "--output", metavar="FILE", type=Path, help="a picture of the rows: .png, .svg or .pdf; needs matplotlib")
    own.add_argument("--json", metavar="FILE", type=Path, help="the rows")
    own.add_argument("--trace", metavar="FILE", type=Path, help="a Chrome trace of one more step by torch.profiler; .gz compresses it")
    own.add_argument("--nvtx", action="store_true", help="NVTX ranges around stages and operations of the measured steps (CUDA)")
    shared = parser.add_argument_group("which step, as in train_gpt2.py")
    taken = {flag.field: flag for flag in FLAGS if flag.field in TAKEN}
    for field in TAKEN:
        flag = taken[field]
        text = flag.help.replace("%", "%%")
        if flag.kind is bool:
            shared.add_argument(*flag.names, action="store_true", help=text)
        else:
            shared.add_argument(*flag.names, metavar=flag.value, help=f"{text} [{DEFAULTS.get(field, flag.default)}]")
    args = parser.parse_args(check_words(sys.argv[1:] if argv is None else argv, {name for flag in taken.values() for name in flag.names}))
    if not args.steps.isdecimal() or int(args.steps) < 1:
        raise UserError(f"--steps {args.steps}: expected a whole number of 1 or more")
    args.steps, words = int(args.steps), ["--sample-every", "0"]
    for field, flag in taken.items():
        value = getattr(args, field)
        if flag.kind is bool:
            words += [flag.names[-1]] * value
        elif value is not None or field in DEFAULTS:
            words += [flag.names[-1], DEFAULTS[field] if value is None else value]
    return args, words


def check_words(words: list[str], shared: set[str]) -> list[str]:
    """The words. Raises UserError for a flag that only train_gpt2.py has: argparse may take one for the start of another, -g for -ge."""
    for word in words:
        flag = word.partition("=")[0]
        if flag in BY_NAME and flag not in shared | OWN:
            raise UserError(f"{flag} is not about a step on one device, which is what is profiled; leave it out, or see --help")
    return words


def check_output(flag: str, path: Path):
    """Raise UserError unless a file can be created at `path`: better now than after the work for it."""
    why = "it is a folder" if path.is_dir() else "" if path.parent.is_dir() else f"the folder {path.parent} does not exist"
    try:
        if not why:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise UserError(f"{flag} {path}: cannot be written, {why}; expected the path of a file in a folder that can be written to")


def open_run(words):
    """What train_gpt2.py decides for these words: settings, backend, plan, notes. Raises UserError if no step can be run."""
    s = parse(words)
    if s.batch_size == "auto":
        raise UserError("-b auto looks at the training data too, and a profile has none; give a number")
    if s.model.endswith(".bin"):
        read_model_header(s.model)  # for its message on a missing file: train_gpt2.py's speaks of data as well
    try:
        with redirect_stdout(io.StringIO()), ExitStack() as until_end:  # hides llm.c's table
            run = train_gpt2.open_run(s, until_end)
    except NotEnoughMemory as error:
        raise UserError(f"{error}; use a smaller -e, -b or -t") from error
    o, needed = run.plan.options, run.plan.total_bytes
    if needed > run.budget.bytes:
        raise UserError(
            f"the plan of -b {o.B} -t {o.T} -r {o.recompute} needs {in_mib(needed)} MiB, and there are {run.budget.bytes // MIB} MiB, "
            f"{run.budget.name}; use a smaller -b or a higher -r (train_gpt2.py --plan says what fits)"
        )
    check_host_memory(run.plan, run.host_bytes)
    return run


# ----------------------------------------------------------------------------
# limits and costs


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine does at best: a large copy, bytes read and written, and a large matmul."""

    copy_gb_s: float
    matmul_tflops: float

    def floor_ms(self, n_bytes: int, flops: float) -> float:
        """The least time for this many bytes and FLOPs, when copying and computing overlap."""
        return max(n_bytes / self.copy_gb_s / 1e6, flops / self.matmul_tflops / 1e9)


def measure_limits(run) -> Limits:
    """The Limits of this machine now, each the best of several tries. Takes memory, which is freed afterwards."""
    import torch

    from scripts.gpu_common import time_each

    backend, precision = run.backend, run.plan.options.precision
    elements = {"cpu": 32 << 20, "cuda": 128 << 20}[backend.kind]  # larger than any cache
    a, b = (torch.ones(elements, dtype=torch.float32, device=backend.device) for _ in range(2))
    best_ms = min(time_each(backend, [partial(b.copy_, a)] * 10))
    n_bytes = a.nbytes + b.nbytes
    del a, b
    promised = backend.kind == "cuda" and promised_tflops(backend.name, precision, run.settings.tf32)
    tflops = measure_matmul_tflops(backend, precision) if promised else run.peak_tflops  # which was measured a moment ago
    return Limits(n_bytes / best_ms / 1e6, tflops)


@dataclass(slots=True)
class Cost:
    """What all calls of an operation in one step add up to."""

    calls: int = 0
    n_bytes: int = 0
    flops: int = 0
    floor_ms: float = 0.0


def tensors_in(values):
    """The tensors among values, in order, also those in lists and tuples. A dictionary holds scratch buffers, so it is skipped."""
    import torch

    for value in values:
        if isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, torch.Tensor):
            yield value


def count_bytes(name: str, args, kwargs, result, embedding_rows) -> int:
    """Bytes that one call must read and write, counted as the top of this file says; embedding_rows: those of wte and wpe in use."""
    if name == "adamw_update":
        return count_update_bytes(args[0])
    tensors = list(tensors_in([*args, *(value for key, value in kwargs.items() if key != "room"), result]))
    sizes = [t.nbytes for t in tensors]
    for place, rows in zip(EMBEDDINGS.get(name, ()), embedding_rows):
        sizes[place] = sizes[place] // len(tensors[place]) * rows
    twice = int(kwargs["accumulate"]) if name == "matmul_dweight" else IN_PLACE.get(name, 0)
    operands = FP8_BYTES[name] if in_fp8(name, args, kwargs) else {}
    return sum(sizes) + sum(sizes[:twice]) + sum(more * args[place].numel() for place, more in operands.items())


def in_fp8(name: str, args, kwargs) -> bool:
    """Whether this is a matmul that first makes its factors in FP8: one with scratch buffers (room) for them."""
    room = kwargs.get("room", args[-1]) if name in FP8_BYTES else None
    return isinstance(room, dict) and "fp8_inp" in room


def count_update_bytes(flat: dict) -> int:
    """Bytes of the update: gradients are read; m, v, master and weights are read and written, but weights with a master only written."""
    once = {"gradients", "parameters"} if "master" in flat else {"gradients"}
    return sum(t.nbytes * (1 if name in once else 2) for name, t in flat.items())


def count_flops(name: str, args, attention: int) -> int:
    """FLOPs of one call; attention is B T T C."""
    if name in MATMULS:
        x, weight = (args[place] for place in MATMULS[name])
        return 2 * x.numel() // x.shape[-1] * weight.numel()
    return (2 if "forward" in name else 5) * attention if name.startswith("attention") else 0


def kind_of(operation: str) -> str:
    """The kind of an operation, one of those in COLOURS."""
    if operation in (*MATMULS, "matmul_dout"):
        return MATMUL
    named = {"attention": ATTENTION, "fused_classifier": CLASSIFIER, "global_norm": UPDATE, "adamw": UPDATE}
    return next((kind for start, kind in named.items() if operation.startswith(start)), ELEMENTWISE)


# ----------------------------------------------------------------------------
# hooks


class Recorder:
    """What the hooks around stages and operations write to. A key is (phase, stage, operation).

    recording  whether the hooks do anything; counting: whether they add up costs too, which takes time itself
    phase      forward, backward or update, set by the step      range_of  name -> a context in which that runs
    costs      key -> Cost, in the order of the step             spans     [(key, start, end)] of a step, as the backend's marks
    """

    def __init__(self, backend, limits: Limits, forward_stages, attention: int, embedding_rows):
        self.backend, self.limits, self.forward_stages = backend, limits, forward_stages
        self.attention, self.embedding_rows = attention, embedding_rows
        self.recording = self.counting = self.inside = False
        self.phase = self.stage = ""
        self.range_of = nullcontext
        self.costs, self.spans = defaultdict(Cost), []

    def stage_hook(self, name: str, method):
        """The method, recorded as a stage; inside another stage it is part of that one."""

        def run(*args, **kwargs):
            if not self.recording or self.stage:
                return method(*args, **kwargs)
            self.stage = f"{name} again" if self.phase == "backward" and name in self.forward_stages else name
            with self.range_of(self.stage):
                result = method(*args, **kwargs)
            self.stage = ""
            return result

        return run

    def operation_hook(self, name: str, function):
        """The function, timed; inside another operation it is part of that one, and outside any stage it is a stage itself."""

        def run(*args, **kwargs):
            if not self.recording or self.inside:
                return function(*args, **kwargs)
            stage = self.stage or name.removesuffix("_forward")
            self.inside = True
            with self.range_of(f"{stage}: {name}"):
                start = self.backend.mark()
                result = function(*args, **kwargs)
                end = self.backend.mark()
            self.inside = False
            key = ("head" if stage == "head" else self.phase, stage, name)
            self.spans.append((key, start, end))
            if self.counting:
                self.count(key, args, kwargs, result)
            return result

        return run

    def count(self, key, args, kwargs, result):
        """Add one call to the costs."""
        n_bytes = count_bytes(key[-1], args, kwargs, result, self.embedding_rows)
        flops = count_flops(key[-1], args, self.attention)
        cost = self.costs[key]
        cost.calls, cost.n_bytes, cost.flops = cost.calls + 1, cost.n_bytes + n_bytes, cost.flops + flops
        cost.floor_ms += self.limits.floor_ms(n_bytes, flops / FP8_SPEED if in_fp8(key[-1], args, kwargs) else flops)

    def measure(self, step) -> tuple[dict, float]:
        """Milliseconds of each key, and of the whole step. Waits for the device before and after the step, but not within it."""
        self.spans.clear()
        self.backend.synchronize()
        self.recording = True
        start = self.backend.mark()
        step()
        end = self.backend.mark()
        self.recording = False
        self.backend.synchronize()
        times = defaultdict(float)
        for key, *marks in self.spans:
            times[key] += self.backend.seconds_between(*marks) * 1e3
        return times, self.backend.seconds_between(start, end) * 1e3


@contextmanager
def hooked(model, recorder: Recorder):
    """Put hooks around all that the model runs in a step: model.ops, functions that llmc.gpt2 calls by name, and the stages."""
    from llmc import gpt2

    with ExitStack() as undo:

        def put(owner, name, value):
            undo.callback(*((setattr, owner, name, vars(owner)[name]) if name in vars(owner) else (delattr, owner, name)))
            setattr(owner, name, value)

        def hook(owner, name, prefix=""):
            put(owner, name, recorder.operation_hook(prefix + name.removeprefix("launch_"), getattr(owner, name)))

        for name in [n for n in vars(model.ops) if not n.startswith("stage_")]:  # these copy in what the launch_ ones need
            hook(model.ops, name)
        for name in [n for n in vars(gpt2) if n.startswith(CALLED_BY_NAME)]:
            hook(gpt2, name)
        if hasattr(model, "matmul_gelu"):
            hook(model.matmul_gelu, "forward", "matmul_gelu_")
            hook(model.matmul_gelu, "backward", "matmul_gelu_")
        for name, stage in STAGES.items():
            put(model, name, recorder.stage_hook(stage, getattr(model, name)))
        for name in ("forward_passes", "backward_passes"):
            put(model, name, [recorder.stage_hook(method.__name__.lstrip("_"), method) for method in getattr(model, name)])
        yield


# ----------------------------------------------------------------------------
# measuring


@dataclass(frozen=True, slots=True)
class Row:
    """A stage and an operation in it; or, without an operation, a kind, a phase or the whole step."""

    phase: str
    stage: str
    operation: str
    kind: str
    calls: int
    ms: float
    n_bytes: int
    flops: int
    floor_ms: float

    @property
    def name(self) -> str:
        return f"{self.stage}: {self.operation}" if self.operation else self.stage

    @property
    def of_limit(self) -> float | None:
        return self.floor_ms / self.ms if self.floor_ms and self.ms else None

    @property
    def gb_s(self) -> float | None:
        return self.n_bytes / self.ms / 1e6 if self.n_bytes and self.ms else None

    @property
    def tflop_s(self) -> float | None:
        return self.flops / self.ms / 1e9 if self.flops and self.ms else None


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of one form of a step.

    run       what train_gpt2.py decided         limits  of the machine
    ms        of each step with hooks; the rows add up to the mean of their middle half     plain_ms  of each step without
    """

    run: object
    torch_version: str
    limits: Limits
    rows: list[Row]
    ms: list[float]
    plain_ms: list[float]

    @property
    def title(self) -> str:
        o = self.run.plan.options
        return f"{self.run.settings.model}, B={o.B}, T={o.T}, -r {o.recompute}, {o.precision}"

    @property
    def machine(self) -> str:
        rates = f"copy {self.limits.copy_gb_s:.1f} GB/s, matmul {self.limits.matmul_tflops:.3g} TFLOP/s"
        return f"{self.run.backend.name}, torch {self.torch_version}: {rates}"

    @property
    def step(self) -> Row:
        return together("step", self.rows)

    @property
    def kinds(self) -> list[Row]:
        return [together(kind, [row for row in self.rows if row.kind == kind]) for kind in COLOURS]

    @property
    def plain_step_ms(self) -> float:
        return statistics.median(self.plain_ms)

    @property
    def mfu(self) -> float:
        """MFU as train_gpt2.py prints it, of a step without hooks."""
        o = self.run.plan.options
        per_token = flops_per_token(num_parameters(o.config), o.config.num_layers, o.config.channels, o.T)
        return model_flops_utilization(per_token, o.B * o.T, self.plain_step_ms / 1e3, self.run.peak_tflops)

    @property
    def tokens_per_s(self) -> float:
        o = self.run.plan.options
        return o.B * o.T / self.plain_step_ms * 1e3


def together(name: str, rows: list[Row]) -> Row:
    """One row that sums several."""
    sums = (sum(getattr(row, field) for row in rows) for field in ("calls", "ms", "n_bytes", "flops", "floor_ms"))
    return Row("", name, "", name, *sums)


def profile_step(run, args) -> Profile:
    """Build the model, run its steps, and write the trace if one is wanted."""
    import torch

    from llmc.gpt2 import GPT2

    limits = measure_limits(run)
    model = GPT2(run.plan, run.backend.device)
    model.init_random()
    recorder, step = prepare(model, run.backend, limits)
    with hooked(model, recorder):
        recorder.counting = True
        recorder.measure(step)  # sets libraries up, compiles kernels
        recorder.counting = False
        recorder.measure(step)
        if args.nvtx:
            recorder.range_of = torch.cuda.nvtx.range
        plain_ms, of_keys, ms = [], [], []
        for _ in range(args.steps):  # with and without hooks in turn, as machines drift
            plain_ms.append(time_plain(step, run.backend))
            of_step, step_ms = recorder.measure(step)
            of_keys.append(of_step)
            ms.append(step_ms)
        if args.trace:
            write_trace(args.trace, recorder, step)
    return Profile(run, torch.__version__, limits, make_rows(recorder.costs, of_keys, ms), ms, plain_ms)


def prepare(model, backend, limits: Limits):
    """A recorder for the model, and a step of it as in training, on random tokens."""
    import numpy as np

    from llmc.data.order import token_order

    o = model.plan.options
    inputs, targets = np.random.default_rng(0).integers(0, o.config.vocab_size, (2, o.B, o.T))
    order, number = token_order(inputs), count(1)  # sorted ahead of time, as by the loader
    forward_stages = {stage.name for stage in FORWARD_STAGES} | set(passes(FORWARD_STAGES, o.gelu_fusion))
    recorder = Recorder(backend, limits, forward_stages, o.B * o.T * o.T * o.config.channels, (len(order.tokens), o.T))

    def step():
        recorder.phase = "forward"
        model.forward(inputs)
        recorder.phase = "backward"
        model.backward(targets, order=order)
        recorder.phase = "update"
        model.update(1e-4, 0.1, next(number), model.grad_norm())

    return recorder, step


def time_plain(step, backend) -> float:
    """Milliseconds of a step while hooks do nothing, until the device is done."""
    backend.synchronize()
    start = time.perf_counter()
    step()
    backend.synchronize()
    return (time.perf_counter() - start) * 1e3


def make_rows(costs: dict, times: list[dict], whole: list[float]) -> list[Row]:
    """The rows of a step in its order, the rest last. Times are means over the middle half of the steps, so they add up to the step."""
    steps, cut = sorted(range(len(whole)), key=whole.__getitem__), len(whole) // 4
    middle = steps[cut : len(steps) - cut]
    rows = []
    for (phase, stage, operation), cost in costs.items():
        ms = statistics.fmean(times[i][phase, stage, operation] for i in middle)
        rows.append(Row(phase, stage, operation, kind_of(operation), cost.calls, ms, cost.n_bytes, cost.flops, cost.floor_ms))
    # an operation that a stage first calls in a later layer is placed with the others of that stage
    first = {}
    for i, row in enumerate(rows):
        first.setdefault((row.phase, row.stage), i)
    rows.sort(key=lambda row: first[row.phase, row.stage])
    left = statistics.fmean(whole[i] for i in middle) - sum(row.ms for row in rows)
    return [*rows, Row("", REST, "", REST, 0, left, 0, 0, 0.0)]


def write_trace(path: Path, recorder: Recorder, step):
    """A Chrome trace of one step, with ranges named as stages and rows."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch prints that its profiler starts and stops
    from torch.profiler import ProfilerActivity, profile, record_function

    recorder.range_of = record_function
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if recorder.backend.kind == "cuda" else [])]
    with profile(activities=activities) as profiler:
        recorder.measure(step)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / path.name  # a name that ends in .gz is compressed
        profiler.export_chrome_trace(str(written))
        write_atomically(path, [written.read_bytes()], doing="writing the trace")


# ----------------------------------------------------------------------------
# what is printed, and the rows as JSON


def report_lines(profile: Profile) -> list[str]:
    """The lines to print: what was measured, the rows by phase, the rows by kind, MFU."""
    step, plain_ms = profile.step, profile.plain_step_ms
    lines = [f"{profile.title} on {profile.machine}", *profile.run.notes]
    if profile.run.graphs:
        lines.append("this is the eager step, each operation launched by itself, and the time that takes counts where the device or a core "
                     "waits for it. A graph of the step, as train_gpt2.py runs it, waits less")  # fmt: skip
    table = []
    for phase, rows in groupby(profile.rows, key=lambda row: row.phase):
        rows = list(rows)
        if phase:
            table.append(replace(together(phase, rows), calls=0, n_bytes=0, flops=0))
        table += [replace(row, stage=f"  {row.stage}") for row in rows] if phase else rows
    lines += ["", *table_lines("stage: operation", [*table, step], step.ms)]
    lines += ["", *table_lines("kind", [*profile.kinds, step], step.ms), ""]
    lines.append(f"a step takes {plain_ms:.2f} ms without hooks, the median of {len(profile.ms)}, and {step.ms:.2f} ms with")
    return [*lines, f"without: {100 * profile.mfu:.1f}% MFU | {profile.tokens_per_s:.0f} tok/s"]


def table_lines(title: str, rows: list[Row], step_ms: float) -> list[str]:
    """Rows in columns."""

    def number(value, form):
        return "" if value is None else format(value, form)

    heads = (title, "calls", "ms", "of step", "GB/s", "TFLOP/s", "of limit")
    cells = [
        (row.name, str(row.calls or ""), f"{row.ms:.3f}", f"{row.ms / step_ms:.1%}", number(row.gb_s, ".1f"), number(row.tflop_s, ".3f"),
         number(row.of_limit, ".0%"))
        for row in rows
    ]  # fmt: skip
    return in_columns((heads, *cells), numbers=range(1, len(heads)))


def as_json(profile: Profile) -> dict:
    """All that is printed, unrounded. Times are in ms, rates in GB/s and TFLOP/s, shares are fractions; what does not apply is null."""
    run, o, step_ms = profile.run, profile.run.plan.options, profile.step.ms

    def figures(row):
        return {"calls": row.calls, "ms": row.ms, "of_step": row.ms / step_ms, "bytes": row.n_bytes, "flops": row.flops, "gb_s": row.gb_s,
                "tflop_s": row.tflop_s, "floor_ms": row.floor_ms, "of_limit": row.of_limit}  # fmt: skip

    return {
        "model": run.settings.model, "batch_size": o.B, "sequence_length": o.T, "recompute": o.recompute, "precision": o.precision,
        "kernels": o.kernel_set, "attention": o.attention_kind, "gelu_fusion": o.gelu_fusion,
        "device": run.backend.name, "torch": profile.torch_version, "notes": run.notes,
        "copy_gb_s": profile.limits.copy_gb_s, "matmul_tflop_s": profile.limits.matmul_tflops,
        "step_ms": step_ms, "steps_ms": profile.ms, "plain_step_ms": profile.plain_step_ms, "plain_steps_ms": profile.plain_ms,
        "mfu": profile.mfu, "peak_tflop_s": run.peak_tflops, "tokens_per_s": profile.tokens_per_s,
        "rows": [{"name": row.name, "phase": row.phase, "stage": row.stage, "operation": row.operation, "kind": row.kind} | figures(row)
                 for row in profile.rows],
        "kinds": [{"kind": row.name} | figures(row) for row in profile.kinds],
    }  # fmt: skip


# ----------------------------------------------------------------------------
# the picture


def draw(profile: Profile):
    """The figure: a bar for each row, from top to bottom in the order of the step; its darker part is what the limit would need."""
    from matplotlib.patches import Patch

    rows = profile.rows
    places, at = [], 0.0
    for i, row in enumerate(rows):
        at += 1.0 if i == 0 or row.stage == rows[i - 1].stage else 1.25 if row.phase == rows[i - 1].phase else 2.0
        places.append(at)
    figure = new_figure(9, 1.7 + 0.2 * at)
    axes, longest = figure.subplots(), max(row.ms for row in rows)
    for place, row in zip(places, rows):
        light, dark = COLOURS[row.kind]
        axes.barh(place, row.ms, height=0.8, color=light)
        axes.barh(place, min(row.floor_ms, row.ms), height=0.8, color=dark)
        limit = "" if row.of_limit is None else f", {row.of_limit:.0%} of the limit"
        numbers = f"{row.ms:.{3 if longest < 10 else 1}f} ms{limit}"
        background = dict(facecolor="white", edgecolor="none", pad=0.8)  # hides the lines of the grid behind the text
        axes.text(row.ms + 0.012 * longest, place, numbers, va="center", fontsize=7.5, bbox=background)
    axes.set_yticks(places, [row.name for row in rows], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(at + 0.8, 0.2)
    axes.set_xlim(0, 1.32 * longest)  # room for the numbers beside the longest bar
    axes.set_xlabel("ms per step, all layers; the darker part is what the machine's limit would need")
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    eager = ", eager" if profile.run.backend.kind == "cuda" else ""
    figure.suptitle(f"{profile.title}{eager}: a step of {profile.step.ms:.1f} ms", fontsize=12)
    axes.set_title(profile.machine, fontsize=9, color="#555555")
    handles = []
    for kind in profile.kinds:
        light, dark = COLOURS[kind.name]
        handles.append(Patch(facecolor=light, edgecolor=dark, linewidth=2, label=f"{kind.name} {kind.ms / profile.step.ms:.0%}"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        fontsize=8.5,
        frameon=False,
        title="share of the step",
        title_fontsize=8.5,
    )
    return figure


if __name__ == "__main__":
    run_script(main)
