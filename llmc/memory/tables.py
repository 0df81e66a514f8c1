"""What exists: every parameter and activation, declared once, by name.

Allocation, checkpoint order, the update, the memory log and the tests all walk these tables. A shape is a string of
letters, resolved against the sizes of one run:

    B micro-batch   T sequence length   C channels   NH heads   L layers   V, Vp vocabulary and padded vocabulary
    maxT longest sequence the model knows
"""
from dataclasses import dataclass
from math import prod

from llmc.config import ModelConfig

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "int64": 8, "int32": 4}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of the 16 tensors, in file order. A leading L means one slice per layer."""

    name: str
    shape: str
    decay: bool = False  # weight decay applies
    init: str = "zeros"  # zeros | ones | normal | residual: N(0, 0.02), the last scaled by 1/sqrt(2L)

    @property
    def per_layer(self) -> bool:
        return self.shape.startswith("L ")


PARAMETERS = (
    Parameter("wte", "Vp C", decay=True, init="normal"),
    Parameter("wpe", "maxT C", decay=True, init="normal"),
    Parameter("ln1w", "L C", init="ones"),
    Parameter("ln1b", "L C"),
    Parameter("qkvw", "L 3C C", decay=True, init="normal"),
    Parameter("qkvb", "L 3C"),
    Parameter("attprojw", "L C C", decay=True, init="residual"),
    Parameter("attprojb", "L C"),
    Parameter("ln2w", "L C", init="ones"),
    Parameter("ln2b", "L C"),
    Parameter("fcw", "L 4C C", decay=True, init="normal"),
    Parameter("fcb", "L 4C"),
    Parameter("fcprojw", "L C 4C", decay=True, init="residual"),
    Parameter("fcprojb", "L C"),
    Parameter("lnfw", "C", init="ones"),
    Parameter("lnfb", "C"),
)


def sizes_of(config: ModelConfig, B: int = 0, T: int = 0) -> dict[str, int]:
    """The letters of the shapes, for this model and batch."""
    return {
        "B": B, "T": T, "C": config.channels, "NH": config.num_heads, "L": config.num_layers,
        "V": config.vocab_size, "Vp": config.padded_vocab_size, "maxT": config.max_seq_len,
    }  # fmt: skip


def resolve(shape: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """("L 3C C", sizes) -> (12, 2304, 768)."""
    dims = []
    for word in shape.split():
        letters = word.lstrip("0123456789")
        factor = int(word[: len(word) - len(letters)] or 1)
        dims.append(factor * (sizes[letters] if letters else 1))
    return tuple(dims)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the 16 tensors, in file order."""
    sizes = sizes_of(config)
    return {p.name: resolve(p.shape, sizes) for p in PARAMETERS}


def num_parameters(config: ModelConfig) -> int:
    """All elements of all 16 tensors, the padded rows of wte included."""
    return sum(prod(shape) for shape in parameter_shapes(config).values())
