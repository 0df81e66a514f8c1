"""Starting several ranks of rank_program.py, and waiting for all of them."""

import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import rank_program
from conftest import REPO
from forked import Program, environment

PROGRAM = REPO / "tests" / "rank_program.py"
LONGEST_S = 60


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(*words, before=(), anew=False):
    """One rank: words are those of rank_program.py. before: a command that runs it. anew: as a shell starts it, not forked."""
    if not (before or anew):
        return Program(rank_program.main, words)
    command = [*before, sys.executable, str(PROGRAM), *map(str, words)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start_all(what: str, who: int, size: int, *flags, anew=False) -> list:
    return [start(what, who, "-pn", size, "-pr", rank, *flags, anew=anew) for rank in range(size)]


def ends(processes) -> list[SimpleNamespace]:
    """code, out and err of each, in order, once all have ended. Those that are suspended are killed when the others have."""
    try:
        deadline = time.monotonic() + LONGEST_S
        while any(process.poll() is None and not is_suspended(process) for process in processes):
            assert time.monotonic() < deadline, f"of {[process.args for process in processes]} some still run"
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
    said = [process.communicate() for process in processes]
    return [SimpleNamespace(code=process.returncode, out=out, err=err) for process, (out, err) in zip(processes, said)]


def is_suspended(process) -> bool:
    try:
        with open(f"/proc/{process.pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


KILLED = -signal.SIGKILL
