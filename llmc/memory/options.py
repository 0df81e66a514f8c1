"""What a plan is of: the model, the batch and everything else that says how a run keeps and computes its numbers."""

from dataclasses import dataclass
from math import prod

from llmc.config import ModelConfig
from llmc.memory.layout import divides
from llmc.memory.tables import PARAMETERS, num_parameters, parameter_shapes, sizes_of

MOST_HEAD_CHANNELS = 128  # that Triton's attention takes
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
    grad_dtype: str = ""  # fp32 | bf16; empty: as the weights
    offload_residual: bool = False
    device: str = "cpu"  # cpu | cuda
    kernels: str = ""  # torch | triton | numba, which need working room of their own; empty: triton on CUDA, else torch
    gelu_fusion: int = 0  # inside matmuls: 0 nothing | 1 GELU | 2 and its gradient | 3 that alone
    attention: str = ""  # cpu | flash | cudnn | efficient | triton; empty: the device's default
    head_chunk: int = 0  # rows; 0 = automatic
    sample_length: int = 64
    ranks: int = 1  # that train on data of their own
    zero_stage: int = 0  # what each of them holds only a share of: 1 m, v and master, 2 gradients too, 3 weights too
    tensor_parallel: int = 1  # parts of the model, a process each: there are ranks x tensor_parallel processes
    matmul: str = "native"  # torch's; on a CPU also numba, or widened, which is torch's of bf16 factors in fp32; on a GPU fp8, of layers
    factors: str = ""  # bf16 | fp32, what numba's kernels multiply; empty: as the weights
    step_sequences: int = 0  # of each rank in a step; more than B make several micro-steps
    reduce_every_micro_step: bool = False  # of several, gradients are summed over ranks after each, as stages 2 and 3 must
    keep_gathered: bool = False  # of ln1 and ln2 what all parts gathered, for backward; else they gather it again
    processors: int = 132  # of the card, an H100's: flash attention allocates by them
    async_checkpoint: bool = False  # checkpoints are written beside training, from a copy in host memory
    rank: int = 0  # whose plan it is. Only that copy depends on it: the first rank's is the largest, so all choose by that

    @property
    def kernel_set(self) -> str:
        """torch, triton or numba: whose code does what is not a matmul or a GPU's attention."""
        return self.kernels or ("triton" if self.device == "cuda" else "torch")

    @property
    def fused(self) -> bool:
        """Whether kernels do it, in one pass each, or torch's operations piece by piece."""
        return self.kernel_set != "torch"

    @property
    def gelu_repeats(self) -> bool:
        """Whether GELU that is computed again has the bits of the first: a matmul's own takes sums that are not rounded yet."""
        return self.gelu_fusion in (0, 3)

    @property
    def attention_kind(self) -> str:
        """Whose attention runs. On CUDA in bf16 this project's where it can, which is faster than flash, the other that repeats its bits;
        neither has an fp32 form."""
        if self.attention:
            return self.attention
        if self.device == "cpu":
            return "cpu"
        if self.precision == "fp32":
            return "efficient"
        return "triton" if self.kernel_set == "triton" and self.config.head_size <= MOST_HEAD_CHANNELS else "flash"

    @property
    def multiplied_in(self) -> str:
        """Type of the factors of matmuls; with fp8 of the head's."""
        return {"numba": self.factor_type, "widened": "fp32"}.get(self.matmul, self.precision)

    @property
    def factor_type(self) -> str:
        """Type of the factors of products within numba's kernels."""
        return self.factors or self.precision

    @property
    def gradients(self) -> str:
        """Type of the gradients."""
        return self.grad_dtype or self.precision

    @property
    def keeps_master(self) -> bool:
        """In fp32 the parameters are their own master copy."""
        return self.master == "fp32" and self.precision != "fp32"

    @property
    def keeps_bits(self) -> bool:
        """Whether the master exists as a bf16 weight and the 16 bits it lacks."""
        return self.master == "bits16" and self.precision != "fp32"

    def ranks_of(self, arena: str) -> int:
        """Over how many ranks an arena of one number for each parameter is shared out."""
        return self.ranks if self.zero_stage >= SHARDED_FROM[arena] else 1

    @property
    def shares(self) -> bool:
        """Whether several ranks sum up the gradient in equal shares; else, at stage 0, as a whole."""
        return self.ranks > 1 and divides(self.config, self.ranks, self.tensor_parallel)

    @property
    def reduces_always(self) -> bool:
        """Whether ranks sum up the gradients of every micro-step, and add up the sums; else those of a step, added up before."""
        if self.zero_stage >= SHARDED_FROM["gradients"]:
            return self.ranks > 1
        return self.reduce_every_micro_step and self.shares and self.step_sequences > self.B

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.ranks * self.tensor_parallel

    @property
    def heads(self) -> int:
        """Of this rank's part of the model."""
        return sizes_of(self.config, parts=self.tensor_parallel)["h"]

    @property
    def num_parameters(self) -> int:
        """Of this rank's part of the model."""
        return num_parameters(self.config, self.tensor_parallel)

    @property
    def layer_elements(self) -> int:
        """Of one layer's tensors, in this rank's part of the model."""
        shapes = parameter_shapes(self.config, self.tensor_parallel)
        return sum(prod(shapes[p.name][1:]) for p in PARAMETERS if p.per_layer)

    @property
    def outer_elements(self) -> int:
        """Of the tensors that belong to no layer."""
        return self.num_parameters - self.config.num_layers * self.layer_elements

    @property
    def keeps_gathered(self) -> bool:
        """Whether ln1 and ln2 of all parts are kept for backward, where a part's own would be."""
        return self.keep_gathered and self.tensor_parallel > 1

    @property
    def rounds(self) -> bool:
        """Whether the update rounds anything to bf16, and so needs noise."""
        return "bf16" in (self.precision, self.optimizer_state)
