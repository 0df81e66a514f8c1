#!/usr/bin/env python3
"""Report what this checkout does on the GPU it finds: its tests, every kernel, training steps, and torch.compile beside them.

    python scripts/gpu_check.py                        up to 7.5 minutes; scripts/bench/gpu_<card>.json and .md
    python scripts/gpu_check.py --only steps compile   only these sections; gpu_<card>_steps_compile.json and .md
    python scripts/gpu_check.py --only tune --tune     which tile sizes and warps are fastest here; --tune NAME: for that operation
    python scripts/gpu_check.py --llmc ../llm.c/train_gpt2cu   llm.c's own step beside ours
    python scripts/gpu_check.py --dry-run              the same code in seconds on a CPU, at sizes that measure nothing

A section that fails is recorded with the last lines of its error, and the others go on; what does not fit into the time is skipped,
and the report says so. The report is rewritten after every section, so a kill loses little. Without a GPU it is a dry run.
"""

import argparse
import faulthandler
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.errors import INPUT_CODE  # first, as it says what is not installed

import torch

from llmc.backend import open_backend
from llmc.kernels import launch_problem
from llmc.memory import scratch_sizes
from llmc.memory.options import PlanOptions
from scripts import gpu_algorithms, gpu_compared, gpu_fp8, gpu_goals, gpu_kernels, gpu_llmc, gpu_steps, gpu_tune
from scripts.gpu_common import BF16, DRY, FULL, REPO, Skip, cause_of, device_is_lost, free_memory, last_lines, new_record
from scripts.gpu_report import markdown, print_summary


START_SECONDS = 15  # that a new process takes until its own clock runs


class Run:
    """One check: the device, the sizes, the clock, what later sections need from earlier ones, and the report so far."""

    def __init__(self, args, backend, dry: bool, prefix: Path):
        self.args, self.backend, self.dry, self.prefix, self.sizes = args, backend, dry, prefix, DRY if dry else FULL
        self.deadline = time.monotonic() + 60 * args.minutes
        self.cuda = backend.kind == "cuda"
        self.no_triton = f"Triton's kernels: {why}" if (why := launch_problem(backend.device)) else ""
        self.kernels = "torch" if self.no_triton or args.kernels == "torch" else "triton"
        self.graphs = True  # False once a step with graphs has failed; see gpu_steps.why_no_graphs
        self.generator = torch.Generator(backend.device).manual_seed(0)  # its own: a capture that fails may leave torch's unusable
        self.rates = {}  # "copy" GB/s, "bf16" and "fp32" TFLOP/s
        self.step_ms = None  # of -r 0
        self.awaits_goals = False
        self.summary = {}
        self.report = {"dry_run": dry, "card": backend.name, "minutes": args.minutes, "summary": self.summary, "sections": {}}

    def left(self) -> float:
        """Seconds left of the time allowed."""
        return self.deadline - time.monotonic()

    def has(self, seconds) -> bool:
        """Whether at least this many seconds are left; a dry run begins everything while any are left."""
        return self.left() >= (0 if self.dry else seconds)

    def random(self, *shape, dtype=BF16, scale=1.0):
        return torch.empty(shape, dtype=dtype, device=self.backend.device).normal_(0, scale, generator=self.generator)

    def options(self, config, B, T, **forms) -> PlanOptions:
        usual = dict(kernels=self.kernels, device=self.backend.kind, processors=self.backend.processors() or 132, recompute=0)
        return PlanOptions(config, B, T, **(usual | forms))

    def share(self, rate, of):
        return rate / self.rates[of] if of in self.rates else None

    def write(self):
        """Write both files, each whole at any time, with the goals as far as they are known: this may be the last call."""
        report = self.report
        if self.awaits_goals and "goals" not in report["sections"]:
            so_far = new_record("Goals, so far", "ran")
            gpu_goals.goals(self, so_far)
            report = report | {"sections": report["sections"] | {"goals": so_far}}
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        for path, text in zip(files_of(self.prefix), (json.dumps(report, indent=1, default=str), markdown(report))):
            part = path.with_name(path.name + ".part")
            part.write_text(text)
            part.replace(path)


def files_of(prefix) -> tuple[Path, Path]:
    return Path(f"{prefix}.json"), Path(f"{prefix}.md")


# ----------------------------------------------------------------------------
# sections


@dataclass(frozen=True, slots=True)
class Section:
    """seconds: it is not begun with less time left. on_device: whether it runs anything there; else it only reads what others found."""

    name: str
    title: str
    function: object
    seconds: float
    on_device: bool = True


# in order of value, in case time runs short
SECTIONS = (
    Section("facts", "What it ran on", gpu_steps.facts, 0),
    Section("ceilings", "What the device does at best", gpu_steps.ceilings, 5),
    Section("tests", "The project's own tests", gpu_steps.tests, 30),
    Section("steps", "A training step", gpu_steps.steps, 15),
    Section("attention_steps", "A training step, by other kinds of attention", gpu_steps.attention_steps, 15),
    Section("compile", "The same step in plain PyTorch", gpu_compared.compared, 60),
    Section("larger", "Larger models", gpu_steps.larger, 25),
    Section("more_steps", "A training step: the other levels, and variants", gpu_steps.more_steps, 12),
    Section("small_batches", "Small batches: graph, eager and torch.compile", gpu_compared.small_batches, 60),
    Section("compile_graphs", "Small batches: our graphs and torch.compile's", gpu_compared.compile_graphs, 60),
    Section("llmc", "llm.c itself, the same step", gpu_llmc.llmc, 20),
    Section("kernels", "Every kernel", gpu_kernels.kernels, 10),
    Section("matmuls", "Matrix products", gpu_kernels.matmuls, 8),
    Section("attention", "Attention", gpu_kernels.attention, 8),
    Section("gelu_fusion", "GELU inside the matmul", gpu_kernels.gelu_fusion, 5),
    Section("fp8", "FP8 matmuls against bf16", gpu_fp8.fp8, 10),
    Section("fp8_curve", "What FP8 costs in loss", gpu_fp8.fp8_curve, 60),
    Section("algorithms", "Matrix products by other algorithms", gpu_algorithms.algorithms, 10),
    Section("residual_fusion", "The residual stream inside the matmul", gpu_algorithms.residual_fusion, 8),
    Section("profile", "Where a step's time goes", gpu_steps.profile, 12),
    Section("tune_attention", "Attention's tile sizes, registers and stages", gpu_tune.tune_attention, 20),
    Section("tune_steps", "A training step with other kernels", gpu_tune.tune_steps, 30),
    Section("tune", "Tile sizes and warps", gpu_tune.tune, 20),
    Section("more_compile", "Plain PyTorch again: bf16 throughout, and a larger model", gpu_compared.compared_again, 60),
    Section("goals", "Goals", gpu_goals.goals, 0, on_device=False),
)


def run_sections(run, sections):
    """Run every section and record it in run.report; those that cannot run, or not in time, are recorded with the reason."""
    wanted = run.args.only or [s.name for s in sections]
    run.awaits_goals = "goals" in wanted
    for i, section in enumerate(sections):
        record = run.report["sections"][section.name] = new_record(section.title)
        if section.name not in wanted:
            record["reason"] = "not among the sections of --only"
        elif not run.has(section.seconds):
            record["reason"] = f"no time: {max(0, run.left()):.0f} s were left, and it wants {section.seconds:.0f}"
        else:
            run_section(run, section, record)
            if device_is_lost():
                rest = [s for s in sections[i + 1 :] if s.name in wanted]
                continue_in_new_process(run, section, [s for s in rest if s.on_device])
                for s in (s for s in rest if not s.on_device):
                    run.report["sections"][s.name] = new_record(s.title)
                    run_section(run, s, run.report["sections"][s.name])
                run.write()
                return
        run.write()


def run_section(run, section, record):
    start = time.monotonic()
    print(f"{section.title} ...", flush=True)
    try:
        section.function(run, record)
        record["status"] = "ran"
    except Skip as why:
        record["reason"] = str(why)
    except Exception as error:
        record |= {"status": "failed", "reason": cause_of(error)}
        record["errors"].append({"what": section.title, "lines": last_lines(error)})
    record["seconds"] = round(time.monotonic() - start, 1)
    if record["status"] == "ran" and record["errors"] and not any(record["tables"].values()):
        record |= {"status": "failed", "reason": "nothing in it succeeded"}
    if run.cuda and not device_is_lost():
        try:
            free_memory()
        except Exception as error:  # if the device is lost, the caller will notice
            record["errors"].append({"what": "giving memory back", "lines": last_lines(error)})


def continue_in_new_process(run, section, rest):
    """Run the rest in a new process and take over its report: once a kernel has failed on the device, nothing runs in this one."""
    run.report["sections"][section.name]["notes"].append("the device stopped answering here; what follows ran in a new process")
    if not rest:
        return
    prefix, minutes = run.prefix.with_name(run.prefix.name + "_rest"), max(0.1, (run.left() - START_SECONDS) / 60)
    command = [sys.executable, __file__, "--only", "ceilings", *(s.name for s in rest), "--output", prefix]
    command += ["--minutes", f"{minutes:.2f}", "--kernels", "torch" if section.name == "steps" else run.args.kernels]
    command += [] if run.args.tune is None else ["--tune", *run.args.tune]
    command += ["--dry-run"] * run.dry + ["--llmc", run.args.llmc] * bool(run.args.llmc)
    try:
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=max(10, run.left() + 10))
    except subprocess.TimeoutExpired:
        pass
    report, text = files_of(prefix)
    found = json.loads(report.read_text()) if report.exists() else {"sections": {}, "summary": {}}
    for s in rest:
        gone = new_record(s.title, "failed", "the new process left no report of it")
        run.report["sections"][s.name] = found["sections"].get(s.name, gone)
    run.summary |= {key: value for key, value in found["summary"].items() if key not in run.summary}
    report.unlink(missing_ok=True)
    text.unlink(missing_ok=True)


# ----------------------------------------------------------------------------
# the command line


class Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(INPUT_CODE)


def parse(argv):
    names = [s.name for s in SECTIONS]
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--minutes", type=float, default=7.5, help="what does not fit is skipped [7.5]")
    where = "scripts/bench/gpu_<card>, with the sections of --only; a dry run: a temporary folder"
    flag("--output", help=f"where the report goes, without .json and .md [{where}]")
    flag("--only", nargs="+", metavar="SECTION", help=f"some sections of: {' '.join(names)}")
    flag("--tune", nargs="*", metavar="OPERATION", help="try other tile sizes and warps, of these operations or of all, and of attention")
    flag("--llmc", metavar="PATH", help="llm.c's train_gpt2cu, built elsewhere: its steps beside ours")
    flag("--kernels", choices=("auto", "torch"), default="auto", help="torch: training steps without Triton's kernels [auto]")
    flag("--dry-run", action="store_true", help="tiny sizes on the CPU, kernels in Triton's interpreter")
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: expected more than 0")
    unknown = sorted(set(args.only or ()) - set(names))
    if unknown:
        parser.error(f"--only {unknown[0]}: there is no such section; expected some of {' '.join(names)}")
    unknown = sorted(set(args.tune or ()) - set(gpu_tune.SWEEPS))
    if unknown:
        parser.error(f"--tune {unknown[0]}: there is no such operation; expected some of {' '.join(gpu_tune.SWEEPS)}")
    if args.llmc:
        args.llmc = str(Path(args.llmc).resolve())
        if not (os.path.isfile(args.llmc) and os.access(args.llmc, os.X_OK)):
            parser.error(f"--llmc {args.llmc}: there is no program there; expected the path of llm.c's train_gpt2cu")
    if args.output:
        folder = Path(args.output).resolve().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            parser.error(f"--output {args.output}: cannot be written, {error.strerror}; expected the path of a file, without its suffix")
    return args


def prepare(argv) -> Run:
    """The Run for these arguments: device and sizes. A dry run never touches a GPU."""
    args = parse(argv)
    dry = args.dry_run or not torch.cuda.is_available()
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, so it is set before anything imports them
        for name in ("COLUMN_PARTIALS", "NORM_PARTIALS"):  # each of these partial sums is a program to interpret
            assert hasattr(scratch_sizes, name), name
            setattr(scratch_sizes, name, 4)
        if not args.dry_run:
            print("no CUDA device here, so this is a dry run: tiny sizes on the CPU, and numbers that mean nothing about a GPU")
    backend = open_backend("cpu" if dry else "cuda", 0, True)
    slug = re.sub(r"[^a-z0-9]+", "_", backend.name.lower()).strip("_")
    folder = Path(tempfile.mkdtemp(prefix="gpu_check_")) if dry and not args.output else REPO / "scripts" / "bench"
    name = "_".join(["gpu", slug, *(args.only or ())])  # so that one check's report does not overwrite another's
    run = Run(args, backend, dry, Path(args.output).resolve() if args.output else folder / name)
    if dry and not run.no_triton:
        from llmc.kernels import adamw

        adamw.ELEMENTS = adamw.CHUNK  # fewer turns of its loop too
    return run


def main(argv=None) -> int:
    run = prepare(argv)
    faulthandler.dump_traceback_later(60 * run.args.minutes + 25, exit=True)  # in case a kernel never ends; the report is written by then
    try:
        run_sections(run, SECTIONS)
        run.write()
    finally:
        faulthandler.cancel_dump_traceback_later()
    print_summary(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
