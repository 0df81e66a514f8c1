"""The program on several ranks that meet by llm.c's flags, each in a process of its own."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import forked
from gloo_threads import assert_no_gloo_workers_but
from test_loop import words_of

import train_gpt2

LONGEST_S = 200


def rank_of(argv, rank, out, err, hook, prepare):
    """One rank, in a process of its own."""

    def main(words):
        sys.stdout.reconfigure(line_buffering=True)
        train_gpt2.measure_matmul_tflops = lambda *_: 1.0  # it costs half a second
        if hook:
            record_served(Path(hook) / f"served_{rank}")
        if prepare:
            prepare()
        code = train_gpt2.main(words)
        if code == 0:  # else it ends without taking Python down
            assert_no_gloo_workers_but()
        return code

    forked.run_as_program(main, argv, *(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) for path in (out, err)))


def record_served(path):
    """Add a line "shard start end" to a file for the inputs of every batch that the training loader serves."""
    from llmc.data.loader import TokenLoader

    real = TokenLoader.next_batch

    def next_batch(self):
        batch = real(self)
        if self.flag == "-i":
            with open(path, "a") as file:
                for piece in self._cursor.batch:
                    print(self.paths.index(piece.shard.path), piece.start, piece.end, file=file)
        return batch

    TokenLoader.next_batch = next_batch


@dataclass(frozen=True, slots=True)
class Started:
    """Ranks that run."""

    processes: list
    files: list  # (out, err) of each

    def out(self, rank=0) -> str:
        return Path(self.files[rank][0]).read_text()

    def await_line(self, words: str) -> None:
        """Until rank 0 has printed them."""
        deadline = time.monotonic() + LONGEST_S
        while words not in self.out():
            runs = time.monotonic() < deadline and forked.exit_code(self.processes[0]) is None
            assert runs, [Path(err).read_text() for _, err in self.files]
            time.sleep(0.01)

    def end_after_one(self) -> None:
        """What torchrun and mpirun do: as soon as one rank has ended, the others are sent a SIGTERM."""
        deadline = time.monotonic() + LONGEST_S
        while not any(ended := [forked.exit_code(process) is not None for process in self.processes]):
            assert time.monotonic() < deadline, [Path(err).read_text() for _, err in self.files]
            time.sleep(0.01)
        for process, has_ended in zip(self.processes, ended):
            if not has_ended:
                process.terminate()

    def ended(self) -> list[SimpleNamespace]:
        """code, out and err of each, when all have ended."""
        deadline = time.monotonic() + LONGEST_S
        try:
            while None in map(forked.exit_code, self.processes) and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            for process in self.processes:
                process.kill()
        return [
            SimpleNamespace(code=forked.exit_code(process), out=Path(out).read_text(), err=Path(err).read_text())
            for process, (out, err) in zip(self.processes, self.files)
        ]


def start(n: int, folder: Path, *argv, own=None, hook="", prepare=None) -> Started:
    """n ranks that meet in `folder`.

    own      more words of one rank, by rank
    hook     a folder for served_R, what rank R is trained on
    prepare  a function of a module, which each calls before it starts
    """
    folder.mkdir(exist_ok=True)
    processes, files = [], [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(n)]
    for rank in range(n):
        meet = ["-pn", n, "-pr", rank, "-pi fs -pp", folder] if n > 1 else []
        words = words_of(["--device cpu --threads 1", *meet, *argv, *(own or {}).get(rank, [])])
        for path in files[rank]:
            path.write_text("")
        processes.append(forked.started(rank_of, words, rank, *files[rank], hook, prepare))
    return Started(processes, files)


def ran(n: int, folder: Path, *argv, **options) -> str:
    """What rank 0 printed of a run in which all must succeed and no other says anything."""
    ranks = start(n, folder, *argv, **options).ended()
    assert [(rank.code, rank.err) for rank in ranks] == [(0, "")] * n, ranks
    assert not any(rank.out for rank in ranks[1:])
    return ranks[0].out
