"""Learning rate as a function of the step: cosine, linear, constant, wsd. Source: llm.c llmc/schedulers.h.

llm.c works in float32, this in Python's doubles: the two agree to 1e-6 relative.
"""

from math import cos, pi, sqrt

# kind -> share of the decaying part that is left after the share p of the decay's steps
DECAYS = {
    "cosine": lambda p: 0.5 * (1 + cos(pi * p)),
    "linear": lambda p: 1 - p,
    "wsd": lambda p: 1 - sqrt(p),  # warmup, stable, decay over the last fifth: https://arxiv.org/abs/2405.18392
}


def learning_rate(kind: str, step: int, *, lr: float, warmup: int, total_steps: int, final_fraction: float) -> float:
    """The learning rate of `step`, counted from 0.

    lr is the highest rate, final_fraction * lr the one that decay ends at, warmup the number of steps that rise to lr.
    `constant` ignores warmup, as llm.c's does. Warmup wins over decay: with warmup >= total_steps every step of the run rises.
    From total_steps on, as after -x was lowered on resume, decay stays at its end; llm.c divides by zero or asserts there.
    """
    if kind == "constant":
        return lr
    if step < warmup:
        return lr * (step + 1) / warmup
    decay_from = total_steps * 8 // 10 if kind == "wsd" else warmup
    left = DECAYS[kind](_elapsed(step, decay_from, total_steps))
    return final_fraction * lr + left * (lr - final_fraction * lr)


def _elapsed(step: int, begin: int, end: int) -> float:
    """How much of begin..end has passed at `step`: 0 before it, 1 from `end` on, even if nothing lies between."""
    if step >= end:
        return 1.0
    return max(step - begin, 0) / (end - begin)
