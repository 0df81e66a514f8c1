"""The recompute ladder: what is not kept comes back before it is read, in every slot, for every depth and segment length.

The walk of `steps` below is backward as llmc/gpt2.py does it, written out; a test holds the model itself to it.
"""

from math import ceil, sqrt

import numpy as np
import pytest

from llmc.config import ModelConfig
from llmc.memory.ladder import NOT_KEPT, WRITER, Segments, backward_schedule, kept_names, segments
from llmc.memory.plan import Plan, PlanOptions
from llmc.memory.tables import BACKWARD_STAGES, BLOCK_ACTIVATIONS

LEVELS = tuple(NOT_KEPT)
DEPTHS = range(1, 41)
every_level = pytest.mark.parametrize("level", LEVELS)
every_depth = pytest.mark.parametrize("L", DEPTHS)


def steps(s: Segments):
    """[(what, layer)] of a whole step: "forward" and "again" run a block and write its output, "backward" reads its input."""
    yield from (("forward", l) for l in range(s.L))
    yield "lnf", s.L - 1
    for span, again in zip(reversed(s.spans), reversed(s.again)):
        yield from (("again", l) for l in again)
        yield from (("backward", l) for l in reversed(span))


def clashes(s: Segments) -> list[str]:
    """Reads that find another layer's output, or none, in the slot they read."""
    holds, wrong = {}, []  # slot -> the layer whose output it holds; the first block's input has a place of its own

    def read(what, layer, wanted):
        if wanted >= 0 and holds.get(s.slot(wanted)) != wanted:
            wrong.append(f"{what} of layer {layer} found {holds.get(s.slot(wanted))} for {wanted}")

    for what, l in steps(s):
        read(what, l, l if what == "lnf" else l - 1)
        if what in ("forward", "again"):
            holds[s.slot(l)] = l
    return wrong


# ----------------------------------------------------------------------------
# segments


@every_depth
def test_every_read_of_a_residual_finds_the_layer_it_wants(L):
    """Whatever the segment length: forward, the last layernorm before backward starts, running again, and backward."""
    for k in range(1, L + 2):
        s = Segments(L, k)
        assert not clashes(s), f"k = {k}"
        assert all(0 <= s.slot(l) < s.slots for l in range(L))


def test_the_walk_above_notices_slots_that_clash():
    """The simulation is worth something only if too few slots, or a block not run again, show up in it."""

    class OneSlotLess(Segments):
        def slot(self, l):
            return Segments.slot(self, l) % (Segments(self.L, self.k).slots - 1)

    class NothingAgain(Segments):
        again = tuple(() for _ in range(4))

    assert clashes(OneSlotLess(12, 3)) and clashes(OneSlotLess(12, 1))
    assert clashes(NothingAgain(12, 3)) and not clashes(Segments(12, 3))


@every_depth
def test_spans_are_all_layers_in_order_once(L):
    for k in range(1, L + 2):
        spans = Segments(L, k).spans
        assert [l for span in spans for l in span] == list(range(L))
        assert all(len(span) == k for span in spans[:-1]) and 1 <= len(spans[-1]) <= k


@every_depth
def test_every_block_goes_backward_once_and_runs_again_at_most_once(L):
    """Each segment but the last runs all its blocks again, its last one excepted, whose output is the next one's kept input."""
    for k in range(1, L + 2):
        s = Segments(L, k)
        backward = [l for what, l in steps(s) if what == "backward"]
        assert backward == list(reversed(range(L)))
        again = sorted(l for what, l in steps(s) if what == "again")
        last = (L - 1) // k * k  # where the last segment starts
        assert again == [l for l in range(last) if (l + 1) % k]


@every_depth
def test_segments_of_one_layer_run_nothing_again_and_share_no_slot(L):
    s = Segments(L, 1)
    assert s.slots == L == len({s.slot(l) for l in range(L)})
    assert not any(s.again)


@every_depth
def test_slots_are_the_inputs_of_segments_and_the_longest_run_inside_one(L):
    """No slot is counted that no layer uses, and there are exactly as many as must be held at once."""
    for k in range(1, L + 2):
        s = Segments(L, k)
        last = len(s.spans[-1])
        assert s.slots == len({s.slot(l) for l in range(L)}) == len(s.spans) - 1 + max(k - 1 if len(s.spans) > 1 else 0, last)


@every_depth
def test_level_6_has_the_fewest_slots_there_can_be_and_then_the_fewest_blocks_again(L):
    best = min((Segments(L, k).slots, sum(what == "again" for what, _ in steps(Segments(L, k)))) for k in range(1, L + 1))
    chosen = segments(6, L)
    assert (chosen.slots, sum(what == "again" for what, _ in steps(chosen))) == best
    assert chosen.slots <= 2 * ceil(sqrt(L)) + 1  # the promise of segments: O(sqrt L)


@pytest.mark.parametrize("L, slots, again", [(1, 1, 0), (2, 2, 0), (12, 6, 6), (24, 8, 16), (48, 12, 36)])
def test_level_6_of_the_models_people_train(L, slots, again):
    """Worked out on paper: d12 is (inputs of 4 segments) 3 + 3, d24 4 + 4 with its last segment short, d48 6 + 6."""
    chosen = segments(6, L)
    assert (chosen.slots, sum(map(len, chosen.again))) == (slots, again)


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_levels_that_keep_the_residual_run_no_block_again(level):
    assert all(segments(level, L) == Segments(L, 1) for L in DEPTHS)


@every_level
@pytest.mark.parametrize("L", [1, 2, 5, 12])
def test_the_plan_takes_segments_and_slots_from_the_ladder(level, L):
    """The tensor has as many slots as the layers use, each as large as one layer's output."""
    config = ModelConfig(max_seq_len=16, vocab_size=10, num_layers=L, num_heads=1, channels=8, padded_vocab_size=16)
    plan = Plan(PlanOptions(config, 2, 4, recompute=level))
    s = segments(level, L)
    assert plan.tensors["residual3"].shape == (s.slots, 2, 4, 8)
    assert [plan.residual_slot(l) for l in range(L)] == [s.slot(l) for l in range(L)]


@every_level
@pytest.mark.parametrize("L", [1, 5, 7])
def test_the_model_runs_blocks_in_the_order_of_the_walk(level, L):
    """What clashes() walked through is what forward and backward of the model do, block by block."""
    from llmc.gpt2 import GPT2

    config = ModelConfig(max_seq_len=4, vocab_size=10, num_layers=L, num_heads=1, channels=8, padded_vocab_size=16)
    model, order = GPT2(Plan(PlanOptions(config, 1, 4, precision="fp32", recompute=level, device="cpu"))), []
    model._run = lambda stages, layer: order.append((stages is model.forward_stages, layer.number))
    tokens = np.zeros((1, 4), dtype=np.int64)
    model.forward(tokens)
    assert len(order) == L  # so that what runs forward after these, runs again
    model.backward(tokens)
    assert order == [(what != "backward", l) for what, l in steps(segments(level, L)) if what != "lnf"]


# ----------------------------------------------------------------------------
# levels


def test_each_level_keeps_less_than_the_one_below():
    """Every NOT_KEPT has all names of the one below and at least one more, and names only what a block has."""
    assert NOT_KEPT[0] == () and LEVELS == tuple(range(len(LEVELS)))
    for below, level in zip(LEVELS, LEVELS[1:]):
        assert set(NOT_KEPT[below]) < set(NOT_KEPT[level])
        assert len(set(NOT_KEPT[level])) == len(NOT_KEPT[level])
    assert set(NOT_KEPT[LEVELS[-1]]) == {a.name for a in BLOCK_ACTIVATIONS}


@every_level
def test_kept_and_not_kept_are_all_there_is(level):
    assert sorted((*kept_names(level), *NOT_KEPT[level])) == sorted(a.name for a in BLOCK_ACTIVATIONS)


@every_level
def test_no_stage_runs_twice_in_one_block_s_backward(level):
    names = [stage.name for stage in backward_schedule(level)]
    assert len(set(names)) == len(names)
    assert [name for name in names if name.endswith("_backward")] == [stage.name for stage in BACKWARD_STAGES]


@every_level
def test_nothing_runs_again_for_nobody(level):
    """Every forward stage in a schedule writes a name that was not kept and that a later stage reads."""
    schedule = backward_schedule(level)
    for i, stage in enumerate(schedule):
        if stage not in BACKWARD_STAGES:
            read_later = {name for later in schedule[i + 1 :] for name in later.reads}
            assert set(stage.writes) & read_later & set(NOT_KEPT[level]), stage.name


@every_level
def test_what_is_not_kept_is_written_again_before_backward_reads_it(level):
    """Every name that backward reads is kept, handed down from above, or written earlier in the schedule, by its own writer."""
    written = set()
    for stage in backward_schedule(level):
        for name in stage.reads:
            if name in NOT_KEPT[level]:
                assert WRITER[name].name in written, f"{stage.name} reads {name}"
        written.add(stage.name)
