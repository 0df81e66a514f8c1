"""Collectives on tensors and their shares, and the bytes they sent. Underneath is torch.distributed: NCCL on GPUs, gloo on CPUs."""

import weakref
from collections import Counter
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

# torch 2.13 has new names for these two
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Groups(NamedTuple):
    """The groups of a rank: of the ranks with the same part of the model, of those with the same data, and of all ranks."""

    same_part: "Group"
    same_data: "Group"
    everyone: "Group"


def split_world(rank: int, size: int, parts: int, timeout_s: float) -> Groups:
    """The groups of this rank.

    The parts of one model are neighbouring ranks. Every rank must make every group, in this order. timeout_s is for collectives of the
    first two; the group of all ranks has the one that it was made with.
    """
    everyone, copies = Group(rank, size), size // parts
    if parts == 1:
        return Groups(everyone, Group(0, 1), everyone)

    def new_group(ranks):
        return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s)) if copies > 1 else None

    same_data = [new_group(range(c * parts, (c + 1) * parts)) for c in range(copies)]
    same_part = [new_group(range(p, size, parts)) for p in range(parts)]
    copy, part = divmod(rank, parts)
    return Groups(Group(copy, copies, same_part[part]), Group(part, parts, same_data[copy]), everyone)


class Done:
    """Handle of a collective that need not be waited for."""

    def wait(self):
        pass


class Running:
    """Handle of a collective that runs beside what follows; it keeps the collective's tensors alive until wait().

    If Python gives up a view that nobody else holds while gloo's thread works on it, there is a race within torch
    (https://github.com/pytorch/pytorch/issues/75529).
    """

    def __init__(self, work, tensors):
        self._work, self._tensors = work, tensors

    def wait(self):
        self._work.wait()
        self._tensors = None


class Group:
    """Some ranks, this one among them.

    Collectives take flat contiguous tensors, each made up of as many equal shares as there are ranks, and return a handle.
    They run beside what follows until wait(), after which (on a GPU: on this stream) their results are there. A list of
    tensors is one collective where the library can do that, so a layer's small tensors cost no more than its large ones.
    sent  kind -> bytes that this rank has sent, counted as for a ring, which is the least possible

    Only torch's registry keeps a process group alive, so that destroy_process_group ends gloo's workers and waits for them. A process
    group that lived on could release its last tensor while Python shuts down, which aborts the process
    (https://github.com/pytorch/pytorch/issues/190489).
    """

    def __init__(self, rank: int, size: int, process_group=None):
        process_group = process_group or (dist.group.WORLD if size > 1 else None)
        self.rank, self.size, self.sent = rank, size, Counter()
        self._reference = process_group and weakref.ref(process_group)

    @property
    def _group(self):
        return self._reference and self._reference()

    def set_up(self, device: str):
        """Have the library take what it takes with the first collective of a kind: connections, and on a GPU memory."""
        numbers = torch.zeros(self.size, device=device)
        for collective in (self.sum_shares, self.gather_shares, self.sum_whole):
            collective([numbers]).wait()

    def share(self, tensor):
        """This rank's share of a flat tensor, as a view."""
        n = len(tensor) // self.size
        return tensor[self.rank * n : (self.rank + 1) * n]

    def sum_shares(self, tensors, shares=None):
        """This rank's share of each tensor becomes the sum of that share over all ranks, in place, or in `shares` where they are given. The
        rest of each tensor is left undefined."""
        if shares is None and tensors and tensors[0].device.type == "cpu":  # gloo's own sums a copy of each whole tensor, one by one
            return self._each("reduce-scatter", dist.all_reduce, [(t,) for t in tensors], tensors)
        shares = [self.share(t) for t in tensors] if shares is None else shares
        return self._each("reduce-scatter", reduce_scatter, list(zip(shares, tensors)), tensors)

    def gather_shares(self, tensors, shares=None):
        """Each tensor becomes the shares of all ranks, in order. A rank gives its own in `shares`, or has it in its place already."""
        shares = [self.share(t) for t in tensors] if shares is None else shares
        return self._each("all-gather", all_gather, list(zip(tensors, shares)), tensors)

    def sum_whole(self, tensors):
        """Each tensor becomes its sum over all ranks."""
        return self._each("all-reduce", dist.all_reduce, [(t,) for t in tensors], tensors, passes=2)

    def largest(self, tensors):
        """Each tensor becomes its maximum over all ranks, element by element."""
        return self._each("all-reduce", dist.all_reduce, [(t, dist.ReduceOp.MAX) for t in tensors], tensors, passes=2)

    def send_from(self, source: int, tensor):
        """The tensor becomes that of rank `source` of the group."""
        return self._each("broadcast", dist.broadcast, [(tensor, dist.get_global_rank(self._group, source))], [tensor])

    def barrier(self):
        """Wait until all ranks of the group have come here."""
        dist.barrier(self._group)

    def _each(self, kind, collective, calls, tensors, passes=1):
        if self.size == 1 or not tensors:
            return Done()
        self.sent[kind] += passes * sum(t.nbytes // self.size * (self.size - 1) for t in tensors)
        if len(calls) == 1:
            return Running(collective(*calls[0], group=self._group, async_op=True), calls)
        with dist._coalescing_manager(self._group, async_ops=True) as handle:
            for call in calls:
                collective(*call, group=self._group)
        return Running(handle, calls)
