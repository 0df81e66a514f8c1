"""gpu_check.py: a dry run writes the whole report, says what it is, and what fails or does not fit is recorded while the rest goes on.

Nothing here is timed, and no number of a dry run means anything.
"""

import json
import math
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, count, cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from interpreter import little_to_interpret, quick_interpreter  # noqa: F401  (a fixture)
from torch_gelu import TorchGelu

from llmc.backend import Backend
from llmc.config import config_from_descriptor
from llmc.data.shards import count_tokens
from llmc.graphs import Graphs
from llmc.layers.matmul import matmul_dweight
from scripts import gpu_algorithms, gpu_check, gpu_common, gpu_compared, gpu_fp8, gpu_goals, gpu_kernels, gpu_llmc, gpu_steps, gpu_tune
from scripts.gpu_check import SECTIONS, Section
from scripts.gpu_common import FULL, TINY, Skip, attempt, new_record, table, while_time
from scripts.gpu_kernels import CALLS, KERNELS, STAGED, Room, evaluate, letters
from scripts.gpu_report import DRY_NOTICE, cell
from scripts.gpu_steps import EAGER, our_kernels, our_step, pytest_outputs, report_tests
from scripts.gpu_tune import FORWARD, HEADS, KEYS, QUERIES

REPO = Path(__file__).resolve().parent.parent


def check(*arguments, **environment):
    """The script in a process of its own, without a GPU and on one thread."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, REPO / "scripts/gpu_check.py", *arguments], env=env, capture_output=True, text=True)


def report_at(prefix):
    return json.loads(Path(f"{prefix}.json").read_text()), Path(f"{prefix}.md").read_text()


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("dry") / "report"
    done = check("--dry-run", "--kernels", "torch", "--output", str(prefix))  # of steps with Triton's there is a test below
    assert done.returncode == 0, done.stderr
    return done.stdout, *report_at(prefix)


def test_a_dry_run_reports_every_section_with_its_status(dry_run):
    sections = dry_run[1]["sections"]
    assert list(sections) == [s.name for s in SECTIONS]
    for name, section in sections.items():
        assert section["status"] in ("ran", "skipped"), (name, section["errors"])
        assert bool(section["reason"]) == (section["status"] != "ran"), name
    skipped = {name for name, s in sections.items() if s["status"] == "skipped"}
    a_gpu_s = {"attention_steps", "attention", "gelu_fusion", "fp8", "fp8_curve", "algorithms", "residual_fusion", "tune_attention"}
    assert skipped - {"kernels"} == {"llmc", "tune", "tune_steps", *a_gpu_s}


def test_the_report_says_at_its_top_that_it_is_a_dry_run(dry_run):
    stdout, report, text = dry_run
    assert report["dry_run"] and text.splitlines()[2] == DRY_NOTICE
    assert "none of these numbers mean anything about a GPU" in stdout
    beginning, _, rest = text.partition("## What it ran on")
    for section in report["sections"].values():
        assert f"## {section['title']}" in text
        if section["status"] == "skipped":
            assert f"- {section['title']}: skipped, {section['reason']}" in beginning
    for head in ("| what | ms |", "| run | ms |", "| plain PyTorch | ms |", "| matmul | which |", "| kind |",
                 "| -b | run | ms |", "| goal | at least | measured | result |"):  # fmt: skip
        assert head in rest


def test_a_dry_run_goes_through_every_kernel_and_every_level(dry_run):
    sections = dry_run[1]["sections"]
    assert [row["run"] for row in sections["steps"]["tables"][""]] == ["-r 0", "-r 1", "-r 2"]
    assert {row["run"] for row in sections["more_steps"]["tables"][""]} >= {"-r 3", "-r 4", "-r 5", "-r 6", "-r 0, torch's operations"}
    assert not any(s["errors"] for s in sections.values())
    if sections["kernels"]["status"] == "ran":  # Triton is here
        assert [row["kernel"] for row in sections["kernels"]["tables"][""]] == [k.name for k in KERNELS]
        losses = {row["loss"] for row in sections["steps"]["tables"][""]}
        assert len(losses) == 1


def test_without_triton_its_sections_are_skipped_with_the_reason(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('no triton in this environment')")
    done = check("--dry-run", "--only", "kernels", "steps", "tune", "--tune", "--output", str(tmp_path / "out"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    sections = report_at(tmp_path / "out")[0]["sections"]
    for name in ("kernels", "tune"):
        assert sections[name]["status"] == "skipped" and "no triton in this environment" in sections[name]["reason"]
    assert sections["steps"]["status"] == "ran" and len(sections["steps"]["tables"][""]) == 3
    assert sections["steps"]["not_run"][0].startswith(f"{EAGER}: graphs need the device's own kernels")
    assert sections["profile"]["reason"] == "not among the sections of --only"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--minutes", "0"], "error: --minutes 0: expected more than 0"),
        (["--only", "nothing"], "error: --only nothing: there is no such section"),
        (["--output", "/proc/nowhere/report"], "error: --output /proc/nowhere/report: cannot be written, "),
        (["--llmc", "/nowhere/train_gpt2cu"], "error: --llmc /nowhere/train_gpt2cu: there is no program there"),
        (["--only", "tune", "--tune", "nothing"], "error: --tune nothing: there is no such operation; expected some of encoder_forward "),
        (["--wrong"], "error: unrecognized arguments: --wrong"),
    ],
)
def test_a_bad_argument_is_one_sentence_and_exit_code_2(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        gpu_check.parse(arguments)
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(sentence)


# ---- bytes


@pytest.fixture(scope="module")
def d12():
    return letters(config_from_descriptor("d12"), 64, 1024)


U, P = 100_663_296, 124_475_904  # 2 * 64 * 1024 * 768 bytes; parameters, the padded ones included


@pytest.mark.parametrize("name, n_bytes, launches", [
    ("gelu_forward", 805_306_368, 12),
    ("gelu_backward_inplace", 12 * U + 6144, 12),  # a bias gradient of 3072 bf16
    ("residual_layernorm_forward", 4 * U + 8 * 65536 + 3072, 24),  # mean and rstd; weight and bias
    ("adamw_update", 28 * P, 1),
    ("fused_classifier_inplace", 2 * 8192 * (50257 + 50304) + 16 * 8192, 8),
])  # fmt: skip
def test_bytes_are_those_counted_by_hand(d12, name, n_bytes, launches):
    kernel = next(k for k in KERNELS if k.name == name)
    assert (evaluate(kernel.n_bytes, d12), evaluate(kernel.launches, d12)) == (n_bytes, launches)


def test_every_operation_of_the_kernels_is_measured():
    pytest.importorskip("triton")
    from llmc.kernels.functions import triton_operations

    ours = {name.removeprefix("launch_") for name in triton_operations() if not name.startswith("stage_")}
    assert {k.operation for k in KERNELS} == set(CALLS) == {*ours, "fp8_operand"}


# ---- running sections


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of nothing yet, on the CPU, with much time."""
    monkeypatch.setattr(gpu_check, "launch_problem", lambda device: "not asked here")
    args = SimpleNamespace(minutes=60, only=None, tune=None, kernels="auto", llmc=None)
    return gpu_check.Run(args, Backend(torch.device("cpu"), "cpu", "a CPU"), True, tmp_path / "report")


def working(run, record):
    table(record, "").append({"number": 1.0})


def test_a_section_that_raises_is_recorded_and_the_rest_go_on(run):
    def failing(run, record):
        table(record, "").append({"number": 2.0})
        raise RuntimeError("a kernel was wrong")

    gpu_check.run_sections(run, [Section("bad", "Bad", failing, 0), Section("good", "Good", working, 0)])
    report, text = report_at(run.prefix)
    bad, good = report["sections"].values()
    assert (bad["status"], bad["reason"]) == ("failed", "RuntimeError: a kernel was wrong")
    assert bad["tables"][""] == [{"number": 2.0}] and "RuntimeError: a kernel was wrong" in bad["errors"][0]["lines"]
    assert good["status"] == "ran" and "- Bad: failed, RuntimeError: a kernel was wrong" in text


def test_of_an_error_with_a_long_message_the_report_has_its_cause_too():
    text = "\n".join(["no such operator", *(f"registered at {i}" for i in range(20))])
    assert gpu_common.last_lines(RuntimeError(text)).splitlines()[:3] == ["RuntimeError: no such operator", "...", "registered at 12"]
    assert gpu_common.last_lines(RuntimeError("no such operator")) == "RuntimeError: no such operator"


@pytest.mark.parametrize("column", ["loss", "loss as it is", "loss, last tenth", "validation loss"])
def test_losses_are_reported_to_a_digit_that_tells_them_apart(column):
    assert cell(column, 4.1234567) == "4.123457" and cell("ms", 4.1234567) == "4.123"


def test_one_item_that_raises_leaves_the_others_of_its_section(run):
    def section(run, record):
        for item in while_time(run, record, "ab", 0):
            with attempt(record, item):
                table(record, "").append({"inverse": 1 / (item != "a")})

    gpu_check.run_sections(run, [Section("items", "Items", section, 0)])
    record = report_at(run.prefix)[0]["sections"]["items"]
    assert record["status"] == "ran" and record["tables"][""] == [{"inverse": 1.0}]
    assert record["errors"][0]["what"] == "a" and "ZeroDivisionError" in record["errors"][0]["lines"]


def test_what_does_not_fit_in_the_time_says_so(run):
    def skipping(run, record):
        raise Skip("cannot")

    def slow(run, record):
        list(while_time(run, record, ["first", "second"], 7200))

    run.dry = False
    sections = [Section("skips", "Skips", skipping, 0), Section("slow", "Slow", slow, 0), Section("long", "Long", working, 7200)]
    gpu_check.run_sections(run, sections)
    report, text = report_at(run.prefix)
    skips, slow, long = report["sections"].values()
    assert (skips["status"], skips["reason"]) == ("skipped", "cannot")
    assert [what.split(":")[0] for what in slow["not_run"]] == ["first", "second"]
    assert long["status"] == "skipped" and long["reason"].startswith("no time: ") and "it wants 7200" in long["reason"]
    assert f"- Long: skipped, {long['reason']}" in text


def test_after_a_lost_device_a_new_process_runs_the_rest(run, monkeypatch):
    """Its report is taken over, and its files are gone."""
    lost = iter([False, True])
    monkeypatch.setattr(gpu_check, "device_is_lost", lambda: next(lost))
    by_name = {s.name: s for s in SECTIONS}
    sections = [by_name["facts"], Section("bad", "Bad", working, 0), by_name["matmuls"], by_name["goals"]]
    gpu_check.run_sections(run, sections)
    report = report_at(run.prefix)[0]
    assert list(report["sections"]) == ["facts", "bad", "matmuls", "goals"] and report["sections"]["goals"]["status"] == "ran"
    assert "in a new process" in report["sections"]["bad"]["notes"][0]
    assert report["sections"]["matmuls"]["status"] == "ran" and len(report["sections"]["matmuls"]["tables"][""]) == 20
    assert sorted(p.name for p in run.prefix.parent.iterdir()) == ["report.json", "report.md"]


# ---- training steps and graphs


def replayed_on_a_cpu(monkeypatch):
    """Graphs that run the captured work again; the names of all they were given."""
    asked = []

    class Stub(Graphs):
        def __init__(self, kind):
            super().__init__(lambda work: SimpleNamespace(replay=work))

        def run(self, name, work):
            asked.append(name)
            super().run(name, work)

    monkeypatch.setattr(gpu_steps, "graphs_on", Stub)
    for module in (gpu_steps, gpu_compared):
        monkeypatch.setattr(module, "why_no_graphs", lambda run, options: "" if run.graphs else "graphs did not work here")
    return asked


def test_a_step_with_graphs_is_the_program_s_and_its_losses_are_those_without(run, monkeypatch):
    """Three steps: one as it comes, one captured, one replayed."""
    pytest.importorskip("triton")
    little_to_interpret(monkeypatch)
    run.kernels, asked, losses = "triton", replayed_on_a_cpu(monkeypatch), {}
    with torch.no_grad():
        for graphs in (True, False):
            step, _ = our_step(run, TINY, 1, 4, graphs=graphs)
            losses[graphs] = [step() for _ in range(3)]
    assert asked == ["micro-step of 1, writing", "norm", "update"] * 3
    assert losses[True] == losses[False] and losses[True][2] < losses[True][0] and 3 < losses[True][0] < 5


def test_the_warm_up_is_long_enough_to_capture_and_replay():
    assert FULL.warmup >= 3


def test_graphs_are_left_out_where_the_program_leaves_them_out(run):
    card = dict(device="cuda", kernels="triton")
    assert gpu_steps.why_no_graphs(run, run.options(TINY, 1, 8, **card)) == ""
    for forms in (card | {"kernels": "torch"}, card | {"offload_residual": True}, card | {"device": "cpu"}):
        assert "graphs need the device's own kernels" in gpu_steps.why_no_graphs(run, run.options(TINY, 1, 8, **forms))
    run.graphs = False
    assert gpu_steps.why_no_graphs(run, run.options(TINY, 1, 8, **card)) == "graphs did not work here"


def test_peaks_are_what_was_added_to_what_was_there(run, monkeypatch):
    mib = 1 << 20
    for name, value in dict(memory_allocated=5, memory_reserved=7, max_memory_allocated=25, max_memory_reserved=47).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value * mib)
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    run.cuda = True
    with gpu_steps.measured_peak(run) as peak:
        pass
    assert peak == {"measured MiB": 20, "reserved MiB": 40}


def test_a_larger_model_in_plain_pytorch_is_reported_with_its_peak(run, monkeypatch):
    """The peak is known only once the block that it is of has ended."""

    @contextmanager
    def measured_peak(run):
        found = {"measured MiB": None}
        yield found
        found["measured MiB"] = 20.0

    monkeypatch.setattr(gpu_compared, "measured_peak", measured_peak)
    monkeypatch.setattr(gpu_compared, "compare_with", lambda *args, **options: None)
    monkeypatch.setattr(gpu_compared, "torch_step", lambda *args: (lambda: 4.0, "torch.compile"))
    record = new_record("Again")
    gpu_compared.compared_again(run, record)
    [row] = table(record, "a larger model")
    assert (row["measured MiB"], row["loss"], record["errors"]) == (20.0, 4.0, [])


def fake_rows(monkeypatch, losses, failing=()):
    """Rows of steps that take no time; `failing` with graphs."""

    def step_row(run, label, config, B, T, graphs=True, **forms):
        if run.graphs and graphs and label in failing:
            raise RuntimeError("the update cannot be captured")
        figures = dict.fromkeys(gpu_steps.STEP_FIGURES, 1.0)
        return {"run": label} | figures | {"ms": 100.0 if graphs else 200.0, "loss": losses.get(label, 4.0)}

    monkeypatch.setattr(gpu_steps, "step_row", step_row)
    replayed_on_a_cpu(monkeypatch)


@pytest.mark.parametrize("loss, said", [(4.0, "the same number"), (4.5, "NOT the same number")])
def test_a_row_without_graphs_stands_beside_and_the_report_says_whether_its_loss_is_the_same(run, monkeypatch, loss, said):
    fake_rows(monkeypatch, {EAGER: loss})
    record = new_record("")
    gpu_steps.steps(run, record)
    assert [row["run"] for row in record["tables"][""]] == ["-r 0", EAGER, "-r 1", "-r 2"]
    assert run.summary["loss with and without graphs"] == said and f"is {said} in every row" in record["notes"][-1]
    assert run.step_ms == 100.0 and {"ours -r 0", f"ours {EAGER}", "ours -r 2"} <= run.summary.keys()


def test_where_graphs_fail_the_rest_runs_without(run, monkeypatch):
    fake_rows(monkeypatch, {}, failing=("-r 0", "-r 1", "-r 2"))
    record = new_record("")
    gpu_steps.steps(run, record)
    assert [row["run"] for row in record["tables"][""]] == [EAGER, "-r 1", "-r 2"] and not run.graphs
    assert record["errors"][0]["what"] == "-r 0" and "this and all below is without" in record["notes"][1]
    assert run.step_ms == 200.0


def test_larger_models_run_with_every_flag_that_may_make_them_faster(run, monkeypatch):
    fake_rows(monkeypatch, {})
    record = new_record("")
    gpu_steps.larger(run, record)
    assert [row["run"] for row in record["tables"][""]] == ["tiny -b 2 -r 0"] * len(run.sizes.larger)
    assert {line.partition(":")[0] for line in record["not_run"]} == {"tiny -ge 3", "tiny --matmul fp8"}
    monkeypatch.setattr(Backend, "free_bytes", lambda backend: 1 << 30)
    monkeypatch.setattr(Backend, "capability", lambda backend: (9, 0))
    run.cuda, run.kernels, record = True, "triton", new_record("")
    gpu_steps.larger(run, record)
    assert [row["run"] for row in record["tables"][""]][:3] == [f"tiny -b 2 -r 0{more}" for more in ("", " -ge 3", " --matmul fp8")]
    assert [row["run"] for row in record["tables"][""]][3] == "tiny -b 2 -r 0 again"
    assert not record["not_run"] and not record["errors"]


def test_small_batches_are_measured_in_turn_and_compared_with_pytorch(run, monkeypatch):
    replayed_on_a_cpu(monkeypatch)
    calls, ms = [], {"graph": 4.0, "eager": 9.0, "theirs": 8.0}

    def time_each(backend, steps):
        before = len(calls)
        for step in steps:
            step()
        return [ms[name] for name in calls[before:]]

    def step_of(name):
        return lambda: calls.append(name) or 3.5

    monkeypatch.setattr(gpu_compared, "time_each", time_each)
    monkeypatch.setattr(gpu_compared, "our_step", lambda run, config, B, T, graphs=True: (step_of("graph" if graphs else "eager"), None))
    monkeypatch.setattr(gpu_compared, "torch_step", lambda run, record, config, B, T: (step_of("theirs"), "torch.compile"))
    record = new_record("")
    gpu_compared.small_batches(run, record)
    assert calls == ["graph", "eager", "theirs"] * gpu_compared.ROUNDS
    rows = {row["run"]: row for row in record["tables"][""]}
    assert {name: row["ratio"] for name, row in rows.items()} == {"graph": 0.5, "eager": 1.125, "torch.compile": 1.0}
    assert rows["graph"]["-b"] == 1 and rows["graph"]["tokens/s"] == 8 / 4e-3 and rows["graph"]["loss"] == 3.5


def test_graphs_are_compared_with_torch_compile_s(run, monkeypatch):
    replayed_on_a_cpu(monkeypatch)
    asked = []

    def torch_step(run, record, config, B, T, **options):
        asked.append((B, options))
        return lambda: 3.5, "torch.compile"

    monkeypatch.setattr(gpu_compared, "torch_step", torch_step)
    monkeypatch.setattr(gpu_compared, "our_step", lambda run, config, B, T, graphs=True: (lambda: 3.25 if graphs else 3.0, None))
    record = new_record("")
    gpu_compared.compile_graphs(run, record)
    assert not record["errors"] and asked == [(B, {"mode": "reduce-overhead"}) for B in run.sizes.small]
    rows = [(row["run"], row["loss"]) for row in record["tables"][""]]
    assert rows == [("graph", 3.25), ("torch.compile, mode reduce-overhead", 3.5)] * len(run.sizes.small)


@pytest.mark.parametrize("name", STAGED)
def test_of_an_operation_in_halves_only_the_launch_is_timed(run, name, monkeypatch):
    pytest.importorskip("triton")
    from llmc import staging
    from llmc.kernels import door

    copied, launched = count(), []
    monkeypatch.setattr(staging, "copy_in", lambda out, values: next(copied))
    monkeypatch.setattr(door, "launch", lambda *args, **constants: launched.append(args))
    [call, _] = Room(run, "triton").sets(next(k for k in KERNELS if k.operation == name), 0)
    staged = next(copied)
    call()
    assert staged > 0 and next(copied) == staged + 1 and launched


def test_the_operations_that_are_named_are_tuned_alone(run, monkeypatch):
    pytest.importorskip("triton")
    times = cycle((3.0, 4.0, 2.0, 5.0, 6.0))  # as it is, two sizes of tiles, two numbers of warps
    monkeypatch.setattr(gpu_tune, "measure", lambda run, *calls: ([call() for call in calls] and next(times), 0.0))
    run.no_triton, run.args.tune, record = "", ["gelu_forward"], new_record("")
    gpu_tune.tune(run, record)
    assert not record["errors"] and not record["not_run"]
    assert record["tables"][""] == [{"kernel": "gelu_forward", "ms as it is": 3.0, "best ms": 2.0, "best": "ELEMENTS 2048"}]


def test_attention_is_measured_with_each_change_alone(run, monkeypatch):
    pytest.importorskip("triton")
    from llmc.kernels import attention, door

    constants, record, by_row = (attention.FORWARD_KEYS, attention.WARPS), new_record(""), {}

    def launch(kernel, *args, **options):
        by_row.setdefault(len(table(record, "")), []).append((kernel.fn.__name__, options))

    monkeypatch.setattr(door, "launch", launch)
    monkeypatch.setattr(gpu_tune, "measure", lambda run, *calls: ([call() for call in calls], 0.0))
    run.cuda, run.no_triton, run.args.tune = True, "", []
    run.sizes = replace(run.sizes, attention=((1, 1, 256, 64),))  # which all tiles fill
    gpu_tune.tune_attention(run, record)
    assert not record["errors"] and not record["not_run"]
    changes = [row["changed"] for row in record["tables"][""]]
    assert len(changes) == len(set(changes)) == 1 + len(gpu_tune.ATTENTION_SWEEP)
    of, launched = {change: by_row[i] for i, change in enumerate(changes)}, [launch for row in by_row.values() for launch in row]
    limited = {change: {(name, o["maxnreg"]) for name, o in of[change] if "maxnreg" in o} for change in changes}
    assert limited["nothing"] == limited["attention FORWARD_KEYS (32, 32)"] == set()
    [all_three] = (change for change in changes if len(limited[change]) > 1)
    assert limited[all_three] == {(FORWARD, 96), (QUERIES, 96), (KEYS, 128)} and limited[f"{KEYS} maxnreg 128"] == {(KEYS, 128)}
    asked = {change: {name for name, options in of[change] if not options.get("WHOLE", True)} for change in changes}
    assert {change: names for change, names in asked.items() if names} == {changes[5]: {FORWARD, QUERIES, KEYS}}
    whole = {change: {name for name, _ in of[change] if "backward" in name} for change in changes}
    assert [whole[change] for change in changes[1:5]] == 4 * [{HEADS}] and {HEADS} not in [whole["nothing"], whole[changes[5]]]
    assert limited[changes[1]] == {(HEADS, 128)} and limited[changes[2]] == set()
    tiles = {(name, options.get("KEYS", options.get("QUERIES")), options.get("num_warps")) for name, options in launched}
    assert {(FORWARD, 128, 4), (QUERIES, 64, 4), (KEYS, 16, 4), (KEYS, 32, 8)} <= tiles
    assert (attention.FORWARD_KEYS, attention.WARPS) == constants and "maxnreg" not in launched[-1][1]


def test_whole_steps_are_measured_with_each_change_beside_the_step_as_it_is(run, monkeypatch):
    """A CPU runs them, as steps of the interpreter, for which a kernel's source cannot be changed."""
    pytest.importorskip("triton")
    from llmc.kernels import door
    from scripts import gpu_heads

    launched, real, record, rewritten = set(), door.launch, new_record(""), set()

    def launch(kernel, *args, **options):
        launched.add((kernel.fn.__name__, options.pop("maxnreg", None)))
        real(kernel, *args, **options)

    def in_turn(run, steps):
        found = {}
        for name, step in steps.items():
            launched.clear()
            rewritten.clear()
            found[name] = (1.0, 0.0, step())
            named = {"_layernorm_forward", "_gelu_forward", "_classify"} if (name, what) == ("changed", "last rows first") else set()
            assert rewritten == named
            assert ((HEADS, 128) in launched) == ((name, what) == ("changed", "backward by whole heads"))
        return found

    little_to_interpret(monkeypatch)
    monkeypatch.setattr(door, "launch", launch)
    monkeypatch.setattr(gpu_tune, "rewritten", lambda kernel, changes: rewritten.add(kernel.fn.__name__) or kernel)
    monkeypatch.setattr(gpu_tune, "measure_steps_in_turn", in_turn)
    run.no_triton, run.kernels = "", "triton"
    monkeypatch.setattr(run, "options", partial(run.options, attention="triton"))
    for what, change in gpu_tune.STEP_SWEEP[:2]:
        row = gpu_tune.changed_step(run, change, {})
        assert row["loss"] == row["loss as it is"] and row["ratio"] == 1
    assert not gpu_heads._room.cache_info().currsize
    run.cuda, run.args.tune = True, []
    seen = []
    rows = gpu_algorithms.head_chunk_rows(run.options(run.sizes.config, run.sizes.B, run.sizes.T))
    monkeypatch.setattr(gpu_tune, "changed_step", lambda run, change, forms: seen.append((change, forms)) or {"ms": 1.0})
    gpu_tune.tune_steps(run, record)
    assert len(record["tables"][""]) == len(seen) == 1 + len(gpu_tune.STEP_SWEEP) and seen[-1] == ({}, {"head_chunk": 2 * rows})
    run.kernels = "torch"  # as after steps of Triton's failed
    with pytest.raises(Skip, match="Triton's"):
        gpu_tune.tune_steps(run, record)


def test_the_card_s_clock_is_read_while_steps_run(run, tmp_path, monkeypatch):
    """By a stand-in for nvidia-smi, whose first readings are of a card that was idle, and one of which is no number."""
    program, steps = tmp_path / "nvidia-smi", []
    lines = ["1980, 3201, 120.00, 30", "1980, 3201, [N/A], 30", "1980, 3201, 400.50, 40", *3 * ["1600, 3201, 699.50, 60"]]
    answers = "".join(f"echo '{line}'\n" for line in lines)
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{answers}exec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    monkeypatch.setattr(gpu_steps, "LOAD_SECONDS", 1)
    found = gpu_steps.under_load(run, lambda: steps.append(time.sleep(0.01)))
    assert found == {"SM MHz": 1600, "memory MHz": 3201, "W": 699.5, "C": 60, "readings": 5}
    assert len(steps) > 10 and (tmp_path / "asked").read_text().split()[-2:] == ["-i", "GPU-12-34"]


def test_matmuls_without_a_bias_are_measured_by_both_libraries_and_their_bits_compared(run, monkeypatch):
    """The library that is asked for adds one to what gives the weight's gradient."""
    shift = [0.0]

    @contextmanager
    def matmuls_by(library):
        assert library == "cublaslt"
        shift[0] = 1.0
        yield
        shift[0] = 0.0

    def dweight(dweight, dout, inp, *, accumulate, scratch=None):
        matmul_dweight(dweight, dout, inp, accumulate=accumulate, scratch={"widened": torch.empty(inp.numel() + dout.numel())})
        dweight.add_(shift[0])

    monkeypatch.setattr(gpu_kernels, "matmuls_by", matmuls_by)
    monkeypatch.setattr(gpu_kernels, "matmul_dweight", dweight)
    run.cuda, record = True, new_record("")
    with torch.no_grad():
        gpu_kernels.matmuls(run, record)
    assert not record["errors"]
    found = {(row["matmul"], row["which"]): row.get("same bits") for row in record["tables"][""]}
    assert {which for (_, which), same in found.items() if same == "no"} == {"dweight, bf16", "dweight, fp32"}
    assert {where for where, same in found.items() if same == "yes"} == {("head", "forward")} | {
        where for where in found if where[1] == "dinput"
    }
    assert [where for where, same in found.items() if same is None] == [(name, "forward") for name in ("qkv", "attproj", "fc", "fcproj")]


def take_in_turn(monkeypatch, times):
    """gpu_algorithms runs what it measures once, and takes these for the milliseconds, in the order in which it asks."""

    def measure_in_turn(run, *operations):
        for call in chain.from_iterable(operations):
            call()
        return [(next(times), 0.125) for _ in operations]

    monkeypatch.setattr(gpu_algorithms, "measure_in_turn", measure_in_turn)
    monkeypatch.setattr(gpu_algorithms, "measure", lambda run, *calls: measure_in_turn(run, calls)[0])


def test_every_algorithm_is_measured_and_the_best_are_summed_over_a_step(run, monkeypatch):
    """The second of three is the fastest here; measured again, it is faster than the trainer's in all but the first matmul, by as much as
    times are spread, and the second."""

    class Library:
        def __init__(self, workspace):
            pass

        def calls(self, out, left, right, bias=None, added=None):
            def multiply(factor):
                return out.copy_(factor * (left @ right + (0 if bias is None else bias)))

            return [partial(multiply, factor) for factor in (2, 1, 3)]

    # of each matmul and form the three algorithms', the trainer's and the best one's again
    take_in_turn(monkeypatch, chain((3.0, 1.0, 2.0, 1.0, 0.9), (3.0, 1.0, 2.0, 4.0, 4.5), cycle((3.0, 1.0, 2.0, 4.0, 2.0))))
    monkeypatch.setattr(gpu_algorithms, "Algorithms", Library)
    monkeypatch.setattr("llmc.kernels.cublaslt.why_no_cublaslt", lambda: "")
    run.cuda, record = True, new_record("")
    with torch.no_grad():
        gpu_algorithms.algorithms(run, record)
    assert not record["errors"] and not record["not_run"]
    rows = record["tables"][""]
    assert len(rows) == 2 * 5 * 3 and all(row["relative difference"] < 0.01 for row in rows)
    assert [row["best of"] for row in rows] == ["2 of 3"] * 30 and [row["best/ms"] for row in rows] == [0.9, 1.125, *[0.5] * 28]
    layers, heads = TINY.num_layers, 2 * 8 / gpu_algorithms.head_chunk_rows(run.options(TINY, 2, 8))
    [first, second] = record["tables"]["over a step"]
    assert second["ms"] == 4.0 * (12 * layers + 3 * heads) and second["best ms"] == second["ms"] / 2
    assert first["ms"] == second["ms"] - 3.0 * layers and first["best ms"] == second["best ms"] + (1.0 - 2.0 + 4.0 - 2.0) * layers


def test_a_projection_that_adds_to_the_stream_is_measured_beside_the_passes_it_replaces(run, monkeypatch):
    pytest.importorskip("triton")

    class Library:
        def __init__(self, workspace):
            pass

        def calls(self, out, left, right, bias, added):
            """One that adds nothing, one that is right, and one that cannot add another tensor than out."""

            def refuse():
                raise RuntimeError("cublasLtMatmul failed")

            return [lambda: out.copy_(left @ right), lambda: out.copy_((left @ right).float() + bias + added), refuse]

    take_in_turn(monkeypatch, cycle((2.0, 1.0, 3.0, 4.0)))
    monkeypatch.setattr(gpu_algorithms, "Algorithms", Library)
    monkeypatch.setattr("llmc.kernels.cublaslt.why_no_cublaslt", lambda: "")
    run.cuda, run.kernels, record = True, "triton", new_record("")
    with torch.no_grad():
        gpu_algorithms.residual_fusion(run, record)
    assert not record["errors"] and not record["not_run"]
    rows = record["tables"][""]
    assert [(row["model"], row["matmul"]) for row in rows] == [(f"{d} -b 2", m) for d in ("d1", "tiny") for m in ("attproj", "fcproj")]
    assert all(row["fused/separate"] == 0.75 and 0 < row["relative difference"] < 0.01 for row in rows)


def test_an_algorithm_that_is_not_launched_is_none_to_choose(run):
    def refuse():
        raise RuntimeError("cublasLtMatmul failed")

    assert gpu_algorithms.ms_or_never(run, [refuse]) == math.inf


def test_a_matmul_without_an_algorithm_is_an_error_of_its_own(run, monkeypatch):
    monkeypatch.setattr(gpu_algorithms, "Algorithms", lambda workspace: SimpleNamespace(calls=lambda *_: []))
    record = new_record("")
    with torch.no_grad():
        assert gpu_algorithms.measure_matmul(run, record, "tiny", "fc", 16, 32, 128, 1) == []
    assert [error["what"] for error in record["errors"]] == [f"tiny fc {form}" for form in ("forward", "dinput", "dweight")]
    assert all("has no algorithm" in error["lines"] for error in record["errors"])


def test_every_kind_of_attention_is_measured_and_whether_it_repeats_its_bits(run, monkeypatch):
    shifts = count()

    def gradients(datty, qkvr, atty, lse, NH, kind):
        heads = (datty + (next(shifts) if kind == "cudnn" else 0)).unflatten(2, (NH, -1)).transpose(1, 2)
        return [heads] * 3

    copied = lambda atty, lse, qkvr, NH, kind: atty.copy_(qkvr[..., : atty.shape[2]])  # noqa: E731
    monkeypatch.setattr("llmc.layers.attention_library.library_forward", copied)
    monkeypatch.setattr("llmc.layers.attention_library.library_gradients", gradients)
    with pytest.raises(Skip, match="no CUDA device"):
        gpu_kernels.attention(run, new_record(""))
    run.cuda, record = True, new_record("")
    with torch.no_grad():
        gpu_kernels.attention(run, record)
    assert not record["errors"]
    found = {row["attention"].split(",")[0]: row["backward repeats its bits"] for row in record["tables"][""]}
    assert found == {"flash": "yes", "cudnn": "no", "efficient": "yes"} | ({"triton": "yes"} if run.kernels == "triton" else {})


def test_gelu_inside_a_matmul_is_measured_beside_passes_of_its_own(run, monkeypatch):
    monkeypatch.setattr("llmc.kernels.cublaslt.MatmulGelu", TorchGelu)
    monkeypatch.setattr("llmc.kernels.cublaslt.why_no_cublaslt", lambda: "")
    with pytest.raises(Skip, match="no CUDA device"):
        gpu_kernels.gelu_fusion(run, new_record(""))
    run.cuda, run.kernels, record = True, "torch", new_record("")
    with torch.no_grad():
        gpu_kernels.gelu_fusion(run, record)
    assert not record["errors"]
    rows = record["tables"][""]
    assert len(rows) == 3 and all(0 < row["relative difference"] < 0.01 and row["repeats its bits"] == "yes" for row in rows)


# ---- llm.c


LLMC = """#!{python}
import sys
from pathlib import Path
words = sys.argv[1:]
options = dict(zip(words[::2], words[1::2]))
with open({log!r}, "a") as log:
    print(" ".join(words), Path(options["-i"]).stat().st_size, file=log)
for step in range(1, {steps} + 1):
    print("step %4d/%d | loss %7.6f (%+.2fz)| norm %6.4f (%+.2fz)| lr %.2e | %.2f ms | %.1f%% bf16 MFU | %.0f tok/s" % (
        step, 15, 11.0, float("nan"), 13.0, float("nan"), 3e-4, 900.0 if step < 6 else 123.45 + step, -100.0, 5e5))
print("CUDA out of memory in the attention")
sys.exit({status})
"""


def fake_llmc(tmp_path, steps=15, status=0):
    path, log = tmp_path / "train_gpt2cu", tmp_path / "log"
    path.write_text(LLMC.format(python=sys.executable, log=str(log), steps=steps, status=status))
    path.chmod(0o755)
    return str(path), log


def test_llm_c_s_steps_stand_beside_ours(run, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_llmc, "measure_steps", lambda run, step: (66.725, 0.0, 4.0))
    run.args.llmc, log = fake_llmc(tmp_path)
    record = new_record("")
    with torch.no_grad():
        gpu_llmc.llmc(run, record)
    rows = record["tables"][""]
    assert [row["run"] for row in rows] == ["-r 0", "-r 1", "-r 2"] and not record["errors"]
    assert rows[0]["llm.c ms"] == pytest.approx(133.95)  # steps 6 to 15: 129.45 to 138.45
    assert rows[0]["ratio"] == pytest.approx(66.725 / 133.95) and rows[0]["llm.c tokens/s"] == pytest.approx(16 / 0.13395)
    [line, _, last] = log.read_text().splitlines()
    words = line.split()
    assert "-e d12 -b 2 -t 8 -d 16 -x 15 -v 1000 -m 1 -s 0 -h 0 -r 0" in line and "-r 2" in last
    assert int(words[-1]) == 1024 + 2 * (16 * 16 + 1) and not Path(words[1]).exists()  # a whole shard, and gone


def test_the_shard_for_llm_c_is_one(run, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(gpu_llmc, "measure_steps", lambda run, step: (1.0, 0.0, 4.0))
    monkeypatch.setattr(gpu_llmc, "run_program", lambda run, shard, level: seen.append(count_tokens(shard)) or "")
    run.args.llmc, record = "not run", new_record("")
    with torch.no_grad():
        gpu_llmc.llmc(run, record)
    assert seen == [16 * 16 + 1] * 3 and "it printed no step that counts" in record["errors"][0]["lines"]


@pytest.mark.parametrize(
    "steps, status, said", [(15, 3, "ended with status 3"), (0, 0, "it printed no step"), (5, 0, "it printed no step")]
)
def test_a_program_of_llm_c_s_that_fails_or_prints_no_step_leaves_its_last_lines(run, tmp_path, monkeypatch, steps, status, said):
    monkeypatch.setattr(gpu_llmc, "measure_steps", lambda run, step: (1.0, 0.0, 4.0))
    run.args.llmc, _ = fake_llmc(tmp_path, steps, status)
    with torch.no_grad():
        gpu_check.run_sections(run, [Section("llmc", "llm.c", gpu_llmc.llmc, 0)])
    record = run.report["sections"]["llmc"]
    assert record["status"] == "failed" and [e["what"] for e in record["errors"]] == ["-r 0", "-r 1", "-r 2"]
    assert all(said in e["lines"] and "CUDA out of memory in the attention" in e["lines"] for e in record["errors"])


# ---- FP8


def test_fp8_is_measured_where_there_is_a_card_that_has_it(run, monkeypatch):
    for section in (gpu_fp8.fp8, gpu_fp8.fp8_curve):
        run.cuda = False
        with pytest.raises(Skip, match="^--matmul fp8: it is for Hopper and later$"):
            section(run, new_record(""))
        run.cuda = True
        monkeypatch.setattr(Backend, "capability", lambda self: (8, 9))
        with pytest.raises(Skip, match="^--matmul fp8: it is for Hopper and later$"):
            section(run, new_record(""))
        monkeypatch.setattr(Backend, "capability", lambda self: (9, 0))
        monkeypatch.setattr(run, "kernels", "torch")
        with pytest.raises(Skip, match="Triton's kernels$"):
            section(run, new_record(""))


def test_it_needs_no_more_than_torch_triton_numpy_and_pytest():
    """As README says: it starts where nothing else is installed."""
    block = "import sys; sys.modules.update(dict.fromkeys(('tqdm', 'tiktoken', 'numba', 'matplotlib', 'transformers', 'pyarrow')))"
    start = f"{block}; sys.argv = ['gpu_check.py', '--help']; import runpy; runpy.run_path('scripts/gpu_check.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", start], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_every_product_in_fp8_is_that_in_bf16_and_the_sums_are_a_step_s(run, monkeypatch):
    """On a CPU, whose own FP8 matmul takes the same arguments; what times mean is a GPU's."""
    times = iter(float(n) for n in range(1, 100))
    monkeypatch.setattr(gpu_fp8, "measure", lambda run, *calls: ([call() for call in calls] and next(times), 0.0))
    run.rates["copy"], run.kernels = 1.0, "torch"
    run.report["sections"]["larger"] = {
        "tables": {"": [{"run": "tiny -b 2 -r 0 --matmul fp8", "tokens/s": 64e3}, {"run": "tiny -b 2 -r 0", "tokens/s": 32e3}]}
    }
    record = new_record("")
    with torch.no_grad():
        gpu_fp8.measure_model(run, record, "tiny", TINY, 2, 16)
    assert not record["errors"] and not record["not_run"]
    rows = record["tables"]["matmuls"]
    assert [(row["matmul"], row["which"]) for row in rows[:5]] == [
        ("qkv", "forward"), ("qkv", "dout"), ("qkv", "dinput"), ("qkv", "dweight"), ("attproj", "forward"),
    ]  # fmt: skip
    products = [row for row in rows if row["which"] != "dout"]
    # two factors of 3 bits after the point, or one of 2
    assert len(products) == 12 and all(0.02 < row["relative difference"] < 0.08 for row in products)
    # of each matmul: bf16, FP8 and with operands of forward, dout alone, and the three again twice: ten times
    [row] = record["tables"]["over a step"]
    bf16, eight, whole = ([[10 * m + i for i in places] for m in range(4)] for places in ((1, 5, 8), (2, 6, 9), (3, 4, 7, 10)))
    assert (row["bf16 ms"], row["FP8 ms"], row["with operands ms"]) == tuple(sum(map(sum, times)) for times in (bf16, eight, whole))
    least = gpu_fp8.operand_bytes(32, 32) / 1e6
    assert row["gain ms"] == row["bf16 ms"] - row["with operands ms"] and row["step ms"] == pytest.approx(1.0)
    assert row["gain at best ms"] == pytest.approx(row["bf16 ms"] - row["FP8 ms"] - least)
    assert "a step loses" in record["notes"][0] and run.summary["FP8 in tiny"]["FP8 ms"] == row["FP8 ms"]


def test_operands_of_a_block_are_seven_inputs_nine_gradients_and_twelve_weights():
    """Of C columns and rows each: inputs and weights are made twice, of 5 bytes each time, gradients once, of 6."""
    C, n = 64, 1000
    assert gpu_fp8.operand_bytes(C, n) == 10 * 7 * n * C + 6 * 9 * n * C + 10 * 12 * C * C


def test_what_fp8_is_said_to_gain():
    rows = [{"bf16 ms": 10.0, "FP8 ms": 4.0, "with operands ms": 6.0}, {"with operands ms": 1.0},
            {"bf16 ms": 5.0, "FP8 ms": 3.0, "with operands ms": 4.0}]  # fmt: skip
    row = gpu_fp8.step_sums("d48", 2, rows, 1.0)
    assert (row["gain ms"], row["gain at best ms"]) == (8.0, 14.0)
    assert gpu_fp8.sentence(row | {"step ms": 40.0}) == (
        "d48: a step's layers multiply for 30.0 ms in bf16, for 14.0 in FP8, and with the making of its operands for 22.0: "
        "a step gains 8.0 ms; with operands made at the rate of a copy it gains 14.0 ms, of 40.0 ms"
    )
    assert "copy" not in gpu_fp8.sentence(gpu_fp8.step_sums("d48", 2, rows, None))


def test_curves_in_bf16_and_fp8_are_compared(run):
    """Each a run of its own seed on one text. After so few steps all are near each other, and no two the same."""
    run.kernels, record = "torch", new_record("")
    run.has = lambda seconds: True
    with torch.no_grad():
        gpu_fp8.compare_curves(run, record, "tiny", TINY, 2, 8, 12)
    assert not record["errors"] and not record["not_run"]
    rows = record["tables"][""]
    assert [(row["matmuls"], row["seed"]) for row in rows] == [("bf16", 0), ("fp8", 0), ("bf16", 1), ("fp8", 1), ("bf16", 2)]
    losses = [row["validation loss"] for row in rows]
    assert len(set(losses)) == 5 and max(losses) - min(losses) < 0.05 and all(row["loss, step 3"] > row["validation loss"] for row in rows)
    assert "12 steps of 16 bytes" in record["notes"][0] and "seeds differ by" in record["notes"][1]


def test_what_curves_are_said_to_show():
    rows = [{"matmuls": m, "validation loss": loss} for m, loss in (("bf16", 1.0), ("fp8", 1.25), ("bf16", 1.5))]
    assert gpu_fp8.verdict(rows) == "validation loss: FP8's mean is bf16's +0.0000; bf16's seeds differ by up to 0.5000"
    assert gpu_fp8.verdict(rows[:2]).startswith("too few runs")


# ---- goals


def measured_report():
    """What the sections leave, with numbers that miss some goals."""
    compiled = f"torch.compile, {gpu_compared.AUTOCAST}"
    tables = {
        "steps": [{"run": "-r 0", "tokens/s": 660_000.0}, {"run": EAGER, "tokens/s": 9e9}, {"run": "-r 2", "tokens/s": 522_000.0}],
        "more_steps": [{"run": "-r 5", "tokens/s": 450_000.0}],
        "compile": [{"plain PyTorch": compiled, "ratio -r 0": 0.8, "ratio -r 2": 1.0}],
        "small_batches": [{"-b": 4, "run": run, "tokens/s": n} for run, n in (("graph", 3e5), ("eager", 1e5), ("torch.compile", 2e5))],
        "larger": [{"run": "d24 -b 64 -r 0", "tokens/s": 1e6}, {"run": "d48 -b 32 -r 2", "tokens/s": 52_000.0},
                   {"run": "d48 -b 32 -r 2 -ge 3", "tokens/s": 58_000.0}, {"run": "d48 -b 32 -r 2 --matmul fp8", "tokens/s": 61_000.0}],
        "kernels": [{"kernel": "small", "of copy": 0.1, "of step": 0.001}, {"kernel": "slow", "of copy": 0.63, "of step": 0.02},
                    {"kernel": "of another kind of step", "of copy": 0.2, "of step": 0.0},
                    {"kernel": "failed"}],
    }  # fmt: skip
    return {"dry_run": False, "sections": {name: {"tables": {"": rows}} for name, rows in tables.items()}}


def test_goals_are_reached_or_missed_by_what_was_measured():
    assert [(row["measured"], row["result"]) for row in gpu_goals.goal_rows(measured_report())] == [
        ("660,000 tokens/s", "reached"), ("522,000 tokens/s", "missed by 10.0%"), ("450,000 tokens/s", "reached"), ("1.50x", "reached"),
        ("1.25x", "reached"), ("1.00x", "missed by 4.8%"), ("58,000 tokens/s", "reached"), ("61,000 tokens/s", "reached"),
        ("63%", "missed by 10.0%"),
    ]  # fmt: skip


def test_a_goal_whose_section_did_not_run_or_compile_is_not_measured():
    report = measured_report()
    report["sections"]["compile"]["tables"][""][0]["plain PyTorch"] = f"eager, {gpu_compared.AUTOCAST}"
    report["sections"]["small_batches"]["tables"][""][2]["run"] = "plain PyTorch, eager"
    del report["sections"]["larger"], report["sections"]["more_steps"], report["sections"]["kernels"]
    assert [row["result"].split()[0] for row in gpu_goals.goal_rows(report)] == ["reached", "missed", *["not"] * 7]
    assert all(row["result"] == "not measured" for row in gpu_goals.goal_rows(measured_report() | {"dry_run": True}))


def test_goals_say_for_which_card_they_were_set(run):
    run.report |= measured_report()
    record = new_record("")
    gpu_goals.goals(run, record)
    assert record["notes"][0].startswith("set for one NVIDIA H200, and this is a CPU;") and "is slow" in record["notes"][1]
    assert run.summary["goals"] == "6 reached, 3 missed, 0 not measured"


def test_a_check_that_is_killed_has_left_its_goals_so_far(run, monkeypatch):
    """The report as each section finds it; at the end there is one list of goals."""
    found = []

    def looking(run, record):
        run.write()
        report, text = report_at(run.prefix)
        found.append((report["sections"]["goals"]["title"], text.count("## Goals")))

    by_name = {s.name: s for s in SECTIONS}
    gpu_check.run_sections(run, [Section("first", "First", looking, 0), Section("second", "Second", looking, 0), by_name["goals"]])
    report, text = report_at(run.prefix)
    assert found == [("Goals, so far", 1)] * 2 and report["sections"]["goals"]["title"] == "Goals" and text.count("## Goals") == 1
    run.args.only, run.report["sections"] = ["first"], {}
    gpu_check.run_sections(run, [Section("first", "First", working, 0)])
    assert list(report_at(run.prefix)[0]["sections"]) == ["first"], "nobody asked for them"


def test_some_sections_have_a_report_of_their_own(monkeypatch, tmp_path):
    """One of all is not to be lost when some are run again."""
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "open_backend", lambda *_: Backend(torch.device("cpu"), "cpu", "NVIDIA H100 80GB"))
    names = [
        gpu_check.prepare(words).prefix
        for words in ([], ["--only", "tests", "steps"], ["--only", "tests", "--output", str(tmp_path / "mine")])
    ]
    assert [name.name for name in names] == ["gpu_nvidia_h100_80gb", "gpu_nvidia_h100_80gb_tests_steps", "mine"]
    assert names[0].parent == names[1].parent == gpu_check.REPO / "scripts" / "bench"


# ---- what pytest and the profiler say


@pytest.mark.parametrize("only, seconds", [(["facts", "tests"], 280), (["tests"], 280), (["tests", "steps"], 90), (None, 90)])
def test_where_little_else_runs_tests_have_the_whole_time(run, monkeypatch, only, seconds):
    """But for what pytest takes to report; else a share of it."""
    limits = iter([60, seconds])

    def outputs(lists, limit):
        assert round(limit) == next(limits)
        return ["tests/test_cuda.py::test_one\n"]

    monkeypatch.setattr(gpu_steps, "pytest_outputs", outputs)
    run.dry, run.args.only, run.deadline = False, only, time.monotonic() + 300
    gpu_steps.tests(run, new_record(""))
    assert next(limits, None) is None


def test_operations_take_turns(run, monkeypatch):
    """Also where one takes another's time away."""
    order = []
    monkeypatch.setattr(gpu_common, "time_each", lambda backend, calls: [call() for call in calls])
    operations = [[lambda i=i: order.append(i) or float(10 * i)] * 2 for i in (1, 2, 3)]
    assert [ms for ms, _ in gpu_common.measure_in_turn(run, *operations)] == [10.0, 20.0, 30.0]
    warmup, rounds = 2 * run.sizes.warmup, [1, 1, 2, 2, 3, 3]
    assert sorted(order[: 3 * warmup]) == [i for i in (1, 2, 3) for _ in range(warmup)]
    assert order[3 * warmup :] == rounds * ((len(order) - 3 * warmup) // 6) and len(order) > 3 * warmup


def test_pytest_is_read_test_by_test(tmp_path):
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\n@pytest.mark.parametrize('x', [1, 2])\ndef test_is_one(x):\n    assert x == 1\ndef test_long():\n    pass\n"
    )
    names = [f"{os.path.relpath(tests, REPO)}::{name}" for name in ("test_is_one[1]", "test_is_one[2]", "test_long")]
    texts = pytest_outputs([["-v", "--tb=short", names[0]], ["-v", "--tb=short", names[1]]], 60)
    record = new_record("")
    report_tests(record, names, "\n".join(texts))
    assert record["tables"][""] == [{"result": "1 passed, 1 failed", "of": 3, "not run": 1}]
    assert record["tables"]["failed"] == [{"test": names[1]}]
    assert record["errors"][0]["what"] == "test_is_one[2]" and "assert 2 == 1" in record["errors"][0]["lines"]
    assert record["not_run"] == ["1 tests that did not end, the first of them " + names[2]]


def test_the_profile_knows_every_kernel_that_is_launched_and_no_two_share_a_name(run, monkeypatch):
    pytest.importorskip("triton")
    from llmc.kernels import door

    launched = set()
    monkeypatch.setattr(door, "launch", lambda kernel, *args, **constants: launched.add((kernel.fn.__module__, kernel.fn.__name__)))
    for kernel in KERNELS:
        Room(run, "triton", **dict(kernel.forms)).sets(kernel, 0)[0]()
    names = [name for _, name in launched]
    assert len(names) > 10 and len(names) == len(set(names)) and set(names) <= our_kernels()
