"""The recompute ladder: what is not kept comes back before it is read, in every slot, for every depth and segment length.

The walk of `steps` below is backward as llmc/gpt2.py does it, written out; a test holds the model itself to it.
"""

from math import ceil, sqrt

import numpy as np
import pytest

from llmc.config import ModelConfig
from llmc.memory.ladder import IN_ONE_PASS, NOT_KEPT, WRITER, Segments, backward_schedule, kept_names, passes, segments
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tables import BACKWARD_STAGES, BLOCK_ACTIVATIONS, FORWARD_STAGES

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
def test_every_segment_names_the_layer_that_runs_next_after_it(L):
    """The first of those that run forward again, or else the last of the segment below."""
    for k in range(1, L + 2):
        walk = list(Segments(L, k).backward())
        runs = [[*again, *reversed(span)] for span, again, _ in walk]
        assert [then for _, _, then in walk] == [*(layers[0] for layers in runs[1:]), None]


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
    """What clashes() walked through is what forward and backward of the model do, block by block.

    A block starts from its ln1, which the block below has made in its last pass, or a pass of its own where none ran before it.
    """
    from llmc.gpt2 import GPT2

    config = ModelConfig(max_seq_len=4, vocab_size=10, num_layers=L, num_heads=1, channels=8, padded_vocab_size=16)
    model, order = GPT2(Plan(PlanOptions(config, 1, 4, precision="fp32", recompute=level, device="cpu"))), []
    ready = []  # layers whose ln1 is made and not yet used; None for the last layernorm

    def run_block(layer, above):
        assert ready == [layer.number]
        ready[:] = [] if above is None else [None] if above is model.final else [above.number]
        order.append((True, layer.number))

    model._ln1_forward = lambda layer: ready.append(layer.number)
    model._block_forward = run_block
    model.backward_passes = [lambda _, layer: order.append((False, layer.number))]
    tokens = np.zeros((1, 4), dtype=np.int64)
    model.forward(tokens)
    assert len(order) == L  # so that what runs forward after these, runs again
    assert ready == [None]
    ready.clear()
    model.backward(tokens)
    assert not ready  # nor is a layernorm made for nobody
    assert order == [(what != "backward", l) for what, l in steps(segments(level, L)) if what != "lnf"]


@every_level
def test_the_model_runs_the_passes_of_the_ladder(level):
    """Forward and backward of a block are the passes of the tables' stages in order, ln1's and the last one's at the seams of blocks."""
    from llmc.gpt2 import GPT2

    config = ModelConfig(max_seq_len=4, vocab_size=10, num_layers=2, num_heads=1, channels=8, padded_vocab_size=16)
    model, order = GPT2(Plan(PlanOptions(config, 1, 4, precision="fp32", recompute=level, device="cpu"))), []
    assert [f"_{name}" for name in passes(backward_schedule(level))] == [run.__name__ for run in model.backward_passes]
    model.forward_passes = [lambda *_, run=run: order.append(run.__name__) for run in model.forward_passes]
    model._ln1_forward = lambda _: order.append("_ln1_forward")
    model._fcproj = lambda *_: order.append("_fcproj")
    model._block_forward(model.blocks[1], None)
    assert ["_ln1_forward", *order] == [f"_{name}" for name in passes(FORWARD_STAGES)]


# ----------------------------------------------------------------------------
# passes

EVERY_SCHEDULE = {"forward": FORWARD_STAGES} | {f"-r {level}": backward_schedule(level) for level in LEVELS}


def written_out(name):
    """The stages of a pass, by name."""
    return next((list(run) for run, joined in IN_ONE_PASS.items() if joined == name), [name])


@pytest.mark.parametrize("stages", EVERY_SCHEDULE.values(), ids=EVERY_SCHEDULE)
def test_passes_written_out_are_the_schedule(stages):
    """Nothing is lost, doubled or put in another place by joining."""
    assert [stage for name in passes(stages) for stage in written_out(name)] == [s.name for s in stages]


@pytest.mark.parametrize("stages", EVERY_SCHEDULE.values(), ids=EVERY_SCHEDULE)
def test_passes_join_the_neighbours_of_the_table_and_nothing_else(stages):
    """Wherever all stages of an entry follow each other there is its pass, and none of them is left alone beside it."""
    names, joined = [s.name for s in stages], list(passes(stages))
    for run, name in IN_ONE_PASS.items():
        places = [i for i in range(len(names)) if tuple(names[i : i + len(run)]) == run]
        assert joined.count(name) == len(places)
    assert [name for name in joined if name not in IN_ONE_PASS.values()] == [
        name for i, name in enumerate(names)
        if not any(tuple(names[at : at + len(run)]) == run for run in IN_ONE_PASS for at in range(max(0, i - len(run) + 1), i + 1))
    ]  # fmt: skip


@pytest.mark.parametrize("level, joined", [
    (0, []), (1, ["gelu_backward_and_again"]), (2, ["gelu_backward_and_again"]), (3, ["gelu_backward_and_again"]),
    (4, ["gelu_backward_and_again"]), (5, ["ln1_forward", "attproj_ln2", "gelu_backward_and_again"]),
    (6, ["ln1_forward", "attproj_ln2", "gelu_backward_and_again"]),
])  # fmt: skip
def test_passes_of_each_level(level, joined):
    """GELU runs again with its gradient wherever it must; layernorms run again whole only where their statistics are not kept.

    Sorted, as where a block's second half comes back first depends on the level.
    """
    assert sorted(name for name in passes(backward_schedule(level)) if name in IN_ONE_PASS.values()) == sorted(joined)
    assert [name for name in passes(FORWARD_STAGES) if name in IN_ONE_PASS.values()] == ["ln1_forward", "attproj_ln2"]


def test_stages_that_do_not_follow_each_other_are_not_joined():
    """Made up: an entry cut short, turned round, or with another stage inside, stays as it is; two in a row are both joined."""
    by_name = {s.name: s for s in (*FORWARD_STAGES, *BACKWARD_STAGES)}

    def joined(*names):
        return passes([by_name[name] for name in names])

    for alone in (
        ("ln1", "ln1_statistics"),
        ("ln1_statistics", "qkv", "ln1"),
        ("attproj", "ln2_statistics"),
        ("attproj", "ln2"),
        ("gelu",),
        (),
    ):
        assert joined(*alone) == alone
    assert joined("ln1_statistics", "ln1_statistics", "ln1", "ln1") == ("ln1_statistics", "ln1_forward", "ln1")
    assert joined("gelu_backward", "gelu", "ln1_statistics", "ln1") == ("gelu_backward_and_again", "ln1_forward")


def test_no_pass_has_the_name_of_a_stage_or_of_another_pass():
    names = [s.name for s in (*FORWARD_STAGES, *BACKWARD_STAGES)]
    assert len({*names, *IN_ONE_PASS.values()}) == len(names) + len(IN_ONE_PASS)
    assert all(name in names for run in IN_ONE_PASS for name in run)


@every_level
@pytest.mark.parametrize("fusion", [0, 1, 2, 3])
def test_gelu_joins_the_matmul_before_it_at_every_level_both_ways_or_one(level, fusion):
    """Forward with 1 and 2; backward, where its input may have to be made again before that, with 2 and 3."""
    forward, backward = passes(FORWARD_STAGES, fusion), passes(backward_schedule(level), fusion)
    assert ("fc_gelu" in forward, "fc" in forward, "gelu" in forward) == ((True, False, False) if fusion in (1, 2) else (False, True, True))
    again = "fch_gelu" in NOT_KEPT[level]
    if fusion in (2, 3):
        assert "fcproj_dinput_gelu" in backward and {"fcproj_dinput", "gelu_backward"}.isdisjoint(backward)
        assert ("gelu" in backward) == again
    else:
        assert "fcproj_dinput" in backward and ("gelu_backward_and_again" if again else "gelu_backward") in backward
    assert "fc_gelu" not in backward and ("fc" in backward) == ("fch" in NOT_KEPT[level])


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
    forward = {stage.name for stage in FORWARD_STAGES}
    assert [name for name in names if name not in forward] == [stage.name for stage in BACKWARD_STAGES]


@every_level
def test_nothing_runs_again_for_nobody(level):
    """Every forward stage in a schedule writes a name that was not kept and that a later stage reads."""
    schedule = backward_schedule(level)
    for i, stage in enumerate(schedule):
        if stage not in BACKWARD_STAGES:
            read_later = {name for later in schedule[i + 1 :] for name in later.reads}
            assert set(stage.writes) & read_later & set(NOT_KEPT[level]), stage.name


@pytest.mark.parametrize("level", LEVELS[1:])
def test_what_is_not_kept_is_written_again_before_backward_reads_it(level):
    """Every name that backward reads is kept, handed down from above, or written earlier in the schedule, by its own writer."""
    written = set()
    for stage in backward_schedule(level):
        for name in stage.reads:
            if name in NOT_KEPT[level]:
                assert WRITER[name].name in written, f"{stage.name} reads {name}"
        written.add(stage.name)
