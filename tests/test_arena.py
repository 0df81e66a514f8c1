"""Host memory: of a CPU's arenas, on huge pages; and that a GPU reaches: pages of its own, given back once, and before they are freed.
CUDA's two calls are stood in for."""

import gc
from mmap import PAGESIZE
from types import SimpleNamespace

import pytest
import torch

from llmc.backend import resident_bytes
from llmc.errors import is_out_of_memory
from llmc.memory import arena as arenas
from llmc.memory.arena import HUGE_PAGE, allocate, allocate_host

CPU = torch.device("cpu")


class Owner:
    """What has such memory, and is in a circle of references, as models are."""

    def __init__(self, n_bytes):
        self.itself, self.host = self, allocate_host(n_bytes, self, pinned=True)


@pytest.fixture
def locked(monkeypatch):
    """Pages that CUDA has locked: first -> last. It refuses to lock one twice, and to unlock what is not."""
    pages = {}

    def register(address, n_bytes, flags):
        first, last = address // PAGESIZE, (address + n_bytes - 1) // PAGESIZE
        if any(first <= end and start <= last for start, end in pages.items()):
            return 712
        pages[first] = last
        return 0

    def unregister(address):
        return 0 if pages.pop(address // PAGESIZE, None) else 713

    def check_error(code):
        if code:
            raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister))
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return pages


@pytest.mark.parametrize("n_bytes", [1, 100, PAGESIZE, PAGESIZE + 1, 1 << 20])
def test_no_page_is_locked_twice_and_all_are_unlocked_with_their_owners(locked, n_bytes):
    for _ in range(3):
        owners = [Owner(n_bytes) for _ in range(20)]
        assert len(locked) == 20 and all(len(o.host) == n_bytes and not o.host.any() for o in owners)
        del owners
        gc.collect()
        assert not locked


def test_a_view_keeps_the_memory_but_the_owner_decides_how_long_it_is_locked(locked):
    owner = Owner(100)
    view = owner.host[10:]
    del owner
    gc.collect()
    assert not locked and not view.any()


def test_nothing_is_locked_where_nothing_is_asked_for(locked):
    assert len(Owner(0).host) == 0 and not locked


@pytest.mark.parametrize("n_bytes", [0, 1, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 1, 20 * HUGE_PAGE + 12345])
def test_an_arena_is_zeros_of_its_size_and_takes_no_more(n_bytes):
    gc.collect()
    before = resident_bytes()
    arena = allocate(n_bytes, CPU)
    assert arena.shape == (n_bytes,) and arena.dtype == torch.uint8 and not arena.any()
    assert resident_bytes() - before < n_bytes + HUGE_PAGE / 2
    if n_bytes >= HUGE_PAGE:  # less is the C library's, which keeps what was freed
        assert resident_bytes() - before > n_bytes - HUGE_PAGE / 2
        assert arena.data_ptr() % HUGE_PAGE == 0
        view = arena[1:]
        del arena
        view.fill_(1)  # it keeps the memory
        del view
        assert resident_bytes() - before < HUGE_PAGE / 2


def test_an_arena_that_does_not_fit_is_out_of_memory():
    with pytest.raises((MemoryError, RuntimeError)) as refused:
        allocate(1 << 60, CPU)
    assert is_out_of_memory(refused.value)


def test_an_arena_needs_no_huge_pages(monkeypatch):
    class Refuses(arenas.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(arenas, "mmap", Refuses)
    assert not allocate(HUGE_PAGE + 1, CPU).any()
