"""profile.py: every operation of a step is a row, rows add up, FLOPs and bytes are those counted by hand. No time is checked."""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt2
from llmc import gpt2
from llmc.backend import Backend
from llmc.cards import Budget
from llmc.config import config_from_descriptor
from llmc.errors import UserError
from llmc.memory.cost import step_cost
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tables import num_parameters
from scripts import profile, profile_hooks, profile_report
from scripts.profile_hooks import Limits

REPO = Path(__file__).resolve().parent.parent
SCRIPT = REPO / "scripts/profile.py"
L, C, V, Vp, B, T = 2, 32, 50, 64, 2, 12
ROWS = B * T
SMALL = ["-e", "d2", "-t", str(T), "--device", "cpu"]
levels = pytest.mark.parametrize("level", list(NOT_KEPT))


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """-e d2 is a model of no size, and the machine's limits are known."""
    monkeypatch.setattr("llmc.config.GPT2_DEPTHS", {L: (C, 2)})
    monkeypatch.setattr("llmc.config.GPT2_VOCAB_SIZE", V)
    monkeypatch.setattr("llmc.config.GPT2_PADDED_VOCAB_SIZE", Vp)
    monkeypatch.setattr(train_gpt2, "measure_matmul_tflops", lambda *_: 0.5)
    monkeypatch.setattr(profile, "measure_limits", lambda run: Limits(10.0, 0.5))
    enabled = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(enabled)


@pytest.fixture
def profiled(tmp_path, capsys):
    """(what is printed, the JSON) of a run with these words."""

    def run(*words):
        path = tmp_path / "rows.json"
        profile.main([*SMALL, "-b", str(B), "--kernels", "torch", "--steps", "1", "--json", str(path), *words])
        return capsys.readouterr().out, json.loads(path.read_text())

    return run


def total(found, field, **conditions) -> float:
    return sum(row[field] for row in found["rows"] if all(row[name] == value for name, value in conditions.items()))


def row_of(found, name) -> dict:
    [row] = [row for row in found["rows"] if row["name"] == name]
    return row


# ---- time


def test_rows_add_up_to_the_step(profiled):
    _, found = profiled("--steps", "5")
    assert total(found, "ms") == pytest.approx(found["step_ms"])
    assert sum(kind["ms"] for kind in found["kinds"]) == pytest.approx(found["step_ms"])
    assert sum(row["of_step"] for row in found["rows"]) == pytest.approx(1)
    assert found["step_ms"] == pytest.approx(sum(sorted(found["steps_ms"])[1:4]) / 3)
    assert len(found["plain_steps_ms"]) == 5 and found["plain_step_ms"] == sorted(found["plain_steps_ms"])[2]
    assert found["rows"][-1]["name"] == "rest" and all(row["ms"] >= 0 for row in found["rows"])


def test_the_slowest_and_the_fastest_steps_do_not_count():
    key = ("forward", "fc", "matmul_forward")
    times = [{key: ms} for ms in (900.0, 4.0, 6.0, 1.0, 5.0)]
    rows = profile.make_rows({key: profile_hooks.Cost(calls=2)}, times, [1000.0, 10.0, 12.0, 2.0, 14.0])
    assert [(row.name, row.ms) for row in rows] == [("fc: matmul_forward", 5.0), ("rest", 7.0)]


def test_a_row_is_compared_with_the_least_time_that_its_bytes_or_its_flops_take():
    limits = Limits(copy_gb_s=10.0, matmul_tflops=0.5)
    assert limits.floor_ms(20_000_000, 500_000_000) == 2.0  # bytes take longer
    assert limits.floor_ms(20_000_000, 4_000_000_000) == 8.0
    row = profile_report.Row("forward", "fc", "matmul_forward", "matmul", 1, 10.0, 20_000_000, 4_000_000_000, 8.0)
    assert (row.of_limit, row.gb_s, row.tflop_s) == pytest.approx((0.8, 2.0, 0.4))


class FakeEvent:
    """An event that says when it is recorded, and when it is waited for, in `log`; a mark is its place there."""

    log = []

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, *stream):
        self.at = len(self.log)
        self.log.append("mark")

    def synchronize(self):
        self.log.append("wait")

    def elapsed_time(self, end):
        return float(end.at - self.at)


def test_on_cuda_a_step_is_not_waited_for_between_its_operations(monkeypatch):
    log = FakeEvent.log = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    model = gpt2.GPT2(Plan(PlanOptions(config_from_descriptor("d2"), B, T, "fp32", 0)))
    model.init_random()
    recorder, step = profile.prepare(model, Backend(torch.device("cpu"), "cuda", "a GPU"), Limits(1.0, 1.0))
    with torch.no_grad(), profile_hooks.hooked(model, recorder):
        times, whole = recorder.measure(step)
    marks = 2 * len(recorder.spans) + 2
    assert log[: marks + 2] == ["wait", *["mark"] * marks, "wait"]
    assert sum(times.values()) == len(recorder.spans) and whole == marks - 1  # a mark later each


# ---- what is there


@pytest.mark.parametrize("level", [0, 5, 6])
def test_every_operation_that_a_step_calls_is_in_a_row_as_often(profiled, monkeypatch, level):
    """Two steps to warm up, one without hooks and one with: four in all."""
    calls, operations = Counter(), gpt2.operations

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(gpt2, "operations", lambda *args: SimpleNamespace(**{n: counted(n, f) for n, f in vars(operations(*args)).items()}))
    for name in [n for n in vars(gpt2) if n.startswith(("matmul_", "residual_"))]:
        monkeypatch.setattr(gpt2, name, counted(name, getattr(gpt2, name)))
    _, found = profiled("-r", str(level))
    expected = {name.removeprefix("launch_"): n / 4 for name, n in calls.items() if not name.startswith("stage_")}
    assert {name: total(found, "calls", operation=name) for name in expected} == expected
    assert {row["operation"] for row in found["rows"]} == {*expected, ""}
    assert {"adamw_update", "global_norm", "fused_classifier_inplace", "encoder_backward", "matmul_dinput"} < expected.keys()


def test_stages_stand_in_the_order_of_the_step_each_with_what_it_calls(profiled):
    _, found = profiled("-r", "0", "--precision", "fp32")
    names = [row["name"] for row in found["rows"]]
    assert names[:4] == ["encoder: encoder_forward", "ln1_forward: layernorm_forward", "qkv: matmul_forward", names[3]]
    assert names[3].startswith("attention: attention_")
    assert names[4:10] == [
        "attproj_ln2: matmul_forward", "attproj_ln2: residual_layernorm_forward", "fc: matmul_forward", "gelu: gelu_forward",
        "fcproj: matmul_forward", "fcproj: residual_layernorm_forward",
    ]  # fmt: skip
    assert names[10:15] == [
        "head: matmul_forward", "head: fused_classifier_inplace", "head: matmul_dweight", "head: matmul_dinput",
        "lnf_backward: layernorm_backward",
    ]  # fmt: skip
    assert names[-4:] == ["encoder_backward: encoder_backward", "norm: global_norm", "update: adamw_update", "rest"]
    assert row_of(found, "ln1_forward: layernorm_forward")["calls"] == 1 and row_of(found, "fc: matmul_forward")["calls"] == L
    assert list(dict.fromkeys(row["phase"] for row in found["rows"])) == ["forward", "head", "backward", "update", ""]
    assert not [name for name in names if "again" in name]


@pytest.mark.parametrize("level, stages", [
    (2, ["ln2 again", "ln1 again"]),
    (3, ["ln2 again", "fc again", "ln1 again"]),
    (5, ["ln1_forward again", "qkv again", "attention again", "attproj_ln2 again", "fc again"]),
])  # fmt: skip
def test_what_backward_runs_again_has_rows_of_its_own(profiled, level, stages):
    _, found = profiled("-r", str(level))
    again = [row for row in found["rows"] if row["stage"].endswith(" again")]
    assert list(dict.fromkeys(row["stage"] for row in again)) == stages
    assert {row["phase"] for row in again} == {"backward"} and {row["calls"] for row in again} == {L}


def test_the_rows_of_a_stage_stay_together(profiled):
    """At -r 6 the last block of a segment adds without a norm, so an operation of a stage comes up late."""
    _, found = profiled("-r", "6")
    stages = [(row["phase"], row["stage"]) for row in found["rows"]]
    assert [stage for i, stage in enumerate(stages) if i == 0 or stage != stages[i - 1]] == list(dict.fromkeys(stages))


def test_hooks_are_gone_afterwards(profiled):
    before = {name: getattr(gpt2, name) for name in vars(gpt2) if name.startswith(profile_hooks.CALLED_BY_NAME)}
    profiled()
    assert {"residual_add_inplace"} <= before.keys() and {name: getattr(gpt2, name) for name in before} == before


# ---- FLOPs and bytes


WEIGHTS = 12 * C * C * L + Vp * C


@pytest.mark.parametrize("level, again", [(0, 0), (2, 0), (3, 4 * C * C * L), (4, 7 * C * C * L), (5, 8 * C * C * L)])
def test_matmul_flops_are_six_for_each_weight_and_token_and_two_where_one_runs_again(profiled, level, again):
    _, found = profiled("-r", str(level))
    assert total(found, "flops", kind="matmul") == 2 * ROWS * (3 * WEIGHTS + again)
    assert total(found, "flops", kind="attention") == (7 if level < 5 else 9) * B * T * T * C * L


@levels
def test_flops_are_those_of_the_plan(profiled, level):
    _, found = profiled("-r", str(level))
    assert total(found, "flops") == step_cost(PlanOptions(config_from_descriptor("d2"), B, T, recompute=level)).flops


@pytest.mark.parametrize("name, shapes", [
    ("matmul_gelu_forward", ["out", "out", "inp", "weight", "bias"]), ("matmul_gelu_backward", ["out", "inp", "weight", "out"]),
])  # fmt: skip
def test_a_matmul_with_gelu_inside_counts_as_the_matmul(name, shapes):
    shape = {"out": (B, T, 4 * C), "inp": (B, T, C), "weight": (4 * C, C) if "forward" in name else (C, 4 * C), "bias": (4 * C,)}
    assert profile_hooks.count_flops(name, [torch.empty(shape[s]) for s in shapes], 0) == 2 * ROWS * 4 * C * C
    assert profile_report.kind_of(name) == "matmul"


@pytest.mark.parametrize("level", [0, 4])
def test_in_fp8_matmuls_move_their_operands_too_and_multiply_twice_as_fast(level):
    """By as many bytes more than in bf16 as the plan says, but for dout of three matmuls, which the plan takes for read once in bf16, and
    rows for read twice. The head's are the same."""
    found = {}
    for matmul in ("native", "fp8"):
        options = PlanOptions(config_from_descriptor("d2"), 4, T, "bf16", level, kernels="torch", matmul=matmul)
        model = gpt2.GPT2(Plan(options))
        model.init_random()
        recorder, step = profile.prepare(model, Backend(torch.device("cpu"), "cpu", "a CPU"), Limits(1e9, 1.0))  # so FLOPs take longer
        recorder.counting = True
        with torch.no_grad(), profile_hooks.hooked(model, recorder):
            recorder.measure(step)
        found[matmul] = recorder.costs, step_cost(options).bytes
    (costs, n_bytes), (costs8, n_bytes8) = found.values()
    more = sum(c.n_bytes for c in costs8.values()) - sum(c.n_bytes for c in costs.values())
    assert more == n_bytes8 - n_bytes - 2 * L * (3 + 1 + 4) * 4 * T * C > 0
    for key, cost in costs.items():
        assert costs8[key].flops == cost.flops
        if cost.flops:  # attention has room for FP8 among its arguments too, and none in it
            in_fp8 = key[-1] in profile_hooks.MATMULS and key[0] != "head"
            assert costs8[key].floor_ms == cost.floor_ms / (2 if in_fp8 else 1), key
    assert any(key[-1].startswith("attention") and cost.flops for key, cost in costs.items())
    made = {key for key in costs8 if key not in costs}
    assert {key[-1] for key in made} == {"matmul_dout"} and all(profile_report.kind_of(key[-1]) == "matmul" for key in made)


@pytest.mark.parametrize("chunk", [5, 24])
def test_matmul_flops_do_not_depend_on_the_chunks_of_the_head(profiled, chunk):
    _, found = profiled("--head-chunk", str(chunk))
    head = row_of(found, "head: matmul_dweight")
    assert head["calls"] == -(-ROWS // chunk) and head["flops"] == 2 * ROWS * Vp * C


U, P = ROWS * C, Vp * C + 1024 * C + L * (12 * C * C + 13 * C) + 2 * C  # elements of a (B, T, C) tensor; parameters


@pytest.mark.parametrize("precision, x", [("fp32", 4), ("bf16", 2)])
def test_bytes_are_those_counted_by_hand(profiled, precision, x):
    assert num_parameters(config_from_descriptor("d2")) == P
    _, found = profiled("--precision", precision)
    tokens = len(np.unique(np.random.default_rng(0).integers(0, V, (2, B, T))[0]))
    expected = {
        "encoder: encoder_forward": x * (U + tokens * C + T * C) + 8 * ROWS,
        "qkv: matmul_forward": x * L * (4 * U + 3 * C * C + 3 * C),
        "attproj_ln2: residual_layernorm_forward": L * (x * (4 * U + 2 * C) + 8 * ROWS),
        "gelu: gelu_forward": x * L * 8 * U,
        "gelu_backward: gelu_backward_inplace": x * L * (12 * U + 4 * C),
        "head: fused_classifier_inplace": x * 2 * ROWS * Vp + 16 * ROWS,
        "head: matmul_dweight": x * (ROWS * Vp + U + Vp * C),
        "fc_backward: matmul_dinput": x * L * (5 * U + 4 * C * C),
        "norm: global_norm": x * P + 4,
        "update: adamw_update": 28 * P,
    }
    assert {name: row_of(found, name)["bytes"] for name in expected} == expected


def test_a_gradient_that_is_added_to_is_read_and_written(profiled):
    _, found = profiled("--precision", "fp32", "--head-chunk", "12")  # two chunks: the second adds
    assert row_of(found, "head: matmul_dweight")["bytes"] == 4 * (ROWS * Vp + U + 3 * Vp * C)


@pytest.mark.parametrize("words, n_bytes", [
    (["--master", "bits16"], 26), (["--optimizer-state", "bf16"], 20), (["--master", "none"], 22), (["-w", "0"], 22),
    (["--grad-dtype", "fp32"], 30),
])  # fmt: skip
def test_the_update_moves_what_its_form_has(profiled, words, n_bytes):
    _, found = profiled("--precision", "bf16", *words)
    assert row_of(found, "update: adamw_update")["bytes"] == n_bytes * P


# ---- what is printed and written


def test_the_table_has_every_row_and_the_first_line_says_what_was_measured(profiled):
    out, found = profiled("-r", "3", "--precision", "bf16")
    lines = out.splitlines()
    assert lines[0].startswith(f"d2, B={B}, T={T}, -r 3, bf16 on {found['device']}, torch {torch.__version__}: copy 10.0 GB/s, matmul 0.5 ")
    printed = [line.split("  ")[0] for line in (line.removeprefix("  ") for line in lines)]
    assert [row["name"] for row in found["rows"] if row["name"] not in printed] == []
    assert [kind["kind"] for kind in found["kinds"] if kind["kind"] not in printed] == []
    assert f"{100 * found['mfu']:.1f}% MFU" in lines[-2] and f"{found['tokens_per_s']:.0f} tok/s" in lines[-2]
    numba = found["kernels"] == "numba"
    assert len([line for line in lines if line.startswith("this is the eager step")]) == numba


def test_a_picture_is_written(profiled, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.png"
    out, _ = profiled("-r", "5", "--output", str(path))
    assert path.read_bytes().startswith(b"\x89PNG") and out.endswith(f"wrote {path}\n")


def test_a_trace_has_a_range_for_every_row_as_often_as_it_is_called(profiled, tmp_path):
    path = tmp_path / "step.trace.json"
    out, found = profiled("-r", "3", "--trace", str(path))
    ranges = Counter(event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation")
    rows = {row["name"]: row["calls"] for row in found["rows"] if row["operation"]}
    assert {name: ranges[name] for name in rows} == rows
    assert ranges["fc again"] == L and ranges["head"] == 1 and f"wrote {path}" in out


def test_ranges_are_named_as_stages_and_rows():
    """As --nvtx and --trace ask for them, one inside the other."""
    recorder, seen = profile_hooks.Recorder(Backend(torch.device("cpu"), "cpu", "a CPU"), Limits(1.0, 1.0), {"fc"}, 0, ()), []
    recorder.range_of = lambda name: seen.append(name) or nullcontext()
    recorder.recording, recorder.phase = True, "backward"
    operation = recorder.operation_hook("matmul_forward", lambda: None)
    recorder.stage_hook("fc", operation)()
    operation()
    assert seen == ["fc again", "fc again: matmul_forward", "matmul: matmul_forward"]


# ---- the command line


@pytest.mark.parametrize("words, sentence", [
    (["-e", "d7"], "-e d7: neither a .bin file nor a known model descriptor"),
    (["-e", "nowhere.bin"], "nowhere.bin does not exist; expected a model file"),
    (["-r", "9"], "-r 9: no such recompute level"),
    (["-b", "0"], "-b (--batch-size) is '0', but must be"),
    (["-b", "auto"], "-b auto looks at the training data too"),
    (["-t", "2000"], "-t 2000: the model knows 1024 positions"),
    (["--precision", "fp8"], "--precision is 'fp8', but must be auto, fp32 or bf16"),
    (["--kernels", "triton"], "--kernels triton: "),
    (["--attention", "flash"], "--attention flash is a GPU's"),
    (["--steps", "0"], "--steps 0: expected a whole number of 1 or more"),
    (["--nvtx"], "--nvtx marks ranges for a GPU's profiler, and this run is on "),
    (["--wrong"], "unrecognized arguments: --wrong"),
    (["-g", "1"], "-g is not about a step on one device, which is what is profiled; leave it out"),
    (["--max-steps=3"], "--max-steps is not about a step on one device"),
    (["--output", "/proc/nowhere/p.png"], "--output /proc/nowhere/p.png: cannot be written, the folder /proc/nowhere does not exist"),
    (["--json", "/proc/rows.json"], "--json /proc/rows.json: cannot be written, "),
    (["--trace", "/"], "--trace /: cannot be written, it is a folder"),
    (["--output", "p.gif"], "-o p.gif: expected a name that ends in .png"),
])  # fmt: skip
def test_what_cannot_be_done_is_one_sentence(words, sentence, monkeypatch):
    monkeypatch.setattr(profile, "profile_step", lambda *args: pytest.fail("it began"))
    with pytest.raises(UserError) as error:
        profile.main([*SMALL, *words])
    assert str(error.value).startswith(sentence) and "\n" not in str(error.value)


@pytest.mark.parametrize("words, sentence", [
    ([], rf"the plan of -b 4 -t {T} -r 0 needs \d+ MiB, and there are 0 MiB \(free in a test\); use a smaller -b or a higher -r"),
    (["-r", "auto"], f"no recompute level fits -b 4 -t {T} in 0 MiB: .*; use a smaller -e, -b or -t"),
])  # fmt: skip
def test_a_batch_that_does_not_fit_is_refused_before_anything_is_allocated(words, sentence, monkeypatch):
    monkeypatch.setattr(train_gpt2, "run_budget", lambda s, backend, world: Budget(1000, "free in a test", reserve=0.02))
    monkeypatch.setattr(profile, "profile_step", lambda *args: pytest.fail("it began"))
    with pytest.raises(UserError, match=sentence):
        profile.main([*SMALL, *words])


def test_an_allocator_that_says_no_is_explained(monkeypatch):
    def refuse(run, args):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(profile, "profile_step", refuse)
    with pytest.raises(UserError, match="ran out of memory within a plan of .* MiB; use a smaller -b"):
        profile.main(SMALL)


def python(*arguments, cwd=REPO):
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True)


def test_an_error_is_exit_code_2_and_help_is_0():
    bad, good = python(SCRIPT, "-e", "d7", "--device", "cpu"), python("profile.py", "--help", cwd=REPO / "scripts")
    assert bad.returncode == 2 and bad.stdout == "" and len(bad.stderr.splitlines()) == 1 and bad.stderr.startswith("error: -e d7: ")
    assert good.returncode == 0 and good.stderr == ""
    for word in ("--steps N", "--nvtx", "--trace FILE", "--json FILE", "-o FILE", "-r LEVEL", "[d12]", "--attention"):
        assert word in good.stdout


@pytest.mark.parametrize("path", [["scripts"], [".", "scripts"]])
def test_other_scripts_find_the_standard_library_s_module_of_this_name(path):
    """Their folder is where Python looks first, and cProfile, which torch.compile imports, asks for `profile`, before Python 3.15."""
    lines = (
        f"import sys; sys.path[:0] = {path}",
        "import cProfile, profile, pstats",
        "assert getattr(cProfile, '_pyprofile', profile) is profile and hasattr(profile, 'Profile'), profile",
        "from scripts import profile as ours",
        "assert ours.__name__ == 'scripts.profile' and ours is not profile and 'torch' not in sys.modules",
    )
    done = python("-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr
