"""What profile.py found, row by row, and the forms it is shown in: lines of text, JSON, and a picture."""

import statistics
from dataclasses import dataclass, replace
from itertools import groupby

from llmc.memory.tables import num_parameters
from llmc.mfu import flops_per_token, model_flops_utilization
from llmc.text_table import in_columns
from scripts.plotting import new_figure
from scripts.profile_hooks import MATMULS, Limits

MATMUL, ATTENTION, ELEMENTWISE, CLASSIFIER, UPDATE, REST = "matmul", "attention", "elementwise, norms", "classifier", "update", "rest"
COLOURS = {  # kind -> colour of the time it took, colour of what the limit would need
    MATMUL: ("#9dc3e6", "#1f4e79"), ATTENTION: ("#f4a261", "#b5520b"), ELEMENTWISE: ("#b5d6a4", "#3f7d2a"),
    CLASSIFIER: ("#d3b3dc", "#7b3f8c"), UPDATE: ("#ffd966", "#a67c00"), REST: ("#c8c8c8", "#8c8c8c"),
}  # fmt: skip


def kind_of(operation: str) -> str:
    """The kind of an operation, one of those in COLOURS."""
    if operation in (*MATMULS, "matmul_dout"):
        return MATMUL
    named = {"attention": ATTENTION, "fused_classifier": CLASSIFIER, "global_norm": UPDATE, "adamw": UPDATE}
    return next((kind for start, kind in named.items() if operation.startswith(start)), ELEMENTWISE)


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
    speed = f"{100 * profile.mfu:.1f}% MFU | {profile.tokens_per_s:.0f} tok/s"
    lines.append(f"a step with hooks: {step.ms:.2f} ms, as above")
    return [*lines, f"without: {plain_ms:.2f} ms, the median of {len(profile.ms)} | {speed}"]


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
        "kernels": o.kernels, "attention": o.attention, "gelu_fusion": o.gelu_fusion,
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
