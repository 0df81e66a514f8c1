#!/usr/bin/env python3
"""Compile every Triton kernel that a training run launches, for cards that need not be present.

    python scripts/compile_kernels.py                    sm80, sm90 and sm100, at GPT-2's widths
    python scripts/compile_kernels.py --capability 90 --resources

The launches of real training steps are recorded, for every form of weights, gradients and optimizer state, and each distinct one
is compiled down to machine code. --resources prints shared memory and, if cuobjdump is there, registers and stack (where spills go).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # interpreted functions cannot be compiled
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.errors import run_script  # first, as it says what is not installed

import numpy as np
import torch

from llmc.config import ModelConfig
from llmc.gpt2 import GPT2
from llmc.kernels import door
from llmc.layers.matmul_fp8 import E4M3
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tuning import ATTENTION_ROWS, FP8_PARTIALS
from llmc.operations import MATMULS
from llmc.refusals import FP8_CAPABILITY

# launches are recorded at sizes that a CPU can hold, and compiled for those of a run: an argument that is 1 may become a constant
SIZES = {"n_rows": 65536, "rows_each": 256, "B": 64, "T": 1024}
SMALL = ModelConfig(max_seq_len=64, vocab_size=250, num_layers=1, num_heads=1, channels=64, padded_vocab_size=256)
FORMS = (
    dict(precision="fp32"),
    dict(precision="fp32", optimizer_state="bf16"),
    dict(precision="bf16"),
    dict(precision="bf16", optimizer_state="bf16"),
    dict(precision="bf16", master="bits16"),
    dict(precision="bf16", master="bits16", optimizer_state="bf16"),
    dict(precision="bf16", master="none"),
    dict(precision="bf16", grad_dtype="fp32"),
)
PLAIN = (dict(precision="bf16"),)


def record_attention(channels):
    """Launch Triton's attention, which is bf16 only: forward, backward, and of one row; of T's that its tiles fill, and do not. Heads have
    64 channels, or at GPT-2 1.5B's width 128, the most that it takes."""
    from llmc.kernels.functions import triton_attention

    HS = 128 if channels == 1600 else min(64, channels)
    channels = channels // HS * HS
    config, ops = replace(SMALL, channels=channels, num_heads=channels // HS), triton_attention()
    for T in (16, ATTENTION_ROWS):
        plan = Plan(PlanOptions(config, 1, T, kernels="triton", attention="triton")).tensors
        scratch = {name: torch.empty(plan[name].shape) for name in ("attention_delta", "attention_sums", "column_partials")}
        x, qkvr = (torch.empty(1, T, n * channels, dtype=torch.bfloat16) for n in (1, 3))
        lse, NH = torch.empty(1, config.num_heads, T), config.num_heads
        ops["attention_forward"](x, lse, qkvr, NH, scratch)
        ops["attention_backward"](qkvr, qkvr[0, 0], x, qkvr, x, lse, NH, scratch, accumulate=False)
        ops["attention_one_row"](x[0, :1], qkvr[0, :1], torch.empty(2, T, channels, dtype=torch.bfloat16), T - 1, NH)


def record_fp8(channels):
    """Launch the kernels that make operands of FP8 matmuls: in each layout alone, and in both at once."""
    from llmc.kernels.fp8 import fp8_operand

    x, scratch = torch.empty(16, channels, dtype=torch.bfloat16), {"fp8_partials": torch.empty(FP8_PARTIALS)}
    rows, columns = (torch.empty(shape, dtype=E4M3) for shape in (x.shape, x.t().shape))
    for layouts in ({"rows": rows}, {"columns": columns}, {"rows": rows, "columns": columns}):
        fp8_operand(torch.empty(1), x, scratch, **layouts)


def compiles_for(capability: int, module: str) -> bool:
    """Whether the kernels of a module are meant for cards of that compute capability."""
    return module != "fp8" or divmod(capability, 10) >= FP8_CAPABILITY


def recorded_launches(channels, forms=FORMS) -> dict:
    """What steps launch: (module, kernel's name, types of arguments, constants, warps) -> (kernel, args, constants, warps).

    Torch's attention really runs, on the CPU; kernels and matmuls do not, so the numbers mean nothing.
    """
    found = {}

    def record(kernel, grid, *args, num_warps=8, **constants):
        types = tuple(str(a.dtype) if isinstance(a, torch.Tensor) else type(a).__name__ for a in args)
        names = [name for name in kernel.arg_names if name not in constants]
        args = [SIZES.get(name, value) for name, value in zip(names, args)]
        key = (kernel.fn.__module__.rpartition(".")[2], kernel.fn.__name__, types, tuple(constants.items()), num_warps)
        found.setdefault(key, (kernel, args, constants, num_warps))

    with door.launched_by(record):
        for form in forms:
            config = replace(SMALL, channels=channels)
            model = GPT2(Plan(PlanOptions(config, 1, 16, kernels="triton", recompute=2, sample_length=4, **form)))
            for name in MATMULS:
                setattr(model.ops, name, lambda *_, **__: None)
            tokens = np.zeros((1, 16), np.int64)
            for micro_step in range(2):
                model.train(tokens, tokens, 2, micro_step)
            model.update(1e-4, 0.1, 1, model.grad_norm())
            model.token_losses(tokens, tokens)
            block, acts, scratch = model.blocks[0], model.acts, model.scratch
            model.ops.gelu_backward_inplace(acts["dfch"], block.dfcb, block.fch, scratch, accumulate=False)  # as -r 0 does
            model.ops.matmul_dbias(block.dfcb, acts["dfch"], scratch, accumulate=False)  # as -ge 2 does
            heads = [torch.empty(1, 2, 16, channels // 2, dtype=acts["dqkvr"].dtype) for _ in range(3)]
            model.ops.pack_gradients(acts["dqkvr"], block.dqkvb, heads, 2, scratch, accumulate=False)  # a CPU's attention packs by itself
            for dloss in (1.0, None):  # with GPT-2's vocabulary; the model's own is small, or much memory would be zeroed in vain
                logits = torch.empty(1, 50304, dtype=model.params["wte"].dtype)
                model.ops.fused_classifier_inplace(
                    logits, model.acts["losses"], model.acts["targets"], {}, V=50257, dloss=dloss, rows_at_once=1
                )
        record_attention(channels)
        record_fp8(channels)
    return found


def resources(compiled) -> str:
    """The shared memory of a launch; and the registers and stack that ptxas gave it, from cuobjdump, if that is there."""
    import triton

    shared = f"{compiled.metadata.shared:>6} B shared"
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return shared
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        text = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True).stdout
    fields = dict(word.split(":", 1) for word in text.split() if ":" in word)
    return f"{shared}, {fields.get('REG', '?'):>4} registers, {fields.get('STACK', '?'):>3} B stack"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90, 100], help="compute capabilities [80 90 100]")
    parser.add_argument("--channels", type=int, nargs="+", default=[768, 1600], help="model widths [768 1600]")
    parser.add_argument("--plain", action="store_true", help="only of a bf16 model with an fp32 master and optimizer state")
    parser.add_argument("--resources", action="store_true", help="print shared memory, registers and stack of each")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    count = 0
    for channels in args.channels:
        launches = recorded_launches(channels, PLAIN if args.plain else FORMS)
        for capability in args.capability:
            for (module, name, types, constants, warps), launch in launches.items():
                if not compiles_for(capability, module):
                    continue
                compiled = door.compile_only(*launch, capability)
                assert f".target sm_{capability}" in compiled.asm["ptx"]
                count += 1
                if args.resources:
                    dtypes = "/".join(sorted({t.removeprefix("torch.") for t in types if "torch" in t}))
                    constants = " ".join(f"{k}={v}" for k, v in constants)
                    print(f"sm{capability} {module + '.' + name:28} {resources(compiled)}  {warps} warps, {dtypes}, {constants}")
        cards = ", ".join(f"sm{c}" for c in args.capability)
        print(f"C={channels}: {len(launches)} kernels for each of {cards}, FP8's from sm90 on")
    print(f"{count} compilations")


if __name__ == "__main__":
    run_script(main)
