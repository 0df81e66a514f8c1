"""gpu_check.py: a dry run writes the whole report, says what it is, and what fails or does not fit is recorded while the rest goes on.

Nothing here is timed, and no number of a dry run means anything.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmc.backend import Backend
from llmc.config import config_from_descriptor
from scripts import gpu_check
from scripts.gpu_check import SECTIONS, Section
from scripts.gpu_common import Skip, attempt, new_record, table, while_time
from scripts.gpu_kernels import CALLS, KERNELS, Room, evaluate, letters
from scripts.gpu_report import DRY_NOTICE
from scripts.gpu_steps import our_kernels, pytest_outputs, report_tests

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
    done = check("--dry-run", "--output", str(prefix))
    assert done.returncode == 0, done.stderr
    return done.stdout, *report_at(prefix)


def test_a_dry_run_reports_every_section_with_its_status(dry_run):
    sections = dry_run[1]["sections"]
    assert list(sections) == [s.name for s in SECTIONS]
    for name, section in sections.items():
        assert section["status"] in ("ran", "skipped"), (name, section["errors"])
        assert bool(section["reason"]) == (section["status"] != "ran"), name
    skipped = {name for name, s in sections.items() if s["status"] == "skipped"}
    assert {"gelu_fusion", "tune"} <= skipped and not {"facts", "steps", "compile", "matmuls", "profile", "larger"} & skipped


def test_the_report_says_at_its_top_that_it_is_a_dry_run(dry_run):
    stdout, report, text = dry_run
    assert report["dry_run"] and text.splitlines()[2] == DRY_NOTICE
    assert "none of these numbers mean anything about a GPU" in stdout
    beginning, _, rest = text.partition("## What it ran on")
    for section in report["sections"].values():
        assert f"## {section['title']}" in text
        if section["status"] == "skipped":
            assert f"- {section['title']}: skipped, {section['reason']}" in beginning
    for head in ("| what | ms |", "| run | ms |", "| plain PyTorch | ms |", "| matmul | which |", "| attention | forward ms |", "| kind |"):
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
    assert sections["profile"]["reason"] == "not among the sections of --only"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--minutes", "0"], "error: --minutes 0: expected more than 0"),
        (["--only", "nothing"], "error: --only nothing: there is no such section"),
        (["--output", "/proc/nowhere/report"], "error: --output /proc/nowhere/report: cannot be written, "),
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
    from llmc.layers import torch_operations

    assert {k.operation for k in KERNELS} == set(CALLS) == set(torch_operations())


# ---- running sections


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of nothing yet, on the CPU, with much time."""
    monkeypatch.setattr(gpu_check, "triton_problem", lambda backend: "not asked here")
    args = SimpleNamespace(minutes=60, only=None, tune=False, kernels="auto")
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
    sections = [by_name["facts"], Section("bad", "Bad", working, 0), by_name["matmuls"]]
    gpu_check.run_sections(run, sections)
    report = report_at(run.prefix)[0]
    assert "in a new process" in report["sections"]["bad"]["notes"][0]
    assert report["sections"]["matmuls"]["status"] == "ran" and len(report["sections"]["matmuls"]["tables"][""]) == 20
    assert sorted(p.name for p in run.prefix.parent.iterdir()) == ["report.json", "report.md"]


# ---- what pytest and the profiler say


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
