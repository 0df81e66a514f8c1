#!/usr/bin/env python3
"""Draw the logs of one or several runs by step, or by tokens: loss, learning rate, gradient norm, tokens/s.

    python scripts/plot_log.py log_d6                              a folder with main.log and speed.log
    python scripts/plot_log.py log_a log_b --tokens                runs whose steps have other numbers of tokens
    python scripts/plot_log.py log_a/main.log out.txt -o both.png --labels llmc llm.c
    python scripts/plot_log.py log124M --baseline d12              beside OpenAI's models of about that size

A LOG is a main.log (this trainer's or llm.c's), a folder that holds one, or the captured output of a run. For a main.log,
tokens/s come from the speed.log beside it, for an earlier run's main.log.1 from speed.log.1; those that a run prints are the
trainer's running mean. If a log holds a step twice, the later line counts. Steps are counted from 0, as in main.log. With --tokens
a point lies where so many tokens were trained on before its step, by speed.log. Needs matplotlib.

--baseline draws, dashed, the loss of OpenAI's GPT-2 on FineWeb's validation tokens and its HellaSwag accuracy, both as llm.c
measured them, and GPT-3's accuracy, from its paper. A loss on other tokens cannot be compared. Losses far above it are left out
once every log has come near.
"""

import argparse
import re
import statistics
import sys
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.errors import UserError, run_script  # first, as it says what is not installed

import numpy as np

from llmc.logger import LOG_NAME, SPEED_NAME
from scripts.plotting import SPEED_LINE, STEP, check_picture, new_figure, read_lines, read_speed, save_picture, shown

N = r"[-+]?(?:nan|inf|\d+\.?\d*(?:e[-+]?\d+)?)"
# a group's name is the series its value belongs to; step, printed and resumed give the step
FORMS = (
    re.compile(rf"s:(?P<step>{STEP}) trl:(?P<loss>{N})(?: lr:(?P<lr>{N}) norm:(?P<norm>{N}))?"),  # llm.c's older logs end after trl
    re.compile(rf"s:(?P<step>{STEP}) tel:(?P<val>{N})"),
    re.compile(rf"s:(?P<step>{STEP}) eval:(?P<accuracy>{N})"),
    SPEED_LINE,
    re.compile(
        rf"step +(?P<printed>{STEP})/\d+ \| (?:train )?loss +(?P<loss>{N})\b.*?\| norm +(?P<norm>{N})\b.*?\| lr (?P<lr>{N})\b"
        rf".*?\b(?P<speed>{N}) tok/s\)?"
    ),
    re.compile(rf"val loss (?P<val>{N})"),
    re.compile(rf"HellaSwag: \d+/\d+ = (?P<accuracy>{N})"),
    re.compile(rf"resuming at step (?P<resumed>{STEP}) .*"),
)
HIGHEST = 1e300  # the highest value that an axis, which extends somewhat beyond its values, can show
SERIES = ("loss", "val", "accuracy", "lr", "norm", "speed")
COLOURS = ("#1f77b4", "#d95f02", "#2a9d4a", "#b0338c", "#7a5a3c", "#555555", "#17a2b8", "#b8a000")
TITLES = {
    "loss": "loss (nats per token)", "lr": "learning rate", "norm": "gradient norm before clipping (log scale)",
    "speed": "speed (tokens/s)", "accuracy": "HellaSwag accuracy",
}  # fmt: skip

# size -> series -> OpenAI's model of that size, or about that -> its value
BASELINES = {
    "d12": {"val": {"GPT-2 124M": 3.424958}, "accuracy": {"GPT-2 124M": 0.294463, "GPT-3 125M": 0.337}},
    "d24": {"val": {"GPT-2 355M": 3.083089}, "accuracy": {"GPT-2 355M": 0.375224, "GPT-3 350M": 0.436}},
    "d36": {"val": {"GPT-2 774M": 3.000580}, "accuracy": {"GPT-2 774M": 0.431986, "GPT-3 760M": 0.510}},
    "d48": {"val": {"GPT-2 1.5B": 2.831273}, "accuracy": {"GPT-2 1.5B": 0.488946, "GPT-3 1.3B": 0.547}},
}
BASELINE_COLOURS = ("#c0392b", "#777777")
LOSS_ROOM = 1.3  # the loss panel ends at so many times the baseline where all logs come that near


@dataclass(frozen=True, slots=True)
class Log:
    """One run. series: for each of SERIES, step -> value, in order of steps; training steps are counted from 0. trained: step -> tokens
    trained on before it, for all of these steps; None to draw by steps."""

    label: str
    series: dict[str, dict[int, float]]
    trained: dict[int, float] | None = None


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", metavar="LOG", type=Path, nargs="+", help="a main.log, a folder with one, or a run's captured output")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("log.png"), help="the picture: .png, .svg or .pdf [%(default)s]"
    )
    parser.add_argument("--labels", metavar="NAME", nargs="+", help="a name for each LOG [its folder's or its own]")
    parser.add_argument("--tokens", action="store_true", help="draw by tokens trained on, not by step; needs each LOG's speed.log")
    parser.add_argument("--baseline", choices=BASELINES, help="draw OpenAI's models of about this size too")
    args = parser.parse_args(argv)
    if args.labels and len(args.labels) != len(args.logs):
        raise UserError(f"--labels has {len(args.labels)} names for {len(args.logs)} logs; give one for each")
    check_picture(args.output)
    logs = [read_log(label, path, args.tokens) for label, path in zip(args.labels or labels_of(args.logs), args.logs)]
    if args.baseline and not any(finite(log.series[name]) for log in logs for name in BASELINES[args.baseline]):
        raise UserError(f"--baseline {args.baseline} is about validation losses and HellaSwag, and no log has any; leave it out")
    print(*map(summary, logs), sep="\n")
    save_picture(draw(logs, args.baseline), args.output)


# --- reading


def labels_of(paths: list[Path]) -> list[str]:
    """Short names: the folder's for a main.log or a folder, else the file's own; the whole path where the name is not unique."""
    names = [(path.parent if path.name == LOG_NAME else path).resolve().name for path in paths]
    return [name if name and names.count(name) == 1 else str(path) for name, path in zip(names, paths)]


def read_log(label: str, path: Path, by_tokens: bool = False) -> Log:
    """The Log of a file or a run's folder. Raises UserError if there is nothing to draw, or `by_tokens` nothing that counts them."""
    if path.is_dir():
        if not (path / LOG_NAME).is_file():
            raise UserError(f"{path} holds no {LOG_NAME}; give the folder that train_gpt2.py -o wrote, or a log file")
        path /= LOG_NAME
    series = parse_lines(read_lines(path))
    if not any(series.values()):
        raise UserError(
            f"{path} holds no line of a {LOG_NAME} (s:0 trl:...) and none that a run prints (step 1/10 | loss ...); give another log"
        )
    number = re.fullmatch(re.escape(LOG_NAME) + r"(|\.\d+)", path.name)  # of a log that a later run set aside
    beside = path.with_name(SPEED_NAME + number[1]) if number else None
    speeds = dict(sorted(read_speed(beside).items())) if beside and beside.is_file() else {}
    if speeds:
        series["speed"] = {step: speed for step, (_, speed) in speeds.items()}
    if not by_tokens:
        return Log(label, series)
    if not speeds:
        raise UserError(f"--tokens: nothing beside {path} tells how many tokens a step has, as this trainer's speed.log does; leave it out")
    return Log(label, series, tokens_before(set().union(*series.values()), speeds))


def tokens_before(steps: set[int], speeds: dict[int, tuple[float, float]]) -> dict[int, float]:
    """step -> tokens trained on before it. speeds: step -> (ms, tokens/s), in order of steps; one that is not among them has as many tokens
    as the one before that is, or as the first."""
    sizes = [float(round(ms * speed / 1e3)) for ms, speed in speeds.values()]
    ends = np.array([*speeds, max(steps) + 1])
    trained = np.cumsum([sizes[0], *sizes] * np.diff(ends, prepend=0))
    return dict(zip(sorted(steps), np.interp(sorted(steps), [0, *ends], [0, *trained])))


def parse_lines(lines) -> dict[str, dict[int, float]]:
    """Log.series of the lines that match one of FORMS; other lines are skipped.

    A printed evaluation does not name its step. It measured the weights before the step that is printed next or, at the
    end of a run, those after the last step.
    """
    series, evaluated, reached = {name: {} for name in SERIES}, {}, 0

    def put(step, values):
        for name, value in values.items():
            series[name][step] = value

    for line in lines:
        found = next(filter(None, (form.fullmatch(line) for form in FORMS)), None)
        if not found:
            continue
        values = {name: float(text) for name, text in found.groupdict().items() if text is not None}
        values.pop("ms", None)
        if "step" in values:
            put(int(values.pop("step")), values)
        elif "printed" in values:
            reached = int(values.pop("printed"))  # counted from 1
            put(reached - 1, evaluated | values)
            evaluated = {}
        elif "resumed" in values:  # outputs of a crashed run and of the next one in one file
            put(reached, evaluated)
            reached, evaluated = int(values["resumed"]), {}
        else:
            evaluated |= values
    put(reached, evaluated)
    return {name: dict(sorted(points.items())) for name, points in series.items()}


def finite(points: dict[int, float]) -> dict[int, float]:
    return {step: value for step, value in points.items() if isfinite(value)}


def summary(log: Log) -> str:
    """One line: how far the run got, how good it is, and how fast it was."""
    loss, val, accuracy, speed = (log.series[name] for name in ("loss", "val", "accuracy", "speed"))
    parts = [f"{len(loss)} steps, last train loss {list(loss.values())[-1]:.4f}" if loss else "no training step"]
    if losses := finite(val):
        best = min(losses, key=losses.get)
        parts.append(f"best validation loss {losses[best]:.4f} at step {best}")
    else:
        parts.append("no finite validation loss" if val else "no validation loss")
    if scores := finite(accuracy):
        best = max(scores, key=scores.get)
        parts.append(f"best HellaSwag accuracy {scores[best]:.4f} at step {best}")
    parts.append(f"median {statistics.median(speed.values()):.0f} tok/s" if speed else "no tok/s")
    return f"{log.label}: {', '.join(parts)}"


# --- drawing


def draw(logs: list[Log], baseline: str | None = None):
    """The figure: four panels, and a fifth if a log has HellaSwag scores. baseline: one of BASELINES."""
    scored = any(log.series["accuracy"] for log in logs)
    names = [["loss", "lr"], ["norm", "speed"], *([["accuracy", "accuracy"]] if scored else [])]
    figure = new_figure(9, 8 if scored else 6.2)
    panels = figure.subplot_mosaic(names, sharex=True, height_ratios=[1, 1, 0.7][: len(names)])
    for log, colour in zip(logs, COLOURS * len(logs)):
        draw_line(panels["loss"], log, "loss", colour, linewidth=0.7, alpha=0.7)
        draw_line(panels["loss"], log, "val", colour, linewidth=1.2, marker="o", markersize=4, markeredgecolor="white", markeredgewidth=0.6)
        draw_line(panels["lr"], log, "lr", colour, linewidth=1.5)
        draw_line(panels["norm"], log, "norm", colour, linewidth=0.8)
        draw_line(panels["speed"], log, "speed", colour, linewidth=0.8)
        if scored:
            draw_line(panels["accuracy"], log, "accuracy", colour, linewidth=1.2, marker="o", markersize=4)
    if baseline:
        draw_baseline(panels["loss"], "val", baseline)
        if scored and draw_baseline(panels["accuracy"], "accuracy", baseline):
            panels["accuracy"].legend(handles=baselines_in(panels["accuracy"]), fontsize=9)
    for name, panel in panels.items():
        panel.set_title(TITLES[name], fontsize=11)
        panel.tick_params(labelbottom=True)
        if name in names[-1]:
            panel.set_xlabel("step" if logs[0].trained is None else "tokens trained on")
        if panel.lines:
            panel.grid(alpha=0.25)
            scale(panel, name)
        else:
            why = f"nothing to show: no {SPEED_NAME} beside {LOG_NAME}" if name == "speed" else "nothing to show"
            panel.text(0.5, 0.5, why, transform=panel.transAxes, ha="center", va="center", color="#666666")
            panel.set_yticks([])
    if baselines_in(panels["loss"]):
        look_near_baseline(panels["loss"], *BASELINES[baseline]["val"].values())
    add_legends(figure, panels["loss"], logs)
    return figure


def scale(panel, name: str) -> None:
    """Set up the y axis of a panel that has lines."""
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

    values = np.concatenate([line.get_ydata() for line in panel.lines])
    if name in ("lr", "speed"):
        panel.set_ylim(0, 1.1 * np.nanmax(values) or 1)
    if name == "lr":
        panel.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    elif name == "speed":
        panel.yaxis.set_major_formatter("{x:,.0f}")
    elif name == "norm":
        panel.set_yscale("log", nonpositive="mask")
        if np.nanmax(values) < 1e4 * np.nanmin(values):  # otherwise powers of ten are enough
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_minor_formatter(NullFormatter())
        panel.yaxis.set_major_formatter("{x:g}")
    elif name == "accuracy":
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))


def draw_line(panel, log: Log, name: str, colour: str, **style) -> None:
    """Draw one series of a log. nan, inf, values beyond HIGHEST and norms not above 0 are gaps; a series of gaps alone is left out."""
    lowest = 0.0 if name == "norm" else -HIGHEST
    points = {step: value if lowest < value < HIGHEST else nan for step, value in log.series[name].items()}
    if not any(map(isfinite, points.values())):
        return
    if len(points) == 1:
        style.setdefault("marker", "o")  # a line of one point shows nothing
    places = list(points) if log.trained is None else [log.trained[step] for step in points]
    panel.plot(places, np.array(list(points.values())), color=colour, label=name, **style)


def draw_baseline(panel, name: str, size: str) -> bool:
    """Draw OpenAI's models of this size in a panel that shows the same series of a log; whether it does."""
    shows = any(line.get_label() == name for line in panel.lines)
    for (model, value), colour in zip(BASELINES[size][name].items() if shows else (), BASELINE_COLOURS):
        told = f"{value:.1%}" if name == "accuracy" else f"{value:.3f}"
        panel.axhline(value, color=colour, linestyle="--", linewidth=1, label=f"OpenAI's {model}: {told}")
    return shows


def look_near_baseline(panel, loss: float) -> None:
    """Leave out the losses far above that of the baseline, which flatten all the rest, if every log's come near it."""
    lowest = max(np.nanmin(line.get_ydata()) for line in panel.lines if line.get_label() in SERIES)
    if lowest < LOSS_ROOM * loss:
        panel.set_ylim(top=min(panel.get_ylim()[1], LOSS_ROOM * loss))


def baselines_in(panel) -> list:
    """The lines that draw_baseline drew."""
    return [line for line in panel.lines if line.get_label() not in SERIES]


def add_legends(figure, panel, logs: list[Log]) -> None:
    """The legends: above the panels, which colour is which log; in the panels, which line is which loss or baseline."""
    from matplotlib.lines import Line2D

    drawn = {line.get_label() for line in panel.lines}
    forms = {"loss": ("training", dict(linewidth=0.8)), "val": ("validation", dict(linewidth=1.2, marker="o", markersize=4))}
    colour = COLOURS[0] if len(logs) == 1 else "#444444"
    handles = [Line2D([], [], color=colour, label=label, **style) for name, (label, style) in forms.items() if name in drawn]
    if handles:
        panel.legend(handles=handles + baselines_in(panel), fontsize=9)
    if len(logs) == 1:
        figure.suptitle(shown(logs[0].label), fontsize=12)
        return
    handles = [Line2D([], [], color=colour, linewidth=2.5, label=shown(log.label)) for log, colour in zip(logs, COLOURS * len(logs))]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(logs)), fontsize=10, frameon=False)


if __name__ == "__main__":
    run_script(main)
