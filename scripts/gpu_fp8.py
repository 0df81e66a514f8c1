"""Section of gpu_check.py: what a step would gain from FP8 in its large matmuls, their operands' making included.

An FP8 matmul takes both factors with the dimension it sums over last. What forward has that way, backward has not: it takes x, the
weight and dy transposed, so each of them is made in both layouts. Scales are one number per tensor, from its largest element.
"""

from functools import partial

import torch

from scripts.gpu_common import BF16, D24, D48, FP32, Skip, attempt, measure, table, while_time

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
MADE_BYTES = 6  # per element: its bf16 read for the largest and again for the cast, FP8 written in two layouts
MODELS = (("d24", D24, 16, 1024), ("d48", D48, 16, 1024))  # name, config, B, T
FORMS = ("forward", "dinput", "dweight")


def fp8(run, record):
    if not run.cuda:
        raise Skip("FP8 matmuls are measured on a GPU, and there is no CUDA device")
    capability = run.backend.capability()
    if capability < (8, 9):
        raise Skip(f"FP8 matmuls need compute capability 8.9, and this card has {capability[0]}.{capability[1]}")
    for name, config, B, T in while_time(run, record, MODELS, 8, name=lambda model: model[0]):
        measure_model(run, record, name, config, B, T)
    record["notes"] += [
        "e4m3, one scale per tensor, bf16 out; sums in forward are the fast ones, in backward those that are promoted to fp32",
        f"operands: largest element, scale, cast, both layouts. By torch's operations as they come; least: {MADE_BYTES} bytes an element "
        "at the rate of a copy, what a kernel of one's own could come to. A weight's are made once a step",
    ]


def products(C) -> dict:
    """Name -> (inner, outer) of a block's matmuls."""
    return {"qkv": (C, 3 * C), "attproj": (C, C), "fc": (C, 4 * C), "fcproj": (4 * C, C)}


def operand_shapes(C, n) -> list[tuple[int, int]]:
    """Of a block's matmuls: x, dy and the weight of each."""
    return [shape for inner, outer in products(C).values() for shape in ((n, inner), (n, outer), (outer, inner))]


def factors(run, form, n, inner, outer):
    """The (M, K) and (K, N) that torch.mm multiplies in bf16."""
    x, dy, weight = run.random(n, inner), run.random(n, outer), run.random(outer, inner)
    return {"forward": (x, weight.t()), "dinput": (dy, weight), "dweight": (dy.t(), x)}[form]


def scale_of(x):
    return torch.linalg.vector_norm(x, float("inf"), dtype=FP32).clamp(min=1e-12) / LARGEST


def to_fp8(x, scale):
    return (x / scale).to(E4M3).contiguous()


def both_layouts(x):
    """What matmuls of FP8 take of a tensor: it, its transpose, its scale."""
    scale = scale_of(x)
    rows = to_fp8(x, scale)
    return rows, rows.t().contiguous(), scale


def fp8_product(left, right, form):
    """A call that multiplies what `left` and `right` are in FP8."""
    scale_left, scale_right = scale_of(left), scale_of(right)
    return partial(
        torch._scaled_mm, to_fp8(left, scale_left), to_fp8(right.t(), scale_right).t(), scale_a=scale_left, scale_b=scale_right,
        out_dtype=BF16, use_fast_accum=form == "forward",
    )  # fmt: skip


def measure_model(run, record, name, config, B, T):
    """Every large matmul of a block in both types, the making of its operands, and what all of it comes to in a step."""
    n, C = B * T, config.channels
    ms = {BF16: [], E4M3: []}
    for product, (inner, outer) in products(C).items():
        for form in FORMS:
            with attempt(record, f"{name} {product} {form}"):
                sets = [factors(run, form, n, inner, outer) for _ in range(2)]
                calls = [fp8_product(*s, form) for s in sets]
                reference, ours = torch.mm(*sets[0]).float(), calls[0]().float()
                difference = ((ours - reference).norm() / reference.norm()).item()
                del reference, ours
                one, spread = measure(run, *(partial(torch.mm, *s, out=torch.mm(*s)) for s in sets))
                other, _ = measure(run, *calls)
                ms[BF16].append(one)
                ms[E4M3].append(other)
                row = {"model": name, "matmul": product, "which": form, "bf16 ms": one, "spread": spread, "FP8 ms": other}
                row |= {"FP8/bf16": other / one, "FP8 TFLOP/s": 2 * n * inner * outer / other / 1e9, "relative difference": difference}
                table(record, "matmuls").append(row)
    made, shapes = {}, operand_shapes(C, n)
    for shape in dict.fromkeys(shapes):
        with attempt(record, f"{name} operand {shape}"):
            made[shape], spread = measure(run, *(partial(both_layouts, run.random(*shape)) for _ in range(2)))
            row = {"model": name, "operand": f"{shape[0]}, {shape[1]}", "in a block": shapes.count(shape)}
            table(record, "operands").append(row | {"ms": made[shape], "spread": spread, "least ms": least_ms(run, shape)})
    if len(ms[E4M3]) < len(products(C)) * len(FORMS) or len(made) < len(set(shapes)):
        record["not_run"].append(f"{name}: not summed over a step, as a part of it failed")
        return
    least = [least_ms(run, shape) for shape in shapes]
    row = step_sums(name, config.num_layers, ms[BF16], ms[E4M3], [made[shape] for shape in shapes], least)
    step_ms = measured_step_ms(run.report, name, n)
    row |= {"step ms": step_ms, "gain of a step": row["gain ms"] / step_ms if step_ms else None}
    table(record, "over a step").append(row)
    record["notes"].append(sentence(row))
    run.summary[f"FP8 in {name}"] = {key: row[key] for key in ("bf16 ms", "FP8 ms", "operands ms", "gain ms", "gain at best ms")}


def least_ms(run, shape):
    """Of making an operand in both layouts, at the rate of a copy; None where that was not measured."""
    return MADE_BYTES * shape[0] * shape[1] / run.rates["copy"] / 1e6 if "copy" in run.rates else None


def step_sums(name, layers, bf16, eight, made, least) -> dict:
    """Over all layers of a step; gains are negative where FP8 costs time."""
    one, other, operands = (layers * sum(times) for times in (bf16, eight, made))
    at_best = layers * sum(least) if None not in least else None
    row = {"model": name, "layers": layers, "bf16 ms": one, "FP8 ms": other, "operands ms": operands, "least operands ms": at_best}
    return row | {"gain ms": one - other - operands, "gain at best ms": None if at_best is None else one - other - at_best}


def measured_step_ms(report, name, tokens):
    """Milliseconds that as many tokens took in this model's own step; None where it was not measured."""
    rows = report["sections"].get("larger", {}).get("tables", {}).get("", [])
    return next((tokens / row["tokens/s"] * 1e3 for row in rows if row["run"].startswith(f"{name} ")), None)


def sentence(row) -> str:
    """What a step would gain or lose."""

    def gains(ms):
        return f"{'gains' if ms > 0 else 'loses'} {abs(ms):.1f} ms"

    text = f"{row['model']}: a step's large matmuls take {row['bf16 ms']:.1f} ms in bf16 and {row['FP8 ms']:.1f} in FP8. "
    text += f"With operands made by torch's operations, {row['operands ms']:.1f} ms, a step {gains(row['gain ms'])}"
    if row["gain at best ms"] is not None:
        text += f"; with operands made at the rate of a copy, {row['least operands ms']:.1f} ms, it {gains(row['gain at best ms'])}"
    return text + (f", of {row['step ms']:.1f} ms" if row.get("step ms") else "")
