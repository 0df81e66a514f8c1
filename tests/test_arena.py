"""Host memory: a CPU's arenas, on huge pages; and what a GPU reaches, pages of its own, given back once and before they are freed. CUDA's
two calls are stood in for."""

import ctypes
import gc
import re
from mmap import MADV_HUGEPAGE, PAGESIZE
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmc.errors import UserError, is_out_of_memory
from llmc.memory import arena as arenas
from llmc.memory.arena import HUGE_PAGE, allocate, allocate_host, allocate_mapped

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


class OnGpu:
    """Stands in for torch.as_tensor of what a GPU sees: a tensor over that very memory, which keeps the object that it was made of."""

    def __init__(self, copies=False):
        self.copies = copies

    def __call__(self, mapped, device):
        seen = mapped.__cuda_array_interface__
        (n_bytes,), (address, read_only) = seen["shape"], seen["data"]
        assert (seen["typestr"], seen["version"], read_only, device.type) == ("|u1", 3, False, "cuda")
        memory = (ctypes.c_uint8 * n_bytes).from_address(address)
        memory.keeps = mapped
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        return tensor.clone() if self.copies else tensor


def test_memory_that_a_gpu_sees_is_locked_as_long_as_any_tensor_of_it_is_there(locked, monkeypatch):
    monkeypatch.setattr(torch, "as_tensor", OnGpu())
    monkeypatch.setattr(arenas, "has_one_address", lambda: True)
    tensor = allocate_mapped(3 * PAGESIZE + 5, torch.device("cuda:0"))
    view = tensor[4:8].view(torch.float32)
    assert len(tensor) == 3 * PAGESIZE + 5 and not tensor.any() and len(locked) == 1
    del tensor
    gc.collect()
    assert len(locked) == 1 and not view.fill_(1).isnan().any()
    del view
    gc.collect()
    assert not locked


def test_memory_that_torch_copies_to_the_gpu_is_not_taken_for_the_host_s(locked, monkeypatch):
    monkeypatch.setattr(torch, "as_tensor", OnGpu(copies=True))
    monkeypatch.setattr(arenas, "has_one_address", lambda: True)
    with pytest.raises(AssertionError, match="copy"):
        allocate_mapped(PAGESIZE, torch.device("cuda:0"))


@pytest.mark.parametrize("cards, enough", [([(0, 1), (0, 1)], True), ([(0, 1), (0, 0)], False), ([(101, 0)], False), (None, False)])
def test_a_gpu_that_has_other_addresses_for_the_host_s_memory_is_refused(locked, monkeypatch, cards, enough):
    """What the driver returns and says of each card, if it is there. Torch's kernels and Triton's would write to two places."""

    def get_attribute(said, attribute, index):
        assert attribute == 91
        failed, said._obj.value = cards[index]
        return failed

    monkeypatch.setattr(torch, "as_tensor", OnGpu())

    def driver(name):
        assert name == "libcuda.so.1"
        if cards is None:
            raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
        return SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetAttribute=get_attribute)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(ctypes, "CDLL", driver)
    if enough:
        assert len(allocate_mapped(PAGESIZE, torch.device("cuda:0"))) == PAGESIZE
        return
    with pytest.raises(UserError, match="^--offload-optimizer: .* leave it out$"):
        allocate_mapped(PAGESIZE, torch.device("cuda:0"))
    assert not locked


def resident_bytes():
    """To the page, where /proc/self/statm is an estimate."""
    return 1024 * int(re.search(r"Rss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1])


class Always(arenas.mmap):
    """A mapping as Linux gives it that is set to huge pages for everything."""

    def __init__(self, *_):
        self.madvise(MADV_HUGEPAGE, 0, len(self) // PAGESIZE * PAGESIZE)


class Never(arenas.mmap):
    """And one of a Linux that has none."""

    def madvise(self, *_):
        raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("linux", [arenas.mmap, Always, Never])
@pytest.mark.parametrize("n_bytes", [HUGE_PAGE, HUGE_PAGE + 1, 3 * HUGE_PAGE + 12345, 20 * HUGE_PAGE - 1])
def test_an_arena_is_zeros_of_its_size_and_takes_no_more(monkeypatch, linux, n_bytes):
    monkeypatch.setattr(arenas, "mmap", linux)
    for _ in range(2):  # what else these calls take is there after the first time
        gc.collect()
        before = resident_bytes()
        assert not allocate(HUGE_PAGE, CPU).fill_(0).any()
    arena = allocate(n_bytes, CPU)
    assert abs(resident_bytes() - before - n_bytes) < HUGE_PAGE / 2
    assert arena.shape == (n_bytes,) and arena.dtype == torch.uint8 and not arena.any()
    assert arena.untyped_storage().nbytes() == n_bytes and arena.data_ptr() % HUGE_PAGE == 0
    view = arena[1:]
    del arena
    view.fill_(1)  # it keeps the memory
    del view
    assert abs(resident_bytes() - before) < HUGE_PAGE / 2


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this Linux has no huge pages")
def test_an_arena_asks_for_huge_pages():
    arena = allocate(3 * HUGE_PAGE + 1, CPU)
    for address, flag in ((arena.data_ptr(), "hg"), (arena[-1:].data_ptr(), "nh")):
        assert flag in flags_of(address)


def flags_of(address):
    """Those of the mapping that an address lies in."""
    mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", Path("/proc/self/smaps").read_text(), re.DOTALL | re.MULTILINE)
    (flags,) = (flags.split() for first, end, flags in mappings if int(first, 16) <= address < int(end, 16))
    return flags


@pytest.mark.parametrize("n_bytes", [0, 1, HUGE_PAGE - 1])
def test_a_small_arena_is_zeros_of_its_size(n_bytes):
    arena = allocate(n_bytes, CPU)
    assert arena.shape == (n_bytes,) and arena.dtype == torch.uint8 and not arena.any()


@pytest.mark.parametrize("error, is_one", [
    (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True), (MemoryError(), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False), (ValueError("no room"), False),
])  # fmt: skip
def test_every_allocator_s_refusal_is_known(error, is_one):
    assert is_out_of_memory(error) == is_one


def test_an_arena_that_does_not_fit_is_out_of_memory():
    with pytest.raises((MemoryError, RuntimeError)) as refused:
        allocate(1 << 60, CPU)
    assert is_out_of_memory(refused.value)
