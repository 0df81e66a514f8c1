"""Arenas carry the plan out: one allocation per purpose, views cut from it by name."""

from math import prod

import torch

from llmc.memory.plan import Plan
from llmc.memory.tables import DTYPE_BYTES, parameter_shapes

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64, "int32": torch.int32,
               "int16": torch.int16}  # fmt: skip


def allocate(n_bytes: int, device: torch.device) -> torch.Tensor:
    """(n_bytes,) uint8, zeroed. Every page is touched, so what the plan says is resident from the start."""
    return torch.empty(n_bytes, dtype=torch.uint8, device=device).zero_()


def cut(arena: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """The view of `shape` that starts `offset` bytes into an arena."""
    n_bytes = prod(shape) * DTYPE_BYTES[dtype]
    return arena[offset : offset + n_bytes].view(TORCH_DTYPE[dtype]).view(shape)


def cut_activations(arena: torch.Tensor, plan: Plan) -> dict[str, torch.Tensor]:
    """Name -> view, for every tensor of the activation arena."""
    return {t.name: cut(arena, t.offset, t.shape, t.dtype) for t in plan.tensors.values()}


def cut_parameters(flat: torch.Tensor, config) -> dict[str, torch.Tensor]:
    """Name -> view of the 16 tensors in a flat (num_parameters,) tensor, packed in file order."""
    views, start = {}, 0
    for name, shape in parameter_shapes(config).items():
        views[name] = flat[start : start + prod(shape)].view(shape)
        start += prod(shape)
    return views
