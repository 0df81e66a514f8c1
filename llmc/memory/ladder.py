"""The recompute ladder: which activations are not kept for backward, and what backward must run again because of it.

A level is a set of names. Everything else follows: before backward reads a name that was not kept, the stage that
writes it runs again, and so on down to names that were. The same walk gives the model its schedule and the memory
plan its lifetimes, so the two cannot disagree.

Where residual3, the input of the block above, is not kept either, the blocks fall into segments: the input of each
segment is kept, and backward runs a segment's blocks forward again before it goes through them (Chen et al. 2016).
"""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from llmc.memory.tables import BACKWARD_STAGES, BLOCK_ACTIVATIONS, FORWARD_STAGES

# -r level -> what is not kept per layer; each adds to the one before
NOT_KEPT = dict(enumerate(accumulate((
    (), ("fch_gelu",), ("ln1", "ln2"), ("fch",), ("qkvr",),
    ("atty", "lse", "residual2", "ln1_mean", "ln1_rstd", "ln2_mean", "ln2_rstd"), ("residual3",),
))))  # fmt: skip

# stages that are done in one pass where they follow each other: the numbers are the same, and memory is read only once
IN_ONE_PASS = {
    ("ln1_statistics", "ln1"): "ln1_forward",
    ("attproj", "ln2_statistics", "ln2"): "attproj_ln2",
    ("gelu_backward", "gelu"): "gelu_backward_and_again",
}
# -ge -> further such passes: GELU, and its gradient, inside the matmul before it
_GELU, _GRADIENT = {("fc", "gelu"): "fc_gelu"}, {("fcproj_dinput", "gelu_backward"): "fcproj_dinput_gelu"}
IN_ONE_MATMUL = {0: {}, 1: _GELU, 2: _GELU | _GRADIENT, 3: _GRADIENT}

WRITER = {name: stage for stage in FORWARD_STAGES for name in stage.writes}


def can_offload(level: int) -> bool:
    """Whether residuals can be offloaded at a level: where residual3 is not kept, there are too few of them."""
    return "residual3" not in NOT_KEPT[level]


def kept_names(level: int) -> tuple[str, ...]:
    """The block activations that are kept for every layer, in table order."""
    return tuple(a.name for a in BLOCK_ACTIVATIONS if a.name not in NOT_KEPT[level])


def can_keep_gathered(level: int) -> bool:
    """Whether a level can keep the rows that tensor parallelism gathers: they are those of ln1 and ln2, which it must then keep."""
    return {"ln1", "ln2"}.issubset(kept_names(level))


@cache
def backward_schedule(level: int):
    """The stages of one block's backward pass in order, forward stages that run again included.

    Level 2 gives fcproj_dinput, gelu_backward, gelu, fcproj_dweight, ln2, fc_backward, ..., ln1, qkv_backward, ln1_backward.
    GELU's input, fch, is provided before all else, so that GELU's gradient can be one pass with the matmul before it.
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

    provide("fch")
    for stage in BACKWARD_STAGES:
        run(stage)
    return tuple(schedule)


@dataclass(frozen=True, slots=True)
class Segments:
    """L blocks in segments of k; the last may be shorter. Each residual3 has a slot, and several may share one.

    The input of a segment is kept from forward to backward. Inside, outputs take k slots that all segments share; after forward
    these still hold the last segment's outputs, so that segment is not run again. With k = 1 every layer has its own slot.
    """

    L: int
    k: int

    @property
    def spans(self) -> tuple[range, ...]:
        """The layers of each segment, in forward order."""
        return tuple(range(at, min(at + self.k, self.L)) for at in range(0, self.L, self.k))

    def slot(self, l: int) -> int:
        """Where residual3 of layer l lies: the slot of the next segment's input, or one of the shared slots, which follow those."""
        is_input = (l + 1) % self.k == 0 and l + 1 < self.L
        return l // self.k if is_input else len(self.spans) - 1 + l % self.k

    @property
    def slots(self) -> int:
        return 1 + max(self.slot(l) for l in range(self.L))

    @property
    def again(self) -> tuple[tuple[int, ...], ...]:
        """The layers that run forward again before backward goes through each segment, in forward order of segments.

        The last block of a segment need not run again, as its output is kept; no block of the last segment need.
        """
        return (*(tuple(span[:-1]) for span in self.spans[:-1]), ())

    def backward(self):
        """Yields, last segment first, (its layers, those that run forward again before it, the layer that runs after it or None)."""
        walk = list(zip(reversed(self.spans), reversed(self.again)))
        for (span, again), (next_span, next_again) in zip(walk, [*walk[1:], ((), ())]):
            then = next_again[0] if next_again else next_span[-1] if next_span else None
            yield span, again, then


@cache
def segments(level: int, L: int) -> Segments:
    """The segments of a level: with fewest slots, and then fewest blocks run again; one block each where residual3 is kept."""
    if "residual3" not in NOT_KEPT[level]:
        return Segments(L, 1)
    return min((Segments(L, k) for k in range(1, L + 1)), key=lambda s: (s.slots, sum(map(len, s.again))))


@cache
def transient_lifetimes(level: int, gelu_fusion: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Name -> [(first stage, last stage), ...] for every block tensor that is not kept, gradients included; residual3 excepted.

    A name that is not kept lives twice: from its writing in forward to its last reader there, and again in backward. Blocks
    that run forward again before backward do so with no other tensor of theirs alive, as in forward.
    """
    lifetimes: dict[str, list[tuple[str, str]]] = {}
    kept = {"residual", "residual3", "dresidual", *kept_names(level)}
    for prefix, stages in (("", FORWARD_STAGES), *again_stages(level), ("backward: ", backward_schedule(level))):
        spans: dict[str, tuple[str, str]] = {}
        for stage in stages:
            for name in (*stage.reads, *stage.writes):
                if name not in kept:
                    first, _ = spans.get(name, (prefix + stage.name, ""))
                    spans[name] = (first, prefix + stage.name)
        for name, span in spans.items():
            lifetimes.setdefault(name, []).append(span)
        if not prefix.startswith("backward"):
            # the next block's ln1 is computed in one pass with this block's last addition: it must not write where that reads
            for name in spans.keys() & {"ln1", "ln1_mean", "ln1_rstd"}:
                lifetimes[name].append((prefix + "fcproj", prefix + "fcproj"))
            if ("fc", "gelu") in IN_ONE_MATMUL[gelu_fusion] and "fch_gelu" in spans:  # written while the matmul still reads
                lifetimes["fch_gelu"].append((prefix + "fc", prefix + "fc"))
    return lifetimes


def again_stages(level: int) -> tuple[tuple[str, tuple], ...]:
    """((prefix, stages),) of a block that runs forward again before its segment's backward; () where none does."""
    return (("again: ", FORWARD_STAGES),) if "residual3" in NOT_KEPT[level] else ()


@cache
def stage_line(level) -> tuple[str, ...]:
    """All stages of a run, in order of time; one block stands for every layer, as layers share their transient tensors."""
    again = (prefix + s.name for prefix, stages in again_stages(level) for s in stages)
    return (
        "encoder", *(s.name for s in FORWARD_STAGES), "lnf", "head", "lnf_backward", *again,
        *("backward: " + s.name for s in backward_schedule(level)), "encoder_backward", "update", "sample",
    )  # fmt: skip


def passes(stages, gelu_fusion: int = 0) -> tuple[str, ...]:
    """What the model runs: the names of `stages`, where the name of a pass replaces those of the stages that it joins."""
    names, joined, table = [s.name for s in stages], [], IN_ONE_MATMUL[gelu_fusion] | IN_ONE_PASS
    while names:
        run = next((run for run in table if tuple(names[: len(run)]) == run), None)
        joined.append(table[run] if run else names[0])
        del names[: len(run) if run else 1]
    return tuple(joined)
