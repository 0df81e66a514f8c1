"""memory.json beside main.log: what a run planned, what it was asked for, and what it then measured."""

import json
from dataclasses import asdict
from pathlib import Path

from llmc import __version__
from llmc.errors import UserError, raise_error
from llmc.files import write_atomically
from llmc.memory.plan import Plan
from llmc.memory.report import options_json, tensor_rows

RECORD_NAME = "memory.json"


class MemoryRecord:
    """DIR/memory.json. From the first training step on, it is rewritten whenever a phase ends for the first time. A fresh run that trains
    nothing writes it at its end, unless it is there from a run that trained. No folder, no file.

    plan      options, bytes of every arena and column, total, and every tensor
    flags     every setting of the command line
    measured  peak bytes since the start, at the end of build, first step, evaluation, HellaSwag, sampling, checkpoint, resume and the
              run; each also as the excess over `baseline_bytes`, what was in use before the first arena was allocated
    speed     mean step time without the steps that set things up (the first; with CUDA graphs the first two), and tokens per second
    """

    def __init__(self, folder, plan: Plan, settings, backend):
        self._path = Path(folder) / RECORD_NAME if folder else None
        self._backend, self._phases, self._failed = backend, set(), raise_error
        self._baseline = self._peak = backend.baseline_bytes()
        self._record = {
            "version": __version__,
            "device": backend.name,
            "flags": asdict(settings),
            "plan": {
                "options": options_json(plan.options),
                "total_bytes": plan.total_bytes,
                "bytes_per_sequence": plan.bytes_per_sequence,
                "host_bytes": plan.host_bytes,
                "checkpoint_bytes": plan.checkpoint_bytes,
                "arenas": plan.arenas,
                "columns": plan.columns,
                "tensors": tensor_rows(plan),
            },
            "baseline_bytes": self._baseline,
            "measured": [],
            "speed": None,
        }  # fmt: skip

    def phase(self, name: str, step: int) -> None:
        """The first time that a phase ends, record the peak so far."""
        if name in self._phases:
            return
        self._phases.add(name)
        # Linux counts a process's pages in parts, one for each thread, so a later reading may be some pages below an earlier one
        self._peak = peak = max(self._peak, self._backend.peak_bytes())
        self._record["measured"].append({"phase": name, "step": step, "peak_bytes": peak, "over_baseline_bytes": peak - self._baseline})
        self._write()

    def go_ahead(self, failed) -> None:
        """Check that the record can be written. It replaces that of an earlier run only with this run's first step, or at the end of a
        resumed run, so a run that is refused before leaves the earlier record alone.

        failed(UserError) is called if the disk is full or denies the write. Raises UserError if the file's name is that of a folder.
        """
        if self._path and self._path.is_dir():
            raise UserError(f"{self._path} is a directory; expected a file, or nothing, where the memory record is written: move it away")
        self._failed = failed

    def end(self, step: int, average_step_ms: float | None, tokens_per_step: int) -> int:
        """The run is over: record its speed, if known, and its last peak. Returns the peak as the excess over `baseline_bytes`."""
        if average_step_ms:
            self._record["speed"] = {"average_step_ms": average_step_ms, "tokens_per_s": tokens_per_step / average_step_ms * 1e3}
        self.phase("end", step)
        return self._peak - self._baseline

    def _write(self):
        if not self._path or not self._phases & {"first step", "end"}:
            return
        if not self._phases & {"first step", "resume"} and _is_of_training(self._path):
            return
        try:
            write_atomically(self._path, [json.dumps(self._record, indent=1).encode()], doing="writing the memory record")
        except UserError as error:
            self._path = None
            self._failed(error)


def _is_of_training(path: Path) -> bool:
    """Whether there is a record of a run that trained."""
    try:
        return any(phase["phase"] == "first step" for phase in json.loads(path.read_text())["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
