"""What a step costs on paper, against sums made by hand here, and against the operations that a real model runs."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from case_a import CONFIG
from sent_program import Counting, build
from torch.utils.flop_counter import FlopCounterMode

from llmc.cards import PEAKS, parse_budget
from llmc.config import ModelConfig, config_from_descriptor
from llmc.gpt2 import GPT2
from llmc.kernels_cpu import why_no_cpu_kernels
from llmc.memory.cost import Cost, extra_flops_percent, peak_flops, step_cost
from llmc.memory.ladder import NOT_KEPT, backward_schedule, segments
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tables import FORWARD_STAGES, num_parameters

D12, D48 = config_from_descriptor("d12"), config_from_descriptor("d48")
ODD = ModelConfig(max_seq_len=37, vocab_size=101, num_layers=5, num_heads=5, channels=35, padded_vocab_size=103)
LEVELS = tuple(NOT_KEPT)
needs_numba = pytest.mark.skipif(bool(why_no_cpu_kernels()), reason="tensor parallelism needs numba on a CPU")
every_level = pytest.mark.parametrize("level", LEVELS)


def sizes(o):
    """B, T, C, L, Vp."""
    return o.B, o.T, o.config.channels, o.config.num_layers, o.config.padded_vocab_size


# ----------------------------------------------------------------------------
# FLOPs


@pytest.mark.parametrize("config, B, T", [(D12, 64, 1024), (D48, 16, 1024), (ODD, 3, 7)], ids=["d12", "d48", "odd"])
def test_flops_at_level_0_are_6_per_matmul_weight_and_token_and_attention(config, B, T):
    """Matmul weights are qkv 3CC, attproj CC, fc 4CC and fcproj 4CC in each layer, and the head; layernorms, biases and positions
    multiply nothing. Attention is two products forward and five backward, of which the mask leaves half."""
    o = PlanOptions(config, B, T, recompute=0)
    C, L, Vp = config.channels, config.num_layers, config.padded_vocab_size
    matmul_weights = 12 * L * C * C + Vp * C
    attention = L * (2 * B * T * T * C + 5 * B * T * T * C)
    assert step_cost(o).flops == 6 * matmul_weights * B * T + attention


def test_flops_of_d12_as_a_number():
    """6 x (84934656 + 38633472) x 65536 + 7 x 12 x 64 x 1024 x 1024 x 768, by hand."""
    assert step_cost(PlanOptions(D12, 64, 1024, recompute=0)).flops == 48_588_965_019_648 + 4_329_327_034_368


def test_flops_do_not_depend_on_types_device_or_head_chunk():
    plain = step_cost(PlanOptions(ODD, 3, 7)).flops
    for change in ({"precision": "fp32"}, {"device": "cuda"}, {"head_chunk": 2}, {"optimizer_state": "bf16"}, {"grad_dtype": "fp32"}):
        assert step_cost(PlanOptions(ODD, 3, 7, **change)).flops == plain


def stage_flops(name, B, T, C):
    """Written out once more, from the shapes of each stage's product."""
    forward = {"qkv": 2 * B * T * C * 3 * C, "attproj": 2 * B * T * C * C, "fc": 2 * B * T * C * 4 * C, "fcproj": 2 * B * T * 4 * C * C}
    if name == "attention":
        return 2 * B * T * T * C
    if name == "attention_backward":
        return 5 * B * T * T * C
    of, _, half = name.partition("_")  # backward is a product for the input's gradient and one for the weight's; fcproj's are two stages
    return forward.get(of, 0) * (2 if half == "backward" else 1)


@every_level
@pytest.mark.parametrize("L", [1, 2, 3, 12, 48])
def test_flops_are_those_of_a_walk_through_the_step(level, L):
    """Every block forward, segment by segment forward again and then backward by the schedule, and the head."""
    config = ModelConfig(max_seq_len=37, vocab_size=101, num_layers=L, num_heads=5, channels=35, padded_vocab_size=103)
    o = PlanOptions(config, 3, 7, recompute=level)
    B, T, C, _, Vp = sizes(o)
    s, ran = segments(level, L), []
    ran += [stage.name for _ in range(L) for stage in FORWARD_STAGES]
    for span, again in zip(reversed(s.spans), reversed(s.again)):
        ran += [stage.name for _ in again for stage in FORWARD_STAGES]
        ran += [stage.name for _ in span for stage in backward_schedule(level)]
    assert step_cost(o).flops == sum(stage_flops(name, B, T, C) for name in ran) + 6 * B * T * Vp * C


@every_level
@pytest.mark.parametrize("L, parts", [(3, 1), (7, 1), pytest.param(3, 2, marks=needs_numba), pytest.param(3, 4, marks=needs_numba)])
def test_flops_are_those_that_a_real_model_runs(level, L, parts):
    """torch counts the matmuls of a step as they happen; of attention, which computes more than the causal half, the stages that ran.

    Of a model in parts it is one of them, to which the others say nothing.
    """
    config = replace(CONFIG, num_layers=L)
    o = PlanOptions(config, 2, 16, precision="fp32", recompute=level, head_chunk=10, device="cpu",  # 32 rows: chunks of 10 and a rest
                    tensor_parallel=parts, kernels="torch" if parts == 1 else "numba")  # fmt: skip
    B, T, C, _, _ = sizes(o)
    ran = Counter()
    model = GPT2(Plan(o)) if parts == 1 else build(o, Counting(1), Counting(parts), Counting(parts))

    def counted(run):
        def counting(model, layer):
            ran[run.__name__] += 1
            if not run.__name__.startswith("_attention"):
                run(model, layer)

        return counting

    model.forward_passes, model.backward_passes = ([counted(run) for run in x] for x in (model.forward_passes, model.backward_passes))
    tokens = np.zeros((2, 16), dtype=np.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.forward(tokens)
        model.backward(tokens)
    attention = (ran["_attention"] * 2 + ran["_attention_backward"] * 5) * B * T * T * C // parts
    assert ran["_attention"] >= L and ran["_attention_backward"] == L
    assert step_cost(o).flops == counter.get_total_flops() + attention


@pytest.mark.parametrize("parts", [2, 3, 4, 6])
@every_level
def test_parts_of_a_model_share_its_flops(parts, level):
    whole = PlanOptions(D12, 4, 768, recompute=level)
    assert parts * step_cost(replace(whole, tensor_parallel=parts)).flops == step_cost(whole).flops
    assert extra_flops_percent(replace(whole, tensor_parallel=parts)) == extra_flops_percent(whole)


def test_ranks_with_data_of_their_own_take_as_many_flops_as_one_alone():
    for stage in range(4):
        assert step_cost(PlanOptions(D12, 4, 768, data_ranks=8, zero_stage=stage)).flops == step_cost(PlanOptions(D12, 4, 768)).flops


# ----------------------------------------------------------------------------
# what recomputing costs


BLOCKS_AGAIN = {3: 1, 12: 6, 48: 36}  # on paper: L = 3 in segments of 2, 12 in four of 3, 48 in six of 7 and one of 6


def by_hand(o):
    """Percent above level 0, from the design's column "what is run again"."""
    B, T, C, L, Vp = sizes(o)
    product, attention = B * T * C * C, B * T * T * C
    fc, qkv, attproj, fcproj = 8 * product, 6 * product, 2 * product, 8 * product
    block = qkv + 2 * attention + attproj + fc + fcproj
    again = {
        3: L * fc,
        4: L * (fc + qkv),
        5: L * (fc + qkv + 2 * attention + attproj),  # the whole block, but for the product that makes its output
    }  # fmt: skip
    again[6] = again[5] + BLOCKS_AGAIN[L] * block
    return 100 * again.get(o.recompute, 0) / (3 * L * block + L * attention + 6 * B * T * Vp * C)


@every_level
@pytest.mark.parametrize("config, B, T", [(D12, 64, 1024), (D48, 16, 1024), (D48, 1, 77), (CONFIG, 3, 7)])
def test_extra_flops_are_those_the_design_says_are_run_again(config, B, T, level):
    o = PlanOptions(config, B, T, recompute=level)
    assert extra_flops_percent(o) == pytest.approx(by_hand(o), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("config, B, T", [(D12, 64, 1024), (D48, 16, 1024), (ODD, 3, 7)])
def test_levels_0_to_2_cost_no_flops_and_each_above_costs_more_than_the_one_below(config, B, T):
    extra = [extra_flops_percent(PlanOptions(config, B, T, recompute=level)) for level in LEVELS]
    assert extra[:3] == [0, 0, 0]
    assert 0 < extra[3] < extra[4] < extra[5] < extra[6] < 100 / 3 * 2  # the worst is two more forwards, each under a third of a step


def test_extra_flops_are_relative_to_level_0_whatever_the_batch_and_the_types():
    for level in LEVELS:
        one = extra_flops_percent(PlanOptions(D12, 1, 1024, recompute=level))
        assert one == pytest.approx(extra_flops_percent(PlanOptions(D12, 64, 1024, recompute=level, precision="fp32", device="cuda")))


# ----------------------------------------------------------------------------
# bytes


FORMS = (
    # options, bytes per parameter that the update moves: gradient read twice, weights beside an fp32 master written, the rest both
    ({"precision": "fp32"}, 2 * 4 + 2 * (4 + 4 + 4)),
    ({"precision": "bf16"}, 2 * 2 + 2 + 2 * (4 + 4 + 4)),
    ({"precision": "bf16", "master": "bits16"}, 2 * 2 + 2 * (2 + 2 + 4 + 4)),
    ({"precision": "bf16", "master": "none"}, 2 * 2 + 2 * (2 + 4 + 4)),
    ({"precision": "bf16", "optimizer_state": "bf16"}, 2 * 2 + 2 + 2 * (4 + 2 + 2)),
    ({"precision": "bf16", "grad_dtype": "fp32"}, 2 * 4 + 2 + 2 * (4 + 4 + 4)),
)


@every_level
@pytest.mark.parametrize("form, update_bytes", FORMS)
def test_a_step_is_its_micro_steps_and_one_update(form, update_bytes, level):
    """FLOPs and bytes grow with the number of micro-steps; what is left over is the update's, which has no matmul."""
    o = PlanOptions(ODD, 3, 7, recompute=level, **form)
    one, two, nine = (step_cost(o, n) for n in (1, 2, 9))
    update = 2 * one.bytes - two.bytes
    assert update == update_bytes * num_parameters(ODD)
    assert nine.bytes - update == 9 * (one.bytes - update) > 0
    assert nine.flops == 9 * one.flops


@pytest.mark.parametrize("stage, share", [(0, 1), (1, 8), (2, 8), (3, 8)])
@pytest.mark.parametrize("form, update_bytes", FORMS)
def test_the_update_of_a_rank_moves_its_share(form, update_bytes, stage, share):
    """Of 8 ranks with 2 parts each the norm reads an eighth of a part's gradients at every stage; from stage 1 on the update is of one."""
    o = PlanOptions(D12, 4, 768, data_ranks=8, zero_stage=stage, tensor_parallel=2, **form)
    n, grad = num_parameters(D12, 2), 4 if o.grad_dtype == "fp32" else 2
    assert update_bytes_of(o) == n // 8 * grad + n // share * (update_bytes - grad)


def update_bytes_of(o):
    one, two = (step_cost(o, n).bytes for n in (1, 2))
    return 2 * one - two


def test_a_part_moves_its_share_but_for_the_rows_of_all_that_its_matmuls_read_and_write():
    """Two parts move what one model does, and once more: 11 tensors of the stream in each layer, those of the embedding and the head,
    and the parameters that each part has, the gradients read and written."""
    whole = PlanOptions(D12, 4, 768, precision="fp32", head_chunk=4 * 768, recompute=0)
    B, T, C, L, _ = sizes(whole)
    part = replace(whole, tensor_parallel=2)
    stream = (L * (7 + 4) + 2 + 4) * B * T * C
    layernorms = (4 + 2 + 2 * (4 + 2)) * C  # weights and biases forward, weights backward, gradients of both and of two biases more
    biases = 2 * C  # of the projections
    once_more = 2 * (step_cost(part).bytes - update_bytes_of(part)) - (step_cost(whole).bytes - update_bytes_of(whole))
    assert once_more == 4 * (stream + L * (layernorms + biases))


@pytest.mark.parametrize("precision, element", [("fp32", 4), ("bf16", 2)])
def test_bytes_of_a_level_are_those_of_what_it_runs_again(precision, element):
    """Each stage that runs again reads what it reads and writes what it writes: gelu, then both layernorms, then fc, then qkv."""
    o = PlanOptions(D12, 4, 512, precision=precision)
    B, T, C, L, _ = sizes(o)
    row = B * T * C * element
    moved = [step_cost(replace(o, recompute=level)).bytes for level in range(5)]
    layernorm = 2 * row + 2 * 4 * B * T + 2 * C * element  # input and output, mean and rstd in fp32, weight and bias
    assert moved[1] - moved[0] == L * (4 + 4) * row
    assert moved[2] - moved[1] == L * 2 * layernorm
    assert moved[3] - moved[2] == L * ((1 + 4) * row + (4 * C * C + 4 * C) * element)
    assert moved[4] - moved[3] == L * ((1 + 3) * row + (3 * C * C + 3 * C) * element)


def test_bytes_halve_with_the_size_of_an_element_but_for_what_stays_fp32():
    """Statistics and attention's lse, read and written a few times a step, are the only bytes that bf16 does not halve."""
    B, T, L, NH = 4, 512, D12.num_layers, D12.num_heads
    form = dict(head_chunk=1024, master="none", recompute=0)
    wide, narrow = (step_cost(PlanOptions(D12, B, T, precision=p, optimizer_state=p, **form)).bytes for p in ("fp32", "bf16"))
    # per layer: two layernorms of a mean and an rstd, written, read by the normalising and by backward; lse written and read
    assert 2 * narrow - wide == L * 4 * (2 * 2 * 3 * B * T + 2 * B * NH * T)


def test_intensity_is_flops_per_byte():
    assert Cost(flops=300, bytes=4).intensity == 75
    cost = step_cost(PlanOptions(D12, 4, 1024), 3)
    assert cost.intensity == cost.flops / cost.bytes


def test_intensity_grows_with_the_batch_and_with_micro_steps():
    """Weights are read once for more rows, and the update is paid once for more micro-steps."""
    by_batch = [step_cost(PlanOptions(D12, B, 1024, device="cuda")).intensity for B in (1, 2, 4, 8)]
    by_micro_steps = [step_cost(PlanOptions(D12, 1, 1024, device="cuda"), n).intensity for n in (1, 2, 4, 8)]
    for rising in (by_batch, by_micro_steps):
        assert rising == sorted(rising) and len(set(rising)) == len(rising)


def test_fp8_moves_its_operands_too():
    """Of d48: each input and weight twice, in one layout: read twice, written and read again, where bf16's is read once; gradients in two
    layouts, once: read twice, written, and read by two matmuls, where bf16's is read once, but of fcproj, whose stages are two, twice."""
    o = PlanOptions(config_from_descriptor("d48"), 4, 1024, device="cuda")
    C, n = 1600, 4096
    inputs, gradients, weights = 7 * n * C, 9 * n * C, 12 * C * C
    more = 2 * 4 * (inputs + weights) + 6 * gradients - 2 * n * C
    o8 = replace(o, matmul="fp8")
    assert step_cost(o8).bytes - step_cost(o).bytes == 48 * more and step_cost(o8).flops == step_cost(o).flops
    # later micro-steps write and read a sum in fp32
    assert step_cost(o8, 3).bytes - step_cost(o, 3).bytes == 48 * (3 * more + 2 * 8 * weights)
    # of two parts each has half the weights, and of what lies between matmuls half the columns; ln1, ln2 and dresidual are of all rows
    C = 26 * 64  # heads that two parts share out
    halves = replace(o, config=replace(o.config, num_heads=26, channels=C))
    parts = 2 * 4 * ((1 + 1 + 1 / 2 + 4 / 2) * n * C + 12 * C * C / 2) + 6 * (3 / 2 + 1 + 4 / 2 + 1) * n * C - 2 * n * C
    cost = {matmul: step_cost(replace(halves, matmul=matmul, tensor_parallel=2)).bytes for matmul in ("fp8", "native")}
    assert cost["fp8"] - cost["native"] == 48 * parts


def test_fp8_doubles_the_peak_of_what_it_multiplies():
    """Of a step with no head and no attention to speak of it would be twice bf16's."""
    o = PlanOptions(config_from_descriptor("d48"), 4, 1024, device="cuda")
    bf16, fp8 = (peak_flops(replace(o, matmul=matmul), parse_budget("h200")) for matmul in ("native", "fp8"))
    layers = 6 * 12 * 1600 * 1600 * 48 * 4096
    share = layers / step_cost(o).flops
    assert bf16 == 989.4e12 and fp8 == pytest.approx(bf16 / (share / 2 + 1 - share)) and 0.85 < share < 0.95


# ----------------------------------------------------------------------------
# bytes of the head, and a card's rates


@pytest.mark.parametrize("precision, size", [("fp32", 4), ("bf16", 2)])
def test_the_bytes_of_a_step_without_layers_are_those_of_the_head_counted_by_hand(precision, size):
    """Of one chunk, gradients in the weights' type. The encoder reads and writes rows, and reads their gradient; lnf reads and writes them,
    and in backward zeroes the residual's gradient, reads it, its own and the residual, and writes; the head reads lnf twice, and writes
    its gradient; logits are written, read and written as their gradient, and read by two products; wte is read by two products, and its
    gradient read and written. Of the update: a gradient twice, bf16 weights written, as they have a master, all else read and written."""
    one, two = (
        PlanOptions(replace(ODD, num_layers=L), 3, 7, precision=precision, recompute=0, head_chunk=21, device="cpu") for L in (1, 2)
    )
    C, Vp, rows = 35, 103, 21
    stream, logits, weight = (3 + 7 + 3) * rows * C, 5 * rows * Vp, 4 * Vp * C
    per_parameter = 2 * size + 2 * (4 + 4 + 4) + (2 if precision == "bf16" else 0)
    of_no_layer = 2 * one.part_parameters - two.part_parameters
    assert 2 * step_cost(one).bytes - step_cost(two).bytes == size * (stream + logits + weight) + per_parameter * of_no_layer


def test_a_card_s_peak_is_that_of_the_precision():
    h100 = parse_budget("h100-80")
    bf16, fp32 = (peak_flops(PlanOptions(D12, 4, 1024, precision=p, device="cuda"), h100) for p in ("bf16", "fp32"))
    assert (bf16 / 1e12, fp32 / 1e12) == PEAKS[h100.card.peak] and bf16 > 1.5 * fp32
