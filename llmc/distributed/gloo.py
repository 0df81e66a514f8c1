"""Gloo, which carries the collectives on CPUs, with one worker per group of ranks instead of torch's two.

Torch's workers each write the name of the collective they have finished into one shared string, without a lock. Where two finish at
once the string is freed twice, and some steps later the process aborts with "malloc(): unaligned tcache chunk detected" (in
c10d::ProcessGroupGloo::runLoop, seen with torch 2.13, once in some four thousand short steps). One worker is also enough: a group's
collectives share one network, and they run in the order in which they were called.
"""

import os

import torch.distributed as dist

NAME = "gloo_one_worker"


def register_gloo() -> str:
    """Register this backend with torch. Returns the name that init_process_group takes; groups made later use the same backend."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, connect_gloo, devices=["cpu"])
    return NAME


def connect_gloo(store, rank: int, size: int, timeout):
    """Connect as torch's own gloo backend does, GLOO_SOCKET_IFNAME included, but with one worker. Raises RuntimeError if that fails."""
    gloo, interfaces = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME")
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=i) for i in interfaces.split(",")] if interfaces else [gloo.create_default_device()]
    options._threads, options._timeout = 1, timeout
    return gloo(store, rank, size, options)
