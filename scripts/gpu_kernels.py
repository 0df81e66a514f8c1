"""Sections of gpu_check.py: every kernel compared with the bytes it must move, matmuls and attention with their FLOPs."""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from llmc.data.order import token_order
from llmc.gpt2 import tensor_states
from llmc.kernels import cublaslt
from llmc.layers.matmul import matmul_dinput, matmul_dweight, matmul_forward
from llmc.layers.matmul_fp8 import E4M3
from llmc.memory.arena import TORCH_DTYPE
from llmc.memory.layout import flat_layout
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.scratch_sizes import classifier_rows, head_chunk_rows
from llmc.memory.tables import num_parameters
from llmc.memory.tuning import MATMUL_WORKSPACE, TUNING
from llmc.operations import fp8_operand_of, operations
from llmc.rand import XorShift
from scripts.gpu_common import (
    FP32, Skip, attempt, block_matmuls, check_cublaslt, measure, random_tokens, relative_difference, table, while_time, zeros_of,
)  # fmt: skip

SLOW, WEIGHTY = 0.70, 0.005  # a kernel is flagged below SLOW of the copy rate, if it takes at least WEIGHTY of a step


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operation as the model calls it.

    n_bytes   what it must move, each input read and each output written once: a formula in the letters below
    launches  per training step, likewise; 0 for what only another kind of step launches
    when      the flags it runs with, if not at -r 0
    forms     of the plan's options, as (name, value) pairs
    """

    operation: str
    n_bytes: str
    launches: str
    when: str = ""
    forms: tuple = ()

    @property
    def name(self) -> str:
        return self.operation + (f" ({self.when})" if self.when else "")


def weighs(row) -> bool:
    """Whether a kernel's share of a step is large enough to matter, or unknown."""
    share = row.get("of step")
    return share is None or share >= WEIGHTY


LETTERS = "u one pass over a (B, T, C) bf16 tensor, n = B T rows, C channels, L layers, V and Vp vocabulary, R rows of a head chunk, " \
    "K tokens that occur, P parameters"  # fmt: skip
AGAIN = "-r 1, GELU again"
BITS, SMALL = ("master", "bits16"), ("optimizer_state", "bf16")
KERNELS = (
    Kernel("encoder_forward", "u + 8*n + 2*K*C + 2*T*C", "1"),
    Kernel("layernorm_forward", "2*u + 8*n + 4*C", "1"),
    Kernel("residual_layernorm_forward", "4*u + 8*n + 4*C", "2*L"),
    Kernel("layernorm_normalize", "2*u + 8*n + 4*C", "2*L", when="-r 2"),
    Kernel("gelu_forward", "8*u", "L"),
    Kernel("fused_classifier_inplace", "2*R*(V + Vp) + 16*R", "n/R"),
    Kernel("gelu_backward_inplace", "12*u + 8*C", "L"),
    Kernel("gelu_backward_inplace", "16*u + 8*C", "L", when=AGAIN),
    Kernel("layernorm_backward", "4*u + 8*n + 8*C", "2*L + 1"),
    Kernel("pack_gradients", "6*u + 6*C", "L"),
    Kernel("matmul_dbias", "4*u + 8*C", "L", when="-ge 2"),
    Kernel("encoder_backward", "u + 8*n + 4*K + 4*K*C + 2*T*C", "1"),
    Kernel("global_norm", "2*P", "1"),
    Kernel("global_norm", "4*P", "1", when="--grad-dtype fp32", forms=(("grad_dtype", "fp32"),)),
    Kernel("adamw_update", "28*P", "1"),
    Kernel("adamw_update", "26*P", "1", when="--master bits16", forms=(BITS,)),
    Kernel("adamw_update", "20*P", "1", when="--optimizer-state bf16", forms=(SMALL,)),
    Kernel("adamw_update", "18*P", "1", when="both", forms=(BITS, SMALL)),
    Kernel("adamw_update", "22*P", "1", when="--master none", forms=(("master", "none"),)),
    Kernel("fp8_operand", "12*u", "0", when="--matmul fp8, fc's dout", forms=(("matmul", "fp8"),)),
)


def letters(config, B, T) -> dict:
    K = len(np.unique(random_tokens(config, B, T)[0]))
    R = head_chunk_rows(PlanOptions(config, B, T, device="cuda"))
    return dict(u=2 * B * T * config.channels, n=B * T, T=T, C=config.channels, L=config.num_layers, V=config.vocab_size,
                Vp=config.padded_vocab_size, R=R, K=K, P=num_parameters(config))  # fmt: skip


def evaluate(formula: str, values: dict) -> float:
    return eval(formula, {"__builtins__": {}}, values)


# ----------------------------------------------------------------------------
# inputs


class Room:
    """What a kernel's arguments are made from: random tensors of the model's shapes, and the scratch buffers of a plan."""

    def __init__(self, run, kernels, **forms):
        self.run, s = run, run.sizes
        self.config, self.B, self.T, self.C, self.n = s.config, s.B, s.T, s.config.channels, s.B * s.T
        self.options = run.options(s.config, s.B, s.T, kernels=kernels, gelu_fusion=0, **forms)
        self.plan, self.head_rows, device = Plan(self.options), head_chunk_rows(self.options), run.backend.device
        wanted = [t for t in self.plan.tensors.values() if t.is_scratch]
        self.scratch = zeros_of(wanted, device)
        if run.dry and "fp8_partials" in self.scratch:  # a program for each, one after the other: few will do
            self.scratch["fp8_partials"] = self.scratch["fp8_partials"][:4]
        inputs = random_tokens(s.config, s.B, s.T)[0]
        self.tokens, self.order = torch.from_numpy(inputs).to(device), token_order(inputs)
        self.operations = vars(operations(kernels)) | {"fp8_operand": fp8_operand_of(kernels)}

    def x(self, width=1):
        return self.run.random(self.B, self.T, width * self.C)

    def wte(self):
        return self.run.random(self.config.padded_vocab_size, self.C)

    def wpe(self):
        return self.run.random(self.config.max_seq_len, self.C)

    def vector(self, width=1):
        return self.run.random(width * self.C)

    def stat(self):
        return self.run.random(self.B, self.T, dtype=FP32).abs_().add_(0.5)

    def in_fp8(self, rows, columns):
        return torch.zeros(rows, columns, dtype=E4M3, device=self.tokens.device)

    def heads(self):
        return self.x().view(self.B, self.T, self.config.num_heads, -1).transpose(1, 2)

    def logits(self):
        return self.run.random(self.head_rows, self.config.padded_vocab_size)

    def flat(self):
        """The flat arenas, by name."""
        P, made = num_parameters(self.config), {}
        for name, dtype in self.plan.flat_types.items():
            if dtype == "int16":
                made[name] = torch.zeros(P, dtype=torch.int16, device=self.tokens.device)
            else:
                made[name] = self.run.random(P, dtype=TORCH_DTYPE[dtype], scale=1e-2)
        made["v"].abs_()
        return made

    def tensors(self):
        return tensor_states(flat_layout(self.config), XorShift(1), XorShift(2))

    def sets(self, kernel: Kernel, n_bytes):
        """Calls of a kernel for measure(), each on its own inputs. No input is restored between calls: time does not depend on values.

        For an operation in two halves, the copies to the device are made beforehand: the calls are those of the half that launches.
        """
        function = self.operations["launch_" * (kernel.operation in STAGED) + kernel.operation]
        if kernel.when == AGAIN:
            function = partial(function, out_again=self.x(4))
        return [CALLS[kernel.operation](self, function) for _ in range(1 if n_bytes > 2e9 else 2)]


# operation in two halves -> a call of its first half on the inputs of room r; it returns what the second half takes
STAGED = {
    "encoder_backward": lambda r: r.operations["stage_encoder_backward"](r.order, 12345, r.scratch),
    "adamw_update": lambda r: r.operations["stage_adamw_update"](
        r.tensors(), r.scratch, lr=1e-4, weight_decay=0.1, step=3, grad_norm=r.scratch["grad_norm"],
    ),
}  # fmt: skip
# operation -> a call of its function f, or of its second half, on the inputs of room r
CALLS = {
    "encoder_forward": lambda r, f: partial(f, r.x(), r.tokens, r.wte(), r.wpe()),
    "encoder_backward": lambda r, f: partial(
        f, r.wte(), r.wpe(), r.x(), r.tokens, STAGED["encoder_backward"](r), r.scratch, accumulate=False,
    ),
    "layernorm_forward": lambda r, f: partial(f, r.x(), r.stat(), r.stat(), r.x(), r.vector(), r.vector(), r.scratch),
    "residual_layernorm_forward": lambda r, f: partial(f, r.x(), r.x(), r.stat(), r.stat(), r.x(), r.vector(), r.vector(), r.scratch),
    "layernorm_normalize": lambda r, f: partial(f, r.x(), r.x(), r.stat(), r.stat(), r.vector(), r.vector(), r.scratch),
    "layernorm_backward": lambda r, f: partial(
        f, r.x(), r.vector(), r.vector(), r.vector(), r.x(), r.x(), r.vector(), r.stat(), r.stat(), r.scratch, accumulate=False,
    ),
    "gelu_forward": lambda r, f: partial(f, r.x(4), r.x(4), r.scratch),
    "gelu_backward_inplace": lambda r, f: partial(f, r.x(4), r.vector(4), r.x(4), r.scratch, accumulate=False),
    "pack_gradients": lambda r, f: partial(
        f, r.x(3), r.vector(3), [r.heads() for _ in range(3)], r.config.num_heads, r.scratch, accumulate=False,
    ),
    "matmul_dbias": lambda r, f: partial(f, r.vector(4), r.x(4), r.scratch, accumulate=False),
    "fused_classifier_inplace": lambda r, f: partial(
        f, r.logits(), torch.zeros(r.head_rows, device=r.tokens.device), r.tokens.view(-1)[: r.head_rows], r.scratch,
        V=r.config.vocab_size, dloss=1 / r.n, rows_at_once=classifier_rows(r.options),
    ),
    "global_norm": lambda r, f: partial(
        f, r.scratch["grad_norm"], r.flat()["gradients"], r.scratch, piece=TUNING[r.options.device].update_elements,
    ),
    "adamw_update": lambda r, f: partial(f, r.flat(), STAGED["adamw_update"](r), r.scratch),
    "fp8_operand": lambda r, f: partial(
        f, r.scratch["fp8_dout_scale"], r.x(4), r.scratch, rows=r.in_fp8(r.n, 4 * r.C), columns=r.in_fp8(4 * r.C, r.n),
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------
# sections


def kernels(run, record):
    if run.no_triton:
        raise Skip(run.no_triton)
    values = letters(run.sizes.config, run.sizes.B, run.sizes.T)
    record["notes"] += [f"bytes: each input read once, each output written once; {LETTERS}",
                        f"flagged: below {SLOW:.0%} of the copy rate, and at least {WEIGHTY:.1%} of a step at -r 0"]  # fmt: skip
    for kernel in while_time(run, record, KERNELS, 6, name=lambda k: k.name):
        n_bytes, launches = evaluate(kernel.n_bytes, values), evaluate(kernel.launches, values)
        row = {"kernel": kernel.name, "bytes": kernel.n_bytes, "MB": n_bytes / 1e6}
        with attempt(record, kernel.name):
            ms, spread = measure(run, *Room(run, "triton", **dict(kernel.forms)).sets(kernel, n_bytes))
            rate = n_bytes / ms / 1e6
            row |= {"ms": ms, "spread": spread, "GB/s": rate, "of copy": run.share(rate, "copy"), "launches": launches}
            row["of step"] = ms * launches / run.step_ms if run.step_ms else None
            row["flag"] = "SLOW" if not run.dry and (row["of copy"] or 1) < SLOW and weighs(row) else ""
        with attempt(record, f"{kernel.name}, torch's operation"):
            row["torch ms"], _ = measure(run, *Room(run, "torch", **dict(kernel.forms)).sets(kernel, n_bytes))
            row["torch/ours"] = row["torch ms"] / row["ms"] if "ms" in row else None
        table(record, "").append(row)
    run.summary["kernels flagged"] = [row["kernel"] for row in table(record, "") if row.get("flag")]


def matmuls(run, record):
    s, C = run.sizes, run.sizes.config.channels
    n, R, Vp = s.B * s.T, head_chunk_rows(run.options(s.config, s.B, s.T)), s.config.padded_vocab_size
    shapes = (*((name, n, *sizes) for name, sizes in block_matmuls(C).items()), ("head", R, C, Vp))
    for name, rows, inner, outer in while_time(run, record, shapes, 5, name=lambda x: x[0]):
        scratch = None if run.cuda else {"widened": torch.empty(rows * (inner + outer))}

        def calls(kind):
            x, y, w, b = run.random(rows, inner), run.random(rows, outer), run.random(outer, inner), run.random(outer)
            w32 = torch.empty(outer, inner, device=w.device)
            return {"forward": partial(matmul_forward, y, x, w, None if name == "head" else b), "dinput": partial(matmul_dinput, x, y, w),
                    "dweight, bf16": partial(matmul_dweight, w, y, x, accumulate=False),
                    "dweight, fp32": partial(matmul_dweight, w32, y, x, accumulate=False, scratch=scratch)}[kind]  # fmt: skip

        for kind in ("forward", "dinput", "dweight, bf16", "dweight, fp32"):
            with attempt(record, f"{name} {kind}"):
                sets = calls(kind), calls(kind)
                ms, spread = measure(run, *sets)
                rate = 2 * rows * inner * outer / ms / 1e9
                row = {"matmul": name, "which": kind, "rows, in, out": f"{rows}, {inner}, {outer}", "ms": ms, "spread": spread}
                row |= {"TFLOP/s": rate, "of matmul": run.share(rate, "bf16")}
                table(record, "").append(row)
                if run.cuda and (kind != "forward" or name == "head"):  # with a bias torch calls cuBLASLt anyway
                    row |= other_library(run, *sets)
    record["notes"].append("cublaslt: what --matmul cublaslt would run instead; worth a row of a table if it is faster")


@contextmanager
def matmuls_by(library):
    """Run matmuls without a bias by this GPU library: cublas or cublaslt."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def other_library(run, *calls) -> dict:
    """The time of the same matmul by cuBLASLt, and whether its bits equal cuBLAS's."""

    def other(call):
        with matmuls_by("cublaslt"):
            call()

    ms, _ = measure(run, *(partial(other, call) for call in calls))
    call, results = calls[0], []
    for function in (call, partial(other, call)):
        function()
        results.append(call.args[0].clone())
    return {"cublaslt ms": ms, "same bits": "yes" if torch.equal(*results) else "no"}


class Attention:
    """Attention of one kind as the model calls it, on its own inputs."""

    def __init__(self, run, shape, kind):
        (B, NH, T, HS), device = shape, run.backend.device
        C, self.NH, kernels = NH * HS, NH, "triton" if kind == "triton" else run.kernels
        plan = Plan(run.options(replace(run.sizes.config, num_heads=NH, channels=C), B, T, kernels=kernels, attention=kind))
        rooms = [t for t in plan.tensors.values() if t.is_scratch]
        self.scratch = zeros_of(rooms, device)
        self.operations = operations(kernels, attention=kind)
        self.atty, self.datty, self.qkvr = run.random(B, T, C), run.random(B, T, C), run.random(B, T, 3 * C)
        self.dqkvr, self.dbias = run.random(B, T, 3 * C), run.random(3 * C)
        self.lse = torch.empty(plan.tensors["lse"].shape[1:], device=device)

    def forward(self):
        self.operations.attention_forward(self.atty, self.lse, self.qkvr, self.NH, self.scratch)

    def backward(self):
        self.operations.attention_backward(
            self.dqkvr, self.dbias, self.datty, self.qkvr, self.atty, self.lse, self.NH, self.scratch, accumulate=False
        )


def repeats_its_bits(compute, *results) -> str:
    """Whether the results have the same bits all three times it computes them."""
    runs = []
    for _ in range(3):
        compute()
        runs.append([result.clone() for result in results])
    return "yes" if all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other)) else "no"


def attention(run, record):
    if not run.cuda:
        raise Skip("these kernels are a GPU's, and there is no CUDA device")
    kinds = ("flash", *(["triton"] if run.kernels == "triton" else []), "cudnn", "efficient")
    for shape, kind in while_time(run, record, [(shape, kind) for shape in run.sizes.attention for kind in kinds], 5):
        B, NH, T, HS = shape
        label = f"{kind}, B={B} NH={NH} T={T}"
        with attempt(record, label):
            sets = [Attention(run, shape, kind) for _ in range(2)]
            forward, spread = measure(run, *(one.forward for one in sets))
            backward, _ = measure(run, *(one.backward for one in sets))
            row = {"attention": label, "forward ms": forward, "spread": spread, "backward ms": backward}
            for name, ms, factor in (("forward", forward, 2), ("backward", backward, 5)):
                rate = factor * B * T * T * NH * HS / ms / 1e9
                row |= {f"{name} TFLOP/s": rate, f"{name} of matmul": run.share(rate, "bf16")}
            one = sets[0]
            table(record, "").append(row | {"backward repeats its bits": repeats_its_bits(one.backward, one.dqkvr, one.dbias)})
    record["notes"].append("as the model calls it: o and lse where the plan wants them; dq, dk and dv packed, and their bias' gradient. "
                           "Causal attention counts the half it computes, and five products backward, whoever takes seven")  # fmt: skip


def gelu_fusion(run, record):
    check_cublaslt(run, "GELU inside a matmul is")
    r, fused = Room(run, run.kernels), cublaslt.MatmulGelu(torch.empty(MATMUL_WORKSPACE, dtype=torch.uint8, device=run.backend.device))
    w, w2 = (run.random(*shape, scale=r.C**-0.5) for shape in ((4 * r.C, r.C), (r.C, 4 * r.C)))
    x, bias, dout, dbias, dbias2 = r.x(), r.vector(4), r.x(), r.vector(4), r.vector(4)
    pre, out, dpre, pre2, out2, dpre2 = (r.x(4) for _ in range(6))
    ops, add = r.operations, {"accumulate": False}

    def forward():
        matmul_forward(pre2, x, w, bias)
        ops["gelu_forward"](out2, pre2, r.scratch)

    def fused_backward():
        fused.backward(dpre, dout, w2, pre2)
        ops["matmul_dbias"](dbias, dpre, r.scratch, **add)

    def backward():
        matmul_dinput(dpre2, dout, w2)
        ops["gelu_backward_inplace"](dpre2, dbias2, pre2, r.scratch, **add)

    sums_too = partial(fused.backward, dpre, dout, w2, pre2, dbias)
    for name, one, two, ours, reference in (
        ("fc and GELU", partial(fused.forward, out, pre, x, w, bias), forward, (out, pre), (out2, pre2)),
        ("dinput of fcproj, GELU's gradient, fc's bias gradient", fused_backward, backward, (dpre, dbias), (dpre2, dbias2)),
        ("the same, the bias gradient by cuBLASLt too", sums_too, backward, (dpre, dbias), (dpre2, dbias2)),
    ):
        with attempt(record, name):
            (fused_ms, spread), (ms, _) = measure(run, one), measure(run, two)
            row = {"what": name, "fused ms": fused_ms, "spread": spread, "separate ms": ms, "fused/separate": fused_ms / ms}
            row |= {"relative difference": max(map(relative_difference, ours, reference)), "repeats its bits": repeats_its_bits(one, *ours)}
            table(record, "").append(row)
