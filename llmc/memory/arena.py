"""Arenas carry the plan out: one allocation per purpose, views cut from it by name."""

from math import prod
from mmap import PAGESIZE
from weakref import finalize

import torch

from llmc.memory.plan import Plan
from llmc.memory.tables import DTYPE_BYTES, PARAMETERS, parameter_shapes

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64, "int32": torch.int32,
               "int16": torch.int16}  # fmt: skip


def allocate(n_bytes: int, device: torch.device) -> torch.Tensor:
    """(n_bytes,) uint8, zeroed. Every page is touched, so what the plan says is resident from the start."""
    return torch.empty(n_bytes, dtype=torch.uint8, device=device).zero_()


def allocate_host(n_bytes: int, owner, pinned: bool) -> torch.Tensor:
    """(n_bytes,) uint8 of host memory, zeroed; pinned, a GPU reaches it directly for as long as `owner` lives.

    Then it has its pages, up to two more than it fills, for itself: none can be locked twice. Torch's own allocator of such memory
    rounds up to a power of two.
    """
    if not pinned:
        return allocate(n_bytes, torch.device("cpu"))
    room = torch.empty(n_bytes + 2 * PAGESIZE, dtype=torch.uint8)
    start = -room.data_ptr() % PAGESIZE
    host = room[start : start + n_bytes].zero_()
    if n_bytes:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), n_bytes, 0)))
        finalize(owner, _unpin, host).atexit = False
    return host


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
    return _cut(flat, {p.name: shape[1:] for p, shape in zip(PARAMETERS, parameter_shapes(config, parts).values()) if p.per_layer})


def cut_outer(flat: torch.Tensor, config, parts: int = 1) -> dict[str, torch.Tensor]:
    """Name -> view of the tensors of no layer; and, where there is room, of a bias (C,) of a layer's last projection."""
    shapes = {p.name: shape for p, shape in zip(PARAMETERS, parameter_shapes(config, parts).values()) if not p.per_layer}
    if len(flat) > sum(map(prod, shapes.values())):
        shapes["fcprojb"] = (config.channels,)
    return _cut(flat, shapes)


def cut_parameters(flat: torch.Tensor, config, parts: int = 1) -> dict[str, torch.Tensor]:
    """Name -> view of the 16 tensors, or of one of so many parts of them, in a flat tensor, packed in file order."""
    return _cut(flat, parameter_shapes(config, parts))


def _cut(flat, shapes):
    views, start = {}, 0
    for name, shape in shapes.items():
        views[name] = flat[start : start + prod(shape)].view(shape)
        start += prod(shape)
    return views
