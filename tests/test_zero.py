"""ZeRO: however many ranks share out however much, all of them train one model, the same to the last bit wherever sums have one order.

Every case runs with NaN in whatever memory a stage may not count on, and with collectives that are over when they begin, or begin
when they are waited for: a weight read too early, a gradient overwritten too early, or a slot believed to hold what it held before
changes the result. `real` are gloo's own.
"""

import inspect
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks_model import CONFIG, Ranks, case, whole

from llmc.distributed.sharing import OneRank, Sharing
from llmc.distributed.tensor_parallel import Divided, Undivided
from llmc.kernels_cpu import why_no_cpu_kernels
from llmc.memory.ladder import segments
from llmc.memory.slots import LAYER_SLOTS
from llmc.memory.tables import DTYPE_BYTES, PARAMETERS, num_parameters, parameter_shapes
from llmc.memory.tuning import RANK_NUMBERS, STOPS, WRITTEN

FORMS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bits16": {"precision": "bf16", "master": "bits16", "optimizer_state": "bf16"},
    "grad-fp32": {"precision": "bf16", "grad_dtype": "fp32"},
}
EVERY = {"reduce_every_micro_step": True, "step_sequences": 100}
ULP = 2.0**-23  # of fp32, of numbers from 1 to 2

forms = pytest.mark.parametrize("form", FORMS)
two_or_four = pytest.mark.parametrize("ranks", [2, 4])
NUMBA = pytest.mark.skipif(bool(why_no_cpu_kernels()), reason="no numba here")
all_forms = pytest.mark.parametrize("ranks, form, kernels", [
    *((2, form, "torch") for form in FORMS), *(pytest.param(2, form, "numba", marks=NUMBA) for form in FORMS),
    (4, "bf16", "torch"), pytest.param(4, "fp32", "numba", marks=NUMBA), pytest.param(4, "bits16", "numba", marks=NUMBA),
])  # fmt: skip


@pytest.fixture(scope="module")
def run():
    ranks = Ranks()
    yield ranks.run
    ranks.stop()


def bits(seen, options) -> dict:
    """Name -> bytes of all that a run's ranks saw, after all of them agreed."""
    alike = [{
        "losses": np.array(one["losses"]), "norms": np.array(one["norms"]), "evaluations": np.array(one["evaluations"]),
        "logits": np.array(one["logits"]),
    } for one in seen]  # fmt: skip
    for name, values in alike[0].items():
        assert np.isfinite(values).all() and all(np.array_equal(one[name], values) for one in alike), (
            f"{name}: {[one[name] for one in alike]}"
        )
    return {name: values.tobytes() for name, values in alike[0].items()} | {
        name: put_together([one["flat"][name] for one in seen], options, name).tobytes() for name in seen[0]["flat"]
    }


def put_together(parts, options, name) -> np.ndarray:
    """An arena of the whole model: its shares put together, or what every rank has of it, which must be the same."""
    if options.ranks_of(name) > 1:
        return whole(parts, options.config)
    assert all(np.array_equal(part, parts[0]) for part in parts), f"ranks disagree on {name}"
    return parts[0]


@pytest.mark.parametrize("one, several", [(OneRank, Sharing), (Undivided, Divided)])
def test_the_model_makes_the_same_calls_to_one_and_to_several(one, several):
    def calls(kind):
        """Name -> names and defaults of its arguments; of a property, None."""
        found = {name: f for name, f in inspect.getmembers(kind) if not name.startswith("_") and (callable(f) or isinstance(f, property))}
        return {name: callable(f) and [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] or None
                for name, f in found.items()}  # fmt: skip

    assert calls(one).items() <= calls(several).items()


def test_any_rank_may_ask_to_stop_and_a_checkpoint_is_there_when_all_have_written_theirs():
    sharing = object.__new__(Sharing)
    sharing._acts = {"rank_numbers": torch.zeros(3, RANK_NUMBERS)}
    sharing._acts["rank_numbers"][1, STOPS] = 1
    sharing._acts["rank_numbers"][:, WRITTEN] = torch.tensor([3.0, 2.0, 4.0])
    assert (sharing.stops, sharing.written_by_all) == (1, 2)


def assert_same_bits(run, cases):
    """All cases, and all ranks of each, see the same."""
    runs = [bits(seen, one.options) for one, seen in zip(cases, run(*cases))]
    for one, found in zip(cases, runs):
        different = [name for name in found if found[name] != runs[0][name]]
        assert not different, f"{one} differs in {different}"


# ----------------------------------------------------------------------------
# the same bits


@all_forms
def test_with_one_micro_step_every_stage_gives_the_same_bits(run, kernels, form, ranks):
    """Also across a step that is skipped."""
    common = dict(kernels=kernels, forms=FORMS[form], skipped=(1,))
    changes = [(0, "early"), (1, "late"), (2, "real"), (2, "late"), (3, "early"), (3, "late")]
    cases = [case(ranks, stage, collectives=how, poisoned=True, **common) for stage, how in changes]
    assert_same_bits(run, [case(ranks, 0, **common), *cases])


def test_matmuls_in_fp8_give_the_same_bits_at_every_stage(run):
    """A rank scales its own rows, and weights that all have alike."""
    common = dict(forms={"precision": "bf16", "matmul": "fp8"}, config=replace(CONFIG, channels=32), layers=2)
    assert_same_bits(run, [case(2, stage, level=level, poisoned=True, **common) for stage, level in ((0, 0), (1, 3), (2, 5), (3, 6))])


@pytest.mark.parametrize("form", FORMS)
@NUMBA
def test_shares_that_are_no_whole_vectors_give_the_same_bits(run, form):
    """11 elements of a bias for each rank. Not so with torch's own update, which rounds the last elements of a tensor otherwise."""
    common = dict(kernels="numba", forms=FORMS[form], config=replace(CONFIG, channels=44))
    assert_same_bits(run, [case(4, stage, **common) for stage in range(4)])


@pytest.mark.parametrize("kernels", ["torch", pytest.param("numba", marks=NUMBA)])
def test_a_gradient_of_several_pieces_whose_share_has_fewer_gives_the_same_bits(run, kernels):
    """The norm's partial sums are one for each 2^19 elements."""
    common = dict(kernels=kernels, forms=FORMS["bits16"], config=replace(CONFIG, channels=128), steps=2)
    cases = [case(2, stage, poisoned=True, **common) for stage in range(4)]
    assert all(c.options.part_parameters > 2**19 > c.options.part_parameters // 2 for c in cases)
    assert_same_bits(run, [case(2, 0, **common), *cases])


@all_forms
def test_with_several_micro_steps_stages_0_and_1_and_stages_2_and_3_give_the_same_bits(run, kernels, form, ranks):
    """Stages 2 and 3 add up the ranks' gradients first and the micro-steps' then, stages 0 and 1 the other way round."""
    common = dict(kernels=kernels, forms=FORMS[form], accumulation=3, steps=2, poisoned=True)
    for stages in ((0, 1), (2, 3)):
        assert_same_bits(run, [case(ranks, stage, collectives=how, **common) for stage in stages for how in ("real", "late")])


@pytest.mark.parametrize("ranks, form, kernels", [
    (2, "grad-fp32", "torch"), (4, "bf16", "torch"), pytest.param(2, "fp32", "numba", marks=NUMBA),
    pytest.param(4, "bits16", "numba", marks=NUMBA),
])  # fmt: skip
def test_where_every_micro_step_is_summed_over_ranks_all_stages_give_the_same_bits(run, kernels, form, ranks):
    common = dict(kernels=kernels, accumulation=3, steps=2, poisoned=True)
    everywhere = FORMS[form] | EVERY
    changes = [(0, "early"), (0, "late"), (1, "late"), (2, "early"), (3, "early")]
    cases = [case(ranks, stage, forms=everywhere, collectives=how, **common) for stage, how in changes]
    assert_same_bits(run, [case(ranks, 2, forms=FORMS[form], **common), *cases])


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_every_recompute_level_gives_the_same_bits(run, layers):
    """Also -r 6, whose segments run blocks forward again before they are run backward: each needs its weights twice."""
    common = dict(layers=layers, accumulation=2, steps=2)
    changes = [(3, 0, "early"), (3, 2, "late"), (3, 5, "late"), (3, 6, "early"), (3, 6, "late"), (2, 6, "late")]
    cases = [case(2, stage, level=level, collectives=how, poisoned=True, **common) for stage, level, how in changes]
    assert_same_bits(run, [case(2, 2, level=0, **common), *cases])


# ----------------------------------------------------------------------------
# the same numbers: other orders of the same sums


def tensors_of(flat, config=CONFIG) -> dict:
    """Name -> its part of a flat arena of the whole model."""
    sizes = [int(np.prod(shape)) for shape in parameter_shapes(config).values()]
    return dict(zip((p.name for p in PARAMETERS), np.split(flat, np.cumsum(sizes)[:-1])))


def gradient_of(seen, options) -> np.ndarray:
    """The first step's, of the whole model."""
    parts = [one["gradient"] for one in seen]
    return whole(parts, options.config) if options.shares else parts[0]


def norm_rounding(n) -> float:
    """What the norm of n numbers may be off, relatively: three deviations of a random walk of the roundings of an fp32 sum of squares."""
    return 1.5 * (n / 16) ** 0.5 * 2.0**-24


def assert_close(found, expected, *, ulps, one=ULP):
    """The first step of two runs, (seen, options) each: gradients by units in the last place of the largest of their tensor, loss, norm.

    A tensor's gradient is a sum over the batch, of which each order rounds the largest partial sums a few times: at most 3.3 units were
    measured between one rank and several, 1.5 between orders of micro-steps, 0.7 of the loss, which is summed in double precision.
    """
    config = found[1].config
    ours, theirs = (tensors_of(gradient_of(*run), config) for run in (found, expected))
    apart = {name: abs(ours[name] - theirs[name]).max() / (one * abs(theirs[name]).max()) for name in ours}
    assert max(apart.values()) <= ulps, apart
    for name, allowed in (("losses", 2 * ULP), ("norms", 2 * norm_rounding(num_parameters(config)) + one)):
        mine, other = (run[0][0][name][0] for run in (found, expected))
        assert abs(mine - other) <= allowed * other, f"{name} {mine}, {other}"


@pytest.mark.parametrize("kernels", ["torch", pytest.param("numba", marks=NUMBA)])
@two_or_four
def test_ranks_see_what_one_rank_sees_of_the_same_batch(run, kernels, ranks):
    for accumulation in (1, 3):
        cases = [case(n, 3 * (n > 1), kernels=kernels, accumulation=accumulation, steps=1) for n in (1, ranks)]
        alone, shared = ((seen, one.options) for one, seen in zip(cases, run(*cases)))
        assert_close(shared, alone, ulps=8)


@all_forms
def test_the_orders_of_several_micro_steps_sums_differ_by_their_rounding(run, kernels, form, ranks):
    cases = [case(ranks, stage, kernels=kernels, forms=FORMS[form], accumulation=3, steps=1) for stage in (0, 2)]
    first, second = ((seen, one.options) for one, seen in zip(cases, run(*cases)))
    assert_close(second, first, ulps=4, one=2.0**-7 if cases[0].options.grad_dtype == "bf16" else ULP)


def test_a_width_that_the_ranks_do_not_divide_is_summed_as_a_whole(run):
    """Once a step, whatever was asked."""
    config = replace(CONFIG, num_heads=5, channels=50)
    common = dict(config=config, accumulation=2, poisoned=True)
    cases = [case(4, 0, collectives=how, **common) for how in ("real", "early", "late")]
    assert_same_bits(run, [*cases, case(4, 0, forms=FORMS["fp32"] | EVERY, **common)])
    alone, shared = case(1, **common), cases[0]
    assert not shared.options.shares
    results = run(alone, shared)
    assert_close((results[1], shared.options), (results[0], alone.options), ulps=8)


@forms
@pytest.mark.parametrize("stage", range(4))
def test_the_norm_is_that_of_the_whole_gradient(run, form, stage):
    one = case(4, stage, forms=FORMS[form], steps=1)
    (seen,) = run(one)
    gradient = gradient_of(seen, one.options).astype(np.float64)
    want = np.sqrt((gradient**2).sum())
    assert want > 1 and abs(seen[0]["norms"][0] - want) <= norm_rounding(len(gradient)) * want


# ----------------------------------------------------------------------------
# bytes


@forms
@two_or_four
@pytest.mark.parametrize("stage", range(4))
def test_every_rank_s_arenas_are_the_plan_s(run, form, ranks, stage):
    (seen,) = run(case(ranks, stage, forms=FORMS[form], steps=1))
    N = num_parameters(CONFIG)
    for one in seen:
        assert one["arenas"] == one["planned"]
        assert one["arenas"]["m"] * (ranks if stage >= 1 else 1) == N * DTYPE_BYTES[FORMS[form].get("optimizer_state", "fp32")]
        assert one["arenas"]["parameters"] * (ranks if stage == 3 else 1) == N * DTYPE_BYTES[FORMS[form]["precision"]]


def expected_sent(one) -> dict:
    """Bytes that each rank sends in a step, by kind.

    Of a ring, each rank sends (n - 1) / n of what is summed into shares or gathered from them, and twice that of what is summed whole.
    With A micro-steps:
      gradients  stages 0, 1  once, or A times if asked  stages 2, 3  A times
                 stage 0 then gathers their sums, or, where the ranks do not divide C, sums them whole instead
      weights    stages 1, 2  once                       stage 3      each time a layer is needed that is not in its slot
    and everywhere the few numbers of combine().
    """
    o, A = one.options, one.accumulation
    P, G = (num_parameters(o.config) * DTYPE_BYTES[t] for t in (o.precision, o.grad_dtype))
    sent = {"all-gather": 4 * RANK_NUMBERS * o.data_ranks, "reduce-scatter": G * (A if o.zero_stage >= 2 or o.step_sequences else 1)}
    if o.zero_stage == 0:
        sent["all-gather"] += G
    elif o.zero_stage < 3:
        sent["all-gather"] += P
    else:
        sent["all-gather"] += DTYPE_BYTES[o.precision] * (A * o.outer_elements + fetched_layers(o, A) * o.layer_elements)
    if not o.shares:
        sent = {"all-gather": 4 * RANK_NUMBERS * o.data_ranks, "all-reduce": 2 * G}
    return {kind: n_bytes // o.data_ranks * (o.data_ranks - 1) for kind, n_bytes in sent.items()}


def fetched_layers(o, A) -> int:
    """How often a layer of stage 3 is needed in a step and not in its slot. With -r 0 to 5: L, then 2 A - 1 times L - 2."""
    spans = segments(o.recompute, o.config.num_layers)
    needed = list(range(o.config.num_layers))
    for span, again in zip(reversed(spans.spans), reversed(spans.again)):
        needed += [*again, *reversed(span)]
    slots, fetched = {}, 0
    for l in needed * A:
        fetched += slots.get(l % LAYER_SLOTS) != l
        slots[l % LAYER_SLOTS] = l
    if o.recompute < 6:
        assert fetched == o.config.num_layers + (2 * A - 1) * max(0, o.config.num_layers - LAYER_SLOTS)
    return fetched


@two_or_four
@pytest.mark.parametrize("stage", range(4))
def test_what_a_rank_sends_is_what_the_stage_must(run, ranks, stage):
    cases = [case(ranks, stage, layers=layers, level=level, accumulation=A, forms=FORMS["bf16"], steps=1)
             for layers, level in ((1, 0), (3, 0), (5, 2), (5, 6)) for A in (1, 3)]  # fmt: skip
    cases.append(case(ranks, stage, accumulation=3, forms=FORMS["bf16"] | EVERY, steps=1))
    if stage == 0:
        cases.append(case(ranks, 0, config=replace(CONFIG, num_heads=3, channels=45), forms=FORMS["fp32"], steps=1))
    for one, seen in zip(cases, run(*cases)):
        for rank in seen:
            assert rank["sent"] == [Counter(expected_sent(one))], one
