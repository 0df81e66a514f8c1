"""Triton's attention: softmax over the past and its gradients, in memory of the plan alone. Compiled on a card, else interpreted.

fp32 is interpreted only. No run on a card has it: products of tiles would be TF32's, and exact ones take more registers than there are.
"""

from functools import partial
from math import inf, log, nan
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="no triton here, and so no kernels: python -m pip install triton")

from interpreter import quick_interpreter  # noqa: F401  (a fixture)
from test_kernels import (  # noqa: F401
    BF16, DEVICE, NOISE, OnDevice, accumulate_gradients, batch, build, distance, little_work, one_step, poison,
    prepared_device,
)  # fmt: skip
from test_layers import (  # noqa: F401
    DTYPES, judge_attention, judge_rows, noise, same_bits, test_attention_does_not_see_the_future,
    test_attention_error_is_a_few_roundings, test_attention_may_be_written_anywhere,
    test_attention_is_the_same_bits_whatever_its_room_held_and_leaves_the_matmul_s_precision,
    test_attention_of_a_later_token_that_is_not_a_number_stays_clear_of_the_earlier_ones, unwritten,
)  # fmt: skip

from llmc.kernels.functions import triton_attention
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.tuning import ATTENTION_ROWS
from scripts.gpu_tune import WholeHeads

# the interpreter is numpy, which tells of infinities
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
dtypes = pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cpu" else [BF16], ids=str)
OF_THIS_KIND = dict(attention="triton", precision="bf16")


def room(B, T, C, NH, dtype, *_):
    sums = unwritten(B, -(-T // ATTENTION_ROWS), 3 * C)
    return {"attention_delta": unwritten(B, NH, T), "attention_sums": sums, "column_partials": unwritten(4, 4 * C)}


@pytest.fixture
def ours(request):
    """As in test_layers.py. On a card the tests from there leave fp32 out."""
    if DEVICE != "cpu" and "dtype" in request.fixturenames and request.getfixturevalue("dtype") == torch.float32:
        pytest.skip("no fp32 form on a card")
    forward, backward = (partial(OnDevice()._run, triton_attention()[f"attention_{way}"]) for way in ("forward", "backward"))
    return SimpleNamespace(forward=forward, backward=backward, room=room, block=ATTENTION_ROWS, lse_unit=log(2))


# one token, nothing that divides anything, heads of a card's usual sizes, several tiles with a rest, tiles that T is a multiple of
SHAPES = [  # B, T, C, NH
    (1, 1, 1, 1), (3, 7, 15, 5), (2, 67, 80, 1), (1, 130, 128, 2), (1, 256, 64, 1), (1, 96, 64, 1), (1, 300, 24, 2), (1, 140, 128, 1),
]  # fmt: skip


@dtypes
@pytest.mark.parametrize("B, T, C, NH", SHAPES)
@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "add"])
def test_triton_s_attention_is_softmax_of_the_past_and_gives_the_bias_below_its_gradient(ours, B, T, C, NH, dtype, accumulate):
    judge_attention(ours, B, T, C, NH, dtype, accumulate)


@dtypes
@pytest.mark.parametrize("T, C, NH, positions", [(1, 1, 1, [0]), (7, 15, 5, range(7)), (200, 64, 1, [0, 15, 62, 63, 64, 127, 128, 199])])
def test_triton_s_attention_row_by_row_over_a_cache_is_the_whole(T, C, NH, positions, dtype):
    judge_rows(partial(OnDevice()._run, triton_attention()["attention_one_row"]), list(positions), T, C, NH, dtype)


@dtypes
@pytest.mark.parametrize("B, T, C, NH", [(1, 1, 1, 1), (3, 7, 15, 5), (2, 67, 80, 1), (1, 300, 24, 2), (1, 256, 64, 1)])
@pytest.mark.parametrize("tiles", [(128, 32, 8), (64, 32, 4)], ids=str)
def test_backward_by_whole_heads_gives_the_gradients_whatever_its_room_held(ours, monkeypatch, B, T, C, NH, dtype, tiles):
    """As gpu_check.py measures it: its sums of dq are added up in memory of its own."""
    from scripts import gpu_heads

    backward, results = partial(OnDevice()._run, WholeHeads(*tiles)), []

    def kept(dqkvr, dbias, *arguments, **options):
        for garbage in (inf, nan):
            monkeypatch.setattr(gpu_heads, "_room", lambda device, elements: torch.full((elements,), garbage, device=device))
            held = dbias.clone()
            backward(dqkvr, held, *arguments, **options)
            results.append((dqkvr.clone(), held))
        dbias.copy_(held)

    ours.backward = kept
    judge_attention(ours, B, T, C, NH, dtype, accumulate=True)
    assert all(same_bits(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("T, whole", [(128, True), (96, False), (65, False)])
def test_where_tiles_fill_the_sequences_nobody_asks_whether_a_row_exists_and_the_bits_are_the_same(ours, T, whole):
    """96 positions fill tiles of 32 rows and not of 64; 192 not of 128, with which gpu_check.py tries forward."""
    from llmc.kernels import attention, door

    assert not attention._tiles(64, 128, 192)["WHOLE"] and not attention._tiles(128, 32, 192)["WHOLE"]
    B, C, NH, launch, results = 2, 64, 1, door.launch, []
    qkvr, datty = noise(B, T, 3 * C, dtype=BF16, seed=1), noise(B, T, C, dtype=BF16, seed=2)
    for asked in (False, True):
        chosen = []

        def launch_it(kernel, *args, asked=asked, chosen=chosen, **options):
            if "WHOLE" in options:
                chosen.append(options["WHOLE"])
                options["WHOLE"] &= not asked
            launch(kernel, *args, **options)

        atty, dqkvr, dbias = (unwritten(*shape, dtype=BF16) for shape in ((B, T, C), (B, T, 3 * C), (3 * C,)))
        lse, scratch = unwritten(B, NH, T), room(B, T, C, NH, BF16)
        with door.launched_by(launch_it):
            ours.forward(atty, lse, qkvr, NH, scratch)
            ours.backward(dqkvr, dbias, datty, qkvr, atty, lse, NH, scratch, accumulate=False)
        assert chosen == 3 * [whole]
        results.append((atty, lse, dqkvr, dbias))
    assert all(same_bits(a, b) for a, b in zip(*results))


def test_scores_that_overflow_an_exponential_do_not_matter(ours):
    """Powers are taken below the highest score so far, which rises from tile to tile here."""
    B, T, C, NH = 1, 200, 16, 1
    qkvr = noise(B, T, 3 * C, dtype=BF16, seed=1)
    qkvr[..., :C] = 30.0
    qkvr[..., C : 2 * C] = torch.arange(T).bfloat16()[:, None]  # later keys have higher scores, up to some 24000
    atty = unwritten(B, T, C, dtype=BF16)
    ours.forward(atty, unwritten(B, NH, T), qkvr, NH, {})
    rows = [t for t in range(T) if (qkvr[0, : t + 1, C] == qkvr[0, t, C]).sum() == 1]  # in bf16 some keys are the same
    assert len(rows) > 100 and torch.equal(atty[0, rows], qkvr[0, rows, 2 * C :])  # a query sees its own token alone


@pytest.mark.skipif(DEVICE == "cpu", reason="interpreted, the test from test_layers.py is of the same memory")
@pytest.mark.parametrize("start", [0, 1, 8])
def test_nothing_is_written_around_the_results_on_a_card(start):
    """Also where they are not aligned as the plan aligns them."""
    B, T, C, NH = 2, 131, 128, 2
    memory = [torch.full((B * T * width + 16,), torch.nan, dtype=BF16, device=DEVICE) for width in (C, 3 * C)]
    atty, dqkvr = (x[start : len(x) - 16 + start].view(B, T, -1) for x in memory)
    qkvr, datty = (noise(B, T, width, dtype=BF16, seed=width).to(DEVICE) for width in (3 * C, C))
    scratch, lse = ({name: x.to(DEVICE) for name, x in room(B, T, C, NH, BF16).items()}, torch.empty(B, NH, T, device=DEVICE))
    triton_attention()["attention_forward"](atty, lse, qkvr, NH, scratch)
    dbias = torch.empty(3 * C, dtype=BF16, device=DEVICE)
    triton_attention()["attention_backward"](dqkvr, dbias, datty, qkvr, atty, lse, NH, scratch, accumulate=False)
    assert [x.isnan().sum().item() for x in memory] == [16, 16] and dbias.isfinite().all()


# ----------------------------------------------------------------------------
# in a model


def test_every_recompute_level_gives_the_same_bits(little_work):  # noqa: F811
    """Interpreted, which takes long, those where attention runs again; and where no two activations share a byte."""
    baseline = one_step(build("triton", recompute=0, **OF_THIS_KIND))
    for level in list(NOT_KEPT)[1:] if DEVICE != "cpu" else (5, 6):
        assert one_step(build("triton", recompute=level, **OF_THIS_KIND)) == baseline, f"-r {level}"
    assert one_step(build("triton", recompute=6, own_bytes=True, **OF_THIS_KIND)) == baseline


def test_gradients_are_those_of_the_torch_operations_but_for_noise(little_work):  # noqa: F811
    models = [build("triton", **OF_THIS_KIND), build("torch", "bf16")]
    for model in models:
        accumulate_gradients(model, 0)
    for name, ours in models[0].grads.items():
        assert distance(ours, models[1].grads[name]) <= NOISE["bf16"], name


def test_sampling_and_evaluation_are_those_of_the_torch_operations_but_for_noise(little_work):  # noqa: F811
    rows = []
    for model in (build("triton", **OF_THIS_KIND), build("torch", "bf16")):
        poison(model)
        rows += [torch.stack([torch.from_numpy(model.next_logits(token, position)) for position, token in enumerate((3, 44, 0, 7))])]
        poison(model)
        rows += [torch.tensor(model.loss_of(*batch(3)))]
    for ours, theirs in zip(rows[:2], rows[2:]):
        assert (ours - theirs).abs().max() <= NOISE["bf16"] * theirs.abs().max()
