"""What cannot be honoured: a form that this model, device or number of ranks cannot have. Each check raises UserError, one sentence."""

from llmc.cards import HOPPER, Device
from llmc.config import ModelConfig
from llmc.errors import UserError
from llmc.flags import Settings
from llmc.memory.ladder import can_keep_gathered
from llmc.memory.layout import divides
from llmc.memory.options import MOST_HEAD_CHANNELS, PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tables import sizes_of
from llmc.memory.tuning import ALIGNMENT, FP8_MULTIPLE
from llmc.processor import CPU_MATMULS
from llmc.units import MIB, ceil_mib


def check_forms(s: Settings, precision: str, device_kind: str):
    """Raise UserError for what a model in that precision, on that kind of device, cannot have."""
    for wish, asked in (("--master bits16", s.master == "bits16"), ("--grad-dtype bf16", s.grad_dtype == "bf16")):
        if asked and precision == "fp32":
            raise UserError(f"{wish} is for a bf16 model, and this one is fp32; leave it out, or use a bf16 model")
    here = "this plan is for a CPU; name a card with --memory-budget, or" if s.plan else "this run is on a CPU;"
    for wish, asked, what in (
        ("--offload-residual", s.offload_residual, "moves residuals from a GPU to host memory"),
        ("--offload-optimizer", s.offload_optimizer, "moves m, v and the master from a GPU to host memory"),
        (f"-ge {s.gelu_fusion}", s.gelu_fusion, "fuses GELU into matmuls of a GPU"),
        (f"--attention {s.attention}", s.attention != "auto", "is a GPU's"),
        (f"--matmul {s.matmul}", s.matmul not in ("auto", *CPU_MATMULS), "is a GPU's"),
    ):
        if asked and device_kind != "cuda":
            raise UserError(f"{wish} {what}, and {here} leave it out")
    if s.matmul in CPU_MATMULS and device_kind == "cuda":
        raise UserError(f"--matmul {s.matmul} is a CPU's, and this run is on a GPU; leave it out")
    if s.matmul == "widened" and precision == "fp32":
        raise UserError("--matmul widened is for a bf16 model, and this one is fp32; leave it out, or use a bf16 model")
    if s.matmul == "numba" and s.kernels != "numba":
        raise UserError(f"--matmul numba goes with --kernels numba, and this run has --kernels {s.kernels}; leave one of them out")


# of the kinds that take bf16 only
HEAD_SIZES = {"flash": range(8, 257, 8), "cudnn": range(8, 129, 8), "triton": range(1, MOST_HEAD_CHANNELS + 1)}


def check_attention(o: PlanOptions):
    """Raise UserError unless the attention of these options takes their type and heads, and what it is written in is there."""
    kind, head_size = o.attention, o.config.head_size
    if kind == "triton" and o.kernels != "triton":
        raise UserError(f"--attention triton goes with --kernels triton, and this run has --kernels {o.kernels}; leave one of them out")
    sizes = HEAD_SIZES.get(kind)
    if sizes and o.precision == "fp32":
        raise UserError(f"--attention {kind} has no fp32 form; leave it out, or train in bf16")
    if sizes and head_size not in sizes:
        taken = "sizes" if sizes.step == 1 else f"multiples of {sizes.step}"
        repeating = ("flash", "triton") if o.kernels == "triton" else ("flash",)
        others = "".join(f"{other} or " for other in repeating if head_size in HEAD_SIZES[other])
        raise UserError(
            f"heads of size {head_size}: {kind} attention takes {taken} up to {sizes[-1]} in bf16; "
            f"use --attention {others}efficient, an fp32 model with --precision fp32, or --device cpu"
        )
    numbers = o.T * 3 * sizes_of(o.config, parts=o.tensor_parallel)["k"]
    if kind == "triton" and numbers >= 1 << 31:
        raise UserError(
            f"-t {o.T}: triton attention finds a sequence's numbers by 32 bits, and queries, keys and values of a layer are {numbers}; "
            f"use --attention {'flash' if head_size in HEAD_SIZES['flash'] else 'efficient'}, or a smaller -t"
        )


FP8_CAPABILITY = HOPPER  # Ada multiplies FP8 too, but Triton 3.6 rounds to it twice there


def check_fp8(o: PlanOptions, device: Device):
    """Raise UserError unless --matmul fp8, where it is asked for, can be honoured on that card."""
    if o.matmul != "fp8":
        return
    if device.capability and device.capability < FP8_CAPABILITY:
        raise UserError(f"--matmul fp8 is for Hopper and later, SM90, and this run is on {device.name}; leave it out")
    if o.precision == "fp32":
        raise UserError("--matmul fp8 is for a bf16 model, and this one is fp32; leave it out, or use a bf16 model")
    if o.kernels != "triton":
        raise UserError(f"--matmul fp8 goes with --kernels triton, and this run has --kernels {o.kernels}; leave one of them out")
    if o.gelu_fusion:
        raise UserError(f"--matmul fp8 -ge {o.gelu_fusion}: GELU joins matmuls of bf16, and these are FP8; leave one of them out")


def check_gelu_fusion(o: PlanOptions):
    """Raise UserError unless cuBLASLt is there for -ge."""
    if o.gelu_fusion:
        from llmc.kernels.cublaslt import why_no_cublaslt

        if why_not := why_no_cublaslt():
            raise UserError(f"-ge {o.gelu_fusion}: {why_not}; use -ge 0, which computes the same function")


def check_sizes(o: PlanOptions):
    """Raise UserError unless -ge can fuse and --matmul fp8 multiply these sizes, and -ge 3 keeps with them the bits that it promises."""
    if o.gelu_fusion:
        for what, width in (("C", o.config.channels), (f"4 C / {o.tensor_parallel}", 4 * o.config.channels // o.tensor_parallel)):
            if width % 8:
                raise UserError(
                    f"-ge {o.gelu_fusion}: cuBLASLt fuses GELU into matmuls of widths that 8 divides, and {what} is {width}; use -ge 0"
                )
        # else how GELU's input of a layer is aligned depends on the level, and cuBLASLt chooses its algorithm by alignment
        if o.gelu_repeats and o.gelu_input_bytes % ALIGNMENT:
            raise UserError(
                f"-ge {o.gelu_fusion} promises the same bits at every -r, for which a layer's B*T*4C inputs of GELU must take a multiple "
                f"of {ALIGNMENT} bytes, and they take {o.gelu_input_bytes}; use a -b or -t with more factors of two, or -ge 0"
            )
    if o.matmul == "fp8":
        sizes = sizes_of(o.config, parts=o.tensor_parallel)
        channels = {"C": sizes["C"], "the channels of a rank's heads": sizes["k"], "a rank's part of 4 C": 4 * sizes["f"]}
        for what, size in ({"B*T": o.B * o.T} | channels).items():
            if size % FP8_MULTIPLE:
                raise UserError(f"--matmul fp8 takes sizes that {FP8_MULTIPLE} divides, and {what} is {size}; leave it out")


def check_parts(s: Settings, config: ModelConfig):
    """Raise UserError unless tensor parallelism can split this model."""
    parts = s.tensor_parallel
    split = {"channels": config.channels, "rows of the padded vocabulary": config.padded_vocab_size, "tokens of -t": s.sequence_length}
    for what, count in split.items():
        if count % parts:
            raise UserError(f"--tensor-parallel {parts} does not divide the {count} {what}; use a number that does")
    if parts > config.num_heads:
        raise UserError(f"--tensor-parallel {parts} is more than there are heads, {config.num_heads}; use a smaller number")
    if not s.tp_recompute_allgather and parts == 1:
        raise UserError("--tp-recompute-allgather 0 is about what --tensor-parallel gathers, and there is none; leave it out")
    if not s.tp_recompute_allgather and s.recompute != "auto" and not can_keep_gathered(s.recompute):
        raise UserError(
            f"--tp-recompute-allgather 0 keeps the layernorms of all parts, and -r {s.recompute} does not keep them; "
            "use -r 0 or -r 1, or leave it out"
        )
    if parts > 1 and s.kernels == "torch":
        raise UserError(
            "--tensor-parallel needs kernels that take a part's tokens, which torch's operators do not; use --kernels numba or triton"
        )


def check_shares(s: Settings, config: ModelConfig, ranks: int):
    """Raise UserError unless ZeRO can share every tensor out over so many ranks."""
    parts = s.tensor_parallel
    if s.zero_stage > 0 and not divides(config, ranks, parts):
        sizes = sizes_of(config, parts=parts)
        channels = (
            f"C = {config.channels}" if parts == 1 else f"both C / {parts} = {sizes['f']} and the {sizes['k']} channels of a part's heads"
        )
        raise UserError(
            f"-z {s.zero_stage} shares every tensor out over {ranks} processes, which do not divide {channels}; "
            "use a number that does, or -z 0"
        )


def check_host_memory(plan: Plan, host_bytes: int):
    """Raise UserError for a plan that needs more pinned host memory than there is for this process."""
    if plan.host_bytes <= host_bytes:
        return
    o = plan.options
    takers = {
        "--offload-residual": o.offload_residual, "--offload-optimizer": o.offload_optimizer, "--async-checkpoint 1": o.async_checkpoint
    }  # fmt: skip
    asked = [flag for flag, given in takers.items() if given]
    smaller = "use a smaller -b, or " if o.offload_residual else ""
    raise UserError(
        f"{' with '.join(asked)} needs {ceil_mib(plan.host_bytes)} MiB of host memory for each process, and there are "
        f"{host_bytes // MIB} MiB; {smaller}leave {'it' if len(asked) == 1 else 'one of them'} out and see --plan"
    )
