"""Collectives: what their handles hold while they run."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from llmc.distributed.group import Group


@pytest.mark.parametrize("n", [1, 3], ids=["one tensor", "several at once"])
@pytest.mark.parametrize("given", [False, True], ids=["shares in place", "shares apart"])
@pytest.mark.parametrize("kind", ["sum_shares", "gather_shares"])
def test_a_collective_s_tensors_live_until_it_was_waited_for(kind, given, n, monkeypatch):
    """Shares are views that the call makes; where they go while a thread of gloo's reads them, torch may crash."""
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
    monkeypatch.setattr("llmc.distributed.group.dist._coalescing_manager", Coalescing)
    flat = torch.zeros(64)
    tensors = [flat[i * 8 : i * 8 + 8] for i in range(n)]
    running = getattr(Group(1, 2, object()), kind)(tensors, [flat[40 + i * 4 : 44 + i * 4] for i in range(n)] if given else None)
    del tensors
    gc.collect()
    assert len(seen) == 2 * n and all(tensor() is not None for tensor in seen)
    running.wait()
    gc.collect()
    assert waited == [True] and all(tensor() is None for tensor in seen)
