"""Collectives: what their handles hold while they run, and how gloo runs them."""

import gc
import weakref
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import sentinel

import pytest
import torch
import torch.distributed as dist
from forked import Program
from gloo_threads import assert_no_gloo_workers_but, gloo_workers

from llmc.distributed.gloo import register_gloo
from llmc.distributed.group import Group, split_world
from llmc.distributed.world import World, connect_groups
from llmc.errors import UserError


@pytest.mark.parametrize("n", [1, 3], ids=["one tensor", "several at once"])
@pytest.mark.parametrize("given", [False, True], ids=["shares in place", "shares apart"])
@pytest.mark.parametrize("kind", ["sum_shares", "gather_shares"])
def test_a_collective_s_tensors_live_until_it_was_waited_for(kind, given, n, monkeypatch):
    """Shares are views that the call makes; giving them up while gloo's thread reads them is a race within torch."""
    seen, waited = [], []
    work = SimpleNamespace(wait=lambda: waited.append(all(tensor() is not None for tensor in seen)))

    def collective(*tensors, group, async_op=False):
        seen.extend(map(weakref.ref, tensors))
        return work

    class Coalescing:
        def __init__(self, group, async_ops):
            assert async_ops

        def __enter__(self):
            return work

        def __exit__(self, *error):
            pass

    for name in ("reduce_scatter", "all_gather"):
        monkeypatch.setattr(f"llmc.distributed.group.{name}", collective)
    monkeypatch.setattr("llmc.distributed.group.dist.all_reduce", collective)
    monkeypatch.setattr("llmc.distributed.group.dist._coalescing_manager", Coalescing)
    flat = torch.zeros(64)
    tensors = [flat[i * 8 : i * 8 + 8] for i in range(n)]
    running = getattr(Group(1, 2, sentinel.nobody), kind)(tensors, [flat[40 + i * 4 : 44 + i * 4] for i in range(n)] if given else None)
    del tensors
    gc.collect()
    summed_whole = kind == "sum_shares" and not given  # of which no shares are made
    assert len(seen) == (n if summed_whole else 2 * n) and all(tensor() is not None for tensor in seen)
    running.wait()
    gc.collect()
    assert waited == [True] and all(tensor() is None for tensor in seen)


TIMEOUT = timedelta(seconds=70)


def connect():
    """Be the only rank of a world."""
    dist.init_process_group(register_gloo(), store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)


@pytest.mark.parametrize("interface", [None, "lo"])
def test_a_group_has_one_worker_of_gloo_s_and_no_more(interface, monkeypatch):
    """Torch's two free one string twice (llmc.distributed.gloo). The groups that are made later are no different."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    connect()
    try:
        options = [group._get_backend(torch.device("cpu")).options for group in (dist.group.WORLD, dist.new_group([0]))]
        assert [o._threads for o in options] == [1, 1] and options[0]._timeout == TIMEOUT
    finally:
        dist.destroy_process_group()


def test_an_interface_that_is_not_there_is_gloo_s_own_error(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0"):
        connect()


def test_no_worker_of_gloo_s_outlives_its_process_group():
    """One that lets go of a tensor while Python ends aborts the process, and a Group may well be there until then."""
    before = gloo_workers()
    connect()
    groups = [Group(0, 2), Group(0, 2, dist.new_group([0]))]
    try:
        for group in groups:
            group.sum_whole([torch.ones(1)]).wait()
            group.sum_whole([torch.ones(1), torch.ones(2)]).wait()
        assert gloo_workers() == before + 2
    finally:
        dist.destroy_process_group()
    assert_no_gloo_workers_but(before)


def test_the_groups_of_a_model_s_parts_wait_as_long_as_the_world(monkeypatch):
    """Torch would give them 10 minutes on NCCL, and 30 on gloo, whatever --timeout says."""
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: made.append((ranks, timeout.total_seconds())))
    split_world(rank=0, size=4, parts=2, timeout_s=77)
    assert made == [([0, 1], 77), ([2, 3], 77), ([0, 2], 77), ([1, 3], 77)]


def test_parts_of_a_single_copy_need_no_groups_beside_the_world(monkeypatch):
    """On a GPU each would take memory."""
    monkeypatch.setattr(dist, "new_group", None)
    same_part, same_data, everyone = split_world(rank=1, size=2, parts=2, timeout_s=77)
    assert [(g.rank, g.size) for g in (same_part, same_data, everyone)] == [(0, 1), (1, 2), (1, 2)]


def collectives_of_a_rank(words) -> int:
    """One of four ranks, two copies of two parts: what each collective makes of the numbers of each of its groups."""
    rank, store = int(words[0]), words[1]
    dist.init_process_group(register_gloo(), store=dist.FileStore(store, 4), rank=rank, world_size=4, timeout=TIMEOUT)
    members = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1], [0, 1, 2, 3]
    for group, ranks in zip(split_world(rank, 4, 2, TIMEOUT.total_seconds()), members):
        given = torch.tensor([[10.0**r, -(10.0**r), r, -r] for r in ranks])  # whose sums are exact
        in_place = torch.cat([row.chunk(len(ranks))[i] for i, row in enumerate(given)])
        for name, expected in {
            "sum_whole": given.sum(0), "sum_shares": given.sum(0), "largest": given.amax(0), "gather_shares": in_place,
        }.items():  # fmt: skip
            ours = [given[group.rank].clone() for _ in range(2)]
            getattr(group, name)(ours[:1]).wait()
            getattr(group, name)(ours[1:] + [torch.zeros(4)]).wait()
            kept = group.share if name == "sum_shares" else lambda whole: whole
            assert all(torch.equal(kept(found), kept(expected)) for found in ours), (name, ranks, ours)
        for source in range(len(ranks)):
            ours = given[group.rank].clone()
            group.send_from(source, ours).wait()
            assert torch.equal(ours, given[source]), (source, ranks, ours)
    dist.destroy_process_group()
    return 0


def test_a_collective_is_of_the_ranks_of_its_group(tmp_path):
    """A maximum that were a sum would show in nothing else: a softmax may be shifted by either, if logits are small."""
    processes = [Program(collectives_of_a_rank, [rank, tmp_path / "store"]) for rank in range(4)]
    try:
        said = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(err for _, err in said)


@pytest.mark.parametrize("words, expected, match", [
    ("CUDA out of memory", UserError, "rank 1 ran out of memory as the ranks connected; end what else"), ("NCCL", RuntimeError, "NCCL"),
])  # fmt: skip
def test_no_memory_for_a_group_is_a_sentence(words, expected, match, monkeypatch):
    def refuse(group, device):
        raise RuntimeError(words)

    monkeypatch.setattr(Group, "set_up", refuse)
    with pytest.raises(expected, match=match):
        connect_groups(World(1, 2), "cuda", 60, copies=2)
