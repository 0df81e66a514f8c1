"""A model that trains nothing (-x 0): it has its weights and what forward needs, and gives the numbers of one that trains, to the bit."""

import json
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import ranks_program
from case_a import write_case_a
from test_forms import DEEP
from test_gpt2 import SMALL, activation_arena, batch, build
from test_gpt2 import one_thread  # noqa: F401  (autouse here too)
from test_loop import inputs, ran, run

import train_gpt2
from llmc.config import config_from_descriptor
from llmc.flags import parse
from llmc.memory.choose import levels_of
from llmc.memory.cost import step_cost
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tables import BACKWARD_STAGES, num_parameters
from llmc.request import needs_training_state

D12, D48 = (config_from_descriptor(name) for name in ("d12", "d48"))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return write_case_a(tmp_path_factory.mktemp("case_a"))


def numbers(model):
    """Losses of two batches and the logits of a few tokens, as bits, of an arena that is all NaN before each."""
    found = []
    for step in range(2):
        activation_arena(model).fill_(0xFF)
        found.append(model.token_losses(*batch(step, model.config)).numpy().tobytes())
    activation_arena(model).fill_(0xFF)
    return found + [model.next_logits(token, position).tobytes() for position, token in enumerate((3, 1, 4, 1, 5))]


@pytest.mark.parametrize("kernels, matmul", [("torch", "native"), ("torch", "widened"), ("numba", "numba")])
@pytest.mark.parametrize("config", [SMALL, DEEP], ids=["small", "deep"])
def test_evaluation_and_sample_have_the_bits_of_a_model_that_trains(config, kernels, matmul):
    if kernels == "numba":
        pytest.importorskip("numba")
    for precision, chunk in product(("fp32", "bf16"), (0, 5)):
        if matmul == "widened" and precision == "fp32":
            continue
        forms = dict(precision=precision, kernels=kernels, matmul=matmul, head_chunk=chunk)
        for level in (0, 2, max(NOT_KEPT)):
            trains, only_evaluates = (build(config, recompute=level, trains=trains, **forms) for trains in (True, False))
            assert numbers(only_evaluates) == numbers(trains), (forms, level)
        assert only_evaluates.flat.keys() == {"parameters"} and not only_evaluates.grads


@pytest.mark.parametrize("forms", [
    {"device": "cpu"}, {"device": "cpu", "kernels": "numba", "matmul": "numba"}, {"device": "cpu", "precision": "fp32", "head_chunk": 9},
    {"device": "cuda"}, {"device": "cuda", "matmul": "fp8"}, {"device": "cuda", "gelu_fusion": 2},
    {"device": "cuda", "data_ranks": 4, "zero_stage": 3}, {"device": "cuda", "tensor_parallel": 2, "data_ranks": 2, "zero_stage": 1},
    {"device": "cuda", "attention": "flash"}, {"device": "cuda", "attention": "efficient", "precision": "fp32"},
    {"device": "cuda", "offload_optimizer": True, "offload_residual": True, "async_checkpoint": True, "optimizer_state": "bf16"},
])  # fmt: skip
@pytest.mark.parametrize("level", NOT_KEPT)
def test_the_plan_has_weights_and_what_forward_and_a_sample_need(forms, level):
    """Nothing of backward and the update, each tensor from when it is written in forward, and never more than with them."""
    o = replace(PlanOptions(D12, 4, 1024, **forms).only_evaluating(), recompute=level)
    plan, training = Plan(o), Plan(replace(o, trains=True))
    assert plan.host_bytes == 0 and plan.library_bytes <= training.library_bytes
    assert plan.arenas.keys() == {"parameters", "activations"} and plan.arenas["parameters"] == training.arenas["parameters"]
    assert sum(plan.columns.values()) == plan.total_bytes and plan.columns["gradients"] == plan.columns["optimizer"] == 0
    assert plan.arenas["activations"] <= training.arenas["activations"]
    line = plan.stages[: plan.stages.index("head") + 1] + ("sample",)
    assert all(stage in line for t in plan.tensors.values() for span in t.spans for stage in span)
    assert plan.tensors["residual3"].shape[0] == 2  # layers take turns, as no backward reads them again
    forward = {name for name, t in training.tensors.items() if any(first in line for first, _ in t.spans)}
    left_out = {"dwte_sum", "dwte_group", "gradient_share", "head_widened"}  # which the head and micro-steps need for gradients alone
    assert forward - left_out == plan.tensors.keys() - left_out and plan.tensors.keys() <= training.tensors.keys()
    assert {stage for stage in (s.name for s in BACKWARD_STAGES)}.isdisjoint(plan.schedule) and not plan.schedule
    assert levels_of(o) == (level,)


def test_an_evaluation_costs_a_third_of_a_step_s_matmuls_and_forward_s_attention():
    B, T, L, C, Vp = 4, 1024, 12, 768, 50304
    o = PlanOptions(D12, B, T, trains=False)
    assert step_cost(o).flops == L * (24 * B * T * C * C + 2 * B * T * T * C) + 2 * B * T * Vp * C
    assert step_cost(o, 3).flops == 3 * step_cost(o).flops and step_cost(o, 3).bytes == 3 * step_cost(o).bytes
    assert 0 < step_cost(o).bytes < step_cost(replace(o, trains=True, recompute=0)).bytes / 3


@pytest.mark.parametrize("flags, needs", [
    ("-x 0", False), ("-x 0 -o log", False), ("-x 0 -n 5", False), ("-x 0 -o log -n 5", True), ("-x 1", True), ("", True),
])  # fmt: skip
def test_a_checkpoint_that_is_written_needs_the_optimizer_s_state(flags, needs):
    assert needs_training_state(parse(flags.split())) == needs


@pytest.mark.parametrize("level", ["0", "6", "auto"])
@pytest.mark.parametrize("more", ["", "--async-checkpoint 1", "--optimizer-state bf16"])
def test_the_program_says_the_same_with_a_fraction_of_the_memory(case, tmp_path, level, more):
    """As the run that goes on to train from there, and what it measures is in its record."""
    common = "-b 2 -t 32 -v 1 -m 3 -h 1 -s 1 -g 9"
    evaluation = ["--hellaswag-data", case / "eval.bin"]
    only = ran(*inputs(case), common, *evaluation, "-x 0 -o", tmp_path / "log", "-r", level, more)
    first = ran(*inputs(case), common, *evaluation, "-x 1 -l 0")
    said = [re.findall(r"val loss \S+", out)[0] for out in (only, first)]
    assert said[0] == said[1]
    found = [re.search(rf"{what}", out)[0] for what in (r"HellaSwag: .*", r"generating:\n---\n.*") for out in (only, first)]
    assert found[0] == found[1] and found[2] == found[3]
    assert "-x 0 trains nothing: no memory is planned for gradients" in only and "parameter gradients" not in only
    record = json.loads((tmp_path / "log" / "memory.json").read_text())
    assert record["plan"]["arenas"].keys() == {"parameters", "activations"} and record["plan"]["options"]["trains"] is False


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_looked_at_all_the_same(case, tmp_path, monkeypatch):
    """With -nk 1 the run that goes on replaces it while kernels are compiled for who looks."""
    argv = (*inputs(case), "-b 2 -t 32 -m 3 -s 1 -g 9 -o", tmp_path / "log")
    ran(*argv, "-x 2 -n 2 -v 0")
    usual, compile_kernels = ran(*argv, "-x 0 -y 1 -v 1").partition("val loss")[2], train_gpt2.compile_kernels

    def too_slow(run):
        compile_kernels(run)
        for name in ("DONE_00000002", "model_00000002.bin", "state_00000002_00000.bin", "extra_00000002_00000.json"):
            (tmp_path / "log" / name).unlink()

    monkeypatch.setattr(train_gpt2, "compile_kernels", too_slow)
    found = ran(*argv, "-x 0 -y 1 -v 1").partition("val loss")[2]
    assert found.partition("total")[0] == usual.partition("total")[0] != ""
    assert not (tmp_path / "log" / "model_00000002.bin").exists()


def test_what_could_not_be_trained_can_be_looked_at(case):
    """d48 in bf16: 2971 MiB of weights, and the rest is little; 24 GB is not enough to train it at all."""
    asked = "--plan -e d48 -b 1 -t 1024 --precision bf16 --memory-budget 4090 --device cuda"
    told = json.loads(ran(asked, "-x 0 --json"))
    assert [row["recompute"] for row in told["levels"]] == [max(NOT_KEPT)]
    assert 2 * num_parameters(D48) / 2**20 < told["levels"][0]["total_mib"] < 3300
    table = ran(asked, "-x 0")
    assert "on cuda, nothing is trained" in table and "an evaluation: 3.346 TFLOP of matmuls and attention, " in table
    assert "the plan needs" in ran(asked, "-r 6") and "the plan needs" not in table
    common = (*inputs(case), "-b 1 -t 32 -v 0 -s 1")
    enough = int(re.search(r"(\d+) MiB planned", ran(*common, "-x 0"))[1]) + 1
    assert run(*common, f"-x 0 --memory-budget {enough}MiB").code == 0
    assert run(*common, f"-x 1 --memory-budget {enough}MiB").code == 3


@pytest.mark.parametrize("flags", ["-z 0", "-z 1", "-z 3", "--tensor-parallel 2"])
def test_several_ranks_evaluate_and_sample_so_too(case, tmp_path, flags):
    """The losses of all, in other sums; the sample to the token."""
    common = "-t 32 -x 0 -m 3 -s 1 -g 9 --kernels numba --device cpu --threads 1"
    many = ranks_program.ran(2, tmp_path, *inputs(case), common, "-b 4" if "tensor" in flags else "-b 2", flags)
    one = ran(*inputs(case), common, "-b 4")
    losses = [float(re.search(r"val loss (\S+)", out)[1]) for out in (many, one)]
    assert np.isclose(*losses, atol=2e-6, rtol=0)
    samples = [re.search(r"generating:\n---\n(.*)", out)[1] for out in (many, one)]
    assert samples[0] == samples[1]
