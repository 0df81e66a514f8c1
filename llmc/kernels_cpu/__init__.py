"""numba kernels for CPUs, on all cores: operations in one pass over memory each, attention, and matmuls where torch's are slower.

Each has the name and the arguments of its counterpart in llmc/layers/. Only door.py and compiler.py import numba; a machine
without it trains with the torch operations.
"""

import os
import warnings
from contextlib import contextmanager
from importlib.util import find_spec

from llmc.errors import lines_of


def not_installed() -> str:
    """The reason why there are no kernels; empty if numba is installed. numba is not imported."""
    return "" if find_spec("numba") else "numba is not installed (pip install numba)"


def why_no_cpu_kernels() -> str:
    """The reason why the kernels cannot run; empty if they can."""
    return not_installed() or launch_problem()


def launch_problem() -> str:
    """Why a kernel cannot be compiled and run; empty if it can. For example, numba works with certain versions of numpy only."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numba warns where /dev/shm cannot hold its lock; one process needs none
            from llmc.kernels_cpu.global_norm import global_norm

            partials, numbers, norm = (torch.ones(n) for n in (4, 64, 1))
            global_norm(norm, numbers, {"norm_partials": partials}, piece=64)
    except Exception as error:
        return f"numba's kernels do not run here: {lines_of(error)[-1]}"
    return ""


_say = None  # of told_when_compiling


@contextmanager
def told_when_compiling(say):
    """Inside, say(a sentence) is called before a kernel is compiled, once. For kernels that are found on disk it is not called."""
    global _say
    _say = say
    try:
        yield
    finally:
        _say = None


def compiling(kept: bool = True):
    """The compiler calls this before each kernel. kept: whether the code can be kept on disk."""
    global _say
    if _say:
        named = os.environ.get("NUMBA_CACHE_DIR")
        places = f"NUMBA_CACHE_DIR={named} cannot" if named else "neither their folder nor the home folder can"
        again = "" if kept else f", in every run: {places} be written to; name a folder in NUMBA_CACHE_DIR"
        _say(f"compiling kernels for this processor, which may take a minute{again}")
        _say = None
