"""Training of a tiny model and all that it leaves, for tests that hold one way to run steps to another."""

from itertools import accumulate
from unittest.mock import patch

import numpy as np
import torch

from llmc.config import ModelConfig
from llmc.data.order import token_order
from llmc.gpt2 import GPT2
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tuning import ALIGNMENT
from llmc.units import round_up

TINY = ModelConfig(max_seq_len=8, vocab_size=21, num_layers=2, num_heads=2, channels=16, padded_vocab_size=24)
B, T, ACCUM = 2, 5, 2


def build(kernels, graphs=None, **options):
    model = GPT2(Plan(PlanOptions(TINY, B, T, kernels=kernels, sample_length=8, **options)), graphs=graphs)
    model.init_random()
    return model


def batch(number):
    tokens = np.random.default_rng(number).integers(0, TINY.vocab_size, (2, B, T))
    return tokens[0], tokens[1]


def trained(model, steps=3):
    """Everything that training, evaluating in between and the optimizer leave: bytes by name."""
    left = {}
    for step in range(steps):
        for micro_step in range(ACCUM):
            inputs, targets = batch(10 * step + micro_step)
            model.train(inputs, targets, ACCUM, micro_step, token_order(inputs))
        norm = model.grad_norm()
        left[f"loss {step}"], left[f"norm {step}"] = raw(model.acts["loss_sum"]), raw(model.acts["grad_norm"])
        left[f"gradients {step}"] = raw(model.flat["gradients"])
        model.update(1e-2 / (step + 1), 0.1, step + 1, norm)
        left[f"evaluation {step}"] = raw(model.token_losses(*batch(1000 + step)))
    return left | {name: raw(arena) for name, arena in model.flat.items()}


def plan_without_sharing(options: PlanOptions) -> Plan:
    """A plan in whose arena every tensor has bytes of its own."""

    def place(tensors, stages):
        sizes = {t.name: round_up(t.nbytes, ALIGNMENT) for t in tensors}
        ends = list(accumulate(sizes.values()))
        return dict(zip(sizes, [0, *ends])), ends[-1]

    with patch("llmc.memory.plan.place", place):
        return Plan(options)


def put_back(model, other):
    """Load what another model holds, in place, as a resume does."""
    for name, arena in model.flat.items():
        arena.copy_(other.flat[name])
    model.rng.state, model.rng_state_last_update = other.rng.state, other.rng_state_last_update


def raw(tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
