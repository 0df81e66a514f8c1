"""Gloo, which carries the collectives of CPUs, with one worker for each group of ranks instead of torch's two.

Torch's workers write the name of the collective that each has done into one string, without a lock: where two of them end at once it
is freed twice, and some steps later the process aborts with "malloc(): unaligned tcache chunk detected" (in
c10d::ProcessGroupGloo::runLoop, seen with torch 2.13, once in some four thousand short steps). One worker is also enough: a group's
collectives share one network, and their order stays the one they were called in.
"""

import os

import torch.distributed as dist

NAME = "gloo_one_worker"


def register_gloo() -> str:
    """Tell torch of it. Returns the name that init_process_group takes; the groups made later are of the same kind."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, connect_gloo, devices=["cpu"])
    return NAME


def connect_gloo(store, rank: int, size: int, timeout):
    """What torch's own does, GLOO_SOCKET_IFNAME included, but for the number of workers. Raises RuntimeError where it cannot be."""
    gloo, interfaces = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME")
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=i) for i in interfaces.split(",")] if interfaces else [gloo.create_default_device()]
    options._threads, options._timeout = 1, timeout
    return gloo(store, rank, size, options)
