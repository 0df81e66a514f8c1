"""Tensor parallelism: every part of a model, alone and together, against the whole model of one rank.

Where sums are taken in another order numbers differ in their last bits: then the yardstick is what one unit in the last place of the
first weights leads to, or the error of eager torch. All else must be the same bits.
"""

import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import sentinel

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="no numba here, and torch's operators take no part of the tokens", exc_type=ImportError)

import parts_model
from allocations import largest_allocation
from oracle import assert_as_good_as_eager, logits_of, loss_and_gradients
from parts_model import CONFIG, SAMPLED, T, batch, build, case, whole
from ranks_model import Ranks, raw
from test_kernels import update_in_shares, updates
from test_layers import (
    CLASSIFIERS, classifier_case, classifier_scratch, dtypes, judge_classifier, noise, rounding_scratch, same_bits, unwritten,
)  # fmt: skip

from llmc.checkpoint.model_file import open_weights, write_model
from llmc.checkpoint.snapshot import fill, load_weights, read_arena
from llmc.checkpoint.whole_tensors import whole_tensors
from llmc.config import ModelConfig
from llmc.data.order import token_order
from llmc.distributed.group import Done, Group
from llmc.distributed.sharing import Sharing
from llmc.distributed.tensor_parallel import Divided, sliced_classifier_inplace
from llmc.distributed.world import World
from llmc.gpt2 import GPT2
from llmc.layers.adamw import adamw_update
from llmc.memory.layout import flat_layout, runs
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tables import PARAMETERS, num_parameters, parameter_shapes
from llmc.memory.tuning import ROUNDING_BLOCK

pytestmark = pytest.mark.usefixtures("plain_torch")
TWO_LAYERS = replace(CONFIG, num_layers=2)
PADDED = replace(TWO_LAYERS, vocab_size=14)  # of 2 parts the second is all padding, of 4 all but the first
HEADS = replace(TWO_LAYERS, num_heads=3, channels=48)  # of 2 parts the second has one of padding, of 4 the last has no other
FORMS = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "bf16, fp32 gradients": {"precision": "bf16", "forms": {"grad_dtype": "fp32"}},
    "bits16, bf16 moments": {"precision": "bf16", "forms": {"master": "bits16", "optimizer_state": "bf16"}},
    "padded heads": {"precision": "bf16", "config": HEADS},
}


@pytest.fixture(scope="module")
def ranks():
    started = Ranks(parts_model.serve)
    yield started
    started.stop()


def everything(case, seen):
    """Bits of all that a run leaves, put together from all ranks, which must agree on what several of them have."""
    numbers = [mine["norms"] for mine in seen], [mine["losses"] for mine in seen]
    assert all(values == all_of[0] for all_of in numbers for values in all_of)
    assert all((mine["logits"] == seen[0]["logits"]).all() for mine in seen)
    parts = case.options.tensor_parallel
    assert all((mine["evaluation"] == seen[rank // parts * parts]["evaluation"]).all() for rank, mine in enumerate(seen))
    evaluation = np.concatenate([mine["evaluation"] for mine in seen[::parts]])
    arenas = {name: whole(case, seen, name).tobytes() for name in seen[0]["flat"]}
    return arenas | {"norms": seen[0]["norms"], "losses": seen[0]["losses"], "evaluation": raw(torch.from_numpy(evaluation)).tobytes()}


# ----------------------------------------------------------------------------
# the same model


FIFTY = dict(config=TWO_LAYERS, B=2, steps=50)


@pytest.fixture(scope="module")
def undivided(ranks):
    """(case, what its rank saw) of fifty steps of one rank, as they are and from five sets of nudged weights."""
    cases = [case(**FIFTY, nudged=seed) for seed in range(6)]
    return list(zip(cases, ranks.run(*cases)))


@pytest.mark.parametrize("parts", [2, 4])
def test_fifty_steps_differ_from_one_rank_s_as_if_its_first_weights_had_been_one_ulp_others(ranks, undivided, parts):
    """At both settings of --tp-recompute-allgather, which give the same bits. Measured: 0.9 to 1.5 times the largest of three."""
    (alone, truth), *nudged = undivided
    gathered, kept = (case(parts, parts, **FIFTY, keep=keep) for keep in (False, True))
    mine, same = ranks.run(gathered, kept)
    assert everything(gathered, mine) == everything(kept, same)

    def away(case, seen):
        """Distance to the run of one rank, of each kind of result: root of the mean square."""
        pairs = (
            [(whole(*run, "parameters").view(np.float32)) for run in ((case, seen), (alone, truth))],
            *((seen[0][what], truth[0][what]) for what in ("losses", "norms", "evaluation", "logits")),
        )
        return np.array([np.sqrt(np.mean(np.square(np.subtract(*pair, dtype=np.float64)))) for pair in pairs])

    assert truth[0]["losses"][-1] < truth[0]["losses"][0] - 1  # it learns
    yardstick = np.max([away(*run) for run in nudged], axis=0)
    assert (yardstick < [1e-5, 1e-6, 3e-5, 1e-5, 1e-5]).all()
    assert (away(gathered, mine) <= 3 * yardstick).all()


@pytest.mark.parametrize("config, B", [(CONFIG, 4), (PADDED, 4), (HEADS, 4), (CONFIG, 1)], ids=["uneven", "padded", "heads", "B1"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_losses_and_logits_are_as_good_as_eager_torch_s(ranks, config, B, precision):
    """Sixteen gradients, their norm, the loss, evaluation and sampling, at the first weights. Of bf16 gradients what stochastic rounding
    adds, once a token, is in the floor."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    cases = [case(parts, parts, config=config, B=B, precision=precision, steps=steps) for parts in (2, 4) for steps in (1, 0)]
    alone = build(case(config=config, B=B, precision=precision), 0, None)
    (inputs, targets), later = ([torch.from_numpy(x) for x in batch(cases[0].options, number)] for number in (0, 1000))
    exact_loss, exact = loss_and_gradients(alone.params, inputs, targets, config, torch.float64)
    _, eager = loss_and_gradients(alone.params, inputs, targets, config, dtype)

    def evaluated(dtype):
        logits = logits_of({name: p.to(dtype) for name, p in alone.params.items()}, later[0], config)
        logits = logits if dtype == torch.float64 else logits.float()
        losses = torch.nn.functional.cross_entropy(logits.view(B * T, -1), later[1].view(-1), reduction="none")
        sampled = logits_of({name: p.to(dtype) for name, p in alone.params.items()}, torch.tensor([SAMPLED]), config)
        return losses.view(B, T), sampled[0]

    (eager_losses, eager_logits), (exact_losses, exact_logits) = evaluated(dtype), evaluated(torch.float64)
    answers = ranks.run(*cases)
    for trained, mine, evaluation in zip(cases[::2], answers[::2], answers[1::2]):
        gradient = torch.from_numpy(whole(trained, mine, "gradient").view(np.float32))
        norm = gradient.double().square().sum().sqrt().item()
        assert abs(mine[0]["norms"][0] - norm) <= 4 * 2.0**-24 * norm
        assert abs(mine[0]["losses"][0] - exact_loss) <= (8 * 2.0**-24 if precision == "fp32" else 2.0**-9) * exact_loss
        shapes = parameter_shapes(config)
        for (name, shape), ours in zip(shapes.items(), gradient.split([int(np.prod(shape)) for shape in shapes.values()])):
            assert_as_good_as_eager(
                ours.view(shape).to(dtype), eager[name], exact[name], what=f"{name} of {len(mine)} parts", largest=False, floor=4
            )
        assert_as_good_as_eager(torch.from_numpy(evaluation[0]["evaluation"]), eager_losses, exact_losses, what="evaluation", floor=8)
        logits = torch.from_numpy(evaluation[0]["logits"]).to(dtype)
        assert_as_good_as_eager(logits, eager_logits, exact_logits, what="logits", floor=4)


@pytest.mark.parametrize("form", [{"precision": "fp32"}, {"precision": "bf16"}, {"precision": "bf16", "forms": {"matmul": "fp8"}}],
                         ids=["fp32", "bf16", "fp8"])  # fmt: skip
def test_every_recompute_level_gives_the_same_bits_and_none_counts_on_what_was_gathered_before(ranks, form):
    """With FP8, which a CPU multiplies slowly, at levels where other matmuls run between the two of fcproj's backward."""
    base, levels = case(2, 2, **form, steps=2), (3, 6) if "forms" in form else range(7)
    others = [case(2, 2, **form, steps=2, level=level, poisoned=True) for level in levels]
    others += [case(2, 2, **form, steps=2, level=level, keep=True, poisoned=True) for level in (0, 1)]
    first, *rest = ranks.run(base, *others)
    want = everything(base, first)
    for other, seen in zip(others, rest):
        assert everything(other, seen) == want, f"-r {other.options.recompute}, keep {other.options.keep_gathered}"


@pytest.mark.parametrize("form", FORMS)
def test_zero_stages_give_the_same_bits_on_four_ranks_of_two_parts(ranks, form):
    """All of them for one micro-step; for several 0 and 1, and 2 and 3, which add them up in another order unless 0 and 1 are told to
    use theirs. All arenas are as planned."""
    levels = (1, 0, 5, 6)
    cases = [
        case(4, 2, stage, level=levels[stage], keep=stage == 1, accumulation=accumulation, steps=2, **FORMS[form])
        for accumulation in (1, 2) for stage in range(4)
    ]  # fmt: skip
    told = FORMS[form] | {"forms": FORMS[form].get("forms", {}) | {"reduce_every_micro_step": True, "step_sequences": 100}}
    cases += [case(4, 2, stage, accumulation=2, steps=2, **told) for stage in (0, 1)]
    answers = ranks.run(*cases, *(case(2, 2, accumulation=accumulation, steps=2, **FORMS[form]) for accumulation in (1, 2)))
    one, two, told = ([everything(*run) for run in zip(cases[i:j], answers[i:j])] for i, j in ((0, 4), (4, 8), (8, 10)))
    assert one[1] == one[0] and one[2] == one[0] and one[3] == one[0]
    assert two[1] == two[0] and two[3] == two[2] == told[0] == told[1]
    for four, seen in zip((one[0], one[0], two[0], two[2]), (answers[10], answers[10], answers[11], answers[11])):
        # the sum over four sequences is one over two ranks: of bf16 gradients rounded once more
        tolerance = 2.0**-20 if form == "fp32" else 2.0**-8
        np.testing.assert_allclose(four["losses"], seen[0]["losses"], rtol=tolerance)
        np.testing.assert_allclose(four["norms"], seen[0]["norms"], rtol=8 * tolerance)
    for run, seen in zip(cases, answers):
        o = replace(run.options, B=run.options.B // run.options.data_ranks)
        assert all(mine["arenas"] == Plan(o).arenas for mine in seen)


def test_what_one_setting_keeps_more_than_the_other_is_the_other_parts_rows(ranks):
    """Of ln1 and of ln2, in every layer; sizes are whole pages of the arena."""
    config = ModelConfig(64, 512, 5, 4, 64, 512)
    for parts in (2, 4):
        for precision, size in (("fp32", 4), ("bf16", 2)):
            o = PlanOptions(config, 4, 64, precision=precision, recompute=0, tensor_parallel=parts, kernels="numba")
            gathers, keeps = Plan(o), Plan(replace(o, keep_gathered=True))
            more = config.num_layers * (o.B * o.T * 64 - o.B * o.T // parts * 64) * size * 2
            assert keeps.columns["kept"] - gathers.columns["kept"] == more
            assert keeps.total_bytes - gathers.total_bytes == more


def allocating(case, rank, world_of):
    """The largest tensor beside the arenas while a step, an evaluation and a sample run."""
    model = build(case, rank, world_of)

    def run():
        model.train(*parts_model.own(case, rank, 0))
        model.update(1e-3, 0.1, 1, model.grad_norm())
        model.token_losses(*parts_model.own(case, rank, 1))
        model.next_logits(1, 0)

    return largest_allocation(run)


@pytest.mark.parametrize("keep", [False, True])
def test_nothing_as_large_as_a_share_of_the_stream_lives_beside_the_arenas(ranks, keep):
    """Masks and sums of a few bytes a token do; the stream has C numbers a token."""
    run = case(2, 2, keep=keep, config=replace(CONFIG, channels=128), B=4, instead=allocating)
    (seen,) = ranks.run(run)
    for n_bytes, name in seen:
        assert n_bytes <= 8 * 4 * T < 4 * T * 128 * 4 / 2, name


def in_files(case, rank, world_of):
    """What a rank holds after a step, and what it would give to files of whole models."""
    model = parts_model.build(case, rank, world_of)
    model.train(*parts_model.own(case, rank, 0))
    model.update(1e-3, 0.1, 1, model.grad_norm())
    model.sharing.release_all()
    names = [name for name in ("parameters", "m", "v", "master") if name in model.flat or name == "master" and "master_bits" in model.flat]
    for name in {"noise", "noise_work"} & model.acts.keys():  # as of a large model's tensors it has no room for that of a whole layer
        model.acts[name] = model.scratch[name] = model.acts[name][: 4 * ROUNDING_BLOCK]
    return {
        "flat": {name: raw(flat) for name, flat in model.flat.items() if name != "gradients"},
        "files": {name: np.concatenate([raw(piece) for piece in whole_tensors(model, name)]) for name in names},
    }


@pytest.mark.parametrize("config", [CONFIG, HEADS], ids=["even", "padded heads"])
def test_what_goes_into_files_is_what_the_ranks_have(ranks, config):
    cases = [
        case(n, parts, stage, config=config, instead=in_files, **forms)
        for n, parts, stage, forms in (
            (2, 2, 0, FORMS["fp32"]), (4, 4, 0, FORMS["bf16"]), (4, 2, 1, FORMS["bf16"]), (4, 2, 3, FORMS["bits16, bf16 moments"]),
        )
    ]  # fmt: skip
    for one, seen in zip(cases, ranks.run(*cases)):
        for name, written in seen[0]["files"].items():
            assert all((mine["files"][name] == written).all() for mine in seen)
            if name in seen[0]["flat"]:
                assert (written == whole(one, seen, name)).all(), name
            else:  # the upper halves of the master are the weights, rounded
                bits = whole(one, seen, "master_bits").view(np.uint16)
                assert ((written.view(np.uint32) & 0xFFFF) == bits).all()


# ----------------------------------------------------------------------------
# who has what

LAYOUTS = [
    (CONFIG, 1, 1), (CONFIG, 1, 2), (CONFIG, 1, 4), (CONFIG, 2, 2), (CONFIG, 3, 1), (CONFIG, 3, 2), (CONFIG, 3, 4),
    (ModelConfig(5, 7, 1, 8, 48, 12), 2, 4), (ModelConfig(1, 3, 4, 2, 6, 4), 3, 2), (HEADS, 1, 2), (HEADS, 1, 4), (HEADS, 2, 4),
    (ModelConfig(2, 8, 2, 5, 40, 8), 1, 4),
]  # fmt: skip
layouts = pytest.mark.parametrize("config, n, parts", LAYOUTS)


def cut_by_hand(config, n, rank, parts, part):
    """Places in a file of what a rank has, in the order of its arena: every layer split as the papers do, then shared out; -1 for heads
    that are there to make all parts as large."""

    def padded(layer, axis):
        width = [(0, 0)] * layer.ndim
        width[axis] = (0, -config.num_heads % parts * config.head_size)
        return np.pad(layer, width, constant_values=-1)

    places, start = [], 0
    for p, shape in zip(PARAMETERS, parameter_shapes(config).values()):
        numbers = np.arange(start, start + int(np.prod(shape))).reshape(shape)
        start += numbers.size
        for layer in numbers if p.per_layer else [numbers]:
            if p.name == "attprojw":
                layer = np.split(padded(layer, 1), parts, axis=1)[part]
            elif p.name == "fcprojw":
                layer = np.split(layer, parts, axis=1)[part]
            elif p.name in ("wte", "fcw", "fcb"):
                layer = np.split(layer, parts)[part]
            elif p.name in ("qkvw", "qkvb"):
                layer = np.concatenate([np.split(padded(block, 0), parts)[part] for block in np.split(layer, 3)])
            places.append(np.split(layer.ravel(), n)[rank])
    return np.concatenate(places)


@layouts
def test_a_rank_has_the_rows_columns_and_blocks_of_its_part_and_its_share_of_these(config, n, parts):
    for rank in range(n):
        for part in range(parts):
            want = cut_by_hand(config, n, rank, parts, part)
            found, end = np.full(len(want), -1), 0
            for begin, in_file, count in runs(flat_layout(config, n, rank, parts, part)):
                assert begin >= end and count > 0
                found[begin : begin + count] = np.arange(in_file, in_file + count)
                end = begin + count
            assert (found == want).all()


@layouts
def test_every_element_is_in_one_part_or_in_all(config, n, parts):
    have = np.zeros(num_parameters(config), int)
    for rank in range(n):
        for part in range(parts):
            places = cut_by_hand(config, n, rank, parts, part)
            np.add.at(have, places[places >= 0], 1)
    start = 0
    for p, shape in zip(PARAMETERS, parameter_shapes(config).values()):
        assert (have[start : start + int(np.prod(shape))] == (parts if p.split is None else 1)).all(), p.name
        start += int(np.prod(shape))


@layouts
def test_no_two_elements_of_a_layer_share_their_noise_but_those_that_all_parts_have(config, n, parts):
    """A share takes the noise of as many places as it has elements; all of a layer are taken."""
    for place, p in enumerate(PARAMETERS):
        taken = []
        for rank in range(n):
            for part in range(parts):
                t = flat_layout(config, n, rank, parts, part)[place]
                taken.append(range(t.noise_first, t.noise_first + t.elements))
                if part and p.split is None:
                    assert taken.pop() in taken
        assert sorted(k for share in taken for k in share) == list(range(t.whole_elements * (1 if p.split is None else parts))), p.name


@layouts
def test_files_are_read_whole_or_piece_by_piece_to_the_same_arena(config, n, parts):
    """fill goes through runs in order, read_arena finds those of any piece."""
    whole = np.random.default_rng(0).permutation(num_parameters(config)).astype(np.float32)
    for rank in range(n):
        for part in range(parts):
            layout = flat_layout(config, n, rank, parts, part)
            places = cut_by_hand(config, n, rank, parts, part)
            want = np.where(places < 0, 0, whole[places])
            flat = torch.zeros(len(want))
            fill(flat, layout, lambda at, count: whole[at : at + count].copy())
            assert (flat.numpy() == want).all()
            for at in range(0, len(want), 997):
                count = min(1501, len(want) - at)
                assert (read_arena(layout, lambda at, count: whole[at : at + count], at, count) == want[at : at + count]).all()


def lonely(config, n, rank, parts, part, **options):
    """A rank's model whose others do not exist."""
    o = PlanOptions(config, 1, 4, kernels="numba", data_ranks=n, zero_stage=3 if n > 1 else 0, tensor_parallel=parts, **options)
    data, divided = Group(rank, n, sentinel.nobody), Divided(Group(part, parts, sentinel.nobody))
    return GPT2(Plan(o), sharing=Sharing(Plan(o), data, divided, Group(0, 1), World()))


@pytest.mark.parametrize("config, n, parts", [(CONFIG, 1, 2), (CONFIG, 1, 4), (CONFIG, 2, 2), (CONFIG, 3, 4), (HEADS, 1, 2), (HEADS, 2, 4)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_drawn_or_read_in_parts_are_those_of_the_whole_model(tmp_path, monkeypatch, config, n, parts, precision):
    monkeypatch.setattr("llmc.gpt2.INIT_PIECE", 32)  # pieces that end in the middle of rows
    alone = GPT2(Plan(PlanOptions(config, 1, 4, precision=precision)))
    alone.init_random()
    path, want = tmp_path / "model.bin", alone.flat["parameters"]
    write_model(path, config, precision, [want.view(torch.uint8).numpy()])
    for rank in range(n):
        for part in range(parts):
            places = torch.from_numpy(cut_by_hand(config, n, rank, parts, part))
            mine = torch.where(places < 0, torch.zeros((), dtype=want.dtype), want[places])
            for fill_in in (GPT2.init_random, lambda model: load_weights(open_weights(path, precision), model)):
                model = lonely(config, n, rank, parts, part, precision=precision)
                fill_in(model)
                assert same_bits(model.flat["parameters"], mine)
                if precision == "bf16":
                    assert (model.flat["master"] == mine).all()


def test_rows_are_gathered_again_only_if_the_stream_was_used_for_something_else_since():
    gathered = []

    def gather_shares(tensors, shares):
        gathered.append(shares[0].data_ptr())
        return Done()

    divided = Divided(SimpleNamespace(rank=0, size=2, gather_shares=gather_shares))
    divided._stream = torch.zeros(4)
    x, y = torch.ones(2), torch.ones(2)
    for use in (divided.gathered, divided.still_gathered, divided.partial, divided.still_gathered, divided.still_gathered):
        use(x)
    assert gathered == [x.data_ptr()] * 2
    divided.gathered(y)
    divided.still_gathered(x)
    assert gathered[2:] == [y.data_ptr(), x.data_ptr()]


def test_each_part_gets_the_tokens_it_has_by_their_number_there():
    inputs = batch(case().options, 3)[0]
    order = token_order(inputs)
    seen = []
    for part in range(4):
        divided = Divided(SimpleNamespace(rank=part, size=4))
        divided.vocabulary, divided.first_token = 16, 16 * part
        mine = divided.own_order(order)
        assert len(mine.starts) == len(mine.tokens) + 1 and mine.starts[0] == 0 and mine.starts[-1] == len(mine.positions)
        assert all(0 <= token < 16 for token in mine.tokens) and (np.diff(mine.tokens) > 0).all()
        for token, begin, end in zip(mine.tokens, mine.starts, mine.starts[1:]):
            positions = mine.positions[begin:end]
            assert (inputs.ravel()[positions] == token + 16 * part).all() and (np.diff(positions) > 0).all()
            seen += positions.tolist()
    assert sorted(seen) == list(range(inputs.size))
    empty = divided.own_order(token_order(np.zeros((1, 5), np.int64)))
    assert not len(empty.tokens) and not len(empty.positions) and empty.starts.tolist() == [0]


@updates
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["m-fp32", "m-bf16"])
@pytest.mark.parametrize("room", [1024, 1 << 14])
def test_torch_s_adamw_of_shares_has_the_bits_of_the_whole_tensors(dtype, master, moments, room):
    """In pieces of any size; the kernels' are tested beside the kernels."""

    def update(flat, tensors, numbers):
        scratch = {name: unwritten(room) for name in ("update_gradient", "update_parameter", "update_m", "update_v")}
        if torch.bfloat16 in (dtype, moments):
            scratch |= rounding_scratch(room) | {"noise_moments": unwritten(room, dtype=torch.int32)}
        else:  # in one piece: then nothing is widened
            scratch = {}
        adamw_update(flat, tensors, scratch, **numbers)

    assert all(same_bits(*pair) for pair in zip(*update_in_shares(update, dtype, master, moments)))


# ----------------------------------------------------------------------------
# the classifier of sliced columns


class Threads:
    """A Group whose ranks are threads of this process."""

    def __init__(self, size):
        self.size, self.barrier, self.given = size, threading.Barrier(size), [None] * size

    def of(self, rank):
        def collective(reduce):
            def run(tensors):
                self.given[rank] = [t.clone() for t in tensors]
                self.barrier.wait(60)
                for i, t in enumerate(tensors):
                    t.copy_(reduce(torch.stack([given[i] for given in self.given])))
                self.barrier.wait(60)
                return Done()

            return run

        return SimpleNamespace(largest=collective(lambda x: x.amax(0)), sum_whole=collective(lambda x: x.sum(0)))


def sliced(logits, targets, V, parts, rows, dloss):
    """sliced_classifier_inplace by all parts: logits as it left them, and the losses of each part."""
    width, threads, losses = logits.shape[1] // parts, Threads(parts), [None] * parts
    slices = [part.clone(memory_format=torch.contiguous_format) for part in logits.split(width, 1)]

    def run(part):
        torch.set_grad_enabled(False)
        scratch = classifier_scratch(len(targets), width, rows, logits.dtype)
        losses[part] = sliced_classifier_inplace(
            slices[part], targets - part * width, threads.of(part), scratch,
            V=min(width, V - part * width), dloss=dloss, rows_at_once=rows,
        )  # fmt: skip

    workers = [threading.Thread(target=run, args=(part,)) for part in range(parts)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    return torch.cat(slices, 1), losses


@dtypes
@pytest.mark.parametrize("n, V, Vp", [(n, V, -(-Vp // 4) * 4) for n, V, Vp in CLASSIFIERS])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_classifier_of_slices_is_cross_entropy_and_its_gradient(n, V, Vp, parts, dtype):
    dloss, before = 1.0 / 17, noise(n, seed=3)
    logits, targets = classifier_case(n, V, Vp, dtype, 1e4)
    gradient, losses = sliced(logits, targets, V, parts, 4, dloss)
    assert all(same_bits(mine, losses[0]) for mine in losses)
    judge_classifier(gradient, before + losses[0], before, logits, targets, V, dloss)


def test_a_classifier_of_slices_survives_logits_beyond_exp():
    logits = torch.tensor([[1e4, -1e4, 3e4, 0.0], [-3e38, -3e38, -3e38, 3e38], [0.0, 0.0, 0.0, -torch.inf]])
    gradient, losses = sliced(logits, torch.tensor([2, 3, 0]), 4, 4, 2, 1.0)
    assert losses[0].tolist()[:2] == [0, 0] and abs(losses[0][2].item() - np.log(3)) < 1e-6
    assert gradient[:2].abs().max() == 0 and gradient[2, 3] == 0
    _, losses = sliced(torch.full((1, 4), -1e4), torch.tensor([1]), 2, 2, 1, 1.0)
    assert abs(losses[0].item() - np.log(2)) < 1e-6, "a slice that is all padding has no say in the maximum"
