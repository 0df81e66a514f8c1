"""What a run writes down: main.log, the line of each step, and the rows of the parameter table, letter for letter as llm.c's."""

import os
from contextlib import suppress
from itertools import count
from pathlib import Path

from llmc.errors import file_error, raise_error

LOG_NAME, SPEED_NAME = "main.log", "speed.log"
NAME_WIDTH, VALUE_WIDTH = 21, 50  # of the parameter table


class Logger:
    """DIR/main.log, one line per measurement; without a folder, nothing. The operating system has a line when its call returns; only those
    before the first training step wait, for that step or the end of the run.

    So a run that is refused, or ends before it has trained, leaves the log of an earlier one. A fresh run (resume_step None) that trains
    begins an empty file, and that of an earlier one that trained becomes main.log.1, or has the next number that is free: it may be the
    record of weeks. A run resumed at step s appends; lines that a crashed run wrote beyond s are dropped first. llm.c leaves them: a plot
    then runs backwards, as steps s.. appear twice. The weights those lines measured are gone, and the resumed run measures the same steps
    again, so the file reads as if nothing had happened.

    What differs from run to run, the times, has a file of its own, speed.log, so that main.log repeats to the letter.

    Raises UserError where the file cannot be opened. What cannot be written goes to failed(UserError), once; then nothing more is written.
    """

    def __init__(self, folder: str | Path | None, resume_step: int | None = None, name: str = LOG_NAME, failed=raise_error):
        self._resume_step, self._failed = resume_step, failed
        self._file, self._path, self._kept, self._waiting = None, None, frozenset(), []
        if not folder:
            return
        self._path = Path(folder) / name
        self._sets_aside = resume_step is None and is_of_training(self._path)  # what an earlier run logged
        try:
            self._open()
        except OSError as error:
            raise file_error(error, self._path, "opening the log") from error

    def val(self, step: int, loss: float) -> None:
        """The validation loss, before the update of `step`."""
        self._write(f"s:{step} tel:{loss:.4f}\n", waits=True)

    def eval(self, step: int, accuracy: float) -> None:
        """The HellaSwag score, 0 to 1."""
        self._write(f"s:{step} eval:{accuracy:.4f}\n", waits=True)

    def train(self, step: int, loss: float, lr: float, grad_norm: float) -> None:
        """One training step, counted from 0; the norm is the one before clipping."""
        self._write(f"s:{step} trl:{loss:.4f} lr:{lr:.6f} norm:{grad_norm:.2f}\n")

    def speed(self, step: int, dt_ms: float, tokens_per_s: float) -> None:
        """How long one training step took. Only in speed.log."""
        self._write(f"s:{step} ms:{dt_ms:.2f} tok/s:{tokens_per_s:.1f}\n")

    def close(self) -> None:
        """The run is over. If it is a fresh one that has not trained, the log of an earlier one that has stays, and its own lines are not
        written."""
        is_idle = self._waiting is not None
        if self._file and not (is_idle and self._sets_aside):
            self._write("")
        self._let_go()

    def _write(self, line: str, waits=False) -> None:
        if self._file is None:
            return
        try:
            if self._waiting is not None:
                self._waiting.append(line)
                if waits:
                    return
                line = self._begin()
            if line not in self._kept:
                self._file.write(line)
        except OSError as error:
            with suppress(OSError):  # of the same line, which is still in a buffer; left open, Python 3.13 would tell of it at exit
                self._let_go()
            self._failed(file_error(error, self._path, "writing the log"))

    def _begin(self) -> str:
        """Set aside, or drop, what an earlier run wrote and this one does not go on from. Returns all lines that have waited, but for those
        that are there."""
        waiting, self._waiting = self._waiting, None
        if self._sets_aside:
            os.replace(self._path, old_name(self._path))
        elif self._resume_step is None:
            self._file.truncate(0)
        else:
            self._kept = _drop_lines_beyond(self._resume_step, self._path)
        if self._sets_aside or self._resume_step is not None:
            self._file.close()
            self._open()
        return "".join(line for line in waiting if line not in self._kept)

    def _open(self):
        # kept open and line buffered: 2 us per line, 9 with opening and closing
        self._file = open(self._path, "a", buffering=1, encoding="utf-8", newline="\n")

    def _let_go(self):
        file, self._file = self._file, None
        if file:
            file.close()


def old_name(path: Path) -> Path:
    """Where a log goes whose name a fresh run takes: main.log.1, or the next number that is free."""
    return next(old for number in count(1) if not os.path.lexists(old := path.with_name(f"{path.name}.{number}")))


def is_of_training(path: str | Path) -> bool:
    """Whether there is a log with lines of training steps."""
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            return any(" trl:" in line or " ms:" in line for line in lines)
    except OSError:
        return False


def format_step_line(
    step: int, total_steps: int, *, loss: float, loss_z: float, norm: float, norm_z: float,
    lr: float, dt_ms: float, mfu: float, tokens_per_s: float,
) -> str:  # fmt: skip
    """What is printed after step `step` (from 0; printed from 1). mfu is a fraction."""
    return (
        f"step {step + 1:4d}/{total_steps} | loss {loss:7.6f} ({loss_z:+.2f}z)| norm {norm:6.4f} ({norm_z:+.2f}z)"
        f"| lr {lr:.2e} | {dt_ms:.2f} ms | {100 * mfu:.1f}% bf16 MFU | {tokens_per_s:.0f} tok/s"
    )


def table_rule() -> str:
    """The line between parts of the parameter table."""
    return f"+{'-' * (NAME_WIDTH + 2)}+{'-' * (VALUE_WIDTH + 2)}+"


def table_row(name: str, value: int | float | str) -> str:
    """One row of the parameter table: what printf makes of the value with %d, %e or %s."""
    text = format(value, {int: "d", float: "e", str: "s"}[type(value)])
    return f"| {name:<{NAME_WIDTH}} | {text:<{VALUE_WIDTH}} |"


def _drop_lines_beyond(step: int, path: Path) -> frozenset[str]:
    """Cut from the log what was measured after the weights of `step`, and return its lines of `step` itself.

    These measured the very weights that are resumed, so they stay; a resumed run that measures them again to the same digits
    must not write them twice. A last line without its newline was cut off by the crash and goes too.
    """
    before = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    after = [line for line in before if line.endswith("\n") and not _is_beyond(step, line)]
    if after != before:
        beside = path.with_name(path.name + ".tmp")  # the old log stays whole until the new one is
        beside.write_text("".join(after), encoding="utf-8", newline="\n")
        os.replace(beside, path)
    return frozenset(line for line in after if line.startswith(f"s:{step} "))


def _is_beyond(step: int, line: str) -> bool:
    """Whether the line measures weights younger than those at the start of `step`; a line in another form is not ours to judge."""
    head, _, measured = line.partition(" ")
    if not head.startswith("s:") or not head[2:].isdecimal():
        return False
    return int(head[2:]) > step or (int(head[2:]) == step and measured.startswith(("trl:", "ms:")))
