"""A training run of a tiny model, which compiles numba's kernels before the real one is built.

So the first step takes no longer than the others, and the compiler's memory is not counted as the model's.
"""

from dataclasses import replace
from functools import cache

import numpy as np

from llmc.config import ModelConfig
from llmc.gpt2 import GPT2
from llmc.kernels_cpu import compile_processes, door
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan

TINY = ModelConfig(max_seq_len=4, vocab_size=16, num_layers=2, num_heads=1, channels=16, padded_vocab_size=16)


def compile_kernels(options: PlanOptions) -> None:
    """Compile, or load from numba's cache, every kernel that a model of these options calls.

    On several cores the tiny model first runs without its kernels, to see which they are: then several are compiled at once.
    """
    _compile(replace(options, config=TINY, B=1, T=4, data_ranks=1, tensor_parallel=1))


@cache
def _compile(options):
    if door.threads() > 1:
        with door.noted() as calls:
            rehearse(options)
        compile_processes.compile_beside(calls, door.threads())
    rehearse(options)


def rehearse(options: PlanOptions):
    """Call all that a run calls of a model of these options: if it trains, a step of one micro-step; an evaluation and a sample."""
    model, tokens = GPT2(Plan(options)), np.zeros((1, 4), np.int64)
    if options.trains:
        model.train(tokens, tokens, 1, 0)
        model.update(0.0, 0.0, 1, model.grad_norm())
    model.token_losses(tokens, tokens)
    model.next_logits(0, 0)
