"""What exists: every parameter and activation, declared once, by name.

Allocation, checkpoint order, the update, the memory log and the tests all walk these tables. A shape is a string of
letters, resolved against the sizes of one run:

    B micro-batch   T sequence length   C channels   NH heads   L layers   V, Vp vocabulary and padded vocabulary
    maxT longest sequence the model knows   Tp T as the attention in use pads its row statistics: a letter of scratch_sizes.py

With tensor parallelism a rank has a part of some of these, in small letters:

    s its rows of the stream, per sequence of the batch (T)   h its heads (NH)   k their channels (C)
    f a quarter of its columns of the MLP (C)   w its rows of the vocabulary (Vp)

Where the number of parts does not divide NH, heads are padded: the weights of added heads are zero and stay zero, as those of padded
rows of the vocabulary do.
"""

from dataclasses import dataclass
from functools import cache
from math import prod

from llmc.config import ModelConfig

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "int64": 8, "int32": 4, "int16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of the 16 tensors, in file order. A leading L means one slice per layer."""

    name: str
    shape: str  # small letters where tensor parallelism splits it
    decay: bool = False  # weight decay applies
    init: str = "zeros"  # zeros | ones | normal | residual: N(0, 0.02), the last scaled by 1/sqrt(2L)
    blocks: int = 1  # of its rows, each of which is split by itself: q, k and v

    @property
    def per_layer(self) -> bool:
        return self.shape.startswith("L ")

    @property
    def split(self) -> int | None:
        """The dimension of a layer that tensor parallelism splits; None where every rank has all of it."""
        words = self.shape.removeprefix("L ").split()
        return next((i for i, word in enumerate(words) if word.lstrip("0123456789") in SPLIT), None)


SPLIT = {"s": "T", "h": "NH", "k": "C", "f": "C", "w": "Vp"}  # letter of a part -> letter of the whole
PARAMETERS = (
    Parameter("wte", "w C", decay=True, init="normal"),
    Parameter("wpe", "maxT C", decay=True, init="normal"),
    Parameter("ln1w", "L C", init="ones"),
    Parameter("ln1b", "L C"),
    Parameter("qkvw", "L 3k C", decay=True, init="normal", blocks=3),
    Parameter("qkvb", "L 3k", blocks=3),
    Parameter("attprojw", "L C k", decay=True, init="residual"),
    Parameter("attprojb", "L C"),
    Parameter("ln2w", "L C", init="ones"),
    Parameter("ln2b", "L C"),
    Parameter("fcw", "L 4f C", decay=True, init="normal"),
    Parameter("fcb", "L 4f"),
    Parameter("fcprojw", "L C 4f", decay=True, init="residual"),
    Parameter("fcprojb", "L C"),
    Parameter("lnfw", "C", init="ones"),
    Parameter("lnfb", "C"),
)
MATRICES = {p.name for p in PARAMETERS if p.decay and p.per_layer}  # a layer's matrices, which its matmuls multiply by
# gradients that each part takes over its own rows, and that are then summed over parts; wpe's is taken over all rows
SUMMED_OVER_PARTS = {p.name for p in PARAMETERS if p.split is None and p.name != "wpe"}


def sizes_of(config: ModelConfig, B: int = 0, T: int = 0, parts: int = 1) -> dict[str, int]:
    """The letters of the shapes, for this model and batch, split into `parts`."""
    sizes = {
        "B": B, "T": T, "C": config.channels, "NH": config.num_heads, "L": config.num_layers,
        "V": config.vocab_size, "Vp": config.padded_vocab_size, "maxT": config.max_seq_len,
    }  # fmt: skip
    heads = -(-config.num_heads // parts)
    return sizes | {part: sizes[whole] // parts for part, whole in SPLIT.items()} | {"h": heads, "k": heads * config.head_size}


def resolve(shape: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """("L 3C C", sizes) -> (12, 2304, 768)."""
    return tuple(factor * (sizes[letters] if letters else 1) for factor, letters in _dims(shape))


@cache
def _dims(shape: str) -> tuple[tuple[int, str], ...]:
    """Of "L 3C C": ((1, "L"), (3, "C"), (1, "C"))."""
    words = ((word, word.lstrip("0123456789")) for word in shape.split())
    return tuple((int(word[: len(word) - len(letters)] or 1), letters) for word, letters in words)


def parameter_shapes(config: ModelConfig, parts: int = 1) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the 16 tensors, in file order; with tensor parallelism, of one rank's part of them."""
    sizes = sizes_of(config, parts=parts)
    return {p.name: resolve(p.shape, sizes) for p in PARAMETERS}


def layer_shapes(config: ModelConfig, parts: int = 1) -> dict[str, tuple[int, ...]]:
    """The same of one layer; a tensor that belongs to no layer has its whole shape."""
    return {p.name: shape[1:] if p.per_layer else shape for p, shape in zip(PARAMETERS, parameter_shapes(config, parts).values())}


@cache
def num_parameters(config: ModelConfig, parts: int = 1) -> int:
    """All elements of all 16 tensors, the padded rows of wte included; or of one rank's part of them."""
    return sum(prod(shape) for shape in parameter_shapes(config, parts).values())


def state_tensors(master: bool) -> tuple[str, ...]:
    """What a checkpoint's state files hold, in file order: m, v and, unless there is none, the fp32 master."""
    return ("m", "v", "master") if master else ("m", "v")


@dataclass(frozen=True, slots=True)
class Activation:
    """A tensor of one block. "act" is the run's precision; statistics stay fp32 whatever the precision."""

    name: str
    shape: str
    dtype: str = "act"


BLOCK_ACTIVATIONS = (
    Activation("ln1_mean", "B s", "fp32"),
    Activation("ln1_rstd", "B s", "fp32"),
    Activation("ln1", "B s C"),
    Activation("qkvr", "B T 3k"),
    Activation("atty", "B T k"),
    Activation("lse", "B h Tp", "fp32"),  # log-sum-exp of each attention row: what flash attention keeps instead of (T, T)
    Activation("residual2", "B s C"),
    Activation("ln2_mean", "B s", "fp32"),
    Activation("ln2_rstd", "B s", "fp32"),
    Activation("ln2", "B s C"),
    Activation("fch", "B T 4f"),
    Activation("fch_gelu", "B T 4f"),
    Activation("residual3", "B s C"),
)


# gradients of activations are transient: they live from the stage that writes them to the last one that reads them
BLOCK_GRADIENTS = (
    Activation("dfch", "B T 4f"),
    Activation("dln2", "B s C"),
    Activation("datty", "B T k"),
    Activation("dqkvr", "B T 3k"),
    Activation("dln1", "B s C"),
)

# the residual stream as a block sees it: its input, and the gradient that all blocks hand down in one tensor
STREAM = (Activation("residual", "B s C"), Activation("dresidual", "B s C"))


@dataclass(frozen=True, slots=True)
class Stage:
    """One operation of a block: what it reads and what it writes, by name, and what it computes.

    weights  parameters it reads        grads  parameters whose gradient it adds to
    flops    floating-point operations of its matmuls, a product of letters; causal attention counts the half it computes
    gathers  what it reads of which it needs the rows of all parts, with tensor parallelism
    sums     whether what it writes is then a sum over parts
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()
    flops: str = "0"
    gathers: str = ""
    sums: bool = False

    @property
    def is_matmul(self) -> bool:
        """Whether it multiplies by a layer's matrix, or computes the gradient of one; attention does neither."""
        return not MATRICES.isdisjoint(self.weights + self.grads)


# "residual" is the block's input: encoded, or the residual3 of the block below.
# a layernorm is two stages, so that normalising again from kept statistics is simply the second one
FORWARD_STAGES = (
    Stage("ln1_statistics", ("residual",), ("ln1_mean", "ln1_rstd")),
    Stage("ln1", ("residual", "ln1_mean", "ln1_rstd"), ("ln1",), ("ln1w", "ln1b")),
    Stage("qkv", ("ln1",), ("qkvr",), ("qkvw", "qkvb"), flops="6 B T C k", gathers="ln1"),
    Stage("attention", ("qkvr",), ("atty", "lse"), flops="2 B T T k"),
    Stage("attproj", ("atty", "residual"), ("residual2",), ("attprojw", "attprojb"), flops="2 B T C k", sums=True),
    Stage("ln2_statistics", ("residual2",), ("ln2_mean", "ln2_rstd")),
    Stage("ln2", ("residual2", "ln2_mean", "ln2_rstd"), ("ln2",), ("ln2w", "ln2b")),
    Stage("fc", ("ln2",), ("fch",), ("fcw", "fcb"), flops="8 B T C f", gathers="ln2"),
    Stage("gelu", ("fch",), ("fch_gelu",)),
    Stage("fcproj", ("fch_gelu", "residual2"), ("residual3",), ("fcprojw", "fcprojb"), flops="8 B T C f", sums=True),
)

LN1, LN2 = ("ln1_mean", "ln1_rstd"), ("ln2_mean", "ln2_rstd")

# the gradient of a bias is a sum over rows, taken by the stage before that of its matmul, which has those rows at hand.
# fcproj's input gradient comes before GELU runs again, so that one pass can do GELU and its gradient
BACKWARD_STAGES = (
    Stage("fcproj_dinput", ("dresidual",), ("dfch",), ("fcprojw",), (), "8 B T C f", gathers="dresidual"),
    Stage("gelu_backward", ("dfch", "fch"), ("dfch",), (), ("fcb",)),
    Stage("fcproj_dweight", ("dresidual", "fch_gelu"), (), (), ("fcprojw",), "8 B T C f", gathers="dresidual"),
    Stage("fc_backward", ("dfch", "ln2"), ("dln2",), ("fcw",), ("fcw",), "16 B T C f", gathers="ln2", sums=True),
    Stage("ln2_backward", ("dresidual", "dln2", "residual2", *LN2), ("dresidual",), ("ln2w",), ("ln2w", "ln2b", "attprojb")),
    Stage("attproj_backward", ("dresidual", "atty"), ("datty",), ("attprojw",), ("attprojw",), "4 B T C k", gathers="dresidual"),
    Stage("attention_backward", ("datty", "qkvr", "atty", "lse"), ("dqkvr",), (), ("qkvb",), "5 B T T k"),
    Stage("qkv_backward", ("dqkvr", "ln1"), ("dln1",), ("qkvw",), ("qkvw",), "12 B T C k", gathers="ln1", sums=True),
    # fcprojb is that of the block below, whose output's gradient this stage completes
    Stage("ln1_backward", ("dresidual", "dln1", "residual", *LN1), ("dresidual",), ("ln1w",), ("ln1w", "ln1b", "fcprojb")),
)
