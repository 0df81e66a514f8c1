"""numba kernels for CPUs, on all cores: operations in one pass over memory each, attention, and matmuls where torch's are slower.

Each has the name and the arguments of its counterpart in llmc/layers/. Only door.py and compiler.py import numba; a machine
without it trains with the torch operations.

    door                what kernels are written with, and how they are launched
    compiler            how numba compiles them, and where their code is kept
    compile_processes   several compiled beside one another
    notice              saying so, once
    recording           a step as a list of calls, the CPU's graphs
    tiles               products of tiles in registers
    packing             what they multiply, packed
    columns             sums over rows, the same bits on any number of threads
    encoder layernorm matmul attention gelu fused_classifier global_norm adamw
                        the counterparts
    functions           the launchers by name
"""

import warnings
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
