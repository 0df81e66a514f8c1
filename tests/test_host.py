"""How much of a machine a process may use: its control groups' limits, and a system that has none of Linux's files."""

import subprocess
import sys
from math import inf

import pytest
import torch
from conftest import REPO

import llmc.host
import llmc.processor
from llmc.backend import open_backend
from llmc.errors import UserError
from llmc.host import available_host_bytes, processor_quota, usable_processors


def groups_file(folder, text):
    path = folder / "groups"
    path.write_text(text)
    return path


@pytest.mark.parametrize("own, above, expected", [
    ("200000 100000", "max 100000", 2), ("max 100000", "150000 100000", 1.5), ("400000 100000", "250000 100000", 2.5),
    ("50000 100000", None, 0.5), ("max 100000", "max 100000", inf), (None, None, inf),
])  # fmt: skip
def test_the_lowest_quota_of_a_group_and_those_above_it_counts(tmp_path, own, above, expected):
    for folder, text in ((tmp_path / "job" / "step", own), (tmp_path / "job", above)):
        folder.mkdir(parents=True, exist_ok=True)
        if text:
            (folder / "cpu.max").write_text(text + "\n")
    assert processor_quota(tmp_path, groups_file(tmp_path, "0::/job/step\n")) == expected


def test_the_first_version_keeps_quota_and_period_in_files_of_their_own(tmp_path):
    groups = groups_file(tmp_path, "4:cpu,cpuacct:/job\n3:memory:/job\n0::/\n")
    for folder, quota in ((tmp_path / "cpu", -1), (tmp_path / "cpu" / "job", 300_000)):
        folder.mkdir()
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert processor_quota(tmp_path, groups) == 3
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("-1\n")
    assert processor_quota(tmp_path, groups) == inf
    assert processor_quota(tmp_path, tmp_path / "no such file") == inf


@pytest.mark.parametrize("quota, present, usable", [(inf, 8, 8), (2.5, 8, 2), (0.5, 8, 1), (64, 8, 8)])
def test_threads_are_as_many_as_get_a_whole_processor(monkeypatch, plain_torch, quota, present, usable):
    """And the line that names the processor counts them too; -t or a launcher that says how many is not contradicted."""
    monkeypatch.setattr(llmc.host, "processor_quota", lambda: quota)
    assert usable_processors(present) == usable
    monkeypatch.setattr(llmc.processor.os, "sched_getaffinity", lambda pid: set(range(present)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: present)
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert open_backend("cpu", 0, True).name.endswith(f", {usable} cores")
    open_backend("cpu", 5, True)
    assert asked == [usable, 5]


def test_free_memory_that_no_system_tells_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(llmc.host, "MEMINFO", str(tmp_path / "meminfo"))
    with pytest.raises(UserError, match="there is no .*meminfo, which says how much memory is free on Linux; use --memory-budget"):
        available_host_bytes()


# no fcntl, no /proc, another name
ELSEWHERE = """
import sys
sys.modules["fcntl"], sys.platform = None, "darwin"
import llmc.host, train_gpt2
llmc.host.MEMINFO = "/no/meminfo"
for argv in (["-e", "d12", "--plan", "--device", "cpu"], ["-e", "d12", "--plan", "--memory-budget", "8GiB"], ["-e", "d12", "-o", "log"]):
    print("exit code", train_gpt2.main(argv))
"""


def test_elsewhere_than_on_linux_a_plan_is_made_and_a_run_refused_in_one_sentence(tmp_path):
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "exit code" in line] == ["exit code 2", "exit code 0", "exit code 2"]
    no_memory, no_linux = done.stderr.splitlines()
    assert no_memory.startswith("error: there is no /no/meminfo") and no_linux.startswith("error: training needs Linux, and this is darwin")
    assert "8192 MiB" in done.stdout or "8GiB" in done.stdout


@pytest.mark.parametrize("driver", [0, 1])
def test_a_gpu_is_taken_to_be_there_where_its_driver_is(monkeypatch, tmp_path, driver):
    """Of Linux itself, or of Windows, which lends its own to WSL 2."""
    paths = [tmp_path / "nvidiactl", tmp_path / "libcuda.so.1"]
    monkeypatch.setattr(llmc.processor, "NVIDIA_DRIVERS", paths)
    assert llmc.processor.likely_device_kind("auto") == "cpu"
    paths[driver].touch()
    assert [llmc.processor.likely_device_kind(device) for device in ("auto", "cpu", "cuda:1")] == ["cuda", "cpu", "cuda"]
