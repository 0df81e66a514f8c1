"""The plan in words: llm.c's allocation lines, the table and lists of --plan, and what is said when a plan does not fit."""

from dataclasses import replace
from math import prod

from llmc.cards import Budget
from llmc.errors import NotEnoughMemory
from llmc.memory.choose import levels_of, ways_to_fit
from llmc.memory.cost import extra_flops_percent, step_cost
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.plan import ARENA_PARTS, MIB, Plan, PlanOptions
from llmc.memory.tables import DTYPE_BYTES, parameter_shapes
from llmc.mfu import PEAKS

PURPOSE_NAMES = {"gradients": "parameter gradients", "activations": "activations", "m": "AdamW optimizer state m",
                 "v": "AdamW optimizer state v", "master": "master copy of params",
                 "master_bits": "master copy of params (the 16 bits that bf16 lacks)"}  # fmt: skip
COLUMNS = ("parameters", "gradients", "optimizer", *ARENA_PARTS, "library")  # of Plan.columns
LEGEND = """kept     activations kept from forward to backward, all layers
shared   activations and their gradients that all layers take turns in, on top of it
head     logits and what the classifier needs, on top of that
scratch  working room of layers, update and sampling, on top of that
library  what attention returns in memory of its own, freed at once"""


def allocation_lines(plan: Plan) -> list[str]:
    """llm.c's line for every arena that is about to be allocated, the parameters' excepted: they come first, in other words."""
    lines = [
        f"allocating {n_bytes // MIB} MiB for {PURPOSE_NAMES[purpose]}"
        for purpose, n_bytes in plan.arenas.items()
        if purpose != "parameters"
    ]
    if plan.options.offload_residual:
        lines.append(f"allocating {plan.host_bytes // MIB} MiB of pinned host memory for residuals")
    return lines


def usage_lines(plan: Plan, used_bytes: int, total_bytes: int, free_bytes: int) -> list[str]:
    """llm.c's lines on what is in use and what would still fit. The estimate is the plan's own, not a division."""
    return [
        f"device memory usage: {used_bytes // MIB} MiB / {total_bytes // MIB} MiB",
        f"memory per sequence: {plan.bytes_per_sequence // MIB} MiB",
        f" -> estimated maximum batch size: {plan.largest_batch(free_bytes + plan.total_bytes)}",
    ]


def level_rows(options: PlanOptions, grad_accum_steps: int = 1, budget: Budget | None = None) -> list[dict]:
    """One dict per recompute level: the numbers of --plan, as --plan --json prints them. MiB are floats; unknown is None."""
    rows = []
    for level in levels_of(options):
        o = replace(options, recompute=level)
        plan, cost = Plan(o), step_cost(o, grad_accum_steps)
        rows.append({
            "recompute": level,
            "not_kept": list(NOT_KEPT[level]),
            **{f"{name}_mib": n_bytes / MIB for name, n_bytes in plan.columns.items()},
            "total_mib": plan.total_bytes / MIB,
            "host_mib": plan.host_bytes / MIB,
            "activation_mib_per_sequence": plan.arenas["activations"] / o.B / MIB,
            "largest_batch": plan.largest_batch(budget.bytes) if budget else None,
            "extra_flops_percent": extra_flops_percent(o),
            "flops_per_step": cost.flops,
            "bytes_per_step": cost.bytes,
            "flops_per_byte": cost.intensity,
            "bound": bound(cost, o, budget),
        })  # fmt: skip
    return rows


def ridge(o: PlanOptions, budget: Budget | None) -> float | None:
    """FLOPs that a card can do while it moves a byte; None without a card whose rates are known, and for a plan on a CPU."""
    peak = PEAKS[budget.card.peak][0 if o.precision == "bf16" else 1] if budget and budget.card and o.device == "cuda" else None
    return peak * 1e12 / (budget.card.bandwidth_gb_s * 1e9) if peak else None


def bound(cost, o: PlanOptions, budget: Budget | None) -> str | None:
    """What sets the time of a step on a card: "compute" or "memory"."""
    limit = ridge(o, budget)
    return None if limit is None else "compute" if cost.intensity >= limit else "memory"


def describe(o: PlanOptions) -> str:
    """The options of a plan in one line."""
    c = o.config
    forms = [o.precision, f"on {o.device}"]
    if o.precision == "bf16":
        forms.append({"fp32": "fp32 master weights", "bits16": "master weights in 16 more bits", "none": "no master weights"}[o.master])
    if o.optimizer_state != "fp32":
        forms.append(f"m and v in {o.optimizer_state}")
    if o.gradients != o.precision:
        forms.append(f"gradients in {o.gradients}")
    if o.offload_residual:
        forms.append("residuals in host memory")
    return f"L={c.num_layers} NH={c.num_heads} C={c.channels} V={c.vocab_size}, B={o.B} T={o.T}, {', '.join(forms)}"


def plan_table(options: PlanOptions, grad_accum_steps: int = 1, budget: Budget | None = None) -> str:
    """One line per recompute level, MiB per purpose; the level asked for is marked."""
    heads = ("-r", *COLUMNS, "total", "MiB/seq", "largest -b", "+FLOPs", "FLOP/B", "not kept")
    rows, before = [], ()
    all_levels = level_rows(options, grad_accum_steps, budget)
    for row in all_levels:
        level = row["recompute"]
        mark = "*" if level == options.recompute else ""
        mib = [f"{row[name + '_mib']:.1f}" for name in (*COLUMNS, "total")] + [f"{row['activation_mib_per_sequence']:.1f}"]
        largest = "-" if row["largest_batch"] is None else str(row["largest_batch"])
        more = ", ".join(name for name in NOT_KEPT[level] if name not in before)
        text = ("+ " if before else "") + more if more else "nothing: all is kept"
        rows.append((f"{level}{mark}", *mib, largest, f"{row['extra_flops_percent']:.1f}%", f"{row['flops_per_byte']:.0f}", text))
        before = NOT_KEPT[level]
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row[:-1], widths)) + "  " + row[-1] for row in (heads, *rows)]
    asked = next((row for row in all_levels if row["recompute"] == options.recompute), all_levels[-1])
    return "\n".join([f"memory plan in MiB: {describe(options)}", "", *lines, "", LEGEND, "", *_footer(options, asked, budget)])


def _footer(options, row, budget) -> list[str]:
    """What the batch, the FLOPs and the intensity columns mean for this budget."""
    lines = []
    if budget:
        lines.append(f"largest -b: of {budget.bytes // MIB} MiB, {budget.name}")
    else:
        lines.append("largest -b: say --memory-budget, a size such as 24GiB or a card such as h100-80")
    if options.offload_residual:
        lines.append(f"host memory: {row['host_mib']:.1f} MiB pinned, beside the total")
    lines.append(f"a step: {row['flops_per_step'] / 1e12:.3f} TFLOP of matmuls and attention at -r {row['recompute']}, "
                 f"{row['bytes_per_step'] / 1e9:.1f} GB moved, {row['flops_per_byte']:.0f} FLOP per byte")  # fmt: skip
    limit = ridge(options, budget)
    if limit:
        card = budget.card
        lines[-1] += (
            f": {row['bound']}-bound on {budget.name}, which does {limit:.0f} per byte "
            f"({limit * card.bandwidth_gb_s / 1e3:.0f} TFLOP/s over {card.bandwidth_gb_s:.0f} GB/s)"
        )
    return lines


def plan_json(options: PlanOptions, grad_accum_steps: int, budget: Budget | None) -> dict:
    """--plan --json: what was planned for, and the levels."""
    c = options.config
    return {
        "model": {
            "max_seq_len": c.max_seq_len, "vocab_size": c.vocab_size, "padded_vocab_size": c.padded_vocab_size,
            "num_layers": c.num_layers, "num_heads": c.num_heads, "channels": c.channels,
        },
        **options_json(options),
        "grad_accum_steps": grad_accum_steps,
        "budget": None if budget is None else {"name": budget.name, "mib": budget.bytes / MIB},
        "levels": level_rows(options, grad_accum_steps, budget),
    }  # fmt: skip


def options_json(o: PlanOptions) -> dict:
    """The options of a plan under the names of their flags."""
    return {
        "batch_size": o.B, "sequence_length": o.T, "precision": o.precision, "device": o.device, "recompute": o.recompute,
        "master": o.master if o.precision == "bf16" else None, "optimizer_state": o.optimizer_state, "grad_dtype": o.gradients,
        "offload_residual": o.offload_residual, "head_chunk": o.head_chunk,
    }  # fmt: skip


def tensor_rows(plan: Plan) -> list[dict]:
    """Every tensor of the plan: arena, name, shape, dtype, bytes, place in its arena, and the stages from which to which it lives."""
    rows = []
    for arena in plan.arenas:
        if arena == "activations":
            rows += [
                {"arena": arena, "name": t.name, "purpose": t.purpose, "shape": list(t.shape), "dtype": t.dtype, "bytes": t.nbytes,
                 "offset": t.offset, "lives": [list(span) for span in t.spans]}
                for t in plan.tensors.values()
            ]  # fmt: skip
            continue
        offset = 0
        for name, shape in parameter_shapes(plan.options.config).items():
            dtype = plan.flat_types[arena]
            n_bytes = prod(shape) * DTYPE_BYTES[dtype]
            rows.append({"arena": arena, "name": name, "purpose": arena, "shape": list(shape), "dtype": dtype, "bytes": n_bytes,
                         "offset": offset, "lives": [["start", "end"]]})  # fmt: skip
            offset += n_bytes
    return rows


def tensors_table(plan: Plan) -> str:
    """--plan --tensors in columns."""
    heads = ("arena", "name", "purpose", "shape", "dtype", "bytes", "offset", "lives from .. to")
    rows = [
        (r["arena"], r["name"], r["purpose"], "x".join(map(str, r["shape"])), r["dtype"], str(r["bytes"]), str(r["offset"]),
         ", ".join(first if first == last else f"{first} .. {last}" for first, last in r["lives"]))
        for r in tensor_rows(plan)
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads) - 1)]
    numbers = (5, 6)
    lines = [
        "  ".join(cell.rjust(w) if i in numbers else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))) + "  " + row[-1]
        for row in (heads, *rows)
    ]
    return "\n".join([f"tensors of the plan: {describe(plan.options)}, -r {plan.options.recompute}", "", *lines])


def not_enough_memory(error: NotEnoughMemory) -> str:
    """What to say below the sentence when a plan does not fit, or did not after all: the table, and the cheapest ways out."""
    options, budget_bytes = error.options, error.budget_bytes
    ways = ways_to_fit(options, budget_bytes, options.B * error.grad_accum_steps, batch_is_fixed=error.batch_is_fixed)
    text = plan_table(options, error.grad_accum_steps, Budget(budget_bytes, "what there is"))
    if not ways:
        return f"{text}\n\nno flag makes it fit {budget_bytes // MIB} MiB: use a smaller model (-e) or shorter sequences (-t)"
    width = max(len(way.flags) for way in ways)
    lines = [f"  {way.flags.ljust(width)}  {way.total_bytes // MIB} MiB; {way.price}" for way in ways]
    return "\n".join([text, "", f"the cheapest ways to fit {budget_bytes // MIB} MiB, flags to add:", *lines])
