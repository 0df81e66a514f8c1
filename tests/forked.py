"""Processes forked from one that has imported what they need: torch, numba and the program take longer than most of what they do."""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver
from unittest.mock import patch

from conftest import REPO

LONGEST_S = 240


def started(function, *args):
    """A process that runs the function, as multiprocessing has it. It ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    path = os.pathsep.join([str(REPO / "tests"), str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, PYTHONPATH=path):  # Python 3.11 does not pass sys.path on
        forkserver.ensure_running()
    process = context.Process(target=_with_imports, args=(function, args), daemon=True)
    process.start()
    return process


def _with_imports(function, args):
    assert "preloaded" in sys.modules, "preloaded.py cannot be imported, which multiprocessing does not say"
    function(*args)


class Program:
    """main(words), of a module, in a process of its own, its output in pipes, as subprocess.Popen has one. It is killed if it takes longer
    than LONGEST_S: it may have kernels to compile first."""

    def __init__(self, main, words):
        (out, its_out), (err, its_err) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
        self.args = list(map(str, words))
        self._process = started(_as_a_program, main, self.args, its_out, its_err)
        self.stdout, self.stderr = (open(os.dup(pipe.fileno())) for pipe in (out, err))
        for pipe in (out, its_out, err, its_err):
            pipe.close()
        watchdog = threading.Timer(LONGEST_S, self.kill)
        watchdog.daemon = True
        watchdog.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> tuple[str, str]:
        """What it printed, and its errors, once it has ended."""
        said = self.stdout.read(), self.stderr.read()
        self._process.join()
        return said


def _as_a_program(main, words, out, err):
    for number, pipe in ((1, out), (2, err)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # those there are may be of files
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever pytest was started with
    code = main(words)
    atexit._run_exitfuncs()  # which processes of multiprocessing do not do
    sys.exit(code)
