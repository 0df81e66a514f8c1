"""The tables, the recompute ladder and the plan: every byte has one owner at a time, and the sizes are the promised ones."""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest

from llmc.cards import parse_budget
from llmc.config import ModelConfig, config_from_descriptor
from llmc.memory.cost import extra_flops_percent, optimizer_traffic, step_cost
from llmc.memory.ladder import NOT_KEPT, backward_schedule, kept_names, passes
from llmc.memory.largest_batch import largest_batch
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.report import allocation_lines, plan_table, usage_lines
from llmc.memory.scratch_sizes import head_chunk_rows
from llmc.memory.tables import (
    BACKWARD_STAGES, BLOCK_ACTIVATIONS, DTYPE_BYTES, FORWARD_STAGES, PARAMETERS, num_parameters, parameter_shapes, resolve, sizes_of,
)  # fmt: skip
from llmc.memory.tuning import ALIGNMENT, TUNING
from llmc.units import MIB

REPO = Path(__file__).resolve().parent.parent
D12, D48 = config_from_descriptor("d12"), config_from_descriptor("d48")
TINY = ModelConfig(max_seq_len=64, vocab_size=96, num_layers=3, num_heads=4, channels=64, padded_vocab_size=128)
ODD = ModelConfig(max_seq_len=37, vocab_size=101, num_layers=5, num_heads=5, channels=35, padded_vocab_size=103)
ONE = ModelConfig(max_seq_len=1, vocab_size=1, num_layers=1, num_heads=1, channels=1, padded_vocab_size=1)
LEVELS = tuple(NOT_KEPT)
KERNELS = ("torch", "triton", "numba")


def options(config, B, T, **changes):
    return PlanOptions(config, B, T, **{"sample_length": min(64, config.max_seq_len)} | changes)


# ----------------------------------------------------------------------------
# tables


def test_parameters_are_llmc_s_sixteen_in_file_order():
    C, L, T, Vp = 768, 12, 1024, 50304
    assert list(parameter_shapes(D12).items()) == [
        ("wte", (Vp, C)), ("wpe", (T, C)), ("ln1w", (L, C)), ("ln1b", (L, C)), ("qkvw", (L, 3 * C, C)), ("qkvb", (L, 3 * C)),
        ("attprojw", (L, C, C)), ("attprojb", (L, C)), ("ln2w", (L, C)), ("ln2b", (L, C)), ("fcw", (L, 4 * C, C)), ("fcb", (L, 4 * C)),
        ("fcprojw", (L, C, 4 * C)), ("fcprojb", (L, C)), ("lnfw", (C,)), ("lnfb", (C,)),
    ]  # fmt: skip


def test_d12_has_llmc_s_number_of_parameters():
    assert num_parameters(D12) == 124475904


def test_decay_applies_to_the_six_matrices_only():
    assert [p.name for p in PARAMETERS if p.decay] == ["wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw"]


def test_initialisation_of_each_parameter():
    kinds = {p.name: p.init for p in PARAMETERS}
    assert {n for n, k in kinds.items() if k == "normal"} == {"wte", "wpe", "qkvw", "fcw"}
    assert {n for n, k in kinds.items() if k == "residual"} == {"attprojw", "fcprojw"}
    assert {n for n, k in kinds.items() if k == "ones"} == {"ln1w", "ln2w", "lnfw"}


def test_shapes_resolve_letters_factors_and_bare_numbers():
    assert resolve("L 3C C 2 10", {"L": 12, "C": 768}) == (12, 2304, 768, 2, 10)


# ----------------------------------------------------------------------------
# the recompute ladder


def test_what_each_level_keeps_is_the_design_table():
    """Channels of a row kept per layer, statistics aside, are 16C, 12C, 10C, 6C, 3C and 1C; the names not kept are the table's."""
    names = {a.name for a in BLOCK_ACTIVATIONS}
    factor = {
        a.name: resolve(a.shape, dict.fromkeys(("B", "T", "s", "C", "k", "h", "f", "Tp"), 1)) for a in BLOCK_ACTIVATIONS if a.dtype == "act"
    }
    statistics = {"ln1_mean", "ln1_rstd", "ln2_mean", "ln2_rstd", "lse"}
    more = (
        set(), {"fch_gelu"}, {"ln1", "ln2"}, {"fch"}, {"qkvr"}, {"atty", "residual2", *statistics}, {"residual3"},
    )  # fmt: skip
    for level, channels in enumerate((16, 12, 10, 6, 3, 1, 0)):
        kept = set(kept_names(level))
        assert kept == names.difference(*more[: level + 1])
        assert sum(prod(factor[n]) for n in kept if n in factor) == channels


@pytest.mark.parametrize("level, again", [
    (0, []),
    (1, ["gelu"]),
    (2, ["gelu", "ln2", "ln1"]),
    (3, ["ln2", "fc", "gelu", "ln1"]),
    (4, ["ln2", "fc", "gelu", "ln1", "qkv"]),
    (5, ["ln1_statistics", "ln1", "qkv", "attention", "attproj", "ln2_statistics", "ln2", "fc", "gelu"]),
    (6, ["ln1_statistics", "ln1", "qkv", "attention", "attproj", "ln2_statistics", "ln2", "fc", "gelu"]),
])  # fmt: skip
def test_each_level_runs_again_only_what_the_design_says(level, again):
    """What is kept is never computed twice, nor is anything else within one block; each runs before its first reader."""
    schedule = [s.name for s in backward_schedule(level)]
    backward = [s.name for s in BACKWARD_STAGES]
    assert [s for s in schedule if s in backward] == backward
    assert [s for s in schedule if s not in backward] == again
    before = {"gelu": "fcproj_dweight", "ln1": "qkv_backward"} if level < 4 else {"gelu": "fcproj_dweight"}
    for stage in set(before) & set(again):
        assert schedule[schedule.index(stage) + 1] == before[stage]
    if "gelu" in again:  # in one pass with its gradient
        assert schedule[schedule.index("gelu") - 1] == "gelu_backward"


def test_the_schedules_of_levels_2_and_3_in_full():
    assert [s.name for s in backward_schedule(2)] == [
        "fcproj_dinput", "gelu_backward", "gelu", "fcproj_dweight", "ln2", "fc_backward", "ln2_backward", "attproj_backward",
        "attention_backward", "ln1", "qkv_backward", "ln1_backward",
    ]  # fmt: skip
    assert [s.name for s in backward_schedule(3)] == [
        "ln2", "fc", "fcproj_dinput", "gelu_backward", "gelu", "fcproj_dweight", "fc_backward", "ln2_backward", "attproj_backward",
        "attention_backward", "ln1", "qkv_backward", "ln1_backward",
    ]  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
def test_backward_reads_nothing_that_is_not_there(level):
    """Walk the schedule: every name read is the block's input or output, kept, or written earlier in this very pass."""
    there = {"residual", "dresidual", *kept_names(level)}
    for stage in backward_schedule(level):
        assert set(stage.reads) <= there, stage.name
        there |= set(stage.writes)


# ----------------------------------------------------------------------------
# the plan: lifetimes worked out here, from who reads and writes, and not from the spans the placer used

# working room of the layers that run as torch operations, and as Triton's kernels: empty between its uses
TORCH_ROOM = {
    "ln1_statistics": {"rows"}, "ln1": {"rows"}, "ln2_statistics": {"rows"}, "ln2": {"rows"}, "gelu": {"rows"},
    "gelu_backward": {"rows", "column_sums"},
    "ln2_backward": {"rows", "row_stats", "column_sums"},
    "ln1_backward": {"rows", "row_stats", "column_sums"},
    "head": {"classifier_rows", "classifier_stats"},
    "lnf_backward": {"rows", "row_stats", "column_sums"},
    "encoder_backward": {"encoder_sums", "encoder_rows", "encoder_gathered", "noise", "noise_work"},
    "update": {"norm_work", "noise", "noise_work", "update_gradient", "update_parameter", "noise_moments", "update_m", "update_v"},
}  # fmt: skip
TRITON_ROOM = {
    "gelu_backward": {"column_partials"}, "ln2_backward": {"column_partials"},
    "ln1_backward": {"column_partials"}, "lnf_backward": {"column_partials"},
    "update": {"update_layout", "update_numbers"},
}  # fmt: skip
NUMBA_ROOM = dict(TRITON_ROOM)
# of attention on a CPU: numba's kernels have other room than torch's operations, which serve beside Triton's kernels too
for rooms, names in (
    (TORCH_ROOM, "rows scores stats mask"),
    (TRITON_ROOM, "rows scores stats mask"),
    (NUMBA_ROOM, "packed scores weights left queries block"),
):
    rooms["attention"] = {f"attention_{name}" for name in names.split()}
    rooms["attention_backward"] = rooms["attention"] | {"attention_sums"} | ({"attention_bias"} if rooms is NUMBA_ROOM else set())
TRITON_ROOM["attention_backward"] |= {"attention_delta", "column_partials"}  # of its own attention
# the matmuls of either: torch's where the gradients of bf16 weights are fp32, and where all bf16 factors are widened; and numba's
DWEIGHT_ROOM = {stage: {"widened"} for stage in ("fcproj_dweight", "fc_backward", "attproj_backward", "qkv_backward")}
MATMUL_STAGES = (*DWEIGHT_ROOM, "qkv", "attproj", "fc", "fcproj", "head", "fcproj_dinput")
MATMUL_ROOMS = {
    "native": DWEIGHT_ROOM, "widened": {stage: {"widened"} for stage in MATMUL_STAGES},
    "numba": {stage: {"matmul_panels", "matmul_sums", "matmul_packed"} for stage in MATMUL_STAGES},
    "fp8": {
        stage: {"fp8_inp", "fp8_inp_scale", "fp8_weight", "fp8_weight_scale", "fp8_partials"} for stage in MATMUL_STAGES if stage != "head"
    },
}  # fmt: skip
for stage in DWEIGHT_ROOM:
    MATMUL_ROOMS["fp8"][stage] |= {"fp8_sum"} | ({"fp8_dout", "fp8_dout_scale"} if stage != "fcproj_dweight" else set())
# no room but tensors, the first of fcproj's stages writes them for the second
FP8_FCPROJ = {"fp8_fcproj_dout", "fp8_fcproj_dout_scale"}
# what the stages outside the blocks touch in either form, as gpt2.py reads
OUTSIDE = {
    "encoder": {"inputs", "targets", "encoded", "token_order", "token_groups", "token_seed"},  # targets and order are copied in with inputs
    "head": {"lnf", "logits", "losses", "targets", "dwte_sum", "dwte_group", "head_widened"},
    "lnf_backward": {"lnf", "lnf_mean", "lnf_rstd", "dresidual", "residual"},
    "encoder_backward": {"dresidual", "inputs", "token_order", "token_groups", "token_seed"},
    "update": {"grad_norm", "norm_partials", "losses", "loss_sum"},
    "read": {"grad_norm", "loss_sum"},  # after the update
    "checkpoint": {"noise", "noise_work", "update_parameter", "update_m", "update_v"},
}
STAGE = {s.name: s for s in (*FORWARD_STAGES, *BACKWARD_STAGES)}
FIRST_NORM, LAST_NORM = ("ln1", "ln1_mean", "ln1_rstd"), ("lnf", "lnf_mean", "lnf_rstd")
ROOMS = {"torch": TORCH_ROOM, "triton": TRITON_ROOM, "numba": NUMBA_ROOM}
ROOM = {name for rooms in (*ROOMS.values(), *MATMUL_ROOMS.values()) for names in rooms.values() for name in names}
# zeroed at the first micro-step, added to at each, read after the last and after the update; evaluation and sampling leave them be
ALWAYS = {"losses"}


def timeline(plan):
    """[(reads or both, pure writes)] of one step of a two-layer model: every block twice, so that layers meet each other.

    A moment is one launch: of a matmul or attention, or of a pass that does several stages at once.
    """
    room = ROOMS[plan.options.kernels]
    matmul_room = MATMUL_ROOMS[plan.options.matmul]

    def room_of(name):
        return room.get(name, set()) | matmul_room.get(name, set())

    def launch(*names, more=()):
        """Some stages in one pass, and names that it touches beside."""
        stages = [STAGE[name] for name in names]
        reads, writes = (set().union(*(getattr(s, side) for s in stages)) for side in ("reads", "writes"))
        read_first = {name for i, s in enumerate(stages) for name in s.reads if not any(name in before.writes for before in stages[:i])}
        if plan.options.matmul == "fp8" and names[0].startswith("fcproj_"):
            reads, writes = reads | FP8_FCPROJ, writes | (FP8_FCPROJ if names[0] == "fcproj_dinput" else set())
        return names[0], reads | writes | set(more) | set().union(*map(room_of, names)), writes - read_first

    def outside(name):
        return name, OUTSIDE[name] | room_of(name), set()

    def forward(norm_above):
        """A block after its ln1; its last launch adds the residual and does the first norm of what is above, if anything is."""
        attproj_ln2 = launch("ln2_statistics", "ln2", more={"residual"})  # the sum with the block's input is normalised as it is made
        above = ("norm above", {"residual2", "residual3", *norm_above, *(room_of("ln1") if norm_above else ())}, set(norm_above))
        matmuls = [launch(name) for name in ("qkv", "attention", "attproj")]
        return [*matmuls, attproj_ln2, launch("fc"), launch("gelu"), launch("fcproj"), above]

    def backward():
        names = [s.name for s in plan.schedule]
        while names:
            for run in (("ln1_statistics", "ln1"), ("ln2_statistics", "ln2"), ("gelu_backward", "gelu"), (names[0],)):
                if tuple(names[: len(run)]) == run:
                    yield launch(*run, more={"residual"} if run[0] == "ln2_statistics" else ())
                    del names[: len(run)]
                    break

    first = launch("ln1_statistics", "ln1")
    again = [first, *forward(FIRST_NORM), *forward(())] if plan.segments.k > 1 else []
    return [
        outside("encoder"), first, *forward(FIRST_NORM), *forward(LAST_NORM), outside("head"), outside("lnf_backward"),
        *again, *backward(), *again, *backward(), outside("encoder_backward"), *map(outside, ("update", "read", "checkpoint")),
    ]  # fmt: skip


def alive_at(plan):
    """For every moment of the timeline the set of names whose bytes must not be touched by another.

    A transient is alive from a pure write to its last touch before the next. Kept ones, and what crosses micro-steps or
    the whole pass, are alive from their first touch to their last.
    """
    events = timeline(plan)
    kept = {t.name for t in plan.tensors.values() if t.purpose == "kept"}
    alive = [set() for _ in events]
    for name in plan.tensors:
        at = [i for i, (_, names, _) in enumerate(events) if name in names]
        writes = [i for i, (_, _, pure) in enumerate(events) if name in pure]
        if name in kept:
            # layer l's slice is written by its own block and read by its own backward: from the encoder on to be safe
            encoder_backward = next(i for i, (event, _, _) in enumerate(events) if event == "encoder_backward")
            spans = [(0, encoder_backward)]
        elif name in ROOM:
            spans = [(i, i) for i in at]  # working room, empty between its uses
        elif writes:
            ends = [max(i for i in at if i < nxt) for nxt in (*writes[1:], len(events))]
            spans = list(zip(writes, ends))
        elif at:
            spans = [(at[0], at[-1])]
        else:
            spans = []
        for first, last in spans:
            for i in range(first, last + 1):
                alive[i].add(name)
    sample = {"logits", *(t.name for t in plan.tensors.values() if t.purpose == "sample")}
    return [names | ALWAYS for names in (*alive, sample)]


CASES = [
    (TINY, 4, 32), (ODD, 3, 7), (ODD, 1, 1), (ONE, 1, 1), (ONE, 5, 1), (D12, 4, 1024), (D12, 3, 77), (D48, 1, 1024),
    (config_from_descriptor("gpt3:c384"), 2, 2048),
]  # fmt: skip
every_plan = pytest.mark.parametrize("config, B, T", CASES)


def all_options(config, B, T):
    for level, device, kernels in product(LEVELS, TUNING, KERNELS):
        common = dict(recompute=level, device=device, kernels=kernels)
        for precision in ("fp32", "bf16"):
            for master in ("fp32", "bits16", "none"):
                yield options(config, B, T, precision=precision, master=master, **common)
        yield options(config, B, T, grad_dtype="fp32", head_chunk=2, optimizer_state="bf16", **common)
        yield options(config, B, T, offload_residual=True, head_chunk=1, precision="fp32", **common)
        if device == "cpu":
            for grad_dtype in ("bf16", "fp32"):
                yield options(config, B, T, matmul="widened", grad_dtype=grad_dtype, **common)
                if kernels == "numba":
                    for factors in ("bf16", "fp32"):
                        yield options(config, B, T, matmul="numba", grad_dtype=grad_dtype, factors=factors, **common)
        else:
            yield options(config, B, T, matmul="fp8", **common)
    for kernels in KERNELS:
        for attention in ("flash", "cudnn", "efficient", *(["triton"] if kernels == "triton" else [])):
            yield options(config, B, T, recompute=5, device="cuda", kernels=kernels, attention=attention)
        yield options(config, B, T, kernels=kernels, head_chunk=1)
        yield options(config, B, T, kernels=kernels, head_chunk=10**9, sample_length=0)


def overlapping(plan):
    """Pairs of tensors that are alive together and share a byte."""
    met = {(a, b) for names in alive_at(plan) for a in names for b in names if a < b}
    for a, b in ((plan.tensors[x], plan.tensors[y]) for x, y in sorted(met) if x in plan.tensors and y in plan.tensors):
        if a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes:
            yield a.name, b.name


@every_plan
def test_no_two_tensors_alive_together_share_a_byte(config, B, T):
    for o in all_options(config, B, T):
        assert not list(overlapping(Plan(o))), f"at -r {o.recompute}, {o.device}, {o.kernels}, {o.precision}"


@pytest.mark.parametrize("kernels, a, b", [
    ("torch", "ln1", "residual2"),  # the next block's first norm is made where this block's last sum is read
    ("torch", "ln1_mean", "residual2"), ("torch", "lnf", "residual2"), ("torch", "lnf_rstd", "residual2"), ("torch", "rows", "fch"),
    ("torch", "column_sums", "dfch"), ("torch", "rows", "lnf"), ("torch", "losses", "update_gradient"), ("torch", "row_stats", "dln2"),
    ("torch", "fch_gelu", "dfch"), ("triton", "fch_gelu", "dfch"), ("triton", "column_partials", "dfch"),
    ("triton", "column_partials", "dln2"), ("triton", "column_partials", "lnf"),
    ("triton", "token_order", "dresidual"), ("triton", "token_order", "token_groups"), ("triton", "update_layout", "grad_norm"),
    ("triton", "norm_partials", "losses"), ("triton", "update_parameter", "noise"), ("triton", "token_seed", "fch"),
    ("numba", "column_partials", "dfch"), ("numba", "token_groups", "dresidual"), ("numba", "update_numbers", "grad_norm"),
    ("torch", "attention_scores", "qkvr"), ("numba", "attention_packed", "datty"),
    ("numba", "attention_bias", "dqkvr"), ("triton", "attention_delta", "datty"), ("numba", "matmul_sums", "datty"),
    ("numba", "matmul_packed", "fch"), ("torch", "widened", "fch"), ("numba", "widened", "datty"), ("torch", "widened", "logits"),
    ("torch", "attention_sums", "dqkvr"), ("torch", "loss_sum", "norm_partials"),
    ("triton", "fp8_inp", "fch"), ("triton", "fp8_weight", "qkvr"), ("triton", "fp8_inp_scale", "atty"), ("triton", "fp8_partials", "ln1"),
    ("triton", "fp8_sum", "dfch"), ("triton", "fp8_dout", "dqkvr"), ("triton", "fp8_dout_scale", "dfch"),
    ("triton", "fp8_fcproj_dout", "fch"), ("triton", "fp8_fcproj_dout_scale", "ln2"), ("triton", "fp8_fcproj_dout", "fp8_inp"),
])  # fmt: skip
def test_the_check_above_notices_two_tensors_laid_over_each_other(kernels, a, b):
    """It is worth something only if a plan that is wrong shows up in it."""
    matmul = {"widened": "widened", "matmul": "numba", "fp8": "fp8"}.get(a.partition("_")[0], "native")
    attention = "triton" if a == "attention_delta" else ""
    plan = Plan(options(TINY, 4, 32, recompute=5, kernels=kernels, master="none", matmul=matmul, attention=attention))
    plan.tensors[a] = replace(plan.tensors[a], offset=plan.tensors[b].offset)
    assert tuple(sorted((a, b))) in list(overlapping(plan))


@every_plan
def test_arena_covers_every_tensor_and_every_tensor_is_aligned(config, B, T):
    for o in all_options(config, B, T):
        plan = Plan(o)
        for t in plan.tensors.values():
            assert t.offset >= 0 and t.offset % ALIGNMENT == 0
            assert t.nbytes == prod(t.shape) * DTYPE_BYTES[t.dtype] > 0
            assert t.offset + t.nbytes <= plan.arenas["activations"]
        assert plan.arenas["activations"] == max(-(-(t.offset + t.nbytes) // 256) * 256 for t in plan.tensors.values())


def test_every_tensor_of_every_plan_is_known_to_the_check_above():
    """A tensor added to the plan must be added to this file's own list of who touches what; and the list names nothing else."""
    planned, known = set(), set()
    for o in all_options(ODD, 3, 7):
        plan = Plan(o)
        known = set().union(*alive_at(plan))
        assert set(plan.tensors) <= known
        planned |= set(plan.tensors)
    assert {name for names in (*OUTSIDE.values(), ROOM, ALWAYS) for name in names} <= {*planned, "residual"}


@pytest.mark.parametrize("level", LEVELS)
def test_this_file_s_own_list_of_launches_is_what_the_ladder_joins(level):
    """Worked out here by hand, and there from a table: the stages that one launch does are the same."""
    plan = Plan(options(ODD, 3, 7, recompute=level))
    launched = [name for name, _, _ in timeline(plan)]
    # a pass that starts with a matmul is two launches here
    ladder = [{"ln1_forward": ("ln1_statistics",), "attproj_ln2": ("attproj", "ln2_statistics"),
               "gelu_backward_and_again": ("gelu_backward",)}.get(name, (name,)) for name in passes(plan.schedule)]  # fmt: skip
    one_block = [name for names in ladder for name in names]
    start = launched.index("fcproj_dinput") - one_block.index("fcproj_dinput")
    assert launched[start : launched.index("ln1_backward") + 1] == one_block


@every_plan
def test_each_form_has_its_own_working_room_and_no_other(config, B, T):
    """The kernels bring their own; what only torch operations use must cost a run with kernels nothing, and the other way round."""
    everyone_s = {"losses"}
    room = {kernels: set().union(*names.values()) - everyone_s for kernels, names in ROOMS.items()}
    room["torch"] |= {"sample_rows"}
    for kernels in ("triton", "numba"):
        room[kernels] |= {"token_order", "token_groups", "token_seed"}
    for o in all_options(config, B, T):
        others = set().union(*room.values()) - room[o.kernels] - (OUTSIDE["checkpoint"] if o.fused else set())
        assert not others & set(Plan(o).tensors)
        assert o.fused == (o.kernels != "torch")
    assert [PlanOptions(config, B, T, device=device).fused for device in ("cpu", "cuda")] == [False, True]


@pytest.mark.parametrize("config, B, T, changes", [
    (TINY, 4, 32, {}), (ODD, 3, 37, {"recompute": 0, "precision": "fp32"}),
    (ODD, 2, 20, {"recompute": 6, "kernels": "numba", "matmul": "numba"}),
    (TINY, 4, 32, {"recompute": 3, "data_ranks": 2, "zero_stage": 3}),
    (TINY, 4, 32, {"recompute": 5, "data_ranks": 2, "tensor_parallel": 2}),
])  # fmt: skip
def test_each_byte_of_the_activations_counts_for_the_first_part_that_uses_it(config, B, T, changes):
    """Byte by byte: kept before shared before head before what is gathered; all others are scratch, gaps too."""
    plan = Plan(options(config, B, T, **changes))
    owner = np.full(plan.arenas["activations"], "scratch", dtype="U8")
    of_part = {"gathered": ["gathered"], "head": ["head", "head scratch"], "shared": ["shared", "gradient"], "kept": ["kept"]}
    for part, purposes in of_part.items():
        for t in plan.tensors.values():
            if t.purpose in purposes:
                owner[t.offset : t.offset + t.nbytes] = part
    parts = ("kept", "shared", "head", "gathered", "scratch")
    assert {part: plan.columns[part] for part in parts if part in plan.columns} == {
        part: np.count_nonzero(owner == part) for part in parts if part in plan.columns
    }
    assert all(plan.columns[part] for part in ("kept", "shared", "scratch"))


@pytest.mark.parametrize("changes, rooms, fused_rooms", [
    ({}, "classifier_rows encoder_rows encoder_gathered noise noise_work norm_work update_gradient", "noise noise_work"),
    ({"master": "none"}, "classifier_rows encoder_rows encoder_gathered noise noise_work norm_work update_gradient update_parameter",
     "noise noise_work update_parameter"),
    ({"optimizer_state": "bf16"}, "classifier_rows encoder_rows encoder_gathered noise noise_work noise_moments norm_work update_gradient "
     "update_m update_v", "noise noise_work update_m update_v"),
    ({"optimizer_state": "bf16", "precision": "fp32"}, "noise noise_work noise_moments update_m update_v",
     "noise noise_work update_m update_v"),
    ({"grad_dtype": "fp32"}, "classifier_rows encoder_rows noise noise_work widened head_widened", "noise noise_work widened head_widened"),
    ({"matmul": "widened"}, "classifier_rows encoder_rows encoder_gathered noise noise_work norm_work update_gradient widened",
     "noise noise_work widened"),
])  # fmt: skip
def test_room_to_round_and_to_widen_is_there_only_for_what_is_in_bf16(changes, rooms, fused_rooms):
    """Beyond what a model all in fp32 has, and never instead of it."""
    for kernels, names in (("torch", rooms), ("numba", fused_rooms)):
        fp32, plan = (Plan(options(TINY, 4, 32, kernels=kernels, **form)) for form in ({"precision": "fp32"}, changes))
        assert set(plan.tensors) - set(fp32.tensors) == set(names.split()) and not set(fp32.tensors) - set(plan.tensors)
        if "widened" in plan.tensors:  # forward needs none where it is for the gradients of weights alone
            assert plan.tensors["widened"].spans[0][0] == ("encoder" if "matmul" in changes else "lnf_backward")
    sums = Plan(options(TINY, 4, 32, **changes)).tensors["encoder_sums"]
    assert sums.shape == ((32, 64) if "fp32" in (changes.get("grad_dtype"), changes.get("precision")) else (4, 32, 64))


SHARES = {
    0: {"gradient_share"}, 1: {"gradient_share", "parameter_share"}, 2: {"layer_gradients", "outer_gradients", "parameter_share"},
    3: {"layer_gradients", "outer_gradients", "layer_weights", "outer_weights"},
}  # fmt: skip


@pytest.mark.parametrize("stage", SHARES)
def test_ranks_have_room_for_what_their_stage_gathers_and_no_other(stage):
    """Weights that are gathered are there for a sample as for a step, apart from all that it works in."""
    for level in LEVELS:
        plan = Plan(options(TINY, 4, 32, recompute=level, data_ranks=2, zero_stage=stage))
        assert {t.name for t in plan.tensors.values() if t.purpose == "gathered"} == SHARES[stage]
        sampled = [t for t in plan.tensors.values() if t.purpose == "sample" or t.name == "logits"]
        for weights in (plan.tensors[name] for name in SHARES[stage] if name.endswith("_weights")):
            assert weights.spans[-1] == ("sample", "sample")
            assert all(t.offset + t.nbytes <= weights.offset or weights.offset + weights.nbytes <= t.offset for t in sampled)


@pytest.mark.parametrize("heads, parts, rows", [(4, 2, 64), (5, 4, 48), (3, 2, 48), (25, 8, 100)])
def test_a_checkpoint_of_parts_has_room_for_the_largest_tensor_it_puts_together(heads, parts, rows):
    """Heads of 8 channels. Of 5 heads each of 4 parts has 2, so its rows of qkvw, 3 x 16, are more than its 40 columns of fcprojw."""
    config = ModelConfig(16, 61, num_layers=2, num_heads=heads, channels=8 * heads, padded_vocab_size=64)
    tensors = Plan(PlanOptions(config, 1, 16, kernels="numba", tensor_parallel=parts)).tensors
    shapes = parameter_shapes(config, parts)
    largest = max(prod(shapes[name][1:]) for name in ("qkvw", "attprojw", "fcprojw"))
    assert prod(tensors["part_tensor"].shape) == largest == rows * config.channels
    assert prod(tensors["whole_tensor"].shape) == parts * largest


@pytest.mark.parametrize("fusion", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_matmul_that_does_gelu_does_not_write_where_it_still_reads(kernels, level, fusion):
    tensors = Plan(PlanOptions(D12, 4, 1024, device="cuda", kernels=kernels, recompute=level, gelu_fusion=fusion)).tensors
    read, written = tensors["ln2"], tensors["fch_gelu"]
    assert read.offset + read.nbytes <= written.offset or written.offset + written.nbytes <= read.offset


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("device, kernels", [("cpu", "torch"), ("cpu", "numba"), ("cuda", "torch"), ("cuda", "triton")])
def test_the_next_block_s_layernorm_does_not_write_what_the_pass_that_it_is_in_still_reads(device, kernels, level):
    """That of this block's last matmul and addition."""
    tensors = Plan(PlanOptions(D12, 4, 1024, device=device, kernels=kernels, recompute=level)).tensors
    for read in (tensors["fch_gelu"], tensors["residual2"]):
        for written in (tensors["ln1"], tensors["ln1_mean"], tensors["ln1_rstd"]):
            assert read.offset + read.nbytes <= written.offset or written.offset + written.nbytes <= read.offset


def test_a_matmul_s_workspace_is_planned_wherever_gelu_is_in_one():
    """What cuBLASLt is given, 32 MiB, all the time between the first embedding and the last gradient."""
    tensors = [Plan(options(D12, 4, 1024, device="cuda", gelu_fusion=fusion)).tensors for fusion in range(4)]
    assert "matmul_workspace" not in tensors[0]
    for fused in tensors[1:]:
        assert fused["matmul_workspace"].nbytes == 32 * MIB
        assert fused["matmul_workspace"].spans == (("encoder", "encoder_backward"),)


def test_attention_kinds_are_the_device_s_own_unless_asked_for():
    def kind(**changes):
        return PlanOptions(ODD, 3, 7, **changes).attention

    assert [kind(), kind(precision="fp32")] == ["cpu", "cpu"]
    assert [kind(device="cuda"), kind(device="cuda", precision="fp32")] == ["triton", "efficient"]
    assert kind(device="cuda", kernels="torch") == "flash"
    assert [kind(device="cuda", attention=wish) for wish in ("flash", "cudnn", "triton")] == ["flash", "cudnn", "triton"]


def test_what_options_leave_empty_has_the_value_that_follows_from_the_rest():
    """Types follow the weights, kernels the device; what is given stays."""
    for precision in ("fp32", "bf16"):
        o = PlanOptions(ODD, 3, 7, precision=precision)
        assert (o.grad_dtype, o.factors, o.kernels) == (precision, precision, "torch")
    assert PlanOptions(ODD, 3, 7, device="cuda").kernels == "triton"
    given = {"grad_dtype": "fp32", "factors": "fp32", "kernels": "torch"}
    o = PlanOptions(ODD, 3, 7, device="cuda", **given)
    assert {name: getattr(o, name) for name in given} == given
    assert o.only_evaluating().grad_dtype == "bf16"  # as there are no gradients


def test_plan_holds_every_activation_with_its_own_shape_and_type():
    sizes = sizes_of(ODD, 3, 7) | {"Tp": 7}
    for level in LEVELS:
        plan = Plan(options(ODD, 3, 7, recompute=level, precision="bf16", device="cuda"))
        for a in BLOCK_ACTIVATIONS:
            t = plan.tensors[a.name]
            leading = (5,) if a.name in kept_names(level) else (3,) if a.name == "residual3" else ()
            assert t.shape == (*leading, *resolve(a.shape, sizes)) and t.dtype == ("bf16" if a.dtype == "act" else a.dtype)
            assert (t.purpose == "kept") == bool(leading)
        on_cpu = Plan(options(ODD, 3, 7, recompute=level, precision="bf16")).tensors
        assert all(on_cpu[a.name].shape == plan.tensors[a.name].shape for a in BLOCK_ACTIVATIONS)


@pytest.mark.parametrize(
    "config, B, mib",
    [
        (D12, 64, (313, 247, 213, 147, 97, 64, 56)),
        (D48, 16, (2455, 1868, 1571, 983, 543, 244, 138)),
    ],
    ids=["d12", "d48"],
)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_activations_per_sequence_are_within_3_percent_of_the_design(config, B, mib, level, kernels):
    plan = Plan(PlanOptions(config, B, 1024, precision="bf16", recompute=level, device="cuda", kernels=kernels))
    assert plan.bytes_per_sequence == plan.arenas["activations"] // B
    assert plan.bytes_per_sequence / MIB <= 1.03 * mib[level]
    assert plan.arenas["activations"] >= plan.columns["kept"]


@pytest.mark.parametrize("device", list(TUNING))
@pytest.mark.parametrize("kernels", KERNELS)
def test_level_2_saves_what_llmc_issue_478_left_open(device, kernels):
    """Two layernorms of twelve layers, 4 x 1024 x 768 bf16 each: 144 MiB, for real and not only among the kept."""
    one, two = (Plan(PlanOptions(D12, 4, 1024, precision="bf16", recompute=r, device=device, kernels=kernels)) for r in (1, 2))
    assert one.columns["kept"] - two.columns["kept"] == 144 * MIB
    assert one.total_bytes - two.total_bytes >= 144 * MIB


def test_d24_at_32_sequences_fits_24_gib_on_a_cpu_only_with_recompute():
    """What a two-core machine can train: storing everything takes nearly 30 GiB, whole blocks run again 8."""
    needs = [Plan(PlanOptions(config_from_descriptor("d24"), 32, 1024, recompute=r, device="cpu")).total_bytes / 1024**3 for r in LEVELS]
    assert needs[0] > 29 and 24 > needs[2] and needs[5] < 8.5 and needs[6] < 7.5


@pytest.mark.parametrize("config, B, T", [(D12, 4, 1024), (D48, 2, 512), (TINY, 64, 64)])
def test_each_level_needs_less_than_the_one_below(config, B, T):
    for precision in ("fp32", "bf16"):
        totals = [Plan(options(config, B, T, recompute=r, precision=precision)).total_bytes for r in LEVELS]
        assert totals == sorted(totals, reverse=True) and len(set(totals)) == len(totals)


def test_arenas_are_the_parameters_times_their_bytes():
    n = num_parameters(ODD)
    kinds = (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "none"))
    fp32, bf16, bare = (Plan(options(ODD, 3, 7, precision=p, master=w)).arenas for p, w in kinds)
    assert [fp32[k] for k in ("parameters", "gradients", "m", "v")] == [4 * n] * 4 and "master" not in fp32
    assert [bf16[k] for k in ("parameters", "gradients", "m", "v", "master")] == [2 * n, 2 * n, 4 * n, 4 * n, 4 * n]
    assert [bare[k] for k in ("parameters", "gradients", "m", "v")] == [2 * n, 2 * n, 4 * n, 4 * n] and "master" not in bare
    plan = Plan(options(ODD, 3, 7))
    assert plan.total_bytes == sum(plan.arenas.values()) + plan.library_bytes


@pytest.mark.parametrize("forms", [
    {}, {"master": "bits16"}, {"master": "none", "optimizer_state": "bf16"}, {"precision": "fp32"}, {"data_ranks": 4, "zero_stage": 1},
    {"offload_residual": True, "async_checkpoint": True},
])  # fmt: skip
def test_an_offloaded_optimizer_is_in_host_memory_and_all_else_stays(forms):
    """m, v and the master leave the total for the pinned memory; arenas, tensors and the order of files know nothing of it."""
    o = PlanOptions(D12, 4, 1024, device="cuda", recompute=2, **forms)
    here, there = Plan(o), Plan(replace(o, offload_optimizer=True))
    assert there.arenas == here.arenas and there.tensors == here.tensors
    moved = sum(n_bytes for arena, n_bytes in here.arenas.items() if there.on_host(arena))
    assert not any(map(here.on_host, here.arenas)) and set(filter(there.on_host, here.arenas)) == here.arenas.keys() - {
        "parameters", "gradients", "activations"
    }  # fmt: skip
    assert moved == there.optimizer_bytes == here.columns["optimizer"] > 0
    assert there.total_bytes == here.total_bytes - moved and there.host_bytes == here.host_bytes + moved
    assert there.columns == here.columns | {"optimizer": 0}
    at_home, away = step_cost(here.options, 3), step_cost(there.options, 3)
    assert away.flops == at_home.flops and at_home.bytes - away.bytes == optimizer_traffic(o) == 2 * moved
    lines = zip(allocation_lines(here), allocation_lines(there), strict=True)
    assert [line.replace("for", "of pinned host memory for") if "AdamW" in line or "master" in line else line for line, _ in lines] == (
        allocation_lines(there)
    )


@pytest.mark.parametrize("name, T, wants, library", [
    ("d12", 64, {"precision": "fp32"}, 3 * 64 * 768 * 4 + 64 * 768 * 4 + 2 * 64 * 12 * 4),
    ("d12", 1000, {"attention": "efficient"}, 3 * 1000 * 768 * 2 + 1000 * 12 * 4 + 1024 * 768 * 4),
    ("d12", 1024, {"attention": "flash"}, 3 * 1024 * 768 * 2 + 1024 * 12 * 4 + 11 * 1024 * 768 * 4),  # 132 parts of the card for 12 heads
    ("gpt3:c2560", 1000, {"attention": "flash"}, 3 * 1000 * 2560 * 2 + 1024 * 32 * 4 + 5 * 1024 * 32 * 96 * 4),  # heads of 80 channels
])  # fmt: skip
def test_attention_s_own_memory_on_a_card_is_in_whole_tiles(name, T, wants, library):
    """Backward's, of one sequence: dq, dk and dv, row sums, and a sum of dq in fp32, which flash has several of."""
    wants = {"precision": "bf16"} | wants
    assert Plan(PlanOptions(config_from_descriptor(name), 1, T, device="cuda", processors=132, **wants)).library_bytes == library


@pytest.mark.parametrize("level", LEVELS)
def test_triton_s_attention_is_all_in_the_plan_and_works_where_something_else_lies_at_other_times(level):
    """No memory of a library, and not a byte more in the arena: two numbers for each row and head, and a row for each tile of 64."""
    flash, triton = (Plan(PlanOptions(D12, 8, 1024, device="cuda", attention=kind, recompute=level)) for kind in ("flash", "triton"))
    assert flash.library_bytes > 0 == triton.library_bytes and triton.arenas == flash.arenas
    added = {name: t.shape for name, t in triton.tensors.items() if name not in flash.tensors}
    assert added == {"attention_delta": (8, 12, 1024), "attention_sums": (8, 16, 3 * 768)}


@pytest.mark.parametrize("rows, wish, want", [(4096, 0, 1024), (1025, 0, 1024), (1, 0, 1), (100, 7, 7), (100, 1000, 100)])
def test_head_chunk_is_the_wish_or_the_tuning_and_never_more_than_the_rows(rows, wish, want):
    assert head_chunk_rows(PlanOptions(D12, 1, rows, head_chunk=wish, device="cpu")) == want


@pytest.mark.parametrize("wish, want", [(1, 4), (4, 4), (7, 4), (8, 8), (100, 64)])
def test_a_head_chunk_has_equally_many_rows_of_each_part_and_at_least_one(wish, want):
    assert head_chunk_rows(PlanOptions(D12, 1, 64, head_chunk=wish, device="cuda", tensor_parallel=4)) == want


FIVE_HEADS = ModelConfig(max_seq_len=64, vocab_size=61, num_layers=2, num_heads=5, channels=40, padded_vocab_size=64)
NARROW = ModelConfig(max_seq_len=64, vocab_size=101, num_layers=1, num_heads=1, channels=16, padded_vocab_size=128)
SCRATCH = {
    "torch": (PlanOptions(D12, 4, 1024, matmul="widened"), {
        "rows": (4, 682, 768), "attention_rows": (7, 6, 1024, 64), "attention_scores": (2, 6, 128, 1024), "attention_stats": (2, 6, 1024),
        "attention_sums": (2, 2304), "attention_mask": (128, 128), "classifier_rows": (5, 50304), "norm_partials": (238,),
        "norm_work": (1 << 19,), "noise": (1 << 19,), "kv_cache": (12, 2, 64, 768), "widened": (1024, 3840),
    }),
    "torch, small": (PlanOptions(ODD, 3, 7, matmul="widened"), {
        "rows": (4, 21, 35), "attention_rows": (7, 15, 7, 7), "attention_scores": (2, 15, 7, 7), "attention_mask": (7, 7),
        "classifier_rows": (21, 103), "norm_partials": (1,), "norm_work": (80745,), "noise": (5120,), "kv_cache": (5, 2, 37, 35),
        "widened": (21, 175),
    }),
    "torch, a row": (PlanOptions(ODD, 1, 1, sample_length=5), {"rows": (4, 4, 35), "kv_cache": (5, 2, 5, 35)}),
    "torch, a vast vocabulary": (PlanOptions(replace(NARROW, padded_vocab_size=1 << 19), 1, 8), {"classifier_rows": (1, 1 << 19)}),
    "torch, heads in even parts": (PlanOptions(D12, 1, 1200), {"attention_rows": (7, 4, 1200, 64)}),
    "torch, two ranks": (PlanOptions(D12, 4, 1024, data_ranks=2), {"norm_partials": (119,)}),
    "torch, ranks that share nothing": (PlanOptions(D12, 4, 1024, data_ranks=7), {"norm_partials": (238,)}),
    "numba": (PlanOptions(D12, 5, 1000, kernels="numba", matmul="numba"), {
        "attention_packed": (48, 3, 1024, 64), "attention_scores": (48, 1, 1024, 64), "attention_left": (48, 2, 64, 64),
        "attention_queries": (48, 4, 64, 64), "attention_block": (48, 2, 64, 64), "attention_sums": (48, 2, 1024, 64),
        "attention_bias": (5, 2304), "matmul_panels": (64, 256, 132, 2), "matmul_sums": (16384, 128), "matmul_packed": (3 * 64 * 5024, 2),
        "column_partials": (64, 3072), "norm_partials": (1024,), "noise": (1 << 20,),
    }),
    "numba, small": (PlanOptions(ODD, 3, 7, "fp32", kernels="numba", matmul="numba"), {
        "attention_packed": (15, 3, 64, 64), "matmul_panels": (2, 256, 132, 1), "matmul_sums": (2 * 192, 128), "matmul_packed": (6144, 1),
    }),
    "numba, a large vocabulary": (PlanOptions(NARROW, 1, 8, kernels="numba", matmul="numba"), {
        "matmul_sums": (128, 128), "matmul_packed": (4096, 2), "noise": (2048,),
    }),
    "numba, parts": (PlanOptions(D12, 4, 1000, kernels="numba", tensor_parallel=4, grad_dtype="fp32"), {
        "classifier_rows": (20, 12576), "logits": (4000, 12576), "head_widened": (4000 * (12576 + 768),), "attention_bias": (4, 576),
    }),
    "numba, small parts": (PlanOptions(FIVE_HEADS, 2, 16, kernels="numba", tensor_parallel=4), {"noise": (2048,)}),
    "triton": (PlanOptions(D12, 4, 1000, device="cuda", matmul="fp8"), {
        "fp8_inp": (4, 1000, 3072), "fp8_weight": (3072 * 768,), "fp8_partials": (1024,), "attention_delta": (4, 12, 1000),
        "attention_sums": (4, 16, 2304), "column_partials": (256, 3072), "lse": (12, 4, 12, 1000),
    }),
    "triton, parts": (PlanOptions(D12, 4, 1000, device="cuda", matmul="fp8", tensor_parallel=6), {"fp8_inp": (4, 1000, 768)}),
    "triton, padded heads": (PlanOptions(FIVE_HEADS, 2, 16, device="cuda", matmul="fp8", tensor_parallel=4), {
        "fp8_inp": (2, 16, 48), "fp8_weight": (48 * 40,),
    }),
    "efficient": (PlanOptions(D12, 9, 1000, device="cuda", attention="efficient"), {"lse": (12, 9, 12, 1024), "logits": (8192, 50304)}),
}  # fmt: skip


@pytest.mark.parametrize("o, shapes", SCRATCH.values(), ids=SCRATCH)
def test_scratch_is_as_large_as_what_is_worked_on_at_once(o, shapes):
    """Sizes that follow from the tuning: of too much, which is only memory, nothing else would tell."""
    tensors = Plan(o).tensors
    assert {name: tensors[name].shape for name in shapes} == shapes


# ----------------------------------------------------------------------------
# the report


@pytest.mark.parametrize("asked", LEVELS)
@pytest.mark.parametrize("changes", [{}, {"device": "cpu", "precision": "fp32"}, {"master": "bits16", "optimizer_state": "bf16"}])
def test_plan_table_has_every_level_with_the_plan_s_own_numbers(asked, changes):
    """The parts of a row are Plan.columns and add up to its total to the byte; more recompute never needs more."""
    o = PlanOptions(D12, 4, 1024, **{"precision": "bf16", "recompute": asked, "device": "cuda"} | changes)
    budget = parse_budget("h100-80")
    text, unknown = plan_table(o, 2, budget), plan_table(o, 2)
    heads, *lines = [re.split(r" {2,}", line.strip()) for line in text.split("\n\n")[1].splitlines()]
    assert heads == ["-r", "parameters", "gradients", "optimizer", "kept", "shared", "head", "scratch", "library", "total", "MiB/seq",
                     "largest -b", "+FLOPs", "FLOP/B", "not kept"]  # fmt: skip
    assert [row[0] for row in lines] == [f"{level}*" if level == asked else str(level) for level in LEVELS]
    totals, names = [], ()
    for level, row in zip(LEVELS, lines):
        at_level = replace(o, recompute=level)
        plan, cost = Plan(at_level), step_cost(at_level, 2)
        assert list(plan.columns) == heads[1:9] and sum(plan.columns.values()) == plan.total_bytes
        assert plan.columns["optimizer"] == sum(plan.arenas.get(k, 0) for k in ("m", "v", "master", "master_bits"))
        assert sum(plan.columns[k] for k in ("kept", "shared", "head", "scratch")) == plan.arenas["activations"]
        want = (*plan.columns.values(), plan.total_bytes, plan.arenas["activations"] / 4)
        assert row[1:11] == [f"{n / MIB:.1f}" for n in want]
        more = [name for name in NOT_KEPT[level] if name not in names]
        largest = largest_batch(plan.options, budget.bytes)
        assert row[11:] == [str(largest), f"{extra_flops_percent(at_level):.1f}%", f"{cost.intensity:.0f}",
                            ("+ " if names else "") + ", ".join(more) or "nothing: all is kept"]  # fmt: skip
        totals.append(plan.total_bytes)
        names = NOT_KEPT[level]
    assert totals == sorted(totals, reverse=True)
    assert [re.split(r" {2,}", line.strip())[11] for line in unknown.split("\n\n")[1].splitlines()[1:]] == ["-"] * len(LEVELS)
    assert f"L=12 NH=12 C=768 V=50257, B=4 T=1024, {o.precision}, on {o.device}" in text


def test_allocation_lines_are_llmc_s_words_and_the_plan_s_bytes():
    plan = Plan(PlanOptions(D12, 4, 1024, precision="bf16"))
    a = {k: n // MIB for k, n in plan.arenas.items()}
    assert allocation_lines(plan) == [
        f"allocating {a['gradients']} MiB for parameter gradients",
        f"allocating {a['activations']} MiB for activations",
        f"allocating {a['m']} MiB for AdamW optimizer state m",
        f"allocating {a['v']} MiB for AdamW optimizer state v",
        f"allocating {a['master']} MiB for master copy of params",
    ]
    assert (a["gradients"], a["m"], a["master"]) == (237, 474, 474)  # 124475904 x 2 and x 4 bytes
    assert not any("master" in line for line in allocation_lines(Plan(PlanOptions(D12, 4, 1024, precision="fp32"))))


def test_usage_lines_count_what_this_plan_already_holds():
    """The memory to fill is what is free now and what this plan has taken."""
    plan = Plan(PlanOptions(D12, 4, 1024, precision="bf16"))
    lines = usage_lines(plan, 3 * MIB, 10 * MIB, 5 << 30)
    assert lines[0] == "device memory usage: 3 MiB / 10 MiB"
    assert lines[1] == f"memory per sequence: {plan.bytes_per_sequence // MIB} MiB"
    assert lines[2] == f" -> estimated maximum batch size: {largest_batch(plan.options, (5 << 30) + plan.total_bytes)}"


@pytest.mark.parametrize("arguments", [["--plan", "-e", "d48", "-b", "16", "-r", "2"], ["--help"], ["--version"]], ids=lambda a: a[0])
def test_plan_and_help_do_not_import_torch(arguments):
    """They answer at once and on any machine."""
    code = f"import sys, train_gpt2; assert train_gpt2.main({arguments!r}) == 0; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
