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
from contextlib import ExitStack, redirect_stdout
from functools import partial
from itertools import count

import train_gpt2
from llmc.backend import measure_matmul_tflops
from llmc.checkpoint.model_file import read_model_header
from llmc.errors import NotEnoughMemory, UserError, is_out_of_memory, run_script
from llmc.files import write_atomically
from llmc.flags import BY_NAME, FLAGS, parse
from llmc.memory.ladder import passes
from llmc.memory.tables import FORWARD_STAGES
from llmc.mfu import promised_tflops
from llmc.refusals import check_host_memory
from llmc.units import MIB, ceil_mib
from scripts.plotting import check_picture, save_picture
from scripts.profile_hooks import Limits, Recorder, hooked
from scripts.profile_report import REST, Profile, Row, as_json, draw, kind_of, report_lines

# flags of train_gpt2.py that decide what a step does, and defaults that differ from its
TAKEN = (
    "model", "batch_size", "sequence_length", "recompute", "precision", "device", "kernels", "attention", "matmul", "gelu_fusion", "tf32",
    "master_weights", "master", "optimizer_state", "grad_dtype", "offload_residual", "offload_optimizer",
    "head_chunk", "threads",
)  # fmt: skip
DEFAULTS = {"model": "d12", "sequence_length": "64", "recompute": "0"}

OWN = {"-h", "--help", "-o", "--steps", "--output", "--json", "--trace", "--nvtx"}  # this script's flags, some of them train_gpt2.py's too


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
            f"the plan of -b {o.B} -t {o.T} -r {o.recompute} needs {ceil_mib(needed)} MiB, and there are {run.budget.bytes // MIB} MiB "
            f"({run.budget.origin}); use a smaller -b or a higher -r (train_gpt2.py --plan says what fits)"
        )
    check_host_memory(run.plan, run.host_bytes)
    return run


# ----------------------------------------------------------------------------
# measuring


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


if __name__ == "__main__":
    run_script(main)
