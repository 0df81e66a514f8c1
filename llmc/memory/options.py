"""What a plan is made for: the model, the batch and everything else that says how a run stores and computes its numbers."""

from dataclasses import dataclass, replace
from functools import partial
from math import gcd, prod

from llmc.config import ModelConfig
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.layout import divides
from llmc.memory.tables import DTYPE_BYTES, PARAMETERS, layer_shapes, num_parameters, sizes_of, state_tensors
from llmc.memory.tuning import ALIGNMENT, FP8_MULTIPLE

MOST_HEAD_CHANNELS = 128  # the most that Triton's attention takes
SHARDED_FROM = {"parameters": 3, "gradients": 2, "m": 1, "v": 1, "master": 1, "master_bits": 1}  # arena -> ZeRO stage


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Everything the plan depends on."""

    config: ModelConfig
    B: int
    T: int
    precision: str = "bf16"  # fp32 | bf16, of weights and activations
    recompute: int = 1
    master: str = "fp32"  # of a bf16 model: fp32 | bits16, the 16 bits its weights lack | none
    optimizer_state: str = "fp32"  # fp32 | bf16, of m and v
    grad_dtype: str = ""  # fp32 | bf16, of gradients; empty: as the weights
    offload_residual: bool = False
    offload_optimizer: bool = False  # m, v and the master lie in pinned host memory, where a GPU's update reads and writes them
    device: str = "cpu"  # cpu | cuda
    kernels: str = ""  # torch | triton | numba: who runs what is no matmul and no GPU's attention; empty: triton on CUDA, else torch
    gelu_fusion: int = 0  # fused into matmuls: 0 nothing | 1 GELU | 2 GELU and its gradient | 3 its gradient alone
    attention: str = ""  # cpu | flash | cudnn | efficient | triton; empty: as _default_attention has it
    head_chunk: int = 0  # rows; 0 = automatic
    sample_length: int = 64
    data_ranks: int = 1  # ranks that train on different data
    zero_stage: int = 0  # what each of them holds only a share of: 1 m, v and master, 2 gradients too, 3 weights too
    tensor_parallel: int = 1  # parts of the model, one process each: there are data_ranks x tensor_parallel ranks
    matmul: str = "native"  # torch's; on a CPU also numba, or widened (torch's in fp32, of bf16 factors); on a GPU also fp8, in layers only
    factors: str = ""  # bf16 | fp32: the type that numba's kernels multiply; empty: as the weights
    step_sequences: int = 0  # sequences of each rank in a step; more than B make several micro-steps
    reduce_every_micro_step: bool = False  # sum gradients over ranks after each of several micro-steps, as stages 2 and 3 must
    keep_gathered: bool = False  # keep the gathered rows of ln1 and ln2 for backward; else they are gathered again
    processors: int = 132  # multiprocessors of the card, by default an H100's: flash attention's memory depends on them
    async_checkpoint: bool = False  # checkpoints are written while training goes on, from a copy in host memory
    trains: bool = True  # else it only evaluates and samples: no gradients, no optimizer state, and nothing is kept for backward
    rank: int = 0  # whose plan it is. Only the copy of async_checkpoint depends on it: rank 0's is the largest, so all choose by its plan

    def __post_init__(self):
        """Give what was left empty its value, which replace() then keeps, whatever else it changes."""
        fill = partial(object.__setattr__, self)
        fill("grad_dtype", self.grad_dtype or self.precision)
        fill("factors", self.factors or self.precision)
        fill("kernels", self.kernels or ("triton" if self.device == "cuda" else "torch"))
        fill("attention", self.attention or self._default_attention())

    def _default_attention(self) -> str:
        """On CUDA in bf16 this project's where it can: it is faster than flash, the other kind that repeats its bits. Neither has an fp32
        form."""
        if self.device == "cpu":
            return "cpu"
        if self.precision == "fp32":
            return "efficient"
        return "triton" if self.kernels == "triton" and self.config.head_size <= MOST_HEAD_CHANNELS else "flash"

    def only_evaluating(self) -> "PlanOptions":
        """These options for a run that trains nothing: without all that is only for training, at the level that keeps least."""
        return replace(
            self, trains=False, recompute=max(NOT_KEPT), master="none", optimizer_state="fp32", grad_dtype="", offload_residual=False,
            offload_optimizer=False, keep_gathered=False, async_checkpoint=False, reduce_every_micro_step=False,
        )  # fmt: skip

    @property
    def fused(self) -> bool:
        """Whether it is kernels, each of which goes over its tensors once, rather than torch's operations, which go piece by piece."""
        return self.kernels != "torch"

    @property
    def gelu_repeats(self) -> bool:
        """Whether recomputed GELU has the same bits as the first: GELU fused into a matmul takes sums that are not rounded yet."""
        return self.gelu_fusion in (0, 3)

    @property
    def gelu_input_bytes(self) -> int:
        """Bytes of one layer's fch, GELU's input."""
        return 4 * self.B * self.T * self.config.channels // self.tensor_parallel * DTYPE_BYTES[self.precision]

    @property
    def batch_multiple(self) -> int:
        """What B must be a multiple of: with FP8, so that it can be multiplied; with -ge 3, so that every layer's fch is aligned alike."""
        if self.matmul == "fp8":
            return FP8_MULTIPLE // gcd(FP8_MULTIPLE, self.T)
        if self.gelu_fusion and self.gelu_repeats:
            return ALIGNMENT // gcd(ALIGNMENT, self.gelu_input_bytes // self.B)
        return 1

    @property
    def multiplied_in(self) -> str:
        """Type of the factors of matmuls; with fp8, of the head's matmuls."""
        return {"numba": self.factors, "widened": "fp32"}.get(self.matmul, self.precision)

    @property
    def keeps_master(self) -> bool:
        """Whether there is an fp32 master copy; fp32 parameters are their own."""
        return self.master == "fp32" and self.precision != "fp32"

    @property
    def keeps_bits(self) -> bool:
        """Whether the master is kept as the bf16 weight and the 16 bits that it lacks."""
        return self.master == "bits16" and self.precision != "fp32"

    @property
    def state_tensors(self) -> tuple[str, ...]:
        """What a checkpoint's state files hold; fp32 weights are their own master."""
        return state_tensors(self.master != "none")

    @property
    def checkpoint_file_bytes(self) -> int:
        """Bytes of a checkpoint's model and state files, of all ranks, but for headers and the order of the data."""
        parameters = num_parameters(self.config)
        states = self.data_ranks * (parameters // self.ranks_of("m")) * DTYPE_BYTES["fp32"] * len(self.state_tensors)
        return parameters * DTYPE_BYTES[self.precision] + states

    def ranks_of(self, arena: str) -> int:
        """Over how many ranks an arena with one number for each parameter is sharded."""
        return self.data_ranks if self.zero_stage >= SHARDED_FROM[arena] else 1

    @property
    def shares(self) -> bool:
        """Whether several ranks sum the gradient in equal shares; else, which only stage 0 allows, they sum it whole."""
        return self.data_ranks > 1 and divides(self.config, self.data_ranks, self.tensor_parallel)

    @property
    def reduces_always(self) -> bool:
        """Whether gradients are summed over ranks after every micro-step; else each rank accumulates its own, summed once a step."""
        if self.zero_stage >= SHARDED_FROM["gradients"]:
            return self.data_ranks > 1
        return self.reduce_every_micro_step and self.shares and self.step_sequences > self.B

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.data_ranks * self.tensor_parallel

    @property
    def heads(self) -> int:
        """Heads in this rank's part of the model."""
        return sizes_of(self.config, parts=self.tensor_parallel)["h"]

    @property
    def part_parameters(self) -> int:
        """Parameters in this rank's part of the model."""
        return num_parameters(self.config, self.tensor_parallel)

    @property
    def layer_elements(self) -> int:
        """Elements of one layer's tensors, in this rank's part of the model."""
        shapes = layer_shapes(self.config, self.tensor_parallel)
        return sum(prod(shapes[p.name]) for p in PARAMETERS if p.per_layer)

    @property
    def outer_elements(self) -> int:
        """Elements of the tensors that belong to no layer."""
        return self.part_parameters - self.config.num_layers * self.layer_elements

    @property
    def keeps_all_rows(self) -> bool:
        """Whether ln1 and ln2, where they are kept for backward, are kept with the rows of all parts and not only this part's own."""
        return self.keep_gathered and self.tensor_parallel > 1

    @property
    def rounds(self) -> bool:
        """Whether the update rounds anything to bf16, and so needs noise."""
        return "bf16" in (self.precision, self.optimizer_state)
