"""Sections of gpu_check.py: what a step gains from FP8 in the matmuls of its layers, including the cost of making their operands, and what
FP8 costs in loss."""

import sysconfig
from functools import partial
from pathlib import Path

import numpy as np
import torch

from llmc.layers.matmul_fp8 import E4M3, LARGEST
from llmc.memory.plan import Plan
from llmc.operations import fp8_matmuls
from llmc.rand import XorShift
from scripts.gpu_common import (
    BF16, D24, D48, FP32, Skip, attempt, block_matmuls, factors, free_memory, measure, relative_difference, table, while_time, zeros_of,
)  # fmt: skip
from scripts.gpu_steps import random_model, why_no_fp8
from scripts.stdlib_sources import source_files

MODELS = (("d24", D24, 16, 1024), ("d48", D48, 16, 1024))  # name, config, B, T
FORMS = ("forward", "dinput", "dweight")
# learning curves: (--matmul, seed of the rounding) of each; steps, most rows of a batch, validation batches, warm-up steps, learning rate
RUNS = (("native", 0), ("fp8", 0), ("native", 1), ("fp8", 1), ("native", 2))
STEPS, ROWS, VALIDATION, WARMUP, RATE = 200, 16, 8, 20, 3e-4
# bytes moved per element: bf16 is read to find the largest and again for the cast, FP8 is written in one layout or two
ONE_LAYOUT, TWO_LAYOUTS = 5, 6


def fp8(run, record):
    if why := why_no_fp8(run):
        raise Skip(f"--matmul fp8: {why}")
    for name, config, B, T in while_time(run, record, MODELS, 8, name=lambda model: model[0]):
        measure_model(run, record, name, config, B, T)
    record["notes"] += [
        "e4m3, one scale per tensor, bf16 out; sums of forward are the fast ones, in backward they are promoted to fp32 on the way",
        f"with operands: as --matmul fp8 runs them. At best: {ONE_LAYOUT} bytes an element of an operand in one layout and {TWO_LAYOUTS} "
        "in two, at the rate of a copy. Step: of as many tokens, in bf16, from the larger batch that was measured",
    ]


def operand_bytes(C, n) -> int:
    """Bytes moved to make the operands of a block's matmuls: input and weight for forward and again for backward, and dout."""
    sizes = block_matmuls(C).values()
    return sum(2 * ONE_LAYOUT * (n * inner + inner * outer) + TWO_LAYOUTS * n * outer for inner, outer in sizes)


def product_alone(form, *tensors):
    """A call that multiplies the tensors in FP8, into which they are converted beforehand."""

    def in_fp8(x):
        scale = torch.linalg.vector_norm(x, float("inf"), dtype=FP32).clamp(min=1e-12) / LARGEST
        return (x / scale).to(E4M3).contiguous(), scale

    left, right = factors(form, *tensors)
    (a, of_a), (b, of_b) = in_fp8(left), in_fp8(right.t())
    return partial(torch._scaled_mm, a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=BF16, use_fast_accum=form == "forward")


def calls_of_trainer(ops, scratch, x, dout, weight) -> dict:
    """The trainer's calls, by form; "dout" makes the FP8 operand that "dinput" and "dweight" use."""
    out, dinp, dweight = torch.empty_like(dout), torch.empty_like(x), torch.empty_like(weight)
    return {
        "forward": partial(ops["matmul_forward"], out, x, weight, scratch=scratch), "dout": partial(ops["matmul_dout"], dout, scratch),
        "dinput": partial(ops["matmul_dinput"], dinp, dout, weight, scratch=scratch),
        "dweight": partial(ops["matmul_dweight"], dweight, dout, x, accumulate=False, scratch=scratch),
    }  # fmt: skip


def measure_model(run, record, name, config, B, T):
    """Every matmul of a block in both types, alone and including the making of its operands, and the sums over a step."""
    n, C = B * T, config.channels
    plan, ops, rows = Plan(run.options(config, B, T, matmul="fp8")), fp8_matmuls(run.kernels), []
    scratch = zeros_of([t for t in plan.tensors.values() if t.name.startswith("fp8_")], run.backend.device)
    for product, (inner, outer) in block_matmuls(C).items():
        sets = [(run.random(n, inner), run.random(n, outer), run.random(outer, inner)) for _ in range(2)]
        trainer = [calls_of_trainer(ops, scratch, *s) for s in sets]
        for form in ("forward", "dout", "dinput", "dweight"):
            with attempt(record, f"{name} {product} {form}"):
                row = {"model": name, "matmul": product, "which": form}
                if form != "dout":
                    bf16 = [factors(form, *s) for s in sets]
                    calls = [product_alone(form, *s) for s in sets]
                    row["relative difference"] = relative_difference(calls[0](), torch.mm(*bf16[0]))
                    row["bf16 ms"], row["spread"] = measure(run, *(partial(torch.mm, *s, out=torch.mm(*s)) for s in bf16))
                    row["FP8 ms"], _ = measure(run, *calls)
                    row |= {"FP8/bf16": row["FP8 ms"] / row["bf16 ms"], "FP8 TFLOP/s": 2 * n * inner * outer / row["FP8 ms"] / 1e9}
                row["with operands ms"], _ = measure(run, *(calls[form] for calls in trainer))
                rows.append(row)
                table(record, "matmuls").append(row)
    if len(rows) < len(block_matmuls(C)) * (len(FORMS) + 1):
        record["not_run"].append(f"{name}: not summed over a step, as a part of it failed")
        return
    least = operand_bytes(C, n) / run.rates["copy"] / 1e6 if "copy" in run.rates else None
    row = step_sums(name, config.num_layers, rows, least)
    step_ms = measured_step_ms(run.report, name, n)
    row |= {"step ms": step_ms, "gain of a step": row["gain ms"] / step_ms if step_ms else None}
    table(record, "over a step").append(row)
    record["notes"].append(sentence(row))
    run.summary[f"FP8 in {name}"] = {key: row[key] for key in ("bf16 ms", "FP8 ms", "with operands ms", "gain ms", "gain at best ms")}


def step_sums(name, layers, rows, least) -> dict:
    """Sums over all layers of a step, from one layer's rows and the least time for its operands; a gain is negative if FP8 costs time."""
    one, other, whole = (layers * sum(row.get(key, 0.0) for row in rows) for key in ("bf16 ms", "FP8 ms", "with operands ms"))
    at_best = None if least is None else one - other - layers * least
    return {"model": name, "layers": layers, "bf16 ms": one, "FP8 ms": other, "with operands ms": whole, "gain ms": one - whole,
            "gain at best ms": at_best}  # fmt: skip


def measured_step_ms(report, name, tokens):
    """Milliseconds that this many tokens took in this model's own step in bf16; None if that was not measured."""
    rows = report["sections"].get("larger", {}).get("tables", {}).get("", [])
    rows = [row for row in rows if row["run"].startswith(f"{name} ") and "fp8" not in row["run"]]
    return next((tokens / row["tokens/s"] * 1e3 for row in rows), None)


def sentence(row) -> str:
    """One sentence on what a step gains or loses."""

    def gains(ms):
        return f"{'gains' if ms > 0 else 'loses'} {abs(ms):.1f} ms"

    text = f"{row['model']}: a step's layers multiply for {row['bf16 ms']:.1f} ms in bf16, for {row['FP8 ms']:.1f} in FP8, and with the "
    text += f"making of its operands for {row['with operands ms']:.1f}: a step {gains(row['gain ms'])}"
    if row["gain at best ms"] is not None:
        text += f"; with operands made at the rate of a copy it {gains(row['gain at best ms'])}"
    return text + (f", of {row['step ms']:.1f} ms" if row.get("step ms") else "")


# ----------------------------------------------------------------------------
# learning


def fp8_curve(run, record):
    if why := why_no_fp8(run):
        raise Skip(f"--matmul fp8: {why}")
    name, config, batches = run.sizes.larger[0]
    compare_curves(run, record, name, config, min(batches[0], ROWS), run.sizes.T, STEPS)


def compare_curves(run, record, name, config, B, T, steps):
    """Train the same model on the same text in bf16 and in FP8, with several seeds of stochastic rounding, which alone changes a loss."""
    text = bytes_of_text((steps + VALIDATION) * B * T + 1).astype(np.int64) % config.vocab_size
    batches = [(text[at : at + B * T].reshape(B, T), text[at + 1 : at + 1 + B * T].reshape(B, T)) for at in range(0, len(text) - 1, B * T)]
    for matmul, seed in while_time(run, record, RUNS, 30, name=lambda r: f"{name}, --matmul {r[0]}, seed {r[1]}"):
        with attempt(record, f"{name}, --matmul {matmul}, seed {seed}"):
            losses, validation = learn(random_model(run, config, B, T, matmul=matmul), batches, steps, seed)
            row = {"model": f"{name} -b {B}", "matmuls": {"native": "bf16"}.get(matmul, matmul), "seed": seed}
            row |= {f"loss, step {step}": losses[step - 1] for step in (steps // 4, steps // 2)}
            row |= {"loss, last tenth": float(np.mean(losses[-max(1, steps // 10) :])), "validation loss": validation}
            table(record, "").append(row)
        if run.cuda:
            free_memory()
    record["notes"] += [f"{steps} steps of {B * T} bytes of Python's standard library", verdict(table(record, ""))]


def bytes_of_text(n):
    """The first n bytes, uint8, of the sources that scripts/prepare_stdlib.py takes, one after the other; repeated if there are fewer."""
    found = b""
    for path in source_files(Path(sysconfig.get_path("stdlib"))):
        found += path.read_bytes()
        if len(found) >= n:
            break
    return np.resize(np.frombuffer(found, np.uint8), n)


def learn(model, batches, steps, seed) -> tuple[list[float], float]:
    """Train for `steps`. Returns (losses of the steps, mean validation loss of the batches after them)."""
    model.rng = XorShift(seed + 1)
    model.rng_state_last_update = model.rng.state
    losses = []
    for step, (inputs, targets) in enumerate(batches[:steps]):
        model.train(inputs, targets)
        norm = model.grad_norm()
        losses.append(model.mean_loss())
        model.update(RATE * min(1, (step + 1) / WARMUP), 0.1, step + 1, norm)
    return losses, float(np.mean([model.loss_of(*batch) for batch in batches[steps:]]))


def verdict(rows) -> str:
    """A sentence that compares FP8's validation losses with the spread of bf16's."""
    bf16, eight = ([row["validation loss"] for row in rows if row["matmuls"] == matmuls] for matmuls in ("bf16", "fp8"))
    if len(bf16) < 2 or not eight:
        return "too few runs to say whether FP8's losses lie within the spread of bf16's"
    off, spread = float(np.mean(eight) - np.mean(bf16)), max(bf16) - min(bf16)
    return f"validation loss: FP8's mean is bf16's {off:+.4f}; bf16's seeds differ by up to {spread:.4f}"
