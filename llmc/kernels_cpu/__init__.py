"""numba kernels for CPUs, on all cores: operations in one pass over memory each, attention, and matmuls where torch's are slower.

Each has the name and the arguments of its counterpart in llmc/layers/. Only door.py and compiler.py import numba; a machine
without it trains with the torch operations.
"""

import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

from llmc.config import ModelConfig
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


def compiling():
    """The compiler calls this before each kernel."""
    global _say
    if _say:
        _say("compiling kernels for this processor, which may take a minute")
        _say = None


TINY = ModelConfig(max_seq_len=4, vocab_size=16, num_layers=2, num_heads=1, channels=16, padded_vocab_size=16)


def compile_kernels(options) -> None:
    """Compile, or load from numba's cache, every kernel that a model of these options calls.

    A tiny model with the same options is trained for that, first without its kernels to see which they are: on several cores several are
    compiled at once. So the first step takes no longer than the others, and the compiler's memory is not counted as the model's.
    """
    _compile(replace(options, config=TINY, B=1, T=4, head_chunk=0, sample_length=1, ranks=1, zero_stage=0, tensor_parallel=1))


@cache
def _compile(options):
    from llmc.kernels_cpu import beside, door

    if door.threads() > 1:
        with door.noted() as calls:
            _rehearse(options)
        beside.compile_beside(calls, door.threads())
    _rehearse(options)


def _rehearse(options):
    import numpy as np

    from llmc.gpt2 import GPT2
    from llmc.memory.plan import Plan

    model, tokens = GPT2(Plan(options)), np.zeros((1, 4), np.int64)
    for micro_step in range(2):
        model.train(tokens, tokens, 2, micro_step)
    model.update(0.0, 0.0, 1, model.grad_norm())
    model.token_losses(tokens, tokens)
    model.next_logits(0, 0)
