"""The host's memory and processors, and how much of them this process may use (Linux).

Containers and batch jobs are control groups, any of which may have limits of its own. Source: Linux, cgroup-v2.rst, cgroup-v1/memory.rst,
scheduler/sched-bwc.rst.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from math import inf
from pathlib import Path

from llmc.errors import UserError

MEMINFO = "/proc/meminfo"
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# version -> files of a group's limit and use, and what a name in its memory.stat begins with where it counts the groups below too
MEMORY_FILES = {2: ("memory.max", "memory.current", ""), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The highest resident memory of this process so far."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM:"))


def available_host_bytes(mount: Path = CGROUPS, groups: Path = OWN_CGROUPS) -> int:
    """Memory that this process could still be given without swapping: by the machine, and by its container or job if that has a limit.

    What caches files counts as free. Raises UserError where no system says how much there is.
    """
    try:
        with open(MEMINFO) as f:
            fields = dict(line.split(":", 1) for line in f)
    except FileNotFoundError:
        raise UserError(f"there is no {MEMINFO}, which says how much memory is free on Linux; use --memory-budget, such as 24GiB") from None
    left = [int(fields["MemAvailable"].split()[0]) * 1024, *(limit - used for limit, used in _memory_limits(mount, groups))]
    return max(0, min(left))


def total_host_bytes(mount: Path = CGROUPS, groups: Path = OWN_CGROUPS) -> int:
    """Memory of the machine, or of this process's container or job if that has a limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _memory_limits(mount, groups))])


def _memory_limits(mount: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use, without what caches files) of each control group of this process that has a limit."""
    for folder, version in _control_groups("memory", mount, groups):
        limit_name, used_name, prefix = MEMORY_FILES[version]
        with suppress(OSError, ValueError, KeyError):  # no such file, as outside of what a container sees, or "max"
            limit, used = (int((folder / name).read_text()) for name in (limit_name, used_name))
            kinds = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield limit, used - int(kinds[prefix + "active_file"]) - int(kinds[prefix + "inactive_file"])


def processor_quota(mount: Path = CGROUPS, groups: Path = OWN_CGROUPS) -> float:
    """How many processors' time this process's container or job may use, which need not be a whole number; inf if there is no limit.

    With a thread for each processor of the machine, Linux would suspend threads for most of each period while the others wait for them.
    """
    limits = [inf]
    for folder, version in _control_groups("cpu", mount, groups):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, "max", or a damaged one
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:  # -1 is no limit
                limits.append(quota / period)
    return min(limits)


def own_processors() -> int:
    """How many processors this process may run on and has a quota for: at least one."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux's
    return within_quota(len(affinity(0)) if affinity else os.cpu_count() or 1)


def within_quota(processors: int) -> int:
    """That many, or as many as the quota has whole ones, but at least one."""
    return max(1, int(min(processors, processor_quota())))


def _control_groups(controller: str, mount: Path, groups: Path) -> Iterator[tuple[Path, int]]:
    """The folder of this process's control group for that controller, and of every group above it, with the version of their files."""
    try:
        lines = groups.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not controllers:
            roots, version = [mount], 2
        elif controller in controllers.split(","):
            roots, version = {mount / controller, mount / controllers}, 1  # the one is often a link to the other
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for root, depth in product(roots, range(len(parts) + 1)):
            yield root.joinpath(*parts[:depth]), version
