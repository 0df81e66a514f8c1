"""Compiling several kernels beside one another, each process one at a time: the compiler itself uses one core."""

import os
import signal
import warnings
from contextlib import suppress

from llmc.kernels_cpu.compiler import is_to_be_kept
from llmc.kernels_cpu.notice import compiling

ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
MOST_PROCESSES = 4  # the slowest kernel takes a quarter of the time that all take together; a process takes some 130 MiB


def compile_beside(calls, processes: int) -> None:
    """Have other processes compile what is not on disk yet of `calls`, each a kernel and the numba types of its arguments; this one waits.

    What they could not compile, or not keep, is left to the kernel's first call.
    """
    work = [call for call in dict.fromkeys(calls) if is_to_be_kept(*call)]
    processes = min(processes, MOST_PROCESSES, len(work))
    if processes < 2:
        return
    compiling()
    reading, writing = os.pipe()
    os.write(writing, bytes(range(len(work))))  # whoever is free takes the next
    os.close(writing)
    children, parent = [], os.getpid()
    try:
        with suppress(OSError):  # no more processes for this user, or no memory: those that there are go on
            while len(children) < processes:
                if fork(children):
                    _compile_each(work, reading, parent)
        while children:
            wait_for(children[-1])
            children.pop()
    except BaseException:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
                wait_for(child)
        raise
    finally:
        os.close(reading)


def wait_for(child: int) -> None:
    with suppress(ChildProcessError):  # there is nothing to wait for any more; nor is there ever where SIGCHLD is ignored
        os.waitpid(child, 0)


def fork(children: list) -> bool:
    """True in the child; here its number is added to `children`, whatever signal comes meanwhile. Signals end the child as they would a
    program that knows nothing of them. Threads of this process that wait for work, as OpenMP's do, are none of the child's, which compiles
    and runs nothing."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads
            child = os.fork()
        if child:
            children.append(child)
            return False
        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, signal.SIG_DFL)
        return True
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _compile_each(work, reading, parent):
    """In a child: until nothing is left, or nobody waits for it. Does not return."""
    try:
        _let_go_of_all_but(reading)
        while os.getppid() == parent and (number := os.read(reading, 1)):
            kernel, types = work[number[0]]
            with suppress(Exception):  # this kernel's first call says what is wrong
                kernel.compile(types)
    finally:
        os._exit(0)


def _let_go_of_all_but(kept):
    """Files, sockets and locks of the parent do not outlive it in a child. Their numbers stay taken: Python objects may refer to them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in (kept, nothing):
            os.dup2(nothing, number)
