"""Sections of gpu_check.py: what it ran on, the tests, training steps, and where a step's time goes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import torch

from llmc.cards import RESERVE
from llmc.data.order import token_order
from llmc.flags import parse
from llmc.gpt2 import GPT2
from llmc.graphs import graphs_on
from llmc.host import own_processors
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.largest_batch import largest_batch
from llmc.memory.plan import Plan
from llmc.memory.tables import PARAMETERS, num_parameters
from llmc.mfu import flops_per_token, model_flops_utilization, promised_tflops
from llmc.refusals import FP8_CAPABILITY
from llmc.request import settle_graphs
from llmc.units import MIB
from scripts.gpu_common import (
    BF16, FP32, REPO, Skip, attempt, free_memory, measure, random_tokens, summarize, table, time_each, while_time,
)  # fmt: skip

TEST_FILES = tuple(f"tests/test_{name}.py" for name in "cuda cublaslt kernels triton_attention matmul_fp8 async_checkpoint".split())
TEST_SECONDS, TEST_SHARE = 150, 0.3  # limits of the tests: seconds, and share of the time left; neither applies if nothing else takes time
TEST_REPORT_SECONDS = 20  # that pytest may take to end once it is interrupted
LOAD_SECONDS = 3  # of steps in which the card's clock is read; in the first third of them it may still fall
STEP_FIGURES = ("ms", "tokens/s", "MFU", "planned MiB", "measured MiB", "reserved MiB")  # of a step, shown in the summary
EAGER = "-r 0, without graphs"
NO_CUDA = "there is no CUDA device"


def facts(run, record):
    def output(*command):
        try:
            return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return "not known"

    row = {"card": run.backend.name, "date": time.strftime("%Y-%m-%d %H:%M:%S %Z")}
    row["command"] = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    if run.cuda:
        p = torch.cuda.get_device_properties(run.backend.device)
        row |= {"multiprocessors": p.multi_processor_count, "capability": f"{p.major}.{p.minor}", "memory": f"{p.total_memory // MIB} MiB",
                "L2": f"{getattr(p, 'L2_cache_size', 0) // MIB} MiB", "free": f"{run.backend.free_bytes() // MIB} MiB"}  # fmt: skip
        for what in ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu", "persistence_mode"):
            row[what] = output("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader")
    commit = output("git", "rev-parse", "HEAD")
    changed = output("git", "status", "--porcelain") not in ("", "not known")
    row |= {"commit": commit + (", with local changes" if changed else ""), "python": sys.version.split()[0], "torch": torch.__version__}
    row |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "triton": triton_version(), "numpy": np.__version__}
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    row["C compiler"] = compiler or "none: neither Triton nor torch.compile can build what they launch with"
    table(record, "")[:] = [{"": key, "value": value} for key, value in row.items()]
    if run.no_triton:
        record["notes"].append(run.no_triton + ". Training steps below use torch's operations instead")


def triton_version() -> str:
    try:
        import triton

        return triton.__version__
    except ImportError:
        return "none"


def ceilings(run, record):
    n, rows = run.sizes.matmul, table(record, "")

    def add(what, key, amount, unit, *calls):
        ms, spread = measure(run, *calls)
        run.rates[key] = amount / ms
        rows.append({"what": what, "ms": ms, "spread": spread, "rate": f"{run.rates[key]:.{0 if key == 'copy' else 1}f} {unit}"})

    pairs = [(run.random(run.sizes.copy_bytes // 2), run.random(run.sizes.copy_bytes // 2)) for _ in range(2)]
    copies = [partial(b.copy_, a) for a, b in pairs]
    add("copy, bytes read and written", "copy", 2 * run.sizes.copy_bytes / 1e6, "GB/s", *copies)
    del pairs, copies
    for key, dtype, label in (("bf16", BF16, "bf16"), ("fp32", FP32, "fp32 as TF32")):
        a, b, out = (run.random(n, n, dtype=dtype) for _ in range(3))
        add(f"matmul {n}^3, {label}", key, 2 * n**3 / 1e9, "TFLOP/s", partial(torch.mm, a, b, out=out))
    run.summary |= {"copy GB/s": round(run.rates["copy"]), "bf16 matmul TFLOP/s": round(run.rates["bf16"], 1)}


# ---- tests


def tests(run, record):
    """Run the project's tests of CUDA and the kernels, in several processes: most of their time is spent in a compiler."""
    files = [f for f in TEST_FILES if (REPO / f).exists()]
    record["not_run"] += [f"{f}: there is no such file" for f in TEST_FILES if f not in files]
    [listing] = pytest_outputs([["-m", "gpu or kernels", "--collect-only", "-q", *files]], 60)
    names = [line for line in listing.splitlines() if "::" in line]
    if not names:
        raise RuntimeError("pytest found no tests:\n" + "\n".join(listing.splitlines()[-6:]))
    if run.dry:
        record["not_run"].append(f"{len(names)} tests: a dry run only collects them")
        run.summary["tests"] = f"{len(names)} collected"
        return
    processes = max(1, min(8, own_processors() // 2))
    alone = {"tests"} <= set(run.args.only or ()) <= {"facts", "tests"}
    limit = run.left() - TEST_REPORT_SECONDS if alone else min(TEST_SECONDS, TEST_SHARE * run.left())
    texts = pytest_outputs([["-v", "--tb=short", *names[i::processes]] for i in range(processes)], limit)
    record["notes"].append(f'pytest -m "gpu or kernels" {" ".join(files)}, in {processes} processes at once, stopped after {limit:.0f} s')
    report_tests(record, names, "\n".join(texts))
    run.summary["tests"] = record["tables"][""][0]["result"]


def pytest_outputs(argument_lists, seconds) -> list[str]:
    """The output of pytest for each list, all run at once. After `seconds` they are interrupted, and report on what they have run."""
    others = ("TRITON_INTERPRET", "PYTEST_ADDOPTS")  # the second may change the output, which is parsed here
    env = {k: v for k, v in os.environ.items() if k not in others} | {"OMP_NUM_THREADS": "1"}
    command, deadline = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider"], time.monotonic() + seconds
    with ExitStack() as stack:
        outs = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in argument_lists]
        running = [
            subprocess.Popen([*command, *arguments], cwd=REPO, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            for arguments, out in zip(argument_lists, outs)
        ]
        for end, number in ((0, signal.SIGINT), (15, signal.SIGKILL)):
            for process in running:
                try:
                    process.wait(max(0, deadline + end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, number)
        for process, out in zip(running, outs):
            process.wait()
            out.seek(0)
        return [out.read() for out in outs]


def report_tests(record, names, text):
    """Record counts, the names of failed tests, and the last lines of each failure, from the output of pytest -v."""
    outcomes = dict(re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", text, re.MULTILINE))
    counts = [f"{list(outcomes.values()).count(o)} {o.lower()}" for o in dict.fromkeys(("PASSED", "FAILED", *outcomes.values()))]
    missing = [name for name in names if name not in outcomes]
    table(record, "").append({"result": ", ".join(counts), "of": len(names), "not run": len(missing)})
    if missing:
        record["not_run"].append(f"{len(missing)} tests that did not end, the first of them {missing[0]}")
    for name, outcome in outcomes.items():
        if outcome in ("FAILED", "ERROR"):
            table(record, "failed").append({"test": name})
    blocks = re.split(r"^_{3,} (.+?) _{3,}$", text, flags=re.MULTILINE)
    for name, block in zip(blocks[1::2], blocks[2::2]):
        kept = [line for line in re.split(r"^={3,}", block, flags=re.MULTILINE)[0].strip().splitlines() if line.strip()]
        record["errors"].append({"what": name, "lines": "\n".join(kept[-8:])})
    if not outcomes:
        record["errors"].append({"what": "pytest", "lines": "\n".join(text.strip().splitlines()[-8:])})


# ---- training steps


def why_no_graphs(run, options) -> str:
    """Why a step with these options does not run as graphs here; empty if it does. Decided as in train_gpt2.py."""
    if not run.graphs:
        return "graphs did not work here"
    return "" if settle_graphs(parse([]), options) else "graphs need the device's own kernels, and no --offload-residual"


def random_model(run, config, B, T, graphs=True, **forms) -> GPT2:
    """A model as train_gpt2.py builds it, with graphs if `graphs` and its options allow them. Weights are random, and the same for every
    form of the options."""
    plan = Plan(run.options(config, B, T, **forms))
    with_graphs = graphs and not why_no_graphs(run, plan.options)
    model = GPT2(plan, run.backend.device, graphs=graphs_on(run.backend.kind) if with_graphs else None)
    generator = torch.Generator(run.backend.device).manual_seed(0)
    model.flat["parameters"].normal_(0, 0.02, generator=generator)
    for p in PARAMETERS:
        if p.init in ("ones", "zeros"):
            model.params[p.name].fill_(float(p.init == "ones"))
    model.copy_weights_to_master()
    return model


def our_step(run, config, B, T, graphs=True, **forms):
    """(a step as train_gpt2.py runs it, its plan).

    The first step runs eagerly, the second is captured, and later ones replay the graphs; without `graphs` all are eager.
    """
    model = random_model(run, config, B, T, graphs, **forms)
    inputs, targets = random_tokens(config, B, T)
    order, number = token_order(inputs), count(1)  # sorted ahead of time, as by the loader

    def step():
        model.train(inputs, targets, 1, 0, order)
        norm = model.grad_norm()
        reading = run.backend.read_later(model.acts["loss_sum"], norm)
        model.update(1e-4, 0.1, next(number), norm)
        return reading()[0] / model.tokens(1)

    return step, model.plan


def warm_up(run, step) -> list[float]:
    """Run as many steps as it takes until all later ones run alike. Returns their losses."""
    return [step() for _ in range(run.sizes.warmup)]


def measure_steps(run, step) -> tuple[float, float, float]:
    """(median ms, spread, last loss) of steps after a warm-up."""
    losses = warm_up(run, step)
    ms, spread = summarize(time_each(run.backend, [lambda: losses.append(step())] * run.sizes.steps))
    return ms, spread, losses[-1]


@contextmanager
def measured_peak(run):
    """A dictionary that afterwards holds the allocator's peaks, in MiB, of the code inside: of memory in use and of memory reserved.

    A replayed graph allocates nothing, so the eager step and the capture before it must be inside too.
    """
    found = {"measured MiB": None, "reserved MiB": None}
    if not run.cuda:
        yield found
        return
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    yield found
    found["measured MiB"] = (torch.cuda.max_memory_allocated() - used) / MIB
    found["reserved MiB"] = (torch.cuda.max_memory_reserved() - reserved) / MIB


def speed(run, config, B, T, ms) -> dict:
    """tokens/s and model FLOPs utilization of a step."""
    flops = flops_per_token(num_parameters(config), config.num_layers, config.channels, T)
    peak = promised_tflops(run.backend.name, "bf16") if run.cuda else None
    return {"tokens/s": B * T / ms * 1e3, "MFU": peak and model_flops_utilization(flops, B * T, ms / 1e3, peak)}


def step_row(run, label, config, B, T, **forms) -> dict:
    with measured_peak(run) as peak:
        step, plan = our_step(run, config, B, T, **forms)
        ms, spread, loss = measure_steps(run, step)
    row = {"run": label, "ms": ms, "spread": spread} | speed(run, config, B, T, ms)
    return row | {"planned MiB": plan.total_bytes / MIB} | peak | {"loss": loss}


def measure_forms(run, record, runs):
    """Add a row for each of runs, (label, forms of the options). Each model is freed before the next."""
    s = run.sizes
    for label, forms in while_time(run, record, runs, 12, name=lambda r: r[0]):
        with attempt(record, label):
            table(record, "").append(step_row(run, label, s.config, s.B, s.T, **forms))


CLOCKS = {"SM MHz": "clocks.sm", "memory MHz": "clocks.mem", "W": "power.draw", "C": "temperature.gpu"}


def under_load(run, step) -> dict:
    """What nvidia-smi reads while steps run, a median of each: idle, a card shows its highest clock, which it need not keep under load.

    These steps are not timed, as asking the driver may disturb them.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS.values())}", "--format=csv,noheader,nounits", "-lms", "100"]
    command += ["-i", f"GPU-{torch.cuda.get_device_properties(run.backend.device).uuid}"]
    warm_up(run, step)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as reader:
        try:
            end = time.monotonic() + LOAD_SECONDS
            while time.monotonic() < end:
                step()
            run.backend.synchronize()
        finally:
            reader.terminate()
            lines, _ = reader.communicate()
    rows = [[float(x) for x in line.split(",")] for line in lines.splitlines() if re.fullmatch(r"[\d., ]+", line)]
    rows = [row for row in rows if len(row) == len(CLOCKS)]
    return {name: median(values) for name, values in zip(CLOCKS, zip(*rows[len(rows) // 3 :]))} | {"readings": len(rows)}


def steps(run, record):
    if run.kernels == "triton":
        record["notes"].append("with Triton's kernels")
    rows, why = table(record, ""), why_no_graphs(run, run.options(run.sizes.config, run.sizes.B, run.sizes.T))
    measure_forms(run, record, [("-r 0", {}), (EAGER, {"graphs": False})][: 1 if why else 2])
    if why:
        record["not_run"].append(f"{EAGER}: {why}, so no row is with graphs")
    else:
        record["notes"].append("as CUDA graphs, but for the row that says otherwise")
    if [row["run"] for row in rows] == [EAGER]:
        run.graphs = False
        record["notes"].append("the step with graphs failed: this and all below is without")
    if rows:
        measure_forms(run, record, [(f"-r {level}", {"recompute": level}) for level in (1, 2)])
    if not rows and run.kernels == "triton":
        run.kernels = "torch"
        record["notes"].append("no step with Triton's kernels succeeded: this and all below is with torch's operations")
        measure_forms(run, record, [("-r 0, torch's operations", {})])
    for row in rows:
        if row["run"].startswith("-r 0"):
            run.step_ms = run.step_ms or row["ms"]
        run.summary[f"ours {row['run']}"] = {key: row[key] for key in STEP_FIGURES}
    if rows and run.cuda:
        with attempt(record, "the card's clock in such steps"):
            step, _ = our_step(run, run.sizes.config, run.sizes.B, run.sizes.T)
            table(record, "the card in steps at -r 0").append({"run": "-r 0"} | under_load(run, step))
    losses = {row["run"]: row["loss"] for row in rows}
    if {"-r 0", EAGER} <= losses.keys():
        run.summary["loss with and without graphs"] = "the same number" if losses["-r 0"] == losses[EAGER] else "NOT the same number"
    same = len(set(losses.values())) == 1
    record["notes"].append(f"the loss after the last step is {'the same number' if same else 'NOT the same number'} in every row")


def attention_steps(run, record):
    """Steps by every kind of attention except that of the steps before: no other choice changes a step's time as much."""
    if not run.cuda:
        raise Skip("a CPU has one kind")
    usual = run.options(run.sizes.config, run.sizes.B, run.sizes.T).attention
    kinds = ("flash", "triton", "cudnn") if run.kernels == "triton" else ("flash", "cudnn")
    measure_forms(run, record, [(f"-r 0, {kind} attention", {"attention": kind}) for kind in kinds if kind != usual])
    record["notes"].append(f"the steps before are by {usual} attention")


def more_steps(run, record):
    levels = sorted(range(3, len(NOT_KEPT)), key=lambda level: level != 5)  # -r 5 first, as it has a goal
    forms = [(f"-r {level}", {"recompute": level}) for level in levels]
    fused = (0, 3), (2, 3), (5, 3), (0, 2), (0, 1)
    forms += [(f"-r {level} -ge {fusion}", {"recompute": level, "gelu_fusion": fusion}) for level, fusion in fused]
    forms += [("-r 0 --offload-optimizer", {"offload_optimizer": True}), ("-r 0, torch's operations", {"kernels": "torch"})]
    if not run.cuda:
        record["not_run"].append(f"-ge and --offload-optimizer: {NO_CUDA}")
        forms = [(label, form) for label, form in forms if form.keys() <= {"kernels", "recompute"}]
    measure_forms(run, record, forms)


def larger(run, record):
    """Each model at the largest batch that fits: at -r 0 if the batch is no smaller for it, else at -r 2. Each runs as it is and, where
    possible, with GELU's gradient inside a matmul, and in FP8; and as it is again, which shows how far the card's clocks have drifted."""
    for name, config, batches in while_time(run, record, run.sizes.larger, 40, name=lambda x: x[0]):
        largest_step(run, record, name, config, batches)
        others = (("-ge 3", {"gelu_fusion": 3}, "" if run.cuda else NO_CUDA), ("--matmul fp8", {"matmul": "fp8"}, why_no_fp8(run)))
        for flags, forms, why_not in others:
            if why_not:
                record["not_run"].append(f"{name} {flags}: {why_not}")
            else:
                largest_step(run, record, name, config, batches, flags, **forms)
        if run.cuda:
            largest_step(run, record, name, config, batches, "again")


def largest_step(run, record, name, config, batches, flags="", **forms):
    """Add a row for the largest of the batches that fits; `flags` and `forms` say the same, as flags and as options of the plan."""
    T = run.sizes.T
    if run.cuda:
        free_memory()  # that of the model before
    budget = int(run.backend.free_bytes() * (1 - RESERVE[run.backend.kind])) if run.cuda else 64 * MIB
    chosen = {}
    for level in (2, 0):
        most = largest_batch(run.options(config, 1, T, recompute=level, **forms), budget)
        chosen[level] = next((b for b in batches if b <= most), 0)
    level, B = 0 if chosen[0] == chosen[2] else 2, chosen[2]
    if not B:
        record["not_run"].append(f"{' '.join([name, flags]).rstrip()}: not even one sequence fits {budget // MIB} MiB")
        return
    for B in (b for b in batches if b <= chosen[level]):
        label, has_room = f"{name} -b {B} -r {level} {flags}".rstrip(), True
        with attempt(record, label):
            try:
                row = step_row(run, label, config, B, T, recompute=level, **forms)
            except torch.OutOfMemoryError:  # what libraries take is in no plan
                has_room = False
                raise
            table(record, "").append(row)
            run.summary[f"ours {label}"] = {key: row[key] for key in STEP_FIGURES}
        if has_room:
            break
        free_memory()


def why_no_fp8(run) -> str:
    """Why no step here can use --matmul fp8; empty if one can."""
    if not run.cuda or run.backend.capability() < FP8_CAPABILITY:
        return "it is for Hopper and later"
    return "" if run.kernels == "triton" else "its operands are made by Triton's kernels"


# ---- profile

KINDS = (
    ("copies and fills", r"memcpy|memset|fill|copy"), ("attention", r"flash|fmha|attention|cudnn|sdpa"),
    ("matmul", r"gemm|cutlass|cublas|nvjet|xmma|splitk|addmm|::mm"),
)  # fmt: skip


def our_kernels() -> set[str]:
    """Names of the Triton kernels as they appear in a profile, except those of attention, which is a kind of its own."""
    from llmc.kernels.fp8 import fp8_operand
    from llmc.kernels.functions import triton_operations

    modules = [launcher.__globals__ for launcher in (*triton_operations().values(), fp8_operand)]
    names = {name for module in modules for name, value in module.items() if name.startswith("_") and hasattr(value, "fn")}
    return {name for name in names if "attention" not in name}


def profile(run, record):
    s, device = run.sizes, "CUDA" if run.cuda else "CPU"
    step, _ = our_step(run, s.config, s.B, s.T, graphs=False)
    warm_up(run, step)
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, device)]) as result:
        step()
        run.backend.synchronize()
    ours = our_kernels() if run.kernels == "triton" else set()
    totals, whole = {}, 0.0
    for event in result.events():
        if event.device_type == getattr(torch.autograd.DeviceType, device):
            name, us = event.name, event.time_range.elapsed_us()
            group = "ours" if name in ours else next((g for g, pattern in KINDS if re.search(pattern, name.lower())), "other")
            whole += us
            for key in ((group, name), (group, None)):
                calls, total = totals.get(key, (0, 0.0))
                totals[key] = calls + 1, total + us
    for (group, name), (calls, us) in sorted(totals.items(), key=lambda item: -item[1][1]):
        rows = table(record, "the 25 that take longest" if name else "by kind")
        if len(rows) < 25:
            kernel = {"kernel": name[:100]} if name else {}
            rows.append({"kind": group} | kernel | {"calls": calls, "ms": us / 1e3, "share": us / max(whole, 1e-9)})
    what = "kernels" if run.cuda else "torch operators, nested ones counted twice"
    record["notes"].append(
        f"{whole / 1e3:.3f} ms of {what} in one step at -r 0, without graphs; python scripts/profile.py gives it stage by stage"
    )
