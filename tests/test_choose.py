"""What is chosen for a budget is the best there is, every way out is a real one, and a run does what was chosen for it."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from case_a import CONFIG, write_case_a
from test_loop import QUIET, inputs, losses, ran, run, words_of

from llmc.cards import RESERVE
from llmc.config import ModelConfig, config_from_descriptor
from llmc.distributed.world import World
from llmc.errors import NotEnoughMemory
from llmc.flags import parse
from llmc.host import available_host_bytes, total_host_bytes
from llmc.memory.choose import choose_batch, choose_recompute, levels_of, ways_to_fit
from llmc.memory.cost import extra_flops_percent
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.largest_batch import largest_batch, most_that_fit
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.plan_command import RUN_ITSELF
from llmc.request import micro_steps, plan_options
from llmc.units import MIB

D12 = config_from_descriptor("d12")
ODD = ModelConfig(max_seq_len=37, vocab_size=101, num_layers=5, num_heads=5, channels=35, padded_vocab_size=103)
LEVELS = tuple(NOT_KEPT)
CASES = [
    PlanOptions(D12, 8, 1024, device="cuda"),
    PlanOptions(D12, 64, 1024, recompute=3, master="bits16", device="cuda"),
    PlanOptions(CONFIG, 4, 32, precision="fp32"),
    PlanOptions(CONFIG, 9, 64, optimizer_state="bf16", grad_dtype="fp32", head_chunk=5),
    PlanOptions(D12, 2, 512, offload_residual=True, device="cuda"),  # its levels 4 and 5 need the same: what the update takes
]
every_case = pytest.mark.parametrize("options", CASES, ids=["d12", "bits16", "tiny-fp32", "tiny-bf16", "offload"])


@cache
def total(options, **changes) -> int:
    return Plan(replace(options, **changes)).total_bytes


# ----------------------------------------------------------------------------
# the recompute level


def test_levels_are_all_of_them_but_those_that_leave_nothing_to_offload_or_to_keep_gathered():
    assert levels_of(CASES[0]) == LEVELS
    assert levels_of(CASES[4]) == LEVELS[:-1]
    parts = replace(CASES[0], kernels="triton", tensor_parallel=2)
    assert levels_of(parts) == LEVELS and levels_of(replace(parts, keep_gathered=True)) == (0, 1)


@every_case
def test_the_lowest_level_that_fits_is_chosen_to_the_byte(options):
    """Exactly on, one byte below and one above the total of each level, against trying them all."""
    totals = {level: total(options, recompute=level) for level in levels_of(options)}
    for needs in totals.values():
        for budget in (needs - 1, needs, needs + 1):
            fitting = [level for level, n_bytes in totals.items() if n_bytes <= budget]
            if fitting:
                assert choose_recompute(options, budget)[0] == fitting[0]
    assert choose_recompute(options, 10 * totals[0])[0] == 0


def test_every_level_is_chosen_for_a_budget_of_its_own():
    """Where each needs less than the one below, its total is exactly what it takes, and one byte less takes the next."""
    options = CASES[0]
    totals = [total(options, recompute=level) for level in LEVELS]
    assert [choose_recompute(options, needs)[0] for needs in totals] == list(LEVELS)
    assert [choose_recompute(options, needs - 1)[0] for needs in totals[:-1]] == list(LEVELS[1:])
    assert [choose_recompute(options, needs + 1)[0] for needs in totals] == list(LEVELS)


@every_case
def test_the_level_asked_for_has_no_say_in_the_choice(options):
    budget = total(options, recompute=4)
    assert {choose_recompute(replace(options, recompute=level), budget) for level in levels_of(options)} == {
        choose_recompute(options, budget)
    }


@every_case
def test_one_byte_below_the_last_level_is_not_enough_memory(options):
    """The attempt that is explained is the last level's, in the budget there was."""
    last = levels_of(options)[-1]
    budget = total(options, recompute=last) - 1
    with pytest.raises(NotEnoughMemory) as caught:
        choose_recompute(options, budget)
    assert caught.value.options == replace(options, recompute=last)
    assert caught.value.budget_bytes == budget
    for part in (f"-b {options.B} ", f"-t {options.T} ", f"{budget // MIB} MiB", f"-r {last} still needs {-(-(budget + 1) // MIB)} MiB"):
        assert part in str(caught.value)


def test_the_reason_names_the_plan_the_budget_and_the_level_that_was_too_large():
    options = CASES[0]
    needs = {level: total(options, recompute=level) for level in LEVELS}
    level, reason = choose_recompute(options, needs[3])
    assert level == 3
    assert reason.startswith(f"-r 3: its plan of {needs[3] // MIB} MiB fits the {needs[3] // MIB} MiB")
    assert reason.endswith(f"-r 2 needs {-(-needs[2] // MIB)} MiB")
    assert " needs " not in choose_recompute(options, needs[0])[1]


# ----------------------------------------------------------------------------
# the batch


@pytest.mark.parametrize("config, T", [(CONFIG, 32), (ODD, 7), (D12, 1024), (D12, 64)])
@pytest.mark.parametrize("level", LEVELS)
def test_largest_batch_is_exactly_the_largest(config, T, level):
    """Against trying them all: no larger batch fits, although one more row can halve the head's chunk and need less."""
    o = PlanOptions(config, 1, T, recompute=level, precision="bf16", device="cpu", sample_length=min(64, config.max_seq_len))
    totals = [Plan(replace(o, B=B)).total_bytes for B in range(1, 41)]
    for budget in (totals[0] - 1, totals[0], totals[1] - 1, totals[6] - 1, totals[6], totals[7], totals[8], totals[20] - 1, totals[20]):
        fitting = [B for B, total in enumerate(totals, 1) if total <= budget]
        assert largest_batch(o, budget) == max(fitting, default=0), f"budget {budget}"


def test_the_largest_batch_may_lie_far_beyond_the_first_that_does_not_fit():
    """Where a tensor that grows overtakes one that does not, greedy placement takes the two in another order, and may need less."""
    o = PlanOptions(D12, 1, 64, precision="bf16", recompute=6, device="cpu", kernels="numba", matmul="numba")
    totals = {B: Plan(replace(o, B=B)).total_bytes for B in range(200, 320)}
    dips = [B for B in totals if B + 1 in totals and totals[B + 1] < totals[B] - (8 << 20)]
    assert dips
    for dip in dips:
        for budget in (totals[dip + 1], totals[dip + 1] + (4 << 20)):
            fitting = [B for B, total in totals.items() if total <= budget]
            first = next(B for B, total in totals.items() if total > budget)
            assert max(fitting) > first + 8, "or it would be found without looking far"
            assert largest_batch(o, budget) == max(fitting)


def test_the_largest_batch_is_one_that_the_options_take():
    """With FP8, B * T a multiple of 16."""
    o = PlanOptions(D12, 1, 1000, device="cuda", kernels="triton", matmul="fp8")
    budget = total(o, B=35)
    assert most_that_fit(o, budget) >= 35 and o.batch_multiple == 2
    assert largest_batch(o, budget) == max(B for B in range(2, 60, 2) if total(o, B=B) <= budget)
    assert largest_batch(o, total(o, B=1)) == 0
    B, reason = choose_batch(o, budget, None)
    assert B == largest_batch(o, budget) and reason.endswith("which fits and is a multiple of 2")


def test_batches_that_the_options_take_are_multiples_of_what_one_sequence_lacks():
    """A sequence has 7 rows, and in fch 2240 bytes, half of them in each of two parts; with -ge 3 it must be whole times 256."""
    o = PlanOptions(ModelConfig(64, 61, 2, 4, 40, 64), 8, 7, device="cuda")
    assert [replace(o, gelu_fusion=fusion).batch_multiple for fusion in range(4)] == [1, 1, 1, 4]
    assert replace(o, gelu_fusion=3, tensor_parallel=2).batch_multiple == 8
    assert replace(o, matmul="fp8").batch_multiple == 16


def test_the_largest_batch_that_the_options_take_is_not_one_that_does_not_fit(monkeypatch):
    """Where 31 fits, and 30 does not, but 28 does."""
    o = PlanOptions(D12, 1, 1000, device="cuda", kernels="triton", matmul="fp8")
    needs = {B: 10 * B for B in range(100)} | {29: 400, 30: 400}
    monkeypatch.setattr("llmc.memory.largest_batch.most_that_fit", lambda options, budget: 31)
    monkeypatch.setattr("llmc.memory.largest_batch.Plan", lambda o: SimpleNamespace(total_bytes=needs[o.B]))
    assert largest_batch(o, 310) == 28


def test_largest_batch_does_not_depend_on_the_batch_it_is_asked_from():
    budget = 8 << 30
    assert len({largest_batch(PlanOptions(D12, B, 1024), budget) for B in (1, 4, 9)}) == 1


@pytest.mark.parametrize("curve, budget, most", [
    (lambda B: 700 + 50 * B, 10**400, 14), (lambda B: 700 + 50 * B, 12345678, 14),
    (lambda B: -(-(10**6 + 12345 * B) // 256) * 256, 10**10, 12),  # in which halving alone takes 28
    (lambda B: max(2000, 50 * B), 100_003, 40), (lambda B: 10**4 * max(0, B - 999), 1, 40),  # flat, then steep
    (lambda B: B + 3000 * max(0, B - 300), 305, 30), (lambda B: -(-B // 64) * 100, 2750, 40),
    (lambda B: 1000 * B - 5000 * (B % 4 == 0), 10**9, 250),  # there is always one more that fits, up to the budget
], ids=["beyond float", "a line", "whole blocks", "a kink", "a wall", "steeper", "stairs", "a saw"])  # fmt: skip
def test_the_largest_batch_takes_few_plans_whatever_memory_is_like(monkeypatch, curve, budget, most):
    """Also where lines lead astray. Ten of the plans are of the batches beyond it."""
    asked = []

    def plan(o):
        asked.append(o.B)
        return SimpleNamespace(options=o, total_bytes=curve(o.B), tensors={})

    monkeypatch.setattr("llmc.memory.largest_batch.Plan", plan)
    B = largest_batch(CASES[0], budget)
    assert curve(B) <= budget < curve(B + 1) and len(set(asked)) == len(asked) <= most


def test_the_search_goes_on_over_several_dips(monkeypatch):
    """Every eighth batch needs a tenth of what others do: beyond 10 only 16, 24 and so on up to 96 fit."""

    def plan(o):
        return SimpleNamespace(options=o, total_bytes=o.B * (100 if o.B % 8 == 0 else 1000), tensors={})

    monkeypatch.setattr("llmc.memory.largest_batch.Plan", plan)
    assert largest_batch(CASES[0], 10_000) == 96


@pytest.mark.parametrize("level", [0, 2, 5, 6])
@pytest.mark.parametrize("form", [{"precision": "fp32"}, {"precision": "bf16", "head_chunk": 7}, {"device": "cuda"}], ids=str)
def test_the_largest_batch_is_chosen_among_all_up_to_40(form, level):
    """Against trying them all; with sequences per step, the largest divisor of them that fits."""
    o = PlanOptions(ODD, 3, 7, recompute=level, **form)
    totals = {B: total(o, B=B) for B in range(1, 61)}  # some beyond 40, so that the largest is among them
    for B in (1, 2, 8, 17, 39):
        for budget in (totals[B] - 1, totals[B]):
            fitting = [b for b, needs in totals.items() if needs <= budget]
            if not fitting:
                continue
            assert choose_batch(o, budget, None)[0] == max(fitting)
            for sequences in (1, 36, 97):
                assert choose_batch(o, budget, sequences)[0] == max(b for b in fitting if sequences % b == 0)


def test_the_largest_batch_is_found_beyond_one_that_does_not_fit():
    """Flash attention keeps a copy of dq for every part of the card that works on a head: at d12 two with 10 sequences, one with 11,
    so 10 need more than 11 do, and what fits 11 does not fit 10."""
    o = PlanOptions(D12, 1, 1024, recompute=5, device="cuda", attention="flash")
    budget = total(o, B=11)
    assert total(o, B=10) > budget < total(o, B=12)
    assert choose_batch(o, budget, None)[0] == 11
    assert choose_batch(o, budget, 22)[0] == 11


@pytest.mark.parametrize("processors, heads, one_copy", [(132, 1, 132), (301, 2, 151)])
def test_the_largest_batch_may_lie_as_far_beyond_as_a_card_has_processors(processors, heads, one_copy):
    """Of one head flash attention has two copies of dq up to 131 sequences, and one with 132, which need less. 301 is no multiple of 2."""
    config = ModelConfig(max_seq_len=64, vocab_size=61, num_layers=1, num_heads=heads, channels=64 * heads, padded_vocab_size=64)
    o = PlanOptions(config, 1, 64, recompute=6, optimizer_state="bf16", device="cuda", attention="flash", processors=processors)
    totals = {B: total(o, B=B) for B in range(1, 201)}
    for budget in (totals[one_copy], totals[one_copy] - 1, totals[one_copy - 14], totals[one_copy - 11]):
        assert largest_batch(o, budget) == max(B for B, needs in totals.items() if needs <= budget)
    assert largest_batch(o, totals[one_copy]) == one_copy and totals[one_copy - 12] > totals[one_copy]


@pytest.mark.parametrize("sequences, T", [(4, 64), (6, 64), (12, 64), (40, 16)])
def test_the_largest_batch_may_be_a_whole_step_s_where_ranks_sum_every_micro_step_of_several(sequences, T):
    """Two ranks keep such sums from one micro-step to the next, which a step of one does not need: one sequence may need more than many."""
    o = PlanOptions(D12, 1, T, data_ranks=2, reduce_every_micro_step=True, step_sequences=sequences)
    totals = {B: total(o, B=B) for B in range(1, sequences + 30)}
    assert totals[sequences - 1] > totals[sequences], "else this tests nothing"
    for budget in (min(totals.values()) - 1, totals[sequences] - 1, totals[sequences], totals[1] - 1, totals[1], totals[sequences - 1] - 1):
        fitting = [B for B, needs in totals.items() if needs <= budget]
        assert largest_batch(o, budget) == max(fitting, default=0)
        if dividing := [B for B in fitting if sequences % B == 0]:
            assert choose_batch(o, budget, sequences)[0] == max(dividing)
        else:
            with pytest.raises(NotEnoughMemory, match="not even -b 1"):
                choose_batch(o, budget, sequences)


def test_a_whole_step_that_no_shard_holds_is_not_taken_for_one_sequence_that_does_not_fit():
    o = PlanOptions(D12, 1, 64, data_ranks=2, reduce_every_micro_step=True, step_sequences=4)
    budget = total(o, B=4)
    assert choose_batch(o, budget, 4)[0] == 4 and total(o, B=1) > budget
    with pytest.raises(NotEnoughMemory, match="not even -b 1"):
        choose_batch(o, budget, 4, most=3)


def test_not_even_one_sequence_is_not_enough_memory():
    o = PlanOptions(D12, 9, 1024, recompute=2)
    budget = total(o, B=1) - 1
    with pytest.raises(NotEnoughMemory, match=f"-b 1 -t 1024 .* it needs {-(-(budget + 1) // MIB)} MiB") as caught:
        choose_batch(o, budget, 36)
    assert caught.value.options == replace(o, B=1)
    assert (caught.value.budget_bytes, caught.value.grad_accum_steps) == (budget, 36)
    assert choose_batch(o, budget + 1, 36)[0] == 1


def test_the_reason_tells_the_most_that_fits_from_what_divides():
    o = PlanOptions(ODD, 1, 7)
    budget = total(o, B=11)
    assert (
        choose_batch(o, budget, None)[1].startswith("-b 11: 11 sequences are the most")
        and "divides" not in choose_batch(o, budget, None)[1]
    )
    assert choose_batch(o, budget, 22)[1] == choose_batch(o, budget, None)[1]
    assert choose_batch(o, budget, None, most=1000) == choose_batch(o, budget, None)  # data that have more sequences are not worth a word
    reason = choose_batch(o, budget, 64)[1]
    assert reason.startswith("-b 8: 11 sequences are the most") and reason.endswith("which fits and divides the 64 of a step")


def test_the_reason_names_no_step_where_any_number_is_allowed():
    """86 sequences need more than 88 do: where the data have 86, fewer are taken, and not to divide anything."""
    o = PlanOptions(config_from_descriptor("d12"), 1, 1024, recompute=6, device="cuda")
    budget = total(replace(o, B=88))
    chosen, reason = choose_batch(o, budget, None, most=86)
    assert chosen < 86 and total(replace(o, B=chosen)) <= budget
    assert reason.endswith(f", 86 the most that a shard of the data holds, and {chosen} is the largest number up to that which fits")


@pytest.mark.parametrize("sequences", [None, 36])
def test_one_sequence_is_taken_where_no_shard_has_a_whole_one(sequences):
    """That the data are too few is for those to say who read them."""
    o = PlanOptions(ODD, 1, 7)
    B, reason = choose_batch(o, total(o, B=11), sequences, most=0)
    assert B == 1 and reason.startswith("-b 1: 11 sequences are the most")
    assert reason.endswith(", 0 the most that a shard of the data holds")


def test_files_in_a_container_s_cache_are_free_memory(tmp_path):
    for name, content in {"max": 2**30, "current": 900 * 2**20, "stat": "anon 5\nactive_file 104857600\ninactive_file 209715200"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{content}\n")
    (tmp_path / "groups").write_text("0::/\n")
    assert available_host_bytes(tmp_path, tmp_path / "groups") == (1024 - 900 + 300) * 2**20
    assert total_host_bytes(tmp_path, tmp_path / "groups") == 2**30
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes(tmp_path, tmp_path / "groups") > 2**30
    assert total_host_bytes(tmp_path, tmp_path / "groups") == total_host_bytes(tmp_path, tmp_path / "no such file") > 2**30
    assert available_host_bytes(tmp_path, tmp_path / "no such file") > 2**30


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("limited", ["", "batch", "batch/job_7", "batch/job_7/step_0"])
def test_the_memory_limit_of_a_job_s_group_counts_and_that_of_any_above_it(tmp_path, version, limited):
    """Version 1 counts what lies below in lines of its own. Some groups may be out of sight, as from a container."""
    root = tmp_path / ("" if version == 2 else "memory")
    limit, used, cached = ("max", "current", "") if version == 2 else ("limit_in_bytes", "usage_in_bytes", "total_")
    for name in ("", "batch", "batch/job_7", "batch/job_7/step_0", "batch/job_8"):
        if name == "batch" != limited:
            continue  # out of sight
        folder, mine = root / name, 300 if name == limited else 900 if name != "batch/job_8" else 100
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"memory.{limit}").write_text(f"{mine << 20}\n")
        (folder / f"memory.{used}").write_text(f"{200 << 20}\n")
        (folder / "memory.stat").write_text(f"active_file 0\ninactive_file 0\n{cached}active_file {10 << 20}\n{cached}inactive_file 0\n")
    groups = tmp_path / "groups"
    groups.write_text("0::/batch/job_7/step_0\n" if version == 2 else "9:cpu:/\n4:memory,x:/batch/job_7/step_0\n0::/batch/job_7/step_0\n")
    assert available_host_bytes(tmp_path, groups) == (300 - 200 + 10) << 20


# ----------------------------------------------------------------------------
# ways to fit: the flags are parsed and planned again, as the program would

COMMANDS = (
    "-e d12 -b 16 --device cuda --precision bf16",
    "-e d12 -b 12 -d 61440 --device cuda --precision bf16",  # 5 micro-steps
    "-e d12 -b 14 -d 28672 -r 3 --device cuda --precision bf16",  # 28 sequences, which half of 7 does not divide
    "-e d12 -b 16 --device cpu --precision fp32",
    "-e d12 -b 8 -w 0 --device cuda --precision bf16",
    "-e d12 -b 8 --master bits16 --optimizer-state bf16 --grad-dtype fp32 --device cuda --precision bf16",
    "-e d12 -b 8 -t 256 --offload-residual --head-chunk 100 --device cuda --precision bf16",
    "-e d12 -b 8 --offload-optimizer --device cuda --precision bf16",
    "-e d6 -b 1 -r 6 --device cpu --precision bf16",
    "-e d12 -b 16 -pn 2 -z 1 --device cuda --precision bf16",  # micro-steps bring sums of their own
)
BUDGETS = (0.95, 0.6, 0.4, 0.2)  # of what the command asks for
every_command = pytest.mark.parametrize("command", COMMANDS)
EVERY_WAY = 10**9


@cache
def planned(command) -> tuple[PlanOptions, int]:
    """The options and the number of sequences per step that a command line stands for."""
    s = parse(words_of([command]))
    world = World(num_processes=s.num_processes)
    options = plan_options(s, config_from_descriptor(s.model), s.precision, s.device, world)
    return options, options.B * micro_steps(s, world)


@cache
def asked(command, share) -> tuple[int, list]:
    """(budget, all ways there are) at a share of what the command needs."""
    options, sequences = planned(command)
    budget = int(share * total(options))
    return budget, ways_to_fit(options, budget, sequences, count=EVERY_WAY)


def changes(options):
    """How far each choice is from the command's: B goes down, the rest up."""
    masters, states = ("fp32", "bits16", "none"), ("fp32", "bf16")
    return (
        -options.B, options.recompute, masters.index(options.master), states.index(options.optimizer_state), options.offload_optimizer
    )  # fmt: skip


def at_least(mine, theirs) -> bool:
    return all(a >= b for a, b in zip(mine, theirs))


@every_command
@pytest.mark.parametrize("share", BUDGETS)
def test_every_way_fits_when_its_flags_are_added_to_the_command(command, share):
    """The bytes are those said; the sequences of a step stay, in micro-steps of a divisor, and nothing else changes."""
    _, sequences = planned(command)
    budget, ways = asked(command, share)
    for way in ways:
        options, kept = planned(f"{command} {way.flags}")
        assert total(options) == way.total_bytes <= budget, way.flags
        assert kept == sequences and sequences % options.B == 0, way.flags
        assert way.flags, "something has to change"
        may_change = dict(B=1, step_sequences=0, recompute=1, master="", optimizer_state="", offload_optimizer=False)
        assert replace(options, **may_change) == replace(planned(command)[0], **may_change)


def combinations(command) -> list[PlanOptions]:
    """Everything there is to try: every batch that divides, level above, form of the master and of m and v, and on a GPU whether these
    are in host memory; not the command itself."""
    options, sequences = planned(command)
    options = replace(options, step_sequences=sequences)
    batches, half = [options.B], options.B
    while half > 1:  # each the largest divisor up to half of the one before
        half = max(b for b in range(1, half // 2 + 1) if sequences % b == 0)
        batches.append(half)
    masters = ("fp32", "bits16") if options.precision == "bf16" and options.master == "fp32" else (options.master,)
    states = ("fp32", "bf16")[("fp32", "bf16").index(options.optimizer_state) :]
    levels = [level for level in levels_of(options) if level >= options.recompute]
    hosts = (False, True) if options.device == "cuda" and not options.offload_optimizer else (options.offload_optimizer,)
    return [
        replace(options, B=B, recompute=level, master=master, optimizer_state=state, offload_optimizer=host)
        for B, level, master, state, host in product(batches, levels, masters, states, hosts)
    ][1:]


@every_command
def test_all_ways_are_whatever_fits_and_saves_more_than_its_parts_in_order_of_cost(command):
    """Brute force."""
    for share in BUDGETS:
        budget, ways = asked(command, share)
        listed = [changes(planned(f"{command} {way.flags}")[0]) for way in ways]
        fitting = {changes(o): total(o) for o in combinations(command) if total(o) <= budget}
        useful = [
            mine for mine in fitting
            if all(fitting[theirs] > fitting[mine] for theirs in fitting if theirs != mine and at_least(mine, theirs))
        ]  # fmt: skip
        assert sorted(listed) == sorted(useful)
        costs = [way.cost for way in ways]
        assert costs == sorted(costs) and all(cost > 0 for cost in costs)


@every_command
def test_a_way_that_adds_to_another_costs_more(command):
    for share in BUDGETS:
        ways = [(changes(planned(f"{command} {way.flags}")[0]), way) for way in asked(command, share)[1]]
        for mine, way in ways:
            assert all(way.cost > other.cost for theirs, other in ways if mine != theirs and at_least(mine, theirs))


@every_command
def test_three_ways_are_printed_and_one_that_only_adds_to_another_just_where_others_are_too_few(command):
    """Those that spare something every other one takes come first, the cheapest of them; only what room they leave is filled up."""
    options, sequences = planned(command)
    for share in BUDGETS:
        budget, ways = asked(command, share)
        taken = {way: changes(planned(f"{command} {way.flags}")[0]) for way in ways}
        minimal = [way for way in ways if not any(taken[way] != other and at_least(taken[way], other) for other in taken.values())]
        printed = ways_to_fit(options, budget, sequences)
        assert len(printed) == min(3, len(ways))
        assert [way for way in printed if way in minimal] == minimal[:3]
        adding = [way for way in ways if way not in minimal]
        assert [way for way in printed if way not in minimal] == adding[: 3 - len(minimal[:3])]
        assert [way.cost for way in printed] == sorted(way.cost for way in printed)


def test_a_way_that_rounds_m_and_v_comes_last():
    """It alone changes the numbers of a run, though it takes next to no time: a level and half the batch come before it."""
    options, sequences = planned(COMMANDS[0])
    budget, _ = asked(COMMANDS[0], 0.95)
    printed = [way.flags for way in ways_to_fit(options, budget, sequences)]
    assert printed[-1] == "--optimizer-state bf16" and not any("--optimizer-state" in flags for flags in printed[:-1])


def test_single_ways_come_in_the_order_of_what_they_cost():
    """A longer update, waiting for the disk, half the batch, an eighth at three times the price, and rounded m and v."""
    o = PlanOptions(D12, 8, 64, async_checkpoint=True)
    costs = {way.flags: way.cost for way in ways_to_fit(o, total(o, step_sequences=8) - 1, 8, count=EVERY_WAY)}
    singles = ["--master bits16", "--async-checkpoint 0", "-b 4 -d 512", "-b 1 -d 512", "--optimizer-state bf16"]
    assert [flags for flags in costs if flags in singles] == singles and costs[singles[3]] == 3 * costs[singles[2]] < costs[singles[4]]


def test_host_memory_comes_the_sooner_the_longer_a_step_is():
    """The bus takes as long for one sequence as for half a million tokens."""
    options, places = PlanOptions(D12, 4, 1024, device="cuda"), []
    for sequences in (4, 16, 512):
        budget = int(0.8 * total(replace(options, step_sequences=sequences)))
        printed = [way.flags for way in ways_to_fit(options, budget, sequences, count=EVERY_WAY)]
        places.append(printed.index("--offload-optimizer") / len(printed))
    assert places == sorted(places, reverse=True) and places[0] > places[-1]


def test_no_way_has_a_batch_that_the_options_do_not_take():
    """With FP8, B * T a multiple of 16: of 1000 tokens two sequences, but not one."""
    o = PlanOptions(D12, 4, 1000, device="cuda", kernels="triton", matmul="fp8")
    ways = ways_to_fit(o, total(o) - 1, 4, count=EVERY_WAY)
    assert {re.match(r"(-b \d+)?", way.flags)[0] for way in ways} == {"", "-b 2"}


@every_command
def test_there_is_no_way_into_an_impossible_budget(command):
    options, sequences = planned(command)
    assert ways_to_fit(options, 0, sequences) == ways_to_fit(options, MIB, sequences) == []


@every_command
def test_the_price_says_how_many_micro_steps_and_flops_a_way_takes(command):
    options, sequences = planned(command)
    for way in (way for share in BUDGETS for way in asked(command, share)[1]):
        taken = planned(f"{command} {way.flags}")[0]
        want = []
        if taken.B != options.B:
            want.append(f"{sequences // taken.B} micro-steps a step")
        if taken.recompute != options.recompute:
            want.append(f"{extra_flops_percent(taken) - extra_flops_percent(options):.0f}% more FLOPs, the same bits")
        if taken.master != options.master:
            want.append("the same weights, a slightly longer update")
        if taken.offload_optimizer != options.offload_optimizer:
            mib = Plan(taken).optimizer_bytes // MIB
            want.append(f"{mib} MiB of host memory for each process, which each update moves over the bus twice")
        if taken.optimizer_state != options.optimizer_state:
            want.append("m and v are rounded")
        assert way.price == "; ".join(want)


# ----------------------------------------------------------------------------
# the command line: --plan

CUDA = "--plan -e d12 --device cuda --precision bf16"


def test_plan_with_r_auto_prints_the_reason_and_marks_the_level():
    lines = ran(f"{CUDA} -b 64 -r auto --memory-budget 16GiB").splitlines()
    options = PlanOptions(D12, 64, 1024, device="cuda")
    level, reason = choose_recompute(options, 16 << 30)
    assert 0 < level < 6 and lines[0] == f"-r auto takes {reason} (16GiB)"
    assert [line.split()[0] for line in lines if re.match(r" *\d+\*", line)] == [f"{level}*"]


def test_plan_with_b_auto_prints_the_reason_and_plans_for_what_it_chose():
    argv = f"{CUDA} -r 2 -b auto -d 524288 --memory-budget 16GiB"
    lines = ran(argv).splitlines()
    B, reason = choose_batch(PlanOptions(D12, 1, 1024, recompute=2, device="cuda"), 16 << 30, 512)
    assert 1 < B < 512 and lines[0] == f"-b auto takes {reason} (16GiB)"
    assert f"B={B} T=1024" in lines[1]
    told = json.loads(ran(argv, "--json"))
    assert (told["batch_size"], told["grad_accum_steps"]) == (B, 512 // B)


def test_b_auto_without_d_takes_the_most_that_fits():
    told = json.loads(ran(f"{CUDA} -b auto -r 4 --memory-budget 10GiB --json"))
    options = PlanOptions(D12, told["batch_size"], 1024, recompute=4, device="cuda")
    assert total(options) <= 10 << 30 < total(options, B=options.B + 1)
    assert told["grad_accum_steps"] == 1


def test_a_sentence_where_tokens_of_a_step_are_not_whole_sequences():
    result = run(f"{CUDA} -b auto -d 524289 --memory-budget 16GiB")
    assert result.code == 2 and not result.out
    assert re.fullmatch(r"error: -d 524289 is not a multiple of .* = 1024; use -d 524288 or 525312\n", result.err)


@pytest.mark.parametrize("auto", ["-r auto", "-b auto"])
def test_a_sentence_where_there_is_nothing_to_choose_for(auto):
    """--plan touches no device, so what a GPU has free must be said."""
    result = run(f"{CUDA} {auto}")
    assert result.code == 2 and not result.out
    assert len(result.err.splitlines()) == 1 and "--memory-budget" in result.err and "h100-80" in result.err


def test_a_sentence_where_both_are_to_be_chosen():
    result = run(f"{CUDA} -b auto -r auto --memory-budget 16GiB")
    assert result.code == 2 and len(result.err.splitlines()) == 1 and "-r auto -b auto" in result.err


def flags_listed(err: str) -> list[str]:
    """The ways out that stand below the plan on stderr."""
    _, _, listed = err.partition("flags to add:\n")
    return [re.split(r"  +", line.strip())[0] for line in listed.splitlines()]


@pytest.mark.parametrize("tokens", ["", "-d 4096000"], ids=["one micro-step", "four"])
def test_ways_out_of_r_auto_keep_the_tokens_of_a_step(tokens):
    """The flags are to be added to the command as it was; nobody asked for smaller steps."""
    command = f"{CUDA} -b 1000 {tokens} -r auto --memory-budget 4GiB"
    result = run(command)
    assert result.code == 3 and flags_listed(result.err)
    wanted = 1024 * 1000 * (4 if tokens else 1)
    for flags in flags_listed(result.err):
        told = json.loads(ran(f"{command} {flags} --json"))
        assert told["batch_size"] * told["grad_accum_steps"] * told["sequence_length"] == wanted, flags


def test_ways_below_a_plan_keep_the_tokens_of_a_step():
    command = f"{CUDA} -b 1000 -d 4096000 --memory-budget 4GiB"
    ways = flags_listed(ran(command))
    assert ways
    for flags in ways:
        told = json.loads(ran(f"{command} {flags} --json"))
        assert told["batch_size"] * told["grad_accum_steps"] == 4000, flags


def test_nothing_fits_is_exit_3_and_nothing_on_stdout():
    result = run(f"{CUDA} -b auto --memory-budget 500MiB")
    assert result.code == 3 and not result.out
    assert result.err.startswith("error: not even -b 1 -t 1024 fits 500 MiB at -r 1: ")
    assert "no flag makes it fit 500 MiB" in result.err


def test_auto_leaves_a_reserve_of_what_is_free_and_none_of_what_is_said(monkeypatch):
    """What the machine has free is shared with the process itself, what a run loads before it counts included; a number on the command
    line is taken at its word."""
    needs = total(PlanOptions(D12, 4, 1024, recompute=0))
    command = "--plan -e d12 -b 4 --precision bf16 --device cpu --matmul native -r auto --json"
    said = json.loads(ran(f"{command} --memory-budget {needs / 1024}KiB"))
    monkeypatch.setattr("llmc.plan_command.available_host_bytes", lambda: needs + RUN_ITSELF)
    free = json.loads(ran(command))
    assert (said["recompute"], said["budget"]["mib"]) == (0, needs / MIB)
    assert (free["recompute"], free["budget"]["mib"]) == (1, needs / MIB)
    monkeypatch.setattr("llmc.plan_command.available_host_bytes", lambda: int(needs / (1 - RESERVE["cpu"])) + 2 + RUN_ITSELF)
    assert json.loads(ran(command))["recompute"] == 0


def test_processes_of_a_machine_share_what_it_has_free(monkeypatch):
    """As in a run; a size that is given is each process's own, and what another machine has is its own."""
    monkeypatch.setattr("llmc.plan_command.available_host_bytes", lambda: 12000 * MIB)
    command = "--plan -e d12 -b 4 -t 64 --device cpu --json"
    for flags, mib in {"": 12000, "-pn 4": 3000, "--ranks 4": 3000, "-pn 4 -pg 2": 6000}.items():
        assert json.loads(ran(f"{command} {flags}"))["budget"]["mib"] == mib - RUN_ITSELF / MIB, flags
    assert json.loads(ran(f"{command} -pn 4 --memory-budget 10GiB"))["budget"]["mib"] == 10240
    refused = run("--plan -e d48 -b auto -t 64 --device cpu -pn 2")
    assert refused.code == 3 and "not even -b 1 -t 64 fits 5543 MiB" in refused.err
    monkeypatch.setattr("llmc.plan_command.available_host_bytes", lambda: RUN_ITSELF - MIB)
    assert json.loads(ran(command))["budget"]["mib"] == 0


# ----------------------------------------------------------------------------
# real runs of the tiny model

SIZES = "-t 32 -g 32 -l 3e-3 --precision fp32 --kernels torch"
TINY = PlanOptions(CONFIG, 4, 32, precision="fp32", sample_length=32)


def kib(n_bytes: float) -> str:
    """A budget of exactly that many bytes."""
    assert float(f"{n_bytes / 1024}") * 1024 == n_bytes
    return f"--memory-budget {n_bytes / 1024}KiB"


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Path:
    return write_case_a(tmp_path_factory.mktemp("case_a"))


@pytest.mark.parametrize("level", [1, 3, 6])
def test_r_auto_trains_at_the_lowest_level_that_fits_and_says_why(case, tmp_path, level):
    """The budget lies between two levels' totals. Losses are those of that level, asked for by number; so are all arenas."""
    needs, more = total(TINY, recompute=level), total(TINY, recompute=level - 1)
    budget = (needs + more) // 2
    common = [*inputs(case), f"-b 4 -d 256 -x 3 {SIZES} {QUIET}"]
    chosen = ran(*common, f"-r auto {kib(budget)} -o", tmp_path / "auto")
    fixed = ran(*common, f"-r {level} -o", tmp_path / "fixed")
    assert f"-r auto takes {choose_recompute(TINY, budget)[1]} (" in chosen
    assert re.search(rf"^\| recompute +\| {level} +\|$", chosen, re.MULTILINE)
    assert losses(chosen) == losses(fixed) and len(losses(chosen)) == 3
    plans = [json.loads((tmp_path / name / "memory.json").read_text())["plan"] for name in ("auto", "fixed")]
    assert plans[0] == plans[1] and plans[0]["options"]["recompute"] == level
    assert plans[0]["total_bytes"] == needs


def test_b_auto_trains_with_the_largest_divisor_and_accumulates_the_rest(case):
    """A step of 12 sequences where 5 fit: three micro-steps of 4. The losses are those of -b 4."""
    common = [*inputs(case), f"-d {12 * 32} -x 2 {SIZES} {QUIET}"]
    chosen = ran(*common, f"-b auto {kib(total(TINY, B=5))}")
    assert "-b auto takes -b 4: 5 sequences are the most that fit" in chosen
    assert "batch_size B=4 * seq_len T=32 * num_processes=1 and total_batch_size=384" in chosen
    assert "=> setting grad_accum_steps=3" in chosen
    assert re.search(r"^\| micro batch size B +\| 4 +\|$", chosen, re.MULTILINE)
    assert losses(chosen) == losses(ran(*common, "-b 4")) and len(losses(chosen)) == 2


def test_b_auto_without_d_trains_on_the_most_that_fits(case):
    out = ran(*inputs(case), f"-x 1 {SIZES} {QUIET} -b auto {kib(total(TINY, B=7) + 4)}")
    assert "batch_size B=7 * seq_len T=32 * num_processes=1 and total_batch_size=224" in out
    assert " -> estimated maximum batch size: 7\n" in out  # of the budget, not of the machine
    assert "=> setting grad_accum_steps=1" in out


def test_a_resumed_b_auto_takes_the_checkpoint_s_batch_although_more_would_fit(case, tmp_path):
    """Its place in the data is counted in that batch; so the run goes on as the one that never stopped."""
    common = [*inputs(case), f"-d {8 * 32} -n 2 {SIZES} {QUIET} -o"]
    small, large = kib(total(TINY, B=3)), kib(total(TINY, B=8))
    first = ran(*common, tmp_path / "run", f"-x 2 -b auto {small}")
    assert "batch_size B=2 " in first
    assert "batch_size B=8 " in ran(*inputs(case), f"-x 0 -d {8 * 32} {SIZES} {QUIET} -b auto {large}")  # what it would take afresh
    resumed = ran(*common, tmp_path / "run", f"-x 4 -y 1 -b auto {large}")
    assert "-b auto takes -b 2: the checkpoint's" in resumed
    assert "batch_size B=2 " in resumed and "=> setting grad_accum_steps=4" in resumed
    whole = ran(*common, tmp_path / "whole", "-x 4 -b 2")
    assert losses(first) + losses(resumed) == losses(whole) and len(losses(whole)) == 4
    told = json.loads(ran(*common, tmp_path / "run", f"-y 1 -b auto {large} --plan --json"))
    assert (told["batch_size"], told["grad_accum_steps"]) == (2, 4)


def test_a_run_that_does_not_fit_is_exit_3_with_the_table_and_ways_that_work(case):
    """Nothing was trained; added to the same command, each of the ways trains to the end."""
    needs = total(TINY, B=8)
    command = [*inputs(case), f"-b 8 -d 512 -x 1 {SIZES} {QUIET} {kib((needs + total(TINY, B=8, recompute=2)) // 2)}"]
    result = run(*command)
    assert result.code == 3 and not losses(result.out) and "allocating" not in result.out
    assert result.err.startswith(f"error: the plan needs {-(-needs // MIB)} MiB, and there are ")
    rows = re.findall(r"^ *(\d+\*?)  +\d+\.\d ", result.err, re.MULTILINE)
    assert rows == ["0", "1*", "2", "3", "4", "5", "6"]
    ways = flags_listed(result.err)
    assert "-r 2" in ways and len(ways) == 3
    for flags in ways:
        out = ran(*command, flags)
        assert len(losses(out)) == 1 and "total_batch_size=512" in out  # two micro-steps before, as many tokens now


def test_auto_on_a_run_where_nothing_fits_is_exit_3_before_anything_is_built(case, tmp_path):
    for auto in ("-r auto -b 4", "-b auto"):
        result = run(*inputs(case), f"-x 1 {SIZES} {QUIET} {auto} --memory-budget 100KiB -o", tmp_path / "new")
        assert result.code == 3 and not losses(result.out) and not (tmp_path / "new").exists()
        assert "memory plan in MiB: " in result.err and "no flag makes it fit" in result.err


LEVEL_HELPS, ONLY_A_BATCH_HELPS = dict(B=8, recompute=2), dict(B=4, recompute=6)


@pytest.mark.parametrize(
    "asked, fits, expected",
    [
        ("-b 8", LEVEL_HELPS, "-r 2"),
        ("-b auto", LEVEL_HELPS, "-r 2"),
        ("-b 8", ONLY_A_BATCH_HELPS, "-b 2 -d 256 -r 2"),
        ("-b auto", ONLY_A_BATCH_HELPS, "-b 2 -d 256 -r 2"),
        ("-b 8 -r auto", ONLY_A_BATCH_HELPS, "-b 4 -d 256"),
    ],
)
def test_ways_out_of_a_resumed_run_can_be_taken(case, tmp_path, asked, fits, expected):
    """A smaller batch is one of them where no level is enough, although a checkpoint's place in the data is counted in its own."""
    ran(*inputs(case), f"-b 8 -x 1 -n 1 {SIZES} {QUIET} -o", first := tmp_path / "first")
    command = [*inputs(case), f"{asked} -x 2 -y 1 {SIZES} {QUIET} {kib(total(TINY, **fits))} -o", first]
    result = run(*command)
    ways = flags_listed(result.err)
    assert result.code == 3 and any(flags.startswith(expected) for flags in ways), ways
    for flags in ways:
        shutil.copytree(first, folder := tmp_path / flags)
        taken = run(*command[:-1], folder, flags)
        assert taken.code == 0 and len(losses(taken.out)) == 1, f"{flags}: {taken.err}"


@pytest.mark.parametrize("name, B, budget_from", [("d12", 88, 86), ("d12", 96, 80)])
def test_auto_s_batch_fits_where_fewer_sequences_need_more(name, B, budget_from):
    """Placement is greedy, so memory dips here and there: whatever divides the step, what is chosen has a plan that fits."""
    o = PlanOptions(config_from_descriptor(name), 1, 1024, recompute=6, device="cuda")
    budget = total(replace(o, B=B))
    chosen, _ = choose_batch(o, budget, budget_from)
    assert total(replace(o, B=chosen)) <= budget and budget_from % chosen == 0


def test_cards_without_bf16_are_planned_in_fp32():
    told = json.loads(ran("--device auto --plan --json -e d12 -b 4 --memory-budget t4"))
    assert (told["precision"], told["device"]) == ("fp32", "cuda")
    refused = run("--device auto --plan -e d12 --precision bf16 --memory-budget v100")
    assert refused.code == 2 and "v100-16 has no bf16 arithmetic" in refused.err


def test_a_card_that_is_named_has_its_multiprocessors_and_makes_no_gpu_of_a_cpu():
    command = "--plan --json -e d12 -b 4 --precision bf16 --memory-budget 4090"
    told = {device: json.loads(ran(command, "--device", device)) for device in ("auto", "cuda", "cpu")}
    assert {device: (plan["device"], plan["processors"]) for device, plan in told.items()} == {
        "auto": ("cuda", 128), "cuda": ("cuda", 128), "cpu": ("cpu", None)
    }  # fmt: skip


def test_the_reason_of_auto_is_in_every_form_of_the_plan():
    command = "--plan -e d12 -b auto -t 1024 -r 3 --memory-budget 4090"
    reason = ran(command).splitlines()[0]
    assert reason.startswith("-b auto takes -b ")
    assert json.loads(ran(command, "--json"))["reasons"] == [reason] and ran(command, "--tensors").splitlines()[0] == reason
