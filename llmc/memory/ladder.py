"""The recompute ladder: which activations are not kept for backward, and what backward must run again because of it.

A level is a set of names. Everything else follows: before backward reads a name that was not kept, the stage that
writes it runs again, and so on down to names that were. The same walk gives the model its schedule and the memory
plan its lifetimes, so the two cannot disagree.
"""

from llmc.memory.tables import BACKWARD_STAGES, BLOCK_ACTIVATIONS, FORWARD_STAGES

# -r level -> what is not kept per layer
NOT_KEPT = {
    0: (),
    1: ("fch_gelu",),
    2: ("fch_gelu", "ln1", "ln2"),
}

WRITER = {name: stage for stage in FORWARD_STAGES for name in stage.writes}


def kept_names(level: int) -> tuple[str, ...]:
    """The block activations that are kept for every layer, in table order."""
    return tuple(a.name for a in BLOCK_ACTIVATIONS if a.name not in NOT_KEPT[level])


def backward_schedule(level: int):
    """The stages of one block's backward pass in order, forward stages that run again included.

    2 gives gelu, fcproj_backward, gelu_backward, ln2, fc_backward, ..., ln1, qkv_backward, ln1_backward.
    """
    schedule, at_hand = [], {"residual", *kept_names(level)}

    def provide(name):
        if name in WRITER and name not in at_hand:
            run(WRITER[name])

    def run(stage):
        for name in stage.reads:
            provide(name)
        schedule.append(stage)
        at_hand.update(stage.writes)

    for stage in BACKWARD_STAGES:
        run(stage)
    return tuple(schedule)


def transient_lifetimes(level: int) -> dict[str, list[tuple[str, str]]]:
    """Name -> [(first stage, last stage), ...] for every block tensor that is not kept, gradients included.

    A name that is not kept lives twice: from its writing in forward to its last reader there, and again in backward.
    """
    lifetimes: dict[str, list[tuple[str, str]]] = {}
    kept = {"residual", "dresidual", *kept_names(level)}
    for prefix, stages in (("", FORWARD_STAGES), ("backward: ", backward_schedule(level))):
        spans: dict[str, tuple[str, str]] = {}
        for stage in stages:
            for name in (*stage.reads, *stage.writes):
                if name not in kept:
                    first, _ = spans.get(name, (prefix + stage.name, ""))
                    spans[name] = (first, prefix + stage.name)
        for name, span in spans.items():
            lifetimes.setdefault(name, []).append(span)
    return lifetimes
