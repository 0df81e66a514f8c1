"""Section of gpu_check.py: what was measured beside the goals."""

from dataclasses import dataclass

from scripts.gpu_compared import AUTOCAST
from scripts.gpu_kernels import SLOW, WEIGHTY, weighs

CARD = "H200"  # what the goals were set for


@dataclass(frozen=True, slots=True)
class Goal:
    """Reached if at least `wanted`; numbers are printed as `shown` says. measured(report) gives the number, or None."""

    name: str
    wanted: float
    shown: str
    measured: object


def rows_of(report, section, **fields) -> list[dict]:
    """Rows of a section's main table that have these fields."""
    rows = report["sections"].get(section, {}).get("tables", {}).get("", [])
    return [row for row in rows if all(row.get(key) == value for key, value in fields.items())]


def tokens_per_s(report, section, label):
    return max((row["tokens/s"] for row in rows_of(report, section, run=label)), default=None)


def fastest_of(report, model, fp8=False):
    """Highest tokens/s of one of the larger models, at whatever batch, level and -ge it ran, in bf16 or with --matmul fp8."""
    rows = (row for row in rows_of(report, "larger") if row["run"].startswith(f"{model} ") and row["run"].endswith("fp8") == fp8)
    return max((row["tokens/s"] for row in rows), default=None)


def over_compiled(report, level):
    """Our tokens/s divided by PyTorch's under torch.compile."""
    rows = rows_of(report, "compile", **{"plain PyTorch": f"torch.compile, {AUTOCAST}"})
    return 1 / rows[0][f"ratio -r {level}"] if rows else None


def over_compiled_small(report, B):
    ours, theirs = (rows_of(report, "small_batches", **{"-b": B, "run": run}) for run in ("graph", "torch.compile"))
    return ours[0]["tokens/s"] / theirs[0]["tokens/s"] if ours and theirs else None


def weighty_kernels(report) -> list[dict]:
    """Rows of kernels whose share of a step is large enough to matter, and whose share of the copy rate is known."""
    return [row for row in rows_of(report, "kernels") if row.get("of copy") is not None and weighs(row)]


def slowest_kernel(report):
    return min((row["of copy"] for row in weighty_kernels(report)), default=None)


TOKENS, TIMES, SHARE = "{:,.0f} tokens/s", "{:.2f}x", "{:.0%}"
GOALS = (
    Goal("d12 -b 64 -r 0", 600_000, TOKENS, lambda report: tokens_per_s(report, "steps", "-r 0")),
    Goal("d12 -b 64 -r 2", 580_000, TOKENS, lambda report: tokens_per_s(report, "steps", "-r 2")),
    Goal("d12 -b 64 -r 5", 450_000, TOKENS, lambda report: tokens_per_s(report, "more_steps", "-r 5")),
    Goal("d12 -b 4 over torch.compile", 1.5, TIMES, lambda report: over_compiled_small(report, 4)),
    Goal("d12 -b 64 -r 0 over torch.compile", 1.10, TIMES, lambda report: over_compiled(report, 0)),
    Goal("d12 -b 64 -r 2 over torch.compile", 1.05, TIMES, lambda report: over_compiled(report, 2)),
    Goal("d48", 57_000, TOKENS, lambda report: fastest_of(report, "d48")),
    Goal("d48 --matmul fp8", 57_000, TOKENS, lambda report: fastest_of(report, "d48", fp8=True)),
    Goal("the slowest kernel that weighs, of the copy rate", SLOW, SHARE, slowest_kernel),
)


def goals(run, record):
    rows = record["tables"][""] = goal_rows(run.report)
    results = [row["result"].split()[0] for row in rows]
    run.summary["goals"] = f"{results.count('reached')} reached, {results.count('missed')} missed, {results.count('not')} not measured"
    other = "" if CARD in run.backend.name else f", and this is {run.backend.name}"
    record["notes"].append(f"set for one NVIDIA {CARD}{other}; ours over theirs is tokens/s over tokens/s, so above 1 ours is faster")
    slow = min(weighty_kernels(run.report), key=lambda row: row["of copy"], default=None)
    if slow and not run.report["dry_run"]:
        record["notes"].append(f"the slowest kernel of those that take {WEIGHTY:.1%} of a step is {slow['kernel']}")
    if left := run.report["sections"].get("kernels", {}).get("not_run"):
        record["notes"].append(f"{len(left)} kernels were not measured")


def goal_rows(report) -> list[dict]:
    """A row for each goal. A dry run counts as not measured, as its sizes are not those of the goals."""
    rows = []
    for goal in GOALS:
        found = None if report["dry_run"] else goal.measured(report)
        row = {"goal": goal.name, "at least": goal.shown.format(goal.wanted)}
        row["measured"] = None if found is None else goal.shown.format(found)
        rows.append(row | {"result": result_of(found, goal.wanted)})
    return rows


def result_of(found, wanted) -> str:
    if found is None:
        return "not measured"
    return "reached" if found >= wanted else f"missed by {1 - found / wanted:.1%}"
