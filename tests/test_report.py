"""What --plan prints: the plan's own numbers in every form, for every option, on any machine, without torch."""

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from functools import cache
from itertools import product
from math import prod

import pytest
from case_a import CONFIG, write_case_a
from conftest import REPO
from test_loop import QUIET, inputs, ran, run, words_of

from llmc.cards import CARDS, PEAKS, Budget, parse_budget
from llmc.config import ModelConfig, config_from_descriptor
from llmc.errors import NotEnoughMemory
from llmc.memory.choose import levels_of, ways_to_fit
from llmc.memory.cost import extra_flops_percent, step_cost
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.largest_batch import largest_batch
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.report import (
    COLUMNS, bound, legend, level_rows, not_enough_memory, options_json, plan_json, plan_table, ridge, tensor_rows, tensors_table,
    ways_text,
)  # fmt: skip
from llmc.memory.tables import DTYPE_BYTES, PARAMETERS, num_parameters, parameter_shapes
from llmc.memory.traffic import Links, step_traffic
from llmc.units import MIB

D12, D48 = config_from_descriptor("d12"), config_from_descriptor("d48")
ODD = ModelConfig(max_seq_len=37, vocab_size=101, num_layers=5, num_heads=5, channels=35, padded_vocab_size=103)
ONE = ModelConfig(max_seq_len=1, vocab_size=1, num_layers=1, num_heads=1, channels=1, padded_vocab_size=1)
LEVELS = tuple(NOT_KEPT)
H100 = parse_budget("h100-80")


def grid(config, B, T):
    """Every option of the plan with every other, where they can meet."""
    devices, masters = (("cpu", ""), ("cuda", ""), ("cuda", "torch")), ("fp32", "bits16", "none")
    forms = product(LEVELS, devices, ("fp32", "bf16"), masters, ("fp32", "bf16"), ("", "fp32"), (False, True), (0, 1))
    for level, (device, kernels), precision, master, state, grads, offload, chunk in forms:
        if precision == "fp32" and (master != "fp32" or grads) or offload and (level == 6 or device == "cpu"):
            continue
        yield PlanOptions(
            config, B, T, precision=precision, recompute=level, master=master, optimizer_state=state, grad_dtype=grads,
            offload_residual=offload, device=device, kernels=kernels, head_chunk=chunk, sample_length=min(64, config.max_seq_len),
        )  # fmt: skip


@cache
def plans(config, B, T) -> list[Plan]:
    return [Plan(o) for o in grid(config, B, T)]


every_size = pytest.mark.parametrize("config, B, T", [(ODD, 3, 7), (ONE, 1, 1), (CONFIG, 4, 64)], ids=["odd", "one", "tiny"])


# ----------------------------------------------------------------------------
# columns


@every_size
def test_columns_add_up_to_the_total_for_every_option(config, B, T):
    for plan in plans(config, B, T):
        columns = plan.columns
        assert tuple(columns) == COLUMNS
        assert sum(columns.values()) == plan.total_bytes, plan.options
        assert min(columns.values()) >= 0, plan.options


def kept_bytes(plan) -> int:
    return sum(t.nbytes for t in plan.tensors.values() if t.purpose == "kept")


@pytest.mark.parametrize("config, B", [(D12, 64), (D48, 16)], ids=["d12", "d48"])
def test_columns_of_models_people_train_add_up_too(config, B):
    for device, level, chunk in product(("cpu", "cuda"), LEVELS, (0, 1)):
        plan = Plan(PlanOptions(config, B, 1024, recompute=level, device=device, head_chunk=chunk))
        assert sum(plan.columns.values()) == plan.total_bytes
        assert plan.columns["kept"] == kept_bytes(plan) and min(plan.columns.values()) >= 0


@every_size
def test_each_column_is_the_arenas_it_stands_for(config, B, T):
    """Parameters, gradients and library are their own; the optimizer is m, v and the master; four share the activation arena."""
    for plan in plans(config, B, T):
        arenas, columns = dict(plan.arenas), plan.columns
        assert columns["parameters"] == arenas.pop("parameters") and columns["gradients"] == arenas.pop("gradients")
        assert columns["kept"] + columns["shared"] + columns["head"] + columns["scratch"] == arenas.pop("activations")
        assert columns["optimizer"] == sum(arenas.values()) and columns["library"] == plan.library_bytes
        assert columns["kept"] == kept_bytes(plan)  # kept tensors live from end to end, so each byte of them is its own


# ----------------------------------------------------------------------------
# tensors


@every_size
def test_tensors_cover_each_arena_to_the_byte(config, B, T):
    """Parameters and what mirrors them lie back to back in file order; activations lie inside their arena and reach its end."""
    for plan in plans(config, B, T):
        rows = tensor_rows(plan)
        assert {row["arena"] for row in rows} == set(plan.arenas)
        for arena, n_bytes in plan.arenas.items():
            inside = [row for row in rows if row["arena"] == arena]
            ends = [row["offset"] + row["bytes"] for row in inside]
            if arena == "activations":
                assert min(row["offset"] for row in inside) == 0 and n_bytes - 256 < max(ends) <= n_bytes
                assert sorted(row["name"] for row in inside) == sorted(plan.tensors)
            else:
                assert [row["name"] for row in inside] == [p.name for p in PARAMETERS]
                assert [row["offset"] for row in inside] == [0, *ends[:-1]] and ends[-1] == n_bytes
        assert all(row["bytes"] == prod(row["shape"]) * DTYPE_BYTES[row["dtype"]] > 0 for row in rows)


def test_types_of_the_tensors_are_those_asked_for():
    """One row of each arena, in a form whose every arena differs from the default."""
    o = PlanOptions(ODD, 3, 7, precision="bf16", master="bits16", optimizer_state="bf16", grad_dtype="fp32")
    types = {row["arena"]: row["dtype"] for row in tensor_rows(Plan(o)) if row["name"] == "wte"}
    assert types == {"parameters": "bf16", "gradients": "fp32", "m": "bf16", "v": "bf16", "master_bits": "int16"}
    plain = {row["arena"]: row["dtype"] for row in tensor_rows(Plan(PlanOptions(ODD, 3, 7))) if row["name"] == "wte"}
    assert plain == {"parameters": "bf16", "gradients": "bf16", "m": "fp32", "v": "fp32", "master": "fp32"}


@pytest.mark.parametrize("level", LEVELS)
def test_tensors_say_from_which_stage_to_which_they_live(level):
    """A kept one from the encoder to the end of backward; gradients of activations in backward only; every stage is one of the plan's."""
    plan = Plan(PlanOptions(D12, 4, 1024, recompute=level))
    rows = {row["name"]: row for row in tensor_rows(plan) if row["arena"] == "activations"}
    for row in rows.values():
        assert row["lives"] and all(plan.stages.index(first) <= plan.stages.index(last) for first, last in row["lives"])
        if row["purpose"] == "kept":
            assert row["lives"] == [["encoder", "encoder_backward"]]
    assert all(first.startswith("backward: ") for first, _ in rows["dqkvr"]["lives"])
    assert rows["residual3"]["purpose"] == "kept"


def test_the_list_of_tensors_has_every_number_of_every_row():
    o = PlanOptions(ODD, 3, 7, recompute=4, precision="bf16")
    text = tensors_table(Plan(o))
    found = []
    for line in text.splitlines()[3:]:
        arena, name, purpose, shape, dtype, n_bytes, offset, lives = re.split(r"  +", line, maxsplit=7)
        found.append((arena, name, purpose, shape, dtype, int(n_bytes), int(offset), lives))
    wanted = [
        (r["arena"], r["name"], r["purpose"], "x".join(map(str, r["shape"])), r["dtype"], r["bytes"], r["offset"])
        for r in tensor_rows(Plan(o))
    ]  # fmt: skip
    assert [row[:7] for row in found] == wanted
    assert dict(zip((row[1] for row in found), (row[7] for row in found)))["logits"] == "head, sample"  # single stages, said once each
    assert text.startswith("tensors of the plan: L=5 NH=5 C=35 V=101, B=3 T=7, bf16, on cpu") and "-r 4" in text.splitlines()[0]


def test_tensors_say_which_arenas_are_in_host_memory():
    """Of a GPU's run: what --offload-optimizer moves there, and the copy that --async-checkpoint writes from."""
    for off, beside in product((False, True), repeat=2):
        plan = Plan(PlanOptions(ODD, 3, 7, device="cuda", offload_optimizer=off, async_checkpoint=beside))
        on_host = {row["arena"] for row in tensor_rows(plan) if row["on_host"]}
        assert on_host == {*(("m", "v", "master") if off else ()), *(("checkpoint",) if beside else ())}
        assert {line.split(" (host)")[0] for line in tensors_table(plan).splitlines() if " (host)" in line} == on_host
        assert sum(row["bytes"] for row in tensor_rows(plan) if row["on_host"]) == plan.host_bytes
    assert not any(row["on_host"] for row in tensor_rows(Plan(PlanOptions(ODD, 3, 7, device="cpu", async_checkpoint=True))))


# ----------------------------------------------------------------------------
# JSON

PROMISED = {"recompute", "activation_mib_per_sequence", "total_mib", "largest_batch", "extra_flops_percent"}
FORMS = (
    PlanOptions(D12, 4, 1024, recompute=2, device="cuda"),
    PlanOptions(ODD, 3, 7, precision="fp32", head_chunk=2),
    PlanOptions(CONFIG, 2, 64, master="bits16", optimizer_state="bf16", grad_dtype="fp32"),
    PlanOptions(D12, 8, 1024, device="cuda", offload_residual=True),
    PlanOptions(D12, 8, 1024, device="cuda", offload_optimizer=True),
)
every_form = pytest.mark.parametrize("o", FORMS, ids=["d12", "odd", "bits16", "offload", "optimizer"])
every_budget = pytest.mark.parametrize("budget", [None, H100, Budget(3 << 30, "3GiB")], ids=["none", "card", "size"])


@every_form
@every_budget
def test_each_level_of_the_json_has_the_promised_keys_and_the_plan_s_numbers(o, budget):
    levels = plan_json(o, 3, budget)["levels"]
    assert [row["recompute"] for row in levels] == list(levels_of(o))
    for row in levels:
        assert PROMISED <= row.keys()
        mine = replace(o, recompute=row["recompute"])
        plan, cost = Plan(mine), step_cost(mine, 3)
        assert row["total_mib"] == plan.total_bytes / MIB and row["host_mib"] == plan.host_bytes / MIB
        assert row["activation_mib_per_sequence"] == plan.arenas["activations"] / o.B / MIB
        assert row["largest_batch"] == (largest_batch(plan.options, budget.bytes) if budget else None)
        assert row["extra_flops_percent"] == extra_flops_percent(mine)
        assert row["not_kept"] == list(NOT_KEPT[row["recompute"]])
        assert (row["flops_per_step"], row["bytes_per_step"], row["flops_per_byte"]) == (cost.flops, cost.bytes, cost.intensity)
        assert {name: row[f"{name}_mib"] * MIB for name in COLUMNS} == plan.columns
        assert (row["bound"] is None) == (budget is None or budget.card is None or o.device == "cpu")


@every_form
@every_budget
def test_json_is_strict_and_comes_back_as_it_was(o, budget):
    told = plan_json(o, 1, budget)
    assert json.loads(json.dumps(told, allow_nan=False)) == told


# field of PlanOptions -> its name in JSON, and another value than the default
TOLD = {
    "B": ("batch_size", 5), "T": ("sequence_length", 8), "precision": ("precision", "fp32"), "recompute": ("recompute", 3),
    "master": ("master", "bits16"), "optimizer_state": ("optimizer_state", "bf16"), "grad_dtype": ("grad_dtype", "fp32"),
    "offload_residual": ("offload_residual", True), "offload_optimizer": ("offload_optimizer", True), "device": ("device", "cpu"),
    "kernels": ("kernels", "torch"), "gelu_fusion": ("gelu_fusion", 3), "attention": ("attention", "flash"),
    "head_chunk": ("head_chunk", 3), "sample_length": ("sample_length", 9), "data_ranks": ("ranks", 5), "zero_stage": ("zero_stage", 2),
    "tensor_parallel": ("tensor_parallel", 5), "matmul": ("matmul", "fp8"), "factors": ("factors", "fp32"),
    "step_sequences": ("sequences_per_step", 6),
    "reduce_every_micro_step": ("reduce_every_micro_step", True), "keep_gathered": ("tp_recompute_allgather", False),
    "processors": ("processors", 9), "async_checkpoint": ("async_checkpoint", True), "trains": ("trains", False), "rank": ("rank", 1),
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in fields(PlanOptions) if field.name != "config"])
def test_json_tells_every_option_of_a_plan(field):
    """So two plans that differ do not look alike; the model has an object of its own."""
    (name, value), o = TOLD[field], PlanOptions(ODD, 3, 7, device="cuda")
    asked = replace(o, **{field: not value if field == "keep_gathered" else value})
    assert options_json(asked)[name] == value != options_json(o)[name]


def test_json_says_what_was_planned_for():
    o = PlanOptions(ODD, 3, 7, recompute=2, master="bits16", optimizer_state="bf16", grad_dtype="fp32", head_chunk=2)
    told = plan_json(o, 5, Budget(3 << 30, "3GiB"))
    assert told["model"] == {
        "max_seq_len": 37, "vocab_size": 101, "padded_vocab_size": 103, "num_layers": 5, "num_heads": 5, "channels": 35,
    }  # fmt: skip
    wanted = dict(batch_size=3, sequence_length=7, precision="bf16", device="cpu", recompute=2, master="bits16", optimizer_state="bf16",
                  grad_dtype="fp32", offload_residual=False, head_chunk=2, grad_accum_steps=5)  # fmt: skip
    assert {key: told[key] for key in wanted} == wanted
    assert told["budget"] == {"name": "3GiB", "mib": 3072.0}
    fp32 = plan_json(PlanOptions(ODD, 3, 7, precision="fp32"), 1, None)
    assert fp32["master"] is None and fp32["grad_dtype"] == "fp32" and fp32["budget"] is None


@pytest.mark.parametrize("config, B, mib", [
    ("d12", 64, (313, 247, 213, 147, 97, 64, 56)), ("d48", 16, (2455, 1868, 1571, 983, 543, 244, 138)),
])  # fmt: skip
def test_printed_activations_per_sequence_are_at_most_3_percent_above_the_design(config, B, mib):
    levels = json.loads(ran(f"--plan --json -e {config} -b {B} -t 1024 --precision bf16 --device cuda"))["levels"]
    assert len(levels) == len(mib)
    for row, design in zip(levels, mib):
        assert row["activation_mib_per_sequence"] <= 1.03 * design, row["recompute"]


# ----------------------------------------------------------------------------
# compute or memory


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_is_bound_by_what_its_side_of_the_ridge_says(name, precision):
    """From the card's own numbers: by compute where its multipliers take longer for the step than its memory does."""
    card, budget = CARDS[name], parse_budget(name)
    tflops = PEAKS[card.peak][("bf16", "fp32").index(precision)]
    o = PlanOptions(D12, 4, 1024, precision=precision, device="cuda")
    for changed in (o, replace(o, B=64), replace(o, B=1, T=64), replace(o, config=ODD, T=7)):
        cost = step_cost(changed)
        said = bound(cost, changed, budget)
        if tflops is None:
            assert said is None and ridge(changed, budget) is None
        else:
            seconds = {"compute": cost.flops / (tflops * 1e12), "memory": cost.bytes / (card.bandwidth_gb_s * 1e9)}
            assert seconds[said] == max(seconds.values())


def test_both_sides_of_the_ridge_occur():
    """One sequence of 64 tokens moves weights for little work, 64 of 1024 multiply."""
    o = PlanOptions(D12, 64, 1024, device="cuda")
    assert {row["bound"] for row in level_rows(o, 1, H100)} == {"compute"}
    assert {row["bound"] for row in level_rows(replace(o, B=1, T=64), 1, H100)} == {"memory"}


def test_no_side_without_a_card():
    """Nor on a CPU, whatever card was named as a size."""
    o = PlanOptions(D12, 4, 1024, device="cuda")
    for budget in (None, Budget(80 << 30, "80GiB")):
        assert ridge(o, budget) is None and bound(step_cost(o), o, budget) is None
    assert ridge(o, H100) == pytest.approx(989.4e12 / 3352e9) and ridge(replace(o, device="cpu"), H100) is None


# ----------------------------------------------------------------------------
# the table


def table_rows(text) -> dict[int, list[str]]:
    """Level -> the cells of its line, after the level."""
    found = re.findall(r"^ *(\d+)\*? (.*)$", text, re.MULTILINE)
    return {int(level): re.split(r"  +", rest.strip()) for level, rest in found}


@every_form
@every_budget
def test_the_table_prints_the_numbers_of_the_json(o, budget):
    text = plan_table(o, 2, budget)
    rows = table_rows(text)
    levels = plan_json(o, 2, budget)["levels"]
    assert list(rows) == [row["recompute"] for row in levels]
    for row in levels:
        cells = rows[row["recompute"]]
        assert cells[: len(COLUMNS) + 2] == [
            f"{row[key]:.1f}" for key in (*(f"{name}_mib" for name in COLUMNS), "total_mib", "activation_mib_per_sequence")
        ]
        assert cells[len(COLUMNS) + 2] == ("-" if budget is None else str(row["largest_batch"]))
        assert cells[len(COLUMNS) + 3 : len(COLUMNS) + 5] == [f"{row['extra_flops_percent']:.1f}%", f"{row['flops_per_byte']:.0f}"]
    assert re.findall(r"^ *(\d+)\* ", text, re.MULTILINE) == [str(o.recompute)]
    assert "\n".join(legend(Plan(o).columns)) in text


def test_each_line_of_the_table_adds_what_its_level_stops_keeping():
    rows = table_rows(plan_table(PlanOptions(D12, 4, 1024)))
    assert rows[0][-1] == "nothing: all is kept"
    for below, level in zip(LEVELS, LEVELS[1:]):
        more = [name for name in NOT_KEPT[level] if name not in NOT_KEPT[below]]
        assert rows[level][-1] == ("+ " if below else "") + ", ".join(more)


def test_the_footer_says_what_the_largest_batch_is_of_and_what_bounds_a_step():
    o = PlanOptions(D12, 64, 1024, device="cuda")
    card = plan_table(o, 1, H100)
    assert f"largest -b: of {H100.bytes // MIB} MiB, h100-80" in card and "compute-bound on h100-80" in card
    assert "memory-bound on h100-80" in plan_table(replace(o, B=1, T=64), 1, H100)
    size = plan_table(o, 1, Budget(3 << 30, "3GiB"))
    assert "largest -b: of 3072 MiB, 3GiB" in size and "bound" not in size
    assert "--memory-budget" in plan_table(o)


# ----------------------------------------------------------------------------
# when it does not fit


def test_not_enough_memory_is_the_table_and_the_ways():
    """For the budget there was, and at the sequences per step that were asked for."""
    o = PlanOptions(D12, 16, 1024, device="cuda")
    budget = 4 << 30
    text = not_enough_memory(NotEnoughMemory("", o, budget, 3))
    assert text.startswith(plan_table(o, 3, Budget(budget, "what there is")))
    ways = ways_to_fit(o, budget, 48)
    listed = text.partition("the cheapest ways to fit 4096 MiB, flags to add:\n")[2].splitlines()
    assert len(listed) == len(ways) > 0
    for line, way in zip(listed, ways):
        assert re.split(r"  +", line.strip()) == [way.flags, f"{way.total_bytes // MIB} MiB; {way.price}"]
    assert any(f"-d {48 * 1024}" in line for line in listed)


def test_not_enough_memory_where_no_flag_helps_says_what_would():
    o = PlanOptions(D12, 16, 1024, device="cuda")
    text = not_enough_memory(NotEnoughMemory("", o, 500 * MIB))
    assert text.startswith(plan_table(o, 1, Budget(500 * MIB, "what there is")))
    assert "flags to add" not in text
    assert text.splitlines()[-1] == "no flag makes it fit 500 MiB: use a smaller model (-e) or shorter sequences (-t)"


# ----------------------------------------------------------------------------
# several ranks

RANKS = (
    PlanOptions(D12, 4, 1024, recompute=2, device="cuda", data_ranks=8, zero_stage=1),
    PlanOptions(D12, 4, 1024, recompute=1, device="cuda", data_ranks=64, zero_stage=3, tensor_parallel=4),
    PlanOptions(CONFIG, 2, 64, data_ranks=3),
    PlanOptions(CONFIG, 2, 64, kernels="numba", tensor_parallel=2, master="bits16", keep_gathered=True),
)
LINKS = (Links(), Links(400.0), Links(400.0, 3600.0, 8))
every_rank = pytest.mark.parametrize("o", RANKS, ids=["zero", "both", "thirds", "parts"])
every_kind_of_links = pytest.mark.parametrize("links", LINKS, ids=["unknown", "link", "machines"])


@every_rank
def test_columns_and_tensors_of_a_rank_add_up_to_what_it_allocates(o):
    """Its shares and parts: of each arena the tensors lie back to back, in file order, to its last byte."""
    for level in levels_of(o):
        plan = Plan(replace(o, recompute=level))
        assert sum(plan.columns.values()) == plan.total_bytes and "gathered" in plan.columns
        for arena in (name for name in plan.arenas if name != "activations"):
            inside = [row for row in tensor_rows(plan) if row["arena"] == arena]
            ends = [row["offset"] + row["bytes"] for row in inside]
            assert [row["name"] for row in inside] == [p.name for p in PARAMETERS]
            assert [row["offset"] for row in inside] == [0, *ends[:-1]] and ends[-1] == plan.arenas[arena]
            assert all(row["bytes"] == prod(row["shape"]) * DTYPE_BYTES[row["dtype"]] for row in inside)


@every_rank
@every_kind_of_links
@every_budget
def test_json_has_what_each_level_sends_and_how_long_that_takes(o, links, budget):
    told = plan_json(o, 3, budget, links)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert (told["ranks"], told["zero_stage"], told["tensor_parallel"]) == (o.ranks, o.zero_stage, o.tensor_parallel)
    for row in told["levels"]:
        mine = replace(o, recompute=row["recompute"])
        sent = step_traffic(mine, 3)
        assert [(s["purpose"], s["among"], s["kind"], s["bytes"], s["waits"]) for s in row["sent"]] == [
            (s.purpose, s.among, s.kind, s.bytes, s.waits) for s in sent
        ]
        assert row["sent_mib"] * MIB == pytest.approx(sum(s.bytes for s in sent))
        times = [links.ms(mine, s) for s in sent]
        assert [s["ms"] for s in row["sent"]] == times
        if links.link:
            assert row["sending_ms"] == pytest.approx(sum(times))
            assert row["waiting_ms"] == pytest.approx(sum(ms for ms, s in zip(times, sent) if s.waits))
        else:
            assert row["sending_ms"] is row["waiting_ms"] is None
        cost = step_cost(mine, 3)
        if budget is H100 and o.device == "cuda":
            assert row["compute_ms"] == pytest.approx(1e3 * max(cost.flops / 989.4e12, cost.bytes / 3352e9))
        else:
            assert row["compute_ms"] is None


@every_rank
@every_kind_of_links
@every_budget
def test_the_block_below_the_table_prints_the_numbers_of_the_json(o, links, budget):
    text = plan_table(o, 3, budget, links)
    row = next(row for row in plan_json(o, 3, budget, links)["levels"] if row["recompute"] == o.recompute)
    block = text.partition(f"sent by each rank in a step at -r {o.recompute}")[2]
    lines = [re.split(r"  +", line) for line in block.split("\n\n")[1].splitlines()]
    assert lines[0] == ["sent", "among", "collective", "MiB", "Gbit/s", "ms", "computing"]

    def number(value, form=".1f"):
        return "-" if value is None else format(value, form)

    assert lines[1:-1] == [
        [
            s["purpose"],
            s["among"],
            s["kind"],
            number(s["mib"]),
            number(s["gbit_s"], "g"),
            number(s["ms"]),
            "waits" if s["waits"] else "goes on",
        ]
        for s in row["sent"]
    ]
    assert lines[-1] == ["in all", number(row["sent_mib"]), number(row["sending_ms"])]
    last = text.splitlines()[-1]
    if row["compute_ms"] and links.link:
        best = row["waiting_ms"] + max(row["compute_ms"], row["sending_ms"] - row["waiting_ms"])
        assert f"computing takes {row['compute_ms']:.1f} ms on h100-80" in last and last.endswith(f"a step takes {best:.1f} ms at best")
    else:
        assert "say --" in last or row["compute_ms"] is None
    assert ("over the ports of all its ranks" in text) == bool(links.inside)


def test_what_goes_on_beside_computing_is_said_in_words():
    o = PlanOptions(D12, 4, 1024, data_ranks=8)
    said = {stage: plan_table(replace(o, zero_stage=stage), links=Links()) for stage in range(4)}
    assert all("gradients of layers are summed while backward goes on below them" in text for text in said.values())
    come = {stage: re.findall("weights of layers come while the (.*)", text) for stage, text in said.items()}
    assert come == {0: [], 1: ["next step begins"], 2: ["next step begins"], 3: ["layer before computes"]}
    parts = plan_table(PlanOptions(D12, 4, 1024, kernels="numba", tensor_parallel=2), links=Links())
    assert "computing waits for all of it" in parts


def test_one_rank_sends_nothing_and_says_nothing_of_it():
    assert "sent" not in plan_table(PlanOptions(D12, 4, 1024), links=Links(400.0))


def test_no_shorter_sequence_is_proposed_where_weights_and_gradients_alone_do_not_fit():
    """d48 has 1557686400 parameters of 4 bytes: 5942 MiB."""
    o = PlanOptions(D48, 1, 64, device="cuda", recompute=6, offload_optimizer=True)
    assert ways_text(o, 5943 * MIB, 1) == "no flag makes it fit 5943 MiB: use a smaller model (-e) or shorter sequences (-t)"
    assert ways_text(o, 5942 * MIB, 1) == (
        "no flag makes it fit 5942 MiB: weights and gradients alone take 5942 MiB; use a smaller model (-e), or more processes with -z 3"
    )


def test_a_plan_that_does_not_fit_says_so_and_what_would_help():
    """After the table, of --plan as of a run that is refused; but not in JSON, whose rows have the largest batch, or by tensors."""
    asked = "--plan -e d48 -b 8 -t 1024 -d 524288 --precision bf16 --memory-budget 4090 --device cuda"
    *_, end = ran(asked).split("\n\n")
    plan = Plan(PlanOptions(D48, 8, 1024, device="cuda", processors=128, step_sequences=512))
    sentence = f"the plan needs {-(-plan.total_bytes // MIB)} MiB, and there are 23796 MiB (4090, less 768 MiB that CUDA takes)"
    assert end.splitlines()[0] == sentence
    assert "the cheapest ways to fit 23796 MiB, flags to add:" in end and "--offload-optimizer" in end
    assert "the plan needs" not in ran(asked, "-r 2 --offload-optimizer") + ran(asked, "--json") + ran(asked, "--tensors")


def test_not_enough_memory_says_nothing_of_what_ranks_send():
    o = PlanOptions(D12, 16, 1024, device="cuda", data_ranks=8, zero_stage=3)
    assert "sent by" not in not_enough_memory(NotEnoughMemory("", o, 4 << 30, 3))


# ----------------------------------------------------------------------------
# the command line

THOUSAND = (
    "--plan -e gpt3:c12288 -b 1 -t 2048 -r 2 --ranks 1024 -z 3 --tensor-parallel 8 --link 400 --node-link 3600 --memory-budget h100-80 "
    "--device cuda --precision bf16"
)


def test_a_thousand_ranks_are_planned_for_on_one_machine():
    o = PlanOptions(config_from_descriptor("gpt3:c12288"), 1, 2048, recompute=2, device="cuda", data_ranks=128, zero_stage=3,
                    tensor_parallel=8, reduce_every_micro_step=True)  # fmt: skip
    links = Links(400.0, 3600.0, 8)
    out = ran(THOUSAND)
    assert out == plan_table(o, 1, H100, links) + "\n"
    assert out.splitlines()[0].endswith("one of 1024 ranks, ZeRO stage 3, tensor parallel in 8 parts")
    assert json.loads(ran(THOUSAND, "--json")) == {"reasons": []} | plan_json(o, 1, H100, links)


def test_ranks_to_plan_for_are_those_of_ranks_or_of_pn():
    plan = "--plan -e d12 -b 4 -z 2 --memory-budget h100-80"
    assert ran(plan, "--ranks 8") == ran(plan, "-pn 8") == ran(plan, "-pn 2 --ranks 8") != ran(plan, "-pn 2")
    assert json.loads(ran(plan, "--ranks 8 -d 65536 --json"))["grad_accum_steps"] == 2


D48_ON_H100 = "--plan -e d48 -b 16 --memory-budget h100-80 --device cuda --precision bf16"


def test_plan_prints_the_table_of_what_was_asked():
    out = ran(D48_ON_H100)
    assert out == plan_table(PlanOptions(D48, 16, 1024, device="cuda"), 1, H100) + "\n"
    assert out.startswith("memory plan in MiB: L=48 NH=25 C=1600 V=50257, B=16 T=1024, bf16, on cuda, fp32 master weights\n")
    assert list(table_rows(out)) == list(LEVELS)


def test_plan_json_parses_and_has_every_level():
    told = json.loads(ran(D48_ON_H100, "--json"), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert len(told["levels"]) == 7
    assert told == {"reasons": []} | plan_json(PlanOptions(D48, 16, 1024, device="cuda", reduce_every_micro_step=True), 1, H100)
    assert (told["ranks"], told["zero_stage"], told["tensor_parallel"], told["link"], told["levels"][0]["sent"]) == (1, 0, 1, None, [])


def test_plan_counts_the_micro_steps_of_d():
    five = f"-d {5 * 16 * 1024}"
    assert ran(D48_ON_H100, five) == plan_table(PlanOptions(D48, 16, 1024, device="cuda"), 5, H100) + "\n"
    told = json.loads(ran(D48_ON_H100, five, "--json"))
    assert told["grad_accum_steps"] == 5
    assert told["levels"][0]["flops_per_step"] == 5 * json.loads(ran(D48_ON_H100, "--json"))["levels"][0]["flops_per_step"]


def test_plan_tensors_lists_every_tensor_once_per_arena():
    lines = ran("--plan --tensors -e d12 -b 4 --device cpu --kernels torch --matmul native --precision bf16 -r 3").splitlines()[3:]
    listed = [tuple(line.split()[:2]) for line in lines]
    assert len(set(listed)) == len(listed)
    plan = Plan(PlanOptions(D12, 4, 1024, recompute=3))
    wanted = [(arena, name) for arena in plan.arenas if arena != "activations" for name in parameter_shapes(D12)]
    wanted += [("activations", name) for name in plan.tensors]
    assert sorted(listed) == sorted(wanted)


def test_plan_with_offload_has_the_levels_that_keep_residuals_and_counts_host_memory():
    """Of 48 residuals three stay on the device: 45 of 16 x 1024 x 1600 bf16."""
    told = json.loads(ran(D48_ON_H100, "--offload-residual --json"))
    assert [row["recompute"] for row in told["levels"]] == [0, 1, 2, 3, 4, 5]
    assert {row["host_mib"] for row in told["levels"]} == {45 * 16 * 1024 * 1600 * 2 / MIB}
    table = ran(D48_ON_H100, "--offload-residual")
    assert "host memory: 2250.0 MiB pinned" in table and "residuals in host memory" in table
    resident = json.loads(ran(D48_ON_H100, "--json"))["levels"]
    for row, beside in zip(told["levels"], resident):
        assert row["total_mib"] < beside["total_mib"] and beside["host_mib"] == 0


def test_plan_of_an_offloaded_optimizer_counts_host_memory_and_the_bus():
    """d48 has 1557686400 parameters, of 12 bytes there; all of them are read, and written."""
    n = num_parameters(D48)
    told = json.loads(ran(D48_ON_H100, "--offload-optimizer --json"))
    assert told["offload_optimizer"] is True and {row["host_mib"] for row in told["levels"]} == {12 * n / MIB}
    table = ran(D48_ON_H100, "--offload-optimizer")
    assert f"host memory: {12 * n / MIB:.1f} MiB pinned, beside the total; an update reads {12 * n / 1e9:.1f} GB of it" in table
    assert "fp32 master weights, optimizer state in host memory" in table
    for row, beside in zip(told["levels"], json.loads(ran(D48_ON_H100, "--json"))["levels"], strict=True):
        assert row["total_mib"] == beside["total_mib"] - 12 * n / MIB and row["optimizer_mib"] == 0
        assert row["bytes_per_step"] == beside["bytes_per_step"] - 24 * n


@pytest.mark.parametrize("wish", ["--json", "--tensors"])
def test_a_form_of_the_plan_without_the_plan_is_a_sentence(wish):
    result = run("-e d12", wish)
    assert result.code == 2 and not result.out and wish in result.err and "--plan" in result.err


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Case A, with a checkpoint of a run of -b 2."""
    folder = write_case_a(tmp_path_factory.mktemp("case_a"))
    ran(*inputs(folder), f"-b 2 -t 32 -g 32 -x 1 -n 1 {QUIET} -o", folder / "run")
    return folder


def test_no_form_of_plan_imports_torch(case):
    """They answer at once and on any machine; one process asks for all of them, and for what does not fit or is refused."""
    sizes = "-t 32 -g 32 --memory-budget 1GiB"
    fine = [
        [THOUSAND], [THOUSAND, "--json"], [THOUSAND, "--tensors"],
        [D48_ON_H100], [D48_ON_H100, "--json"], [D48_ON_H100, "--tensors"], [D48_ON_H100, "--offload-residual --json"],
        ["--plan -e d12"], ["--plan -e d12 --device cpu --precision fp32 --memory-budget 24GiB"],
        ["--plan -e d12 -b 64 -r auto --memory-budget 16GiB --device cuda"],
        ["--plan -e d12 -b auto -d 524288 --memory-budget h100-80"], ["--plan -e d6 -t 64 -b auto --device cpu"],
        ["--plan", *inputs(case), sizes], ["--plan", *inputs(case), sizes, "-b auto -y 1 -o", case / "run"],
    ]  # fmt: skip
    too_large, refused = ["--plan -e d12 -b auto --memory-budget 1GiB"], ["--plan -e d12 -r auto --device cuda"]
    code = "\n".join([
        "import sys, train_gpt2",
        f"for argv in {[words_of(form) for form in (*fine, too_large, refused)]!r}:",
        "    code = train_gpt2.main(argv)",
        "    assert 'torch' not in sys.modules, argv",
        "    print('exit code', code)",
    ])  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^exit code (\d)$", done.stdout, re.MULTILINE) == [*("0" for _ in fine), "3", "2"]
    assert "-b auto takes -b 2: the checkpoint's" in done.stdout


def test_sums_of_micro_steps_are_planned_where_there_are_several():
    """A share of the gradients at stages 0 and 1, in the bytes that a run keeps them in, and sums of every micro-step."""
    plan = "--plan -e d12 -b 4 -pn 2 -z 1 --device cuda --json"

    def row(*flags):
        return next(row for row in json.loads(ran(plan, *flags))["levels"] if row["recompute"] == 1)

    once, twice, asked = row(), row(f"-d {2 * 4 * 2 * 1024}"), row(f"-d {2 * 4 * 2 * 1024} --reduce-every-micro-step 0")
    share = num_parameters(config_from_descriptor("d12")) // 2 * 2 / MIB
    assert once["total_mib"] == asked["total_mib"] and share <= twice["total_mib"] - once["total_mib"] <= 1.01 * share
    assert twice["sent_mib"] - asked["sent_mib"] == pytest.approx(share)
