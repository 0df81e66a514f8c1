#!/usr/bin/env python3
"""Memory, planned and measured, and speed of several runs: a table and a picture.

    python scripts/compare_memory.py log_a log_b                   compares runs made earlier (train_gpt2.py -o log_a)
    python scripts/compare_memory.py --sweep -e d12 -b 4 -t 256    trains a few steps at every -r level, then compares
    python scripts/compare_memory.py --sweep -e d12 --levels 0 5 -- --precision fp32

"Planned" is what the program said it would allocate; "measured" is the highest peak above what was in use before. tokens/s and
time are those of the median step; the first step of a process, which sets libraries up, is left out. A run that was resumed is
judged by its last process, whose plan is in memory.json. The picture needs matplotlib; --no-picture leaves it out.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from llmc.errors import MEMORY_CODE, UserError, code_of_child, run_script  # first, as it says what is not installed

import numpy as np

from llmc.checkpoint.model_file import read_model_header
from llmc.config import config_from_descriptor
from llmc.data.shards import write_shard
from llmc.files import make_folder
from llmc.flags import BY_NAME, parse
from llmc.logger import SPEED_NAME
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.record import RECORD_NAME
from llmc.memory.report import COLUMNS
from llmc.text_table import in_columns
from llmc.units import MIB
from scripts.arguments import number_from
from scripts.plotting import check_picture, new_figure, read_speed, save_picture, shown

TRAIN = REPO / "train_gpt2.py"
DATA = (REPO / "dev/data/stdlib/stdlib_train.bin", REPO / "dev/data/tinyshakespeare/tiny_shakespeare_train.bin")
# settings of train_gpt2.py that a sweep sets itself -> the option of this script that decides them
OWN = {
    "model": "-e", "batch_size": "-b", "sequence_length": "-t", "train_data": "--data", "max_steps": "--steps",
    "recompute": "--levels", "output_dir": "--runs",
}  # fmt: skip
SWEEP_DEFAULTS = {
    "model": "d12", "batch_size": 4, "sequence_length": 256, "data": None, "steps": 5, "rounds": 2, "levels": list(NOT_KEPT), "runs": None,
}  # fmt: skip
PALETTE = ("#1f4e79", "#2e75b6", "#9dc3e6", "#b5520b", "#f4a261", "#ffd966", "#8fbf7f", "#8c8c8c")  # blue: allocated from start to end
SPEED_COLOUR = "#8e1b6b"


@dataclass(frozen=True, slots=True)
class Run:
    """What a run folder says. `steps` holds (ms, tokens/s) of each step that counts; `columns` add up to total_bytes."""

    folder: Path
    model: str
    device: str
    options: dict  # of the plan, by the names of flags
    total_batch_size: int  # -d as given
    columns: dict[str, int]
    total_bytes: int
    peak_bytes: int
    steps: tuple[tuple[float, float], ...]

    @property
    def level(self) -> int:
        return self.options["recompute"]

    @property
    def step_ms(self) -> float | None:
        """Of the median step; None where no step counts."""
        return statistics.median(ms for ms, _ in self.steps) if self.steps else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of the median step; None where no step counts."""
        return statistics.median(speed for _, speed in self.steps) if self.steps else None

    @property
    def settings(self) -> tuple:
        """All that defines the run except its -r level."""
        return self.model, self.device, self.total_batch_size, {**self.options, "recompute": None}


def main(argv=None):
    words = sys.argv[1:] if argv is None else list(argv)
    end = words.index("--") if "--" in words else len(words)
    args, further = command_line().parse_args(words[:end]), words[end + 1 :]
    check_arguments(args, further)
    if not args.no_picture:
        check_picture(args.output, ", or print the table alone with --no-picture")
    runs, notes = sweep(args, further) if args.sweep else ([read_run(folder) for folder in args.folders], [])
    labels = labels_of(runs)
    print(*comparison(runs, labels), *notes, sep="\n")
    if not args.no_picture:
        save_picture(draw(runs, labels), args.output)


# --- the command line


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s RUN_FOLDER ... [-o FILE] [--no-picture]\n       %(prog)s --sweep [options] [-- flags for train_gpt2.py]",
    )
    parser.add_argument("folders", metavar="RUN_FOLDER", type=Path, nargs="*", help="what train_gpt2.py -o wrote: memory.json, speed.log")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("memory.png"), help="the picture: .png, .svg or .pdf [%(default)s]"
    )
    parser.add_argument("--no-picture", action="store_true", help="print the table alone")
    parser.add_argument("--sweep", action="store_true", help="train at several levels, one process after another, and compare these runs")
    group = parser.add_argument_group("with --sweep; what stands behind -- goes to train_gpt2.py as it is")
    d = SWEEP_DEFAULTS  # not passed to argparse as defaults, so that an option given without --sweep is noticed
    group.add_argument("-e", "--model", metavar="NAME", help=f"model descriptor or .bin [{d['model']}]")
    group.add_argument("-b", "--batch-size", metavar="B", type=number_from(1), help=f"sequences [{d['batch_size']}]")
    group.add_argument("-t", "--sequence-length", metavar="T", type=number_from(1), help=f"tokens per sequence [{d['sequence_length']}]")
    group.add_argument("--data", metavar="GLOB", help="token shards [a prepared corpus under dev/data, else random tokens]")
    group.add_argument("--steps", metavar="N", type=number_from(2), help=f"steps of a process; the first is not timed [{d['steps']}]")
    rounds_help = f"times to go through the levels, as machines drift [{d['rounds']}]"
    group.add_argument("--rounds", metavar="N", type=number_from(1), help=rounds_help)
    group.add_argument("--levels", metavar="R", type=int, nargs="+", choices=list(NOT_KEPT), help="levels of -r [all]")
    group.add_argument("--runs", metavar="DIR", type=Path, help="keep the run folders here [a temporary folder, removed in the end]")
    return parser


def check_arguments(args: argparse.Namespace, further: list[str]) -> None:
    """Raise UserError for options that exclude each other, and fill in the defaults of a sweep."""
    if args.sweep:
        if args.folders:
            raise UserError(
                f"--sweep makes runs of its own, so {args.folders[0]} would not be compared; leave it out, or leave out --sweep"
            )
        for word in further:
            flag = BY_NAME.get(word.partition("=")[0])
            if flag and flag.field in OWN:
                raise UserError(f"-- {word}: a sweep decides {flag.title} for every run; use {OWN[flag.field]} before the --")
        settings = parse(further)
        if settings.plan or settings.help or settings.version:
            raise UserError(f"-- {' '.join(further)}: train_gpt2.py would print something and train nothing; leave it out")
        for name, default in SWEEP_DEFAULTS.items():
            if getattr(args, name) is None:
                setattr(args, name, default)
        return
    if not args.folders:
        raise UserError("nothing to compare; give the folders of runs (train_gpt2.py -o DIR), or --sweep to make some")
    given = [name for name in SWEEP_DEFAULTS if getattr(args, name) is not None]
    if given or further:
        what = f"--{given[0].replace('_', '-')}" if given else "what stands behind --"
        raise UserError(f"{what} is for runs that are made here, and these were made before; leave it out, or add --sweep")


# --- run folders


def read_run(folder: Path) -> Run:
    """A Run from memory.json and speed.log. Raises UserError if either cannot be read, or memory.json is damaged."""
    path = folder / RECORD_NAME
    if not path.is_file():
        raise UserError(f"{folder} holds no {RECORD_NAME}; expected a folder that a run wrote: python train_gpt2.py ... -o {folder}")
    try:
        record = json.loads(path.read_text())
        plan, phases = record["plan"], {phase["phase"]: phase for phase in record["measured"]}
        # look up the names that are needed later, so that a record without them is refused here
        options = plan["options"] | {name: plan["options"][name] for name in ("batch_size", "sequence_length", "precision")}
        options["recompute"] = int(options["recompute"])
        columns = {name: int(plan["columns"][name]) for name in COLUMNS}
        columns["scratch"] += sum(int(plan["columns"].get(name, 0)) for name in ("gathered", "checkpoint"))  # columns that few runs have
        run = Run(
            folder, Path(record["flags"]["model"]).name, record["device"], options, record["flags"]["total_batch_size"],
            columns, int(plan["total_bytes"]),
            max(int(phase["over_baseline_bytes"]) for phase in phases.values()), (),
        )  # fmt: skip
        first = int(phases["first step"]["step"]) if "first step" in phases else -1
        if run.total_bytes <= 0:
            raise ValueError(f"a plan of {run.total_bytes} bytes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{path} is not a whole record of a run ({type(error).__name__}: {error}); run it again with -o {folder}"
        ) from error
    return replace(run, steps=counted_steps(folder, first))


def counted_steps(folder: Path, first: int) -> tuple[tuple[float, float], ...]:
    """(ms, tokens/s) of the steps after `first`, which is the first step of the process that memory.json describes.

    A resumed process appends to the speed.log of earlier ones. Those may have had another -r or device, and where each
    began is not recorded. If the last process did no step at all (first is -1), the steps are those of the earlier processes,
    without the first step in the log.
    """
    steps = sorted(read_speed(folder / SPEED_NAME).items())
    if first < 0 and steps:
        first = steps[0][0]
    return tuple(times for step, times in steps if step > first)


def labels_of(runs: list[Run]) -> list[str]:
    """-r LEVEL if the runs differ in that alone, else the folder's name, or its path as given if that name repeats."""
    levels = [run.level for run in runs]
    if len(set(levels)) == len(runs) and all(run.settings == runs[0].settings for run in runs):
        return [f"-r {level}" for level in levels]
    names = [run.folder.resolve().name for run in runs]
    return [name if names.count(name) == 1 else str(run.folder) for name, run in zip(names, runs)]


# --- the sweep


def sweep(args: argparse.Namespace, further: list[str]) -> tuple[list[Run], list[str]]:
    """Train at every level in turn, args.rounds times. Returns a Run per level, and a line for each that does not fit in memory.

    If a run fails in any other way, its error is shown, and this program ends with its exit code.
    """
    levels = list(dict.fromkeys(args.levels))
    found, too_large = {level: [] for level in levels}, {}
    turns = [(round_, level) for round_ in range(1, args.rounds + 1) for level in levels]
    with runs_folder(args.runs) as runs:
        flags = ["-i", training_data(args, runs), "-e", args.model, "-b", args.batch_size, "-t", args.sequence_length, "-x", args.steps]
        flags += ["-v", 0, "-s", 0, *further]
        for number, (round_, level) in enumerate(turns, 1):
            if level in too_large:
                continue
            folder = runs / (f"r{level}_round{round_}" if args.rounds > 1 else f"r{level}")
            print(f"run {number} of {len(turns)}: -r {level}", file=sys.stderr, flush=True)
            refusal = train([*flags, "-r", level, "-o", folder])
            if refusal:
                too_large[level] = f"-r {level} is left out, it does not fit in memory: {refusal}"
            else:
                found[level].append(read_run(folder))
    runs = [together(found[level]) for level in levels if level not in too_large]
    if not runs:
        print(*too_large.values(), sep="\n", file=sys.stderr)
        sys.exit(MEMORY_CODE)
    return runs, list(too_large.values())


@contextmanager
def runs_folder(wish: Path | None):
    """`wish`, created if it is missing, or a temporary folder."""
    if wish is None:
        with tempfile.TemporaryDirectory(prefix="compare_memory_") as folder:
            yield Path(folder)
        return
    make_folder(wish)
    yield wish


def training_data(args: argparse.Namespace, runs: Path) -> str:
    """The value of -i: --data, else a prepared corpus, else random tokens written here, as the speed of a step does not depend on them."""
    if args.data:
        return args.data
    for path in DATA:
        if path.exists():
            return str(path)
    config = read_model_header(args.model)[0] if args.model.endswith(".bin") else config_from_descriptor(args.model)
    path, count = runs / "random_train.bin", args.batch_size * args.sequence_length * args.steps + 1
    write_shard(path, np.random.default_rng(0).integers(0, config.vocab_size, count, dtype=np.uint16))
    print(f"no prepared corpus under {REPO / 'dev/data'}: training on {count} random tokens", file=sys.stderr)
    return str(path)


def train(flags: list) -> str:
    """Run train_gpt2.py. Returns "", or its reason if the run does not fit in memory; any other failure ends this program."""
    command = [sys.executable, str(TRAIN), *map(str, flags)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    code, said = result.returncode, result.stderr.strip() or "\n".join(result.stdout.splitlines()[-5:])
    if code == MEMORY_CODE:
        return said.partition("\n")[0].removeprefix("error: ")
    if code:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        print(f"{said}\nerror: this run {how}: {' '.join(command)}", file=sys.stderr)
        sys.exit(code_of_child(code))
    return ""


def together(rounds: list[Run]) -> Run:
    """One Run from several with the same flags: all their steps, and the highest peak."""
    return replace(rounds[0], steps=sum((run.steps for run in rounds), ()), peak_bytes=max(run.peak_bytes for run in rounds))


# --- the table


def comparison(runs: list[Run], labels: list[str]) -> list[str]:
    """The lines to print: what is compared, the table, and what its relative numbers refer to."""
    base = next((i for i, run in enumerate(runs) if run.level == 0), 0)
    heads = ("run", "planned MiB", "measured MiB", "measured/planned", "tokens/s", "rel. memory", "rel. time")
    rows = [
        (
            label,
            f"{run.total_bytes / MIB:.1f}",
            f"{run.peak_bytes / MIB:.1f}",
            f"{run.peak_bytes / run.total_bytes:.3f}",
            "-" if run.tokens_per_s is None else f"{run.tokens_per_s:.0f}",
            f"{run.total_bytes / runs[base].total_bytes:.3f}",
            "-" if None in (run.step_ms, runs[base].step_ms) else f"{run.step_ms / runs[base].step_ms:.3f}",
        )
        for label, run in zip(labels, runs)
    ]
    lines = in_columns((heads, *rows), numbers=range(1, len(heads)))
    level = f"-r {runs[base].level}"
    which = labels[base] if labels[base] == level else f"{labels[base]} ({level})"
    reason = "" if runs[base].level == 0 else ", the first row, as there is no -r 0"
    notes = [f"rel.: planned memory and time of a step, relative to {which}{reason}"]
    if any(not run.steps for run in runs):
        notes.append("-: no step was timed after the first, which sets libraries up; train for more steps (-x)")
    return [f"{compared(runs)} on {listed(run.device for run in runs)}", "", *lines, "", *notes]


def compared(runs: list[Run]) -> str:
    """Model, B, T and precision in one line."""
    B, T, precision = (listed(run.options[name] for run in runs) for name in ("batch_size", "sequence_length", "precision"))
    return f"{listed(run.model for run in runs)}, B={B}, T={T}, {precision}"


def listed(values) -> str:
    """The distinct values, in order: "4", or "4 or 8" where the runs differ."""
    return " or ".join(dict.fromkeys(map(str, values)))


# --- the picture


def draw(runs: list[Run], labels: list[str]):
    """The figure: planned memory by purpose as stacked bars, the measured peak of each run, and tokens/s on an axis of its own."""
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import Normal, Stroke

    figure = new_figure(9, 5.6)
    memory, places = figure.subplots(), range(len(runs))
    below = np.zeros(len(runs))
    for name, colour in zip(COLUMNS, PALETTE):
        heights = np.array([run.columns[name] / MIB for run in runs])
        memory.bar(places, heights, bottom=below, width=0.6, color=colour, label=name)
        below += heights
    measured = [run.peak_bytes / MIB for run in runs]
    outline = [Stroke(linewidth=5, foreground="white"), Normal()]  # the marks and the line may cross bars of any colour
    # a dash almost as wide as the bar: where the line of tokens/s meets it, its ends still show
    memory.plot(places, measured, linestyle="none", marker="_", markersize=min(34, 260 / len(runs)), markeredgewidth=2.5, color="black",
                path_effects=outline)  # fmt: skip
    speed = memory.twinx()
    speeds = [nan if run.tokens_per_s is None else run.tokens_per_s for run in runs]
    speed.plot(places, speeds, color=SPEED_COLOUR, linewidth=2, marker="o", markersize=5, path_effects=outline)

    memory.set_ylim(0, 1.4 * max(*below, *measured))  # room for the line of tokens/s above the bars
    speed.set_ylim(0, 1.1 * max((s for s in speeds if s == s), default=1.0))
    memory.set_ylabel("memory (MiB)")
    speed.set_ylabel("speed (tokens/s)", color=SPEED_COLOUR)
    speed.tick_params(axis="y", colors=SPEED_COLOUR)
    for axes in (memory, speed):
        axes.yaxis.set_major_formatter("{x:,.0f}")
    slanted = sum(map(len, labels)) > 60
    memory.set_xticks(places, [*map(shown, labels)], rotation=30 if slanted else 0, ha="right" if slanted else "center")
    room = max(len(runs), 4) / 2 + 0.1  # keeps one or two bars from being very wide
    memory.set_xlim((len(runs) - 1) / 2 - room, (len(runs) - 1) / 2 + room)
    memory.set_axisbelow(True)
    memory.grid(axis="y", alpha=0.3)
    figure.suptitle(f"{shown(compared(runs))}: planned and measured memory, and speed", fontsize=12)
    memory.set_title(shown(listed(run.device for run in runs)), fontsize=9, color="#555555")
    entries = [
        *memory.containers,
        Line2D([], [], linestyle="none", marker="_", markersize=18, markeredgewidth=2.5, color="black", label="measured peak"),
        Line2D([], [], color=SPEED_COLOUR, linewidth=2, marker="o", markersize=5, label="tokens/s"),
    ]
    half = len(entries) // 2
    by_column = [entry for pair in zip(entries[:half], entries[half:]) for entry in pair]  # legends fill by columns; this reads by rows
    figure.legend(handles=by_column, loc="outside lower center", ncols=half, fontsize=9, frameon=False)
    return figure


if __name__ == "__main__":
    run_script(main)
