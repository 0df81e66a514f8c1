"""How much of a machine a process may use: its control groups' limits, and a system that has none of Linux's files."""

import os
import subprocess
import sys
from math import inf

import pytest
import torch
from conftest import REPO

import llmc.host
import llmc.processor
from llmc.backend import open_backend
from llmc.distributed.place import Place
from llmc.distributed.rendezvous import Meeting, Member
from llmc.distributed.world import World, bound_note, own_threads
from llmc.errors import UserError
from llmc.host import available_host_bytes, processor_quota, within_quota


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


@pytest.mark.parametrize("groups", ["", "no colons", "1:cpu", "7:cpu:/a\udc80", "4:cpu,cpuacct:/job\n4:\n"])
def test_a_damaged_list_of_groups_or_a_damaged_quota_is_no_limit(tmp_path, groups):
    path = tmp_path / "groups"
    path.write_bytes(groups.encode(errors="surrogateescape"))
    assert processor_quota(tmp_path, path) == inf
    path.write_text("0::/\n")
    for text in ("", "max", "1 2 3", "100000 0", "\xff"):
        (tmp_path / "cpu.max").write_text(text)
        assert processor_quota(tmp_path, path) == inf


def test_controllers_that_share_a_folder_are_found_without_a_link_to_it(tmp_path):
    folder = tmp_path / "cpu,cpuacct" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("150000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert processor_quota(tmp_path, groups_file(tmp_path, "4:cpu,cpuacct:/job\n")) == 1.5


@pytest.mark.parametrize("quota, present, usable", [(inf, 8, 8), (2.5, 8, 2), (0.5, 8, 1), (64, 8, 8)])
def test_threads_are_as_many_as_get_a_whole_processor(plain_torch, monkeypatch, quota, present, usable):
    """And the line that names the processor counts them too; --threads, or OMP_NUM_THREADS, is not contradicted."""
    monkeypatch.setattr(llmc.host, "processor_quota", lambda: quota)
    assert within_quota(present) == usable
    monkeypatch.setattr(llmc.host.os, "sched_getaffinity", lambda pid: set(range(present)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: present)
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert open_backend("cpu", 0, True).name.endswith(f", {usable} cores")
    open_backend("cpu", 5, True)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    open_backend("cpu", 0, True)
    assert asked == [usable, 5]


def test_a_shell_s_workspaces_do_not_decide_which_matmuls_run(plain_torch, monkeypatch):
    """Else the same command would have other last bits in another shell, and be slow in one."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "1")
    open_backend("cpu", 1, True)
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["CUBLASLT_WORKSPACE_SIZE"]) == (":4096:8", "32768")


@pytest.mark.parametrize("bound, quota, threads", [
    ([(0, 1), (2, 3)], inf, [2, 2]), ([(0, 1, 2, 3)] * 2, inf, [2, 2]), ([(0, 1, 2), (2, 3)], inf, [1, 1]),
    ([(0, 1, 2, 3), (4, 5, 6, 7)], 4, [2, 2]), ([(0, 1, 2, 3)] * 2, 3, [1, 1]), ([(0,), (1,)], 1, [1, 1]), ([(0, 1)] * 2, 64, [1, 1]),
])  # fmt: skip
def test_ranks_of_a_machine_share_its_processors_and_their_quota(monkeypatch, bound, quota, threads):
    monkeypatch.setattr("llmc.distributed.world.processor_quota", lambda: quota)
    here = [Member("machine", "host", i, "address", processors) for i, processors in enumerate(bound)]
    assert [own_threads(member, here) for member in here] == threads


def test_free_memory_that_no_system_tells_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(llmc.host, "MEMINFO", str(tmp_path / "meminfo"))
    with pytest.raises(UserError, match="there is no .*meminfo, which says how much memory is free on Linux; use --memory-budget"):
        available_host_bytes()


def test_what_a_cpu_has_is_what_its_container_has(plain_torch, monkeypatch):
    monkeypatch.setattr("llmc.backend.total_host_bytes", lambda: 12345)
    used, total = open_backend("cpu", 1, True).memory_bytes()
    assert used > 2**20 and total == 12345


# no fcntl, no /proc, another name
ELSEWHERE = """
import sys
sys.modules["fcntl"], sys.platform = None, "darwin"
import llmc.host, train_gpt2
llmc.host.MEMINFO = "/no/meminfo"
for words in ("--plan --device cpu", "--plan --device cpu -b auto", "--plan -b auto --memory-budget 8GiB", "-o log"):
    print("exit code", train_gpt2.main(["-e", "d12", *words.split()]))
"""


def test_elsewhere_than_on_linux_a_plan_is_made_and_a_run_refused_in_one_sentence(tmp_path):
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if "exit code" in line] == ["exit code 0", "exit code 2", "exit code 0", "exit code 2"]
    unknown, no_linux = done.stderr.splitlines()
    assert unknown.startswith("error: auto chooses what fits, and --plan asks no device how much it has; say --memory-budget")
    assert no_linux.startswith("error: training needs Linux, and this is darwin")
    assert [line for line in lines if "largest -b: of" in line] == ["largest -b: of 8192 MiB, 8GiB"]


@pytest.mark.parametrize("driver", [0, 1])
def test_a_gpu_is_taken_to_be_there_where_its_driver_is(monkeypatch, tmp_path, driver):
    """Of Linux itself, or of Windows, which lends its own to WSL 2."""
    paths = [tmp_path / "nvidiactl", tmp_path / "libcuda.so.1"]
    monkeypatch.setattr(llmc.processor, "NVIDIA_DRIVERS", paths)
    assert llmc.processor.likely_device_kind("auto") == "cpu"
    paths[driver].touch()
    assert [llmc.processor.likely_device_kind(device) for device in ("auto", "cpu", "cuda:1")] == ["cuda", "cpu", "cuda"]


@pytest.mark.parametrize("bound, on_machine, words", [
    ([(0,), (1,)], 8, "bound to 1 of this machine's 8 processors"), ([(0, 4), (1, 5)], 8, "bound to 2 of this machine's 8 processors"),
    ([(0,), (1,)], 2, ""), ([(0, 1), (0, 1)], 8, ""), ([(0, 1, 2), (3, 4, 5)], 8, ""),
])  # fmt: skip
def test_ranks_that_a_launcher_bound_to_few_of_many_processors_are_told_how_to_get_more(bound, on_machine, words, monkeypatch):
    """Not where there are no more, nor where all share a container's few, nor where each was given several."""
    monkeypatch.setattr("os.cpu_count", lambda: on_machine)
    members = [Member("machine", "host", i, "address", processors) for i, processors in enumerate(bound)]
    members.append(Member("another machine", "host", 2, "address", (0, 1, 2, 3)))
    world = World(0, 3, 2, meeting=Meeting(Place(0, 3, 0, 2), "", 0, "", None, members=tuple(members)))
    assert all(words in line for line in bound_note(world)) and bool(bound_note(world)) == bool(words)
    assert bound_note(World()) == []
