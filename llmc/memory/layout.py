"""Where the elements of the 16 tensors lie in a flat arena: all of them in file order, or the share of one of N ranks.

A share holds the same N-th of every layer of every tensor, in file order. So it looks like a smaller model, each of its layers is summed
or gathered in place, and it is what llm.c's ZeRO-1 keeps and writes. With tensor parallelism the layers that are divided into shares are a
rank's parts of the whole layers; files have nothing for padded heads.
"""

from dataclasses import dataclass
from math import prod

from llmc.config import ModelConfig
from llmc.memory.tables import PARAMETERS, Parameter, layer_shapes, sizes_of


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """One of the 16 tensors in a flat arena; all numbers are elements."""

    parameter: Parameter
    layers: int
    start: int  # where it begins in the arena
    elements: int  # of a layer, in this arena
    first: int  # index, in this part of the layer, of the first of them
    whole_start: int  # where it begins in an arena that holds all of this part
    whole_elements: int  # of a layer, in such an arena
    shape: tuple[int, ...]  # of a layer of this part
    part: int = 0  # which part
    parts: int = 1
    file_start: int = 0  # where it begins in a file, which holds all parts
    file_shape: tuple[int, ...] = ()  # of a layer in a file

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def all_layers(self) -> slice:
        """Where all of it lies in the arena."""
        return slice(self.start, self.start + self.layers * self.elements)

    def layer(self, l: int) -> slice:
        """Where layer l lies in the arena."""
        return slice(self.start + l * self.elements, self.start + (l + 1) * self.elements)

    @property
    def file_elements(self) -> int:
        """Elements of a layer in a file."""
        return prod(self.file_shape)

    @property
    def noise_first(self) -> int:
        """The index, in the whole layer, of the first element here, which selects the rounding noise.

        If a tensor is split by columns or blocks, its elements here are not contiguous there: this is then only a start no other part has.
        """
        return self.first + (0 if self.parameter.split is None else self.part * self.whole_elements)

    def runs_of(self, l: int):
        """Yields (begin in the arena, begin in a file, elements) for each run of layer l's elements here: contiguous in both."""
        for begin, in_layer, n in self._runs_of_part():
            first, last = max(begin, self.first), min(begin + n, self.first + self.elements)
            if first < last:
                yield (
                    self.layer(l).start + first - self.first,
                    self.file_start + l * self.file_elements + in_layer + first - begin,
                    last - first,
                )

    def _runs_of_part(self):
        """[(begin in the part, begin in the whole layer, elements)], one for each run that is contiguous in both."""
        p = self.parameter
        if p.split is None or self.parts == 1:
            return [(0, 0, self.whole_elements)]
        # of each block, or of each row, a file has the parts one after the other, without their padding
        count = p.blocks if p.split == 0 else self.shape[0]
        here, in_file = self.whole_elements // count, self.file_elements // count
        n = self.real_of(here, in_file)
        return [(i * here, i * in_file + self.part * here, n) for i in range(count)]

    def real_of(self, here: int, in_file: int, part: int | None = None) -> int:
        """How many of the `here` elements that a part has of something are not padding; a file has `in_file` of all parts together."""
        return max(0, min(here, in_file - (self.part if part is None else part) * here))


def flat_layout(config: ModelConfig, ranks: int = 1, rank: int = 0, parts: int = 1, part: int = 0) -> tuple[FlatTensor, ...]:
    """The tensors in the share that one of `ranks` has of one of `parts`; with one of each, in an arena that holds everything."""
    tensors, start, file_start = [], 0, 0
    in_part, in_file = layer_shapes(config, parts), layer_shapes(config)
    for p in PARAMETERS:
        layers, whole = config.num_layers if p.per_layer else 1, prod(in_part[p.name])
        assert whole % ranks == 0, f"{ranks} ranks do not divide a layer of {p.name}"
        t = FlatTensor(
            p, layers, start=start, elements=whole // ranks, first=whole // ranks * rank, whole_start=start * ranks, whole_elements=whole,
            shape=in_part[p.name], part=part, parts=parts, file_start=file_start, file_shape=in_file[p.name],
        )  # fmt: skip
        tensors.append(t)
        start, file_start = start + layers * t.elements, file_start + layers * t.file_elements
    return tuple(tensors)


def runs(layout):
    """Yields (begin, begin in a file, elements) for all of an arena of that layout; runs that are adjacent in both are joined."""
    run = None
    for here, whole, n in (each for t in layout for l in range(t.layers) for each in t.runs_of(l)):
        if run and (here, whole) == (run[0] + run[2], run[1] + run[2]):
            run[2] += n
            continue
        if run:
            yield tuple(run)
        run = [here, whole, n]
    yield tuple(run)


def divides(config: ModelConfig, ranks: int, parts: int = 1) -> bool:
    """Whether all ranks' shares of every tensor are equally large: a part of a tensor is a multiple of f, a part of C, or of k, the
    channels of its heads."""
    sizes = sizes_of(config, parts=parts)
    return sizes["f"] % ranks == 0 and sizes["k"] % ranks == 0


def gradient_buckets(config: ModelConfig) -> dict:
    """Key -> ((tensor, layer), ...) of the gradients that become complete together, in the order of the backward pass.

    The key of a block is its number. The bias of a block's last projection is with the block above, or the last layernorm: its
    gradient is a sum over rows of the gradient of the stream between them, which is taken there.
    """
    L, blocks = config.num_layers, [p.name for p in PARAMETERS if p.per_layer and p.name != "fcprojb"]
    buckets = {"lnf": (("lnfw", 0), ("lnfb", 0), ("fcprojb", L - 1))}
    for l in reversed(range(L)):
        buckets[l] = tuple((name, l) for name in blocks) + ((("fcprojb", l - 1),) if l else ())
    return buckets | {"encoder": (("wte", 0), ("wpe", 0))}


def weight_buckets(config: ModelConfig) -> dict:
    """Key -> ((tensor, layer), ...) of the weights that are needed together: those that belong to no layer, then layer by layer."""
    outer = tuple((p.name, 0) for p in PARAMETERS if not p.per_layer)
    return {"outer": outer} | {l: tuple((p.name, l) for p in PARAMETERS if p.per_layer) for l in range(config.num_layers)}
