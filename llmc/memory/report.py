"""The plan in words: llm.c's allocation lines, and the table of --plan."""

from dataclasses import replace

from llmc.memory.ladder import NOT_KEPT
from llmc.memory.plan import MIB, Plan, PlanOptions

PURPOSE_NAMES = {"gradients": "parameter gradients", "activations": "activations", "m": "AdamW optimizer state m",
                 "v": "AdamW optimizer state v", "master": "master copy of params"}  # fmt: skip


def allocation_lines(plan: Plan) -> list[str]:
    """llm.c's line for every arena that is about to be allocated, the parameters' excepted: they come first, in other words."""
    return [
        f"allocating {n_bytes // MIB} MiB for {PURPOSE_NAMES[purpose]}"
        for purpose, n_bytes in plan.arenas.items()
        if purpose != "parameters"
    ]


def usage_lines(plan: Plan, used_bytes: int, total_bytes: int, free_bytes: int) -> list[str]:
    """llm.c's lines on what is in use and what would still fit. The estimate is the plan's own, not a division."""
    return [
        f"device memory usage: {used_bytes // MIB} MiB / {total_bytes // MIB} MiB",
        f"memory per sequence: {plan.bytes_per_sequence // MIB} MiB",
        f" -> estimated maximum batch size: {plan.largest_batch(free_bytes + plan.total_bytes)}",
    ]


def plan_table(options: PlanOptions) -> str:
    """One line per recompute level that exists, MiB per purpose; the level asked for is marked."""
    heads = ("-r", "parameters", "gradients", "optimizer", "kept", "shared", "library", "total", "per sequence", "not kept")
    rows = []
    for level, names in NOT_KEPT.items():
        plan = Plan(replace(options, recompute=level))
        arenas = plan.arenas
        optimizer = sum(arenas.get(k, 0) for k in ("m", "v", "master"))
        kept = plan.kept_bytes
        shared = arenas["activations"] - kept
        bytes_columns = (
            arenas["parameters"], arenas["gradients"], optimizer, kept, shared,
            plan.library_bytes, plan.total_bytes, plan.bytes_per_sequence,
        )  # fmt: skip
        mark = "*" if level == options.recompute else ""
        rows.append((f"{level}{mark}", *(f"{n / MIB:.1f}" for n in bytes_columns), ", ".join(names) or "-"))
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row[:-1], widths)) + "  " + row[-1] for row in (heads, *rows)]
    o, c = options, options.config
    return "\n".join([
        f"memory plan in MiB: L={c.num_layers} NH={c.num_heads} C={c.channels} V={c.vocab_size}, "
        f"B={o.B} T={o.T}, {o.precision}, on {o.device}"
        + (", fp32 master weights" if o.keeps_master else ""),
        "", *lines, "",
        "kept     activations kept from forward to backward, all layers",
        "shared   everything else a step, an evaluation or a sample needs, sharing bytes where lifetimes do not meet",
        "library  what attention returns in memory of its own, freed at once",
    ])  # fmt: skip
