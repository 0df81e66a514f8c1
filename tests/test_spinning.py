"""What a run on a CPU finds of other work on its cores, and that threads soon sleep where there is some."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
from conftest import REPO

from llmc import spinning

LINES = """cpu  100 0 0 0 0 0 0 0 0 0
cpu0 {0} 0 0 {1} 7 0 0 0 0 0
cpu1 0 {0} 0 {1} 7 0 0 0 0 0
cpu10 0 0 9999 0 0 0 0 0 0 0
intr 5 5
"""


@contextmanager
def burning(n):
    """So many busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_ticks_are_those_of_the_cores_that_were_asked_for_and_no_idle_ones(tmp_path, monkeypatch):
    path = tmp_path / "stat"
    path.write_text(LINES.format(30, 70))
    monkeypatch.setattr(spinning, "CPU_TIMES", path)
    assert (spinning.ticks_busy({0}), spinning.ticks_busy({0, 1}), spinning.ticks_busy({10}), spinning.ticks_busy({2})) == (30, 60, 9999, 0)
    monkeypatch.setattr(spinning, "CPU_TIMES", tmp_path / "none")
    assert spinning.ticks_busy({0}) == 0


@pytest.mark.parametrize("cores, threads, variable, ticks, note", [
    (2, 0, None, 0, None), (2, 0, None, 4, None), (2, 0, None, 10, "1.0 of 2"), (2, 8, None, 10, "1.0 of 2"),
    (4, 2, None, 20, None), (4, 3, None, 20, "2.0 of 4"), (4, 0, "2", 20, None), (4, 0, "3,1", 20, "2.0 of 4"),
    (4, 0, "many", 10, "1.0 of 4"), (4, 3, "2", 20, "2.0 of 4"), (4, 1, None, 40, None), (4, 0, "1", 40, None),
])  # fmt: skip
def test_threads_sleep_soon_from_half_a_core_on_that_others_take_of_theirs(monkeypatch, cores, threads, variable, ticks, note):
    """Of a tenth of a second, by a clock that says so, in hundredths. One thread waits for no other."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(spinning, "within_quota", lambda n: n)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    readings, clock = iter((1000, 1000 + ticks)), iter((5.0, 5.1))
    before = {"OMP_NUM_THREADS": variable} if variable else {}
    monkeypatch.setattr(spinning, "ticks_busy", lambda cores: next(readings))
    monkeypatch.setattr(spinning.time, "monotonic", lambda: next(clock))
    said = f"note: other work keeps {note} cores busy, so threads waiting for one another go to sleep sooner"
    assert spinning.sleep_soon_where_busy(threads, environ := dict(before)) == ([said] if note else [])
    assert environ == (before | {"GOMP_SPINCOUNT": "3000"} if note else before)


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_who_has_said_how_threads_wait_is_not_contradicted(monkeypatch, name):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(spinning, "ticks_busy", lambda cores: pytest.fail("nobody asks"))
    environ = {name: "anything"}
    assert spinning.sleep_soon_where_busy(2, environ) == [] and environ == {name: "anything"}


def test_a_program_among_others_says_so_and_openmp_hears_it(tmp_path):
    """A process of its own, as its threads are made when torch is imported. OpenMP prints what it goes by."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from llmc.spinning import sleep_soon_where_busy; "
        "print(*sleep_soon_where_busy(), flush=True); import torch"
    )
    decides = spinning.WAITING | {"OMP_NUM_THREADS"}
    env = {name: value for name, value in os.environ.items() if name not in decides} | {"OMP_DISPLAY_ENV": "verbose"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with burning(2 * len(os.sched_getaffinity(0))):
        program = subprocess.Popen([sys.executable, "-c", code, REPO], env=env, **pipes)
        said = program.stdout.readline()
    _, shown = program.communicate()
    assert program.returncode == 0 and "cores busy, so threads waiting for one another go to sleep sooner" in said
    if "GOMP_SPINCOUNT" in shown:  # where torch's OpenMP is GNU's
        assert "GOMP_SPINCOUNT = '3000'" in shown
