"""Gloo's workers among the threads of this process, which Linux names."""

import os
import time
from contextlib import suppress
from pathlib import Path

LISTED_S = 10  # how long Linux may list a thread that has ended


def gloo_workers() -> int:
    """How many there are."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            names.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return names.count("pt_gloo_runloop")


def assert_no_gloo_workers_but(others: int = 0):
    """There are as many as there were before those that should have ended."""
    deadline = time.monotonic() + LISTED_S
    while (workers := gloo_workers()) > others and time.monotonic() < deadline:
        time.sleep(0.01)
    assert workers == others, f"{workers - others} workers of gloo's live on"
