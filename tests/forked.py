"""Processes forked from one that has imported what they need: torch, numba and the program take longer than most of what they do."""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver
from unittest.mock import patch

from conftest import REPO

LONGEST_S = 240
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "OMPI_", "PMI", "MPI_", "SLURM_", "GLOO_", "TORCH_")
_ONE_AT_A_TIME = threading.RLock()  # the start of a process asks whether others have ended, which two threads must not do at once


def environment(**more) -> dict:
    """Of a process that no launcher started."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return plain | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)} | more


def started(function, *args):
    """A process that runs the function, as multiprocessing has it. It ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    path = os.pathsep.join([str(REPO / "tests"), str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = "FATAL"  # as the program sets it for several ranks, too late once torch is imported
    with _ONE_AT_A_TIME:
        # Python 3.11 does not pass sys.path on
        with patch.dict(os.environ, environment(PYTHONPATH=path, TORCH_CPP_LOG_LEVEL=quiet), clear=True):
            forkserver.ensure_running()
        process = context.Process(target=_with_imports, args=(function, args), daemon=True)
        process.start()
    return process


def exit_code(process) -> int | None:
    """Of what started() gave, once it has ended."""
    with _ONE_AT_A_TIME:
        return process.exitcode


def _with_imports(function, args):
    assert "preloaded" in sys.modules, "preloaded.py cannot be imported, which multiprocessing does not say"
    function(*args)


def run_as_program(main, words, *files):
    """main(words) in the place of a process that was forked, its output and errors going to two file descriptors."""
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # those there are may be of files
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever pytest was started with
    try:
        code = main(words)
    finally:
        atexit._run_exitfuncs()  # which processes of multiprocessing do not do
    sys.exit(code)


class Program:
    """main(words), of a module, in a process of its own, its output in pipes; what tests use of subprocess.Popen. It is killed if it takes
    longer than LONGEST_S: it may have kernels to compile first."""

    def __init__(self, main, words):
        (out, its_out), (err, its_err) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
        self.args = list(map(str, words))
        self._process = started(_in_pipes, main, self.args, its_out, its_err)
        self.pid = self._process.pid
        self.stdout, self.stderr = (open(os.dup(pipe.fileno())) for pipe in (out, err))
        for pipe in (out, its_out, err, its_err):
            pipe.close()
        self._watchdog = threading.Timer(LONGEST_S, self.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    @property
    def returncode(self) -> int | None:
        return exit_code(self._process)

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing to one that has ended: what it printed tells why."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[str, str]:
        """What it printed, and its errors, once it has ended."""
        errors = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reader.start()
        out = self.stdout.read()
        reader.join()
        while self.poll() is None:
            time.sleep(0.01)
        self._watchdog.cancel()
        self.stdout.close()
        self.stderr.close()
        return out, errors[0]


def _in_pipes(main, words, *pipes):
    files = [os.dup(pipe.fileno()) for pipe in pipes]
    for pipe in pipes:
        pipe.close()
    run_as_program(main, words, *files)
