"""Kernels that several processes compile beside one another: each once, kept on disk, and nobody left when nobody waits any more."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO

pytest.importorskip("numba", reason="no numba here: python -m pip install numba")

from llmc.kernels_cpu import compile_processes
from llmc.kernels_cpu.notice import told_when_compiling

LONGEST_S = 60


class Piece:
    """Stands in for a kernel: compiling it does something."""

    def __init__(self, compile):
        self.compile = compile


@pytest.fixture
def all_to_be_kept(monkeypatch):
    monkeypatch.setattr(compile_processes, "is_to_be_kept", lambda *_: True)


def await_files(*paths):
    deadline = time.monotonic() + LONGEST_S
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"  # of a parent that is gone too, and nobody asks
    except (ProcessLookupError, FileNotFoundError):
        return True


def test_two_compile_at_once_and_all_that_is_asked_for_twice_is_compiled_once(tmp_path, all_to_be_kept):
    paths, said = [tmp_path / str(i) for i in range(5)], []

    def compile(path):
        with open(path, "a") as file:
            print("compiled", file=file)
        await_files(*paths[:2])

    pieces = [(Piece(lambda types, path=path: compile(path)), ("types",)) for path in paths]
    with told_when_compiling(said.append):
        compile_processes.compile_beside([*pieces, *pieces], 2)
    assert [path.read_text() for path in paths] == ["compiled\n"] * 5 and len(said) == 1


def test_what_a_process_holds_is_not_held_by_those_that_compile_for_it(tmp_path, all_to_be_kept):
    """Else a socket would stay open, and a folder locked, when it is killed."""
    paths, (reading, writing) = [tmp_path / str(i) for i in range(2)], os.pipe()

    def compile(path):
        path.write_text(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in (1, 2, reading, writing)))

    with open(reading), open(writing, "w"):
        compile_processes.compile_beside([(Piece(lambda _, path=path: compile(path)), ()) for path in paths], 2)
    assert [path.read_text().split() for path in paths] == [[os.devnull] * 4] * 2


def test_one_process_or_one_kernel_is_nothing_to_share_out(all_to_be_kept, monkeypatch):
    monkeypatch.setattr(compile_processes, "fork", lambda _: pytest.fail("no other process"))
    compile_processes.compile_beside([(Piece(None), 1), (Piece(None), 2)], 1)
    compile_processes.compile_beside([(Piece(None), 1)], 8)


def test_a_kernel_that_fails_or_takes_its_process_with_it_is_left_and_the_others_are_compiled(tmp_path, all_to_be_kept):
    done = [tmp_path / str(i) for i in range(2)]

    def fails(types):
        raise ValueError("no such type")

    work = [fails, lambda _: os.kill(os.getpid(), signal.SIGKILL), *(lambda _, path=path: path.write_text("done") for path in done)]
    compile_processes.compile_beside([(Piece(compile), ()) for compile in work], 2)
    assert all(path.exists() for path in done)


def test_an_interrupted_wait_leaves_no_process(tmp_path, all_to_be_kept):
    paths = [tmp_path / str(i) for i in range(2)]

    def compile(path):
        path.write_text(str(os.getpid()))
        if path is paths[1]:
            await_files(*paths)
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(LONGEST_S)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        compile_processes.compile_beside([(Piece(lambda _, path=path: compile(path)), ()) for path in paths], 2)
    for path in paths:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


SLOWLY = """
import os, sys, time
from pathlib import Path
from llmc.kernels_cpu import compile_processes

class Piece:
    def __init__(self, path):
        self.path = path

    def compile(self, types):
        self.path.write_text(str(os.getpid()))
        time.sleep(0.2)

compile_processes.is_to_be_kept = lambda *_: True
compile_processes.compile_beside([(Piece(Path(sys.argv[1]) / str(i)), ()) for i in range(100)], 2)
"""


def test_of_a_process_that_was_killed_no_other_goes_on(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, tmp_path], cwd=REPO)
    try:
        await_files(tmp_path / "0", tmp_path / "1")
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + LONGEST_S
    pids = {int(text) for path in tmp_path.iterdir() if (text := path.read_text())}
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(list(tmp_path.iterdir())) < 100


KERNEL = """
@door.jit
def {}(x):
    for i in door.prange(len(x)):
        x[i] += {}
"""
KERNELS = """
import numba
import numpy as np
from llmc.kernels_cpu import compile_processes, door
from llmc.kernels_cpu.notice import told_when_compiling

@door.jit
def wrong(x):
    for i in door.prange(len(x)):
        x.no_such_name = i
"""
KERNELS += "".join(KERNEL.format(name, number) for name, number in (("one", 1), ("two", 2), ("four", 4), ("eight", 8)))
KERNELS += """
x = np.arange(3.0)
with told_when_compiling(print):
    with door.noted() as calls:
        for kernel in (wrong, one, two, four, eight):
            door.launch(kernel, x)
    assert x.tolist() == [0, 1, 2]
    for times in range(2):
        print([kernel.__name__ for kernel, types in calls if compile_processes.is_to_be_kept(kernel, types)])
        compile_processes.compile_beside(calls[times:], 4)
    for kernel in (one, two, four, eight):
        door.launch(kernel, x)
        print(kernel.__name__, x.tolist(), sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
try:
    door.launch(wrong, x)
except numba.TypingError:
    print("wrong fails by itself")
"""


def test_what_others_compiled_is_found_on_disk_and_what_they_could_not_fails_at_its_first_call(tmp_path):
    """Kernels that differ in nothing but a number, and yet none is taken for another."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "kernels.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    compiling, *rest = done.stdout.splitlines()
    assert rest[0] == "compiling kernels for this processor, which may take a minute"
    assert [compiling, *rest[1:]] == [
        "['wrong', 'one', 'two', 'four', 'eight']", "['wrong']", "one [1.0, 2.0, 3.0] 1 0", "two [3.0, 4.0, 5.0] 1 0",
        "four [7.0, 8.0, 9.0] 1 0", "eight [15.0, 16.0, 17.0] 1 0", "wrong fails by itself",
    ]  # fmt: skip
