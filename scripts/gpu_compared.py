"""Sections of gpu_check.py: the same training step in plain PyTorch, at the usual batch and at small ones."""

import time

import torch
from torch.nn.attention import SDPBackend

from scripts.bench_pytorch import PyTorchTrainer
from scripts.gpu_common import attempt, cause_of, free_memory, random_tokens, summarize, table, time_each, while_time
from scripts.gpu_steps import measure_steps, measured_peak, our_step, speed, warm_up, why_no_graphs

ROUNDS = 3  # of steps, measured in turn
COMPILES = 60  # seconds that must be left to begin a compilation, which may take half a minute longer than this
AUTOCAST, BF16_WEIGHTS = "autocast to bf16, fp32 weights", "bf16 weights and optimizer state"


def torch_step(run, record, config, B, T, **options):
    """(a step of plain PyTorch, how it runs): compiled, or eager if compiling fails or is not tried."""
    inputs, targets = torch.from_numpy(random_tokens(config, B, T)).to(run.backend.device)

    def build(compiled):
        trainer = PyTorchTrainer(config, "bf16", run.backend.device, compiled=compiled, **options)

        def step():
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True  # torch's default
            try:
                return trainer.step(inputs, targets)
            finally:
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

        step()
        return step

    why = "a dry run does not wait for a compiler"
    if not run.dry:
        try:
            torch.compiler.reset()
            return build(True), "torch.compile"
        except torch.OutOfMemoryError:  # eager would need even more
            raise
        except Exception as error:
            why = cause_of(error)
    note = f"plain PyTorch ran eagerly, not under torch.compile: {why}"
    if note not in record["notes"]:
        record["notes"].append(note)
    return build(False), "eager"


def compared(run, record):
    compare_with(run, record, AUTOCAST)


def compared_again(run, record):
    """Comparisons that each need another compilation, and say less."""
    compare_with(run, record, BF16_WEIGHTS, bf16_weights=True)
    name, config, batches = run.sizes.larger[0]
    B, T = next(b for b in batches if b <= 16), run.sizes.T
    for label in while_time(run, record, [f"{name} -b {B} in plain PyTorch"], COMPILES + 15):
        with attempt(record, label):
            with measured_peak(run) as peak:
                step, how = torch_step(run, record, config, B, T)
                ms, spread, loss = measure_steps(run, step)
            row = {"run": f"{name} -b {B}, {how}", "ms": ms, "spread": spread} | speed(run, config, B, T, ms)
            table(record, "a larger model").append(row | peak | {"loss": loss})


def compare_with(run, record, label, **options):
    """Ours and plain PyTorch in turn, within the same minute: a drift of the card's clocks shows in the column "ours -r 0 again ms".

    PyTorch shares the card's memory only with our step at -r 0; our step at -r 2 follows when PyTorch's is freed.
    """
    s = run.sizes
    ours = our_step(run, s.config, s.B, s.T)[0]
    warm_up(run, ours)  # so that what a graph capture allocates is not in PyTorch's peak
    for label in while_time(run, record, [label], COMPILES):
        with attempt(record, label):
            with measured_peak(run) as peak:
                start = time.monotonic()
                theirs, how = torch_step(run, record, s.config, s.B, s.T, **options)
                set_up = time.monotonic() - start
                first, _, _ = measure_steps(run, ours)
                ms, spread, loss = measure_steps(run, theirs)
            again, _, _ = measure_steps(run, ours)
            del theirs
            free_memory()
            second, _, _ = measure_steps(run, our_step(run, s.config, s.B, s.T, recompute=2)[0])
            row = {"plain PyTorch": f"{how}, {label}", "ms": ms, "spread": spread} | speed(run, s.config, s.B, s.T, ms) | peak
            row |= {"set-up s": set_up, "loss": loss, "ours -r 0 ms": first, "ours -r 2 ms": second, "ours -r 0 again ms": again}
            row |= {"ratio -r 0": (first + again) / 2 / ms, "ratio -r 2": second / ms}
            table(record, "").append(row)
            keys = ("ms", "tokens/s", "MFU", "measured MiB", "ratio -r 0", "ratio -r 2")
            run.summary[row["plain PyTorch"]] = {key: row[key] for key in keys}
    record["notes"].append("ratios are our time over PyTorch's: below 1, ours is faster")
    if run.cuda:
        shape = (s.B, s.config.num_heads, s.T, s.config.head_size)
        ours = run.options(s.config, s.B, s.T).attention
        record["notes"].append(f"attention is PyTorch's choice of {attention_of_torch(run, shape)}, and ours {ours}")


def attention_of_torch(run, shape) -> str:
    """The name of the kernel that F.scaled_dot_product_attention chooses for (B, NH, T, HS) in bf16; torch has no public way to ask
    for it."""
    q = torch.empty(shape, dtype=torch.bfloat16, device=run.backend.device, requires_grad=True)
    try:
        return SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name
    except Exception as error:
        return f"a kernel it would not name ({cause_of(error)})"


def small_batches(run, record):
    """Graphs, eager steps and plain PyTorch in turn, at batches where the host has little time to launch a step."""
    s = run.sizes
    for B in while_time(run, record, s.small, COMPILES, name=lambda B: f"-b {B}"):
        with attempt(record, f"-b {B}"):
            why = why_no_graphs(run, run.options(s.config, B, s.T))
            if why:
                record["not_run"].append(f"-b {B}, graph: {why}")
            steps = {} if why else {"graph": our_step(run, s.config, B, s.T)[0]}
            steps["eager"] = our_step(run, s.config, B, s.T, graphs=False)[0]
            theirs, how = torch_step(run, record, s.config, B, s.T)
            measured = measure_steps_in_turn(run, steps | {how_named(how): theirs})
            table(record, "").extend(small_rows(B, s.T, measured, how_named(how)))
    record["notes"] += [
        "ratio is a step's time over PyTorch's: below 1, ours is faster. The goal at -b 4 is a ratio of at most 0.67 with graphs",
        "all wait for the loss of a step before the next: PyTorch after its update, ours while its update runs",
    ]


def compile_graphs(run, record):
    """The same against torch.compile where it captures CUDA graphs too, so that neither waits for Python."""
    s = run.sizes
    for B in while_time(run, record, s.small, COMPILES, name=lambda B: f"-b {B}"):
        with attempt(record, f"-b {B}"):
            theirs, how = torch_step(run, record, s.config, B, s.T, mode="reduce-overhead")
            ours = "eager" if why_no_graphs(run, run.options(s.config, B, s.T)) else "graph"
            steps = {ours: our_step(run, s.config, B, s.T, graphs=ours == "graph")[0]}
            name = how_named(how) + (", mode reduce-overhead" if how == "torch.compile" else "")
            table(record, "").extend(small_rows(B, s.T, measure_steps_in_turn(run, steps | {name: theirs}), name))
    record["notes"].append("ratio is a step's time over PyTorch's: below 1, ours is faster")


def how_named(how) -> str:
    return "torch.compile" if how == "torch.compile" else f"plain PyTorch, {how}"


def measure_steps_in_turn(run, steps: dict) -> dict:
    """Name -> (median ms, spread, last loss) of steps that take turns, so that a drift of the card's clocks affects all alike."""
    times, losses = {name: [] for name in steps}, {}
    for step in steps.values():
        warm_up(run, step)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name] += time_each(run.backend, [lambda: losses.update({name: step()})] * run.sizes.steps)
    return {name: (*summarize(times[name]), losses[name]) for name in steps}


def small_rows(B, T, measured: dict, reference) -> list[dict]:
    base = measured[reference][0]
    return [
        {"-b": B, "run": name, "ms": ms, "spread": spread, "tokens/s": B * T / ms * 1e3, "ratio": ms / base, "loss": loss}
        for name, (ms, spread, loss) in measured.items()
    ]
