"""The plan in words: llm.c's allocation lines, the table and lists of --plan, and what is said when a plan does not fit."""

from dataclasses import replace
from math import prod

from llmc.cards import Budget
from llmc.errors import NotEnoughMemory
from llmc.memory.choose import levels_of, ways_to_fit
from llmc.memory.cost import bound, extra_flops_percent, least_ms, optimizer_traffic, ridge, step_cost
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.largest_batch import largest_batch
from llmc.memory.layout import flat_layout
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tables import DTYPE_BYTES
from llmc.memory.traffic import Links
from llmc.memory.traffic_report import traffic_columns, traffic_lines
from llmc.text_table import in_columns
from llmc.units import MIB, ceil_mib

PURPOSE_NAMES = {"gradients": "parameter gradients", "activations": "activations", "m": "AdamW optimizer state m",
                 "v": "AdamW optimizer state v", "master": "master copy of params",
                 "master_bits": "master copy of params (the 16 bits that bf16 lacks)"}  # fmt: skip
COLUMNS = ("parameters", "gradients", "optimizer", "kept", "shared", "head", "scratch", "library")  # of Plan.columns, with one rank
LEGEND = {
    "kept": "activations kept from forward to backward, all layers",
    "shared": "activations and their gradients that all layers take turns in, on top of it",
    "head": "logits and what the classifier needs, on top of that",
    "gathered": "whole layers of what this rank holds a share of, and shares of what it holds whole, on top of that",
    "scratch": "working room of layers, update and sampling, on top of that",
    "library": "what attention returns in memory of its own, freed at once",
    "checkpoint": "the copy from which a checkpoint is written beside training",
}
LEGEND_OF_EVALUATION = LEGEND | {
    "kept": "activations that pass from layer to layer",
    "shared": "activations that all layers take turns in, on top of it",
    "scratch": "working room of layers and sampling, on top of that",
}


def allocation_lines(plan: Plan) -> list[str]:
    """llm.c's line for every arena that is about to be allocated, except the parameters, which print_sizes reports in other words."""
    lines = [
        f"allocating {n_bytes // MIB} MiB {'of pinned host memory ' if plan.on_host(purpose) else ''}for {PURPOSE_NAMES[purpose]}"
        for purpose, n_bytes in plan.arenas.items()
        if purpose != "parameters"
    ]
    if plan.options.offload_residual:
        lines.append(f"allocating {plan.residual_bytes // MIB} MiB of pinned host memory for residuals")
    if plan.options.async_checkpoint:
        pinned = "pinned " if plan.options.device == "cuda" else ""
        lines.append(f"allocating {plan.checkpoint_bytes // MIB} MiB of {pinned}host memory for checkpoints")
    return lines


def usage_lines(plan: Plan, used_bytes: int, total_bytes: int, free_bytes: int) -> list[str]:
    """llm.c's lines on what is in use and what would still fit. The estimate comes from plans, not from a division."""
    return [
        f"device memory usage: {used_bytes // MIB} MiB / {total_bytes // MIB} MiB",
        f"memory per sequence: {plan.bytes_per_sequence // MIB} MiB",
        f" -> estimated maximum batch size: {largest_batch(plan.options, free_bytes + plan.total_bytes)}",
    ]


def level_rows(options: PlanOptions, grad_accum_steps: int = 1, budget: Budget | None = None, links: Links | None = None) -> list[dict]:
    """One dict per recompute level: the numbers of --plan, as --plan --json prints them. MiB are floats; what is unknown is None. Where
    nothing is trained, flops and bytes are those of an evaluation, and what ranks send is not told."""
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
            "checkpoint_mib": plan.checkpoint_bytes / MIB,
            "activation_mib_per_sequence": plan.arenas["activations"] / o.B / MIB,
            "largest_batch": largest_batch(o, budget.bytes) if budget else None,
            "extra_flops_percent": extra_flops_percent(o),
            "flops_per_step": cost.flops,
            "bytes_per_step": cost.bytes,
            "flops_per_byte": cost.intensity,
            "bound": bound(cost, o, budget),
            "compute_ms": least_ms(cost, o, budget),
            **(traffic_columns(o, grad_accum_steps, links) if o.trains else {}),
        })  # fmt: skip
    return rows


def describe(o: PlanOptions) -> str:
    """The options of a plan in one line."""
    forms = [o.precision, f"on {o.device}"]
    if not o.trains:
        forms.append("nothing is trained")
    elif o.precision == "bf16":
        forms.append({"fp32": "fp32 master weights", "bits16": "master weights in 16 more bits", "none": "no master weights"}[o.master])
    if o.optimizer_state != "fp32":
        forms.append(f"m and v in {o.optimizer_state}")
    if o.grad_dtype != o.precision:
        forms.append(f"gradients in {o.grad_dtype}")
    if o.matmul == "numba":
        forms.append("matmuls by numba")
    if o.matmul == "fp8":
        forms.append("matmuls of layers in FP8")
    if o.multiplied_in != o.precision:
        forms.append("matmuls widened to fp32")
    if o.offload_residual:
        forms.append("residuals in host memory")
    if o.offload_optimizer:
        forms.append("optimizer state in host memory")
    if o.async_checkpoint:
        forms.append("checkpoints written beside training")
    if o.ranks > 1:
        forms.append(f"one of {o.ranks} ranks, ZeRO stage {o.zero_stage}")
    if o.tensor_parallel > 1:
        forms.append(f"tensor parallel in {o.tensor_parallel} parts")
    return f"{o.config}, B={o.B} T={o.T}, {', '.join(forms)}"


def plan_table(options: PlanOptions, grad_accum_steps: int = 1, budget: Budget | None = None, links: Links | None = None) -> str:
    """One line per recompute level, MiB per purpose; the level asked for is marked. With several ranks, also what one of them sends."""
    columns = tuple(Plan(options).columns)
    heads = ("-r", *columns, "total", "MiB/seq", "largest -b", "+FLOPs", "FLOP/B", "not kept")
    rows, before = [], ()
    all_levels = level_rows(options, grad_accum_steps, budget, links)
    for row in all_levels:
        level = row["recompute"]
        mark = "*" if level == options.recompute else ""
        mib = [f"{row[name + '_mib']:.1f}" for name in (*columns, "total")] + [f"{row['activation_mib_per_sequence']:.1f}"]
        largest = "-" if row["largest_batch"] is None else str(row["largest_batch"])
        more = ", ".join(name for name in NOT_KEPT[level] if name not in before)
        text = ("+ " if before else "") + more if more else "nothing: all is kept"
        rows.append((f"{level}{mark}", *mib, largest, f"{row['extra_flops_percent']:.1f}%", f"{row['flops_per_byte']:.0f}", text))
        before = NOT_KEPT[level]
    lines = in_columns((heads, *rows), numbers=range(len(heads) - 1))
    asked = next((row for row in all_levels if row["recompute"] == options.recompute), all_levels[-1])
    sent = ["", *traffic_lines(options, asked, budget, links)] if options.ranks > 1 and links and options.trains else []
    title = f"memory plan in MiB: {describe(options)}"
    return "\n".join([title, "", *lines, "", *legend(columns, options.trains), "", *_footer(options, asked, budget), *sent])


def legend(columns, trains: bool = True) -> list[str]:
    """A line for each of these columns of the plan's table whose name does not say what it means."""
    meanings = LEGEND if trains else LEGEND_OF_EVALUATION
    names = [name for name in columns if name in meanings]
    width = max(map(len, names))
    return [f"{name.ljust(width)}  {meanings[name]}" for name in names]


def _footer(options, row, budget) -> list[str]:
    """What the batch, the FLOPs and the intensity columns mean for this budget."""
    lines = ["MiB/seq: all activations over -b, of which some do not grow with it"]
    if budget:
        lines.append(f"largest -b: of {budget.bytes // MIB} MiB, {budget.name}")
    else:
        lines.append("largest -b: say --memory-budget, a size such as 24GiB or a card such as h100-80")
    if options.offload_residual or options.offload_optimizer or options.async_checkpoint:
        lines.append(_host_memory(options, row))
    what, level = ("a step", f" at -r {row['recompute']}") if options.trains else ("an evaluation", "")
    lines.append(f"{what}: {row['flops_per_step'] / 1e12:.3f} TFLOP of matmuls and attention{level}, "
                 f"{row['bytes_per_step'] / 1e9:.1f} GB moved, {row['flops_per_byte']:.0f} FLOP per byte")  # fmt: skip
    limit = ridge(options, budget)
    if limit:
        card = budget.card
        lines[-1] += (
            f": {row['bound']}-bound on {budget.name}, which does {limit:.0f} per byte "
            f"({limit * card.bandwidth_gb_s / 1e3:.0f} TFLOP/s over {card.bandwidth_gb_s:.0f} GB/s)"
        )
    return lines


def _host_memory(options, row) -> str:
    """How much of the plan is in host memory, and whether that is in the total."""
    checkpoint = f"{row['checkpoint_mib']:.1f} MiB for checkpoints while they are written"
    if options.async_checkpoint and options.device == "cpu":
        return f"host memory: {checkpoint}, in the total"
    lines = [f"host memory: {row['host_mib']:.1f} MiB pinned, beside the total"]
    if options.async_checkpoint:
        lines.append(f"of it {checkpoint}")
    if options.offload_optimizer:
        lines.append(f"an update reads {optimizer_traffic(options) / 2e9:.1f} GB of it over the bus and writes as much, not counted below")
    return "; ".join(lines)


def plan_json(options: PlanOptions, grad_accum_steps: int, budget: Budget | None, links: Links | None = None) -> dict:
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
        **links_json(links or Links()),
        "levels": level_rows(options, grad_accum_steps, budget, links),
    }  # fmt: skip


def links_json(links: Links) -> dict:
    """Their speeds under the names of their flags."""
    return {"link": links.link or None, "node_link": links.inside or None, "gpus_per_node": links.machine}


def options_json(o: PlanOptions) -> dict:
    """All options of a plan, with what auto came to, under the names of their flags if they have one. Sequences per step are a rank's."""
    return {
        "trains": o.trains, "batch_size": o.B, "sequence_length": o.T, "precision": o.precision, "device": o.device,
        "recompute": o.recompute, "master": o.master if o.precision == "bf16" else None, "optimizer_state": o.optimizer_state,
        "grad_dtype": o.grad_dtype,
        "matmul": None if o.device == "cuda" and o.matmul == "native" else o.matmul, "factors": o.factors,
        "kernels": o.kernels, "attention": o.attention, "gelu_fusion": o.gelu_fusion, "sample_length": o.sample_length,
        "processors": o.processors if o.device == "cuda" else None, "sequences_per_step": max(o.B, o.step_sequences), "rank": o.rank,
        "offload_residual": o.offload_residual, "offload_optimizer": o.offload_optimizer, "head_chunk": o.head_chunk,
        "async_checkpoint": o.async_checkpoint, "ranks": o.ranks, "zero_stage": o.zero_stage, "tensor_parallel": o.tensor_parallel,
        "tp_recompute_allgather": int(not o.keep_gathered), "reduce_every_micro_step": int(o.reduce_every_micro_step),
    }  # fmt: skip


def tensor_rows(plan: Plan) -> list[dict]:
    """Every tensor of the plan: arena, whether that is host memory of a GPU's run, name, shape, dtype, bytes, place in its arena, and
    first and last stages of its lifetimes."""
    rows = []
    for arena in plan.arenas:
        if arena == "activations":
            rows += [
                {"arena": arena, "on_host": False, "name": t.name, "purpose": t.purpose, "shape": list(t.shape), "dtype": t.dtype,
                 "bytes": t.nbytes, "offset": t.offset, "lives": [list(span) for span in t.spans]}
                for t in plan.tensors.values()
            ]  # fmt: skip
            continue
        o, dtype, offset = plan.options, plan.flat_types[arena], 0
        shares = o.ranks_of(arena)
        for t in flat_layout(o.config, shares, parts=o.tensor_parallel):
            whole = t.shape if shares == 1 else (t.elements,)
            shape = (t.layers, *whole) if t.parameter.per_layer else whole
            n_bytes = prod(shape) * DTYPE_BYTES[dtype]
            rows.append({"arena": arena, "on_host": plan.on_host(arena), "name": t.name, "purpose": arena, "shape": list(shape),
                         "dtype": dtype, "bytes": n_bytes, "offset": offset, "lives": [["start", "end"]]})  # fmt: skip
            offset += n_bytes
    offset = 0
    for name, (elements, dtype) in plan.checkpoint_tensors.items():
        n_bytes = elements * DTYPE_BYTES[dtype]
        rows.append({"arena": "checkpoint", "on_host": plan.options.device == "cuda", "name": name, "purpose": "checkpoint",
                     "shape": [elements], "dtype": dtype, "bytes": n_bytes, "offset": offset, "lives": [["start", "end"]]})  # fmt: skip
        offset += n_bytes
    return rows


def tensors_table(plan: Plan) -> str:
    """What --plan --tensors prints: the tensors in columns."""
    heads = ("arena", "name", "purpose", "shape", "dtype", "bytes", "offset", "lives from .. to")
    rows = [
        (r["arena"] + " (host)" * r["on_host"], r["name"], r["purpose"], "x".join(map(str, r["shape"])), r["dtype"], str(r["bytes"]),
         str(r["offset"]), ", ".join(first if first == last else f"{first} .. {last}" for first, last in r["lives"]))
        for r in tensor_rows(plan)
    ]  # fmt: skip
    lines = in_columns((heads, *rows), numbers=(5, 6))
    return "\n".join([f"tensors of the plan: {describe(plan.options)}, -r {plan.options.recompute}", "", *lines])


def not_enough_memory(error: NotEnoughMemory) -> str:
    """The text below the error's sentence when a plan does not fit, or did not after all: the table, and the cheapest ways to fit."""
    table = plan_table(error.options, error.grad_accum_steps, Budget(error.budget_bytes, "what there is"))
    return f"{table}\n\n{ways_text(error.options, error.budget_bytes, error.grad_accum_steps)}"


def ways_text(options: PlanOptions, budget_bytes: int, grad_accum_steps: int) -> str:
    """The cheapest ways to make a plan fit that does not, or what else to do where there is none."""
    ways = ways_to_fit(options, budget_bytes, options.B * grad_accum_steps)
    if not ways:
        columns, advice = Plan(options).columns, "use a smaller model (-e) or shorter sequences (-t)"
        if (fixed := columns["parameters"] + columns["gradients"]) > budget_bytes:
            them = "weights and gradients" if options.trains else "weights"
            advice = f"{them} alone take {fixed // MIB} MiB; use a smaller model (-e), or more processes with -z 3"
        return f"no flag makes it fit {budget_bytes // MIB} MiB: {advice}"
    width = max(len(way.flags) for way in ways)
    lines = [f"  {way.flags.ljust(width)}  {way.total_bytes // MIB} MiB; {way.price}" for way in ways]
    return "\n".join([f"the cheapest ways to fit {budget_bytes // MIB} MiB, flags to add:", *lines])


def does_not_fit(plan: Plan, budget: Budget) -> str:
    """The sentence for a plan that is larger than the budget."""
    return f"the plan needs {ceil_mib(plan.total_bytes)} MiB, and there are {budget.bytes // MIB} MiB ({budget.origin})"
