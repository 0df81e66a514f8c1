"""Arenas put the plan into effect: one allocation per purpose, from which views are cut by name."""

import ctypes
from contextlib import suppress
from math import prod
from mmap import MADV_HUGEPAGE, MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from weakref import finalize

import torch

from llmc.errors import UserError
from llmc.memory.plan import Plan
from llmc.memory.tables import DTYPE_BYTES, PARAMETERS, layer_shapes, parameter_shapes

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64, "int32": torch.int32,
               "int16": torch.int16, "fp8": torch.uint8}  # fmt: skip

CAN_USE_HOST_POINTER = 91  # of cuDeviceGetAttribute
HUGE_PAGE = 2 << 20  # bytes: on x86, and on Arm where ordinary pages are 4 KiB


def allocate(n_bytes: int, device: torch.device) -> torch.Tensor:
    """(n_bytes,) uint8, zeroed. Every page is touched, so what the plan says is resident from the start.

    On a CPU it consists of huge pages, where Linux has them: a matrix lies on more small pages than a core's TLB holds.
    """
    if device.type == "cpu" and n_bytes >= HUGE_PAGE:
        return _in_huge_pages(n_bytes).zero_()
    return torch.empty(n_bytes, dtype=torch.uint8, device=device).zero_()


def _in_huge_pages(n_bytes):
    """(n_bytes,) uint8: as many huge pages as it fills, and small ones for the rest, so that nothing beyond it becomes resident."""
    try:
        pages = mmap(-1, n_bytes + HUGE_PAGE, MAP_PRIVATE | MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"can't allocate {n_bytes} bytes: {error.strerror}") from error
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    end = start + n_bytes // HUGE_PAGE * HUGE_PAGE
    with suppress(OSError):  # Linux may have been built without them
        pages.madvise(MADV_HUGEPAGE, start, end - start)
        pages.madvise(MADV_NOHUGEPAGE, end, len(pages) - end)
    return torch.frombuffer(pages, dtype=torch.uint8, offset=start, count=n_bytes)


def allocate_host(n_bytes: int, owner, pinned: bool) -> torch.Tensor:
    """(n_bytes,) uint8 of host memory, zeroed. If it is pinned, a GPU reaches it directly for as long as `owner` lives.

    Pinned memory has its pages for itself, as no page can be locked twice: up to two more than it fills. Torch's own allocator of
    pinned memory rounds up to a power of two.
    """
    if not pinned:
        return allocate(n_bytes, torch.device("cpu"))
    room = torch.empty(n_bytes + 2 * PAGESIZE, dtype=torch.uint8)
    start = -room.data_ptr() % PAGESIZE
    host = room[start : start + n_bytes].zero_()
    if n_bytes:
        if code := int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), n_bytes, 0)):
            raise UserError(
                f"CUDA refused to pin {n_bytes} bytes of host memory (error {code}); free some, allow the process or its container more, "
                "or leave out --offload-optimizer, --offload-residual and --async-checkpoint"
            )
        finalize(owner, _unpin, host).atexit = False
    return host


def allocate_mapped(n_bytes: int, device: torch.device) -> torch.Tensor:
    """(n_bytes,) uint8 of host memory, zeroed, as a tensor of the device. A GPU's kernels and copies reach it over the bus, in place, in
    the order of their streams, as they do its own memory; so whoever works with the tensor need not know where it lies."""
    if device.type == "cpu":
        return allocate(n_bytes, device)
    if not has_one_address():
        raise UserError("--offload-optimizer: here a GPU knows host memory by other addresses than the host does; leave it out")
    mapped = _Mapped(n_bytes)
    tensor = torch.as_tensor(mapped, device=device)
    assert tensor.data_ptr() == mapped.host.data_ptr(), "torch made a copy in the GPU's memory"
    return tensor


def has_one_address() -> bool:
    """Whether every GPU that this process sees has host memory that it reaches at the host's own addresses: on Linux all of today's have.

    Source: CUDA driver API, cuDeviceGetAttribute, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM.
    """
    try:
        driver, said = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:  # another maker's GPUs
        return False
    if driver.cuInit(0):
        return False
    for index in range(torch.cuda.device_count()):
        failed = driver.cuDeviceGetAttribute(ctypes.byref(said), CAN_USE_HOST_POINTER, index)
        if failed or not said.value:
            return False
    return True


class _Mapped:
    """Pinned host memory in the form in which libraries tell one another of a GPU's (https://numba.readthedocs.io, CUDA array interface,
    version 3). A tensor made of it keeps it: it stays pinned until the last one is gone."""

    def __init__(self, n_bytes):
        self.host = allocate_host(n_bytes, self, pinned=True)
        self.__cuda_array_interface__ = {"shape": (n_bytes,), "typestr": "|u1", "data": (self.host.data_ptr(), False), "version": 3}


def _unpin(host):
    torch.cuda.synchronize()
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr())))


def cut(arena: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """The view of `shape` that starts `offset` bytes into an arena."""
    n_bytes = prod(shape) * DTYPE_BYTES[dtype]
    return arena[offset : offset + n_bytes].view(TORCH_DTYPE[dtype]).view(shape)


def cut_activations(arena: torch.Tensor, plan: Plan) -> dict[str, torch.Tensor]:
    """Name -> view, for every tensor of the activation arena."""
    return {t.name: cut(arena, t.offset, t.shape, t.dtype) for t in plan.tensors.values()}


def cut_layer(flat: torch.Tensor, config, parts: int = 1) -> dict[str, torch.Tensor]:
    """Name -> view of one layer's tensors, in table order, in a flat tensor that holds them."""
    shapes = layer_shapes(config, parts)
    return _cut(flat, {p.name: shapes[p.name] for p in PARAMETERS if p.per_layer})


def cut_outer(flat: torch.Tensor, config, parts: int = 1, also=()) -> dict[str, torch.Tensor]:
    """Name -> view of the tensors that belong to no layer, and after them of one layer's tensors of the names `also`."""
    shapes = layer_shapes(config, parts)
    return _cut(flat, {name: shapes[name] for name in (*(p.name for p in PARAMETERS if not p.per_layer), *also)})


def cut_parameters(flat: torch.Tensor, config, parts: int = 1) -> dict[str, torch.Tensor]:
    """Name -> view of the 16 tensors in a flat tensor, packed in file order; with several `parts`, of one part of them."""
    return _cut(flat, parameter_shapes(config, parts))


def _cut(flat, shapes):
    views, start = {}, 0
    for name, shape in shapes.items():
        views[name] = flat[start : start + prod(shape)].view(shape)
        start += prod(shape)
    return views
