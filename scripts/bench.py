#!/usr/bin/env python3
"""A training step of this trainer against plain PyTorch, eager or compiled, the two in turn, in one run.

    python scripts/bench.py -e d12 -b 4 -t 64                      time, fp32 and bf16
    python scripts/bench.py -e d12 -b 4 -t 256 --compile           against torch.compile, which takes a minute to compile
    python scripts/bench.py --sweep                                d6 and d12, from 256 to 4096 tokens per step, as a table
    python scripts/bench.py -e d12 -b 8 -t 256 -r 2 --memory       peak memory of each, in a process of its own

Prints medians, the ratio (below 1: this trainer is faster, or smaller), tokens/s, and the share that a step reaches of this machine's
matmul rate: the best rate of a large matmul in the tenth of a second before the two steps. A step's FLOPs are those of its matmuls and of
attention's products (the causal half of these), each counted once, as in llm.c's MFU.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.errors import UserError, code_of_child, run_script  # first, as it says what is not installed

import numpy as np
import torch

from llmc.backend import measure_matmul_tflops, open_backend
from llmc.config import config_from_descriptor
from llmc.flags import parse
from llmc.gpt2 import GPT2
from llmc.graphs import graphs_on
from llmc.host import peak_resident_bytes
from llmc.logger import Logger, format_step_line
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.plan import Plan
from llmc.mfu import flops_per_token
from llmc.operations import other_matmuls
from llmc.request import ALONE, settle_all, settle_kernels_of
from llmc.source import Source, check_lengths
from llmc.units import MIB, ceil_mib
from scripts.arguments import number_from
from scripts.bench_pytorch import PyTorchTrainer
from scripts.gpu_common import random_tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-e", "--model", help="model descriptor [d12; with --sweep d6 and d12]")
    parser.add_argument("-b", "--batch-size", type=number_from(1), help="sequences [4]")
    parser.add_argument("-t", "--sequence-length", type=number_from(1), help="tokens per sequence [64]")
    parser.add_argument(
        "-r",
        "--recompute",
        type=int,
        default=0,
        choices=list(NOT_KEPT),
        help="recompute level [0, which stores everything, as PyTorch does]",
    )
    parser.add_argument("--precision", choices=("fp32", "bf16", "both"), default="both", help="[both]")
    parser.add_argument("--steps", type=number_from(1), default=11, help="timed steps of each [11]")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda[:N] [auto]")
    parser.add_argument("--kernels", choices=("auto", "torch"), default="auto", help="as in train_gpt2.py [auto]")
    parser.add_argument("--matmul", default="auto", help="as in train_gpt2.py [auto]")
    parser.add_argument("--compile", action="store_true", help="run PyTorch's model under torch.compile, which needs a C++ compiler")
    parser.add_argument("--memory", action="store_true", help="compare peak memory instead of time")
    parser.add_argument("--sweep", action="store_true", help="all sizes instead of -b and -t, three steps of each")
    parser.add_argument("--only", choices=("ours", "pytorch"), help="run three steps of one side and print its peak memory")
    args = parser.parse_args()
    if args.sweep and (args.memory or args.only):
        raise UserError("--sweep compares time; leave it out with --memory and --only")
    if args.sweep and (args.batch_size or args.sequence_length):
        raise UserError("--sweep goes through sizes of its own; leave out -b and -t, or --sweep")
    backend = open_backend(args.device, 0, True, args.matmul)
    precisions = ("fp32", "bf16") if args.precision == "both" else (args.precision,)
    if args.sweep:
        sweep(args, backend, precisions)
        return
    args.model, args.batch_size, args.sequence_length = args.model or "d12", args.batch_size or 4, args.sequence_length or 64
    print(f"{args.model} -b {args.batch_size} -t {args.sequence_length} -r {args.recompute} on {backend.name}, torch {torch.__version__}")
    for precision in precisions:
        if args.only:
            print(peak_memory(args, backend, precision))
        elif args.memory:
            compare_memory(precision)
        else:
            compare_time(args, backend, precision)
            if backend.kind == "cpu":
                measure_host_side(args, precision)


class OurTrainer:
    """One training step of this trainer, as train_gpt2.py runs it in the given precision."""

    def __init__(self, args, config, precision, backend):
        words = f"-b {args.batch_size} -t {args.sequence_length} -r {args.recompute} --kernels {args.kernels} --matmul {args.matmul}"
        s, _ = settle_kernels_of(parse(words.split()), backend)
        settled = settle_all(s, Source(config), precision, ALONE, backend.facts(), budget=None)
        graphs = graphs_on(backend.kind) if settled.graphs else None
        plan, free = Plan(settled.options), backend.free_bytes()
        if plan.total_bytes > free:
            raise UserError(
                f"a step of {args.model} -b {args.batch_size} -t {args.sequence_length} -r {args.recompute} in {precision} needs "
                f"{ceil_mib(plan.total_bytes)} MiB, and there are {free // MIB} MiB; use a smaller -e, -b or -t, or a higher -r"
            )
        self.model, self.backend = GPT2(plan, backend.device, graphs=graphs), backend
        self.model.init_random()
        self.steps = 0

    def step(self, inputs, targets) -> float:
        self.steps += 1
        self.model.train(inputs, targets)
        norm = self.model.grad_norm()
        read = self.backend.read_later(self.model.acts["loss_sum"], norm)
        self.model.update(1e-4, 0.1, self.steps, norm)
        return read()[0] / self.model.tokens(1)


def config_of(args):
    """The ModelConfig of -e. Raises UserError for a file, a model that does not exist, or one of fewer positions than -t."""
    if args.model.endswith(".bin"):
        raise UserError(f"-e {args.model}: both sides start from random weights of a size, not from a file; expected one such as d12")
    config = config_from_descriptor(args.model)
    check_lengths(parse(["-t", str(args.sequence_length), "-s", "0"]), config)
    return config


def name_of_pytorch(args) -> str:
    return "torch.compile" if args.compile else "pytorch"


def pytorch_trainer(args, config, precision, backend, batch):
    """The other side. With --compile it has made a step of this batch, for whose sizes alone it is compiled.
    Raises UserError if torch.compile cannot compile here."""
    if not args.compile:
        return PyTorchTrainer(config, precision, backend.device)
    from torch._dynamo.exc import TorchDynamoException  # takes seconds

    torch.compiler.reset()  # what was compiled for other sizes would be compiled for varying ones now
    trainer = PyTorchTrainer(config, precision, backend.device, compiled=True)
    try:
        trainer.step(*batch)
    except TorchDynamoException as error:
        raise UserError(f"torch.compile cannot compile here: {str(error).splitlines()[0]}; mend that, or leave out --compile") from error
    return trainer


def compare_time(args, backend, precision):
    m = measure_time(args, backend, precision)
    ours, pytorch, peak, flops, ratios = m["ours"], m["pytorch"], m["peak"], m["flops"], m["ratios"]
    tokens, name = args.batch_size * args.sequence_length, name_of_pytorch(args)
    print(f"{precision}: ours {ours * 1e3:.0f} ms, {name}{' autocast' if precision == 'bf16' else ''} {pytorch * 1e3:.0f} ms, "
          f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), {args.steps} steps each")  # fmt: skip
    print(f"{precision}: ours {tokens / ours:.0f} tok/s, {m['ours_share']:.0%} of the measured {peak / 1e12:.2f} TFLOP/s "
          f"(floor {flops / peak * 1e3:.0f} ms); {name} {tokens / pytorch:.0f} tok/s, {m['pytorch_share']:.0%}")  # fmt: skip


def measure_time(args, backend, precision, warmup=2) -> dict:
    """Time steps of the two sides in turn, each pair after a large matmul. Returns medians of the seconds of each side, of the matmul's
    FLOP/s and of the share of its rate that each side reaches; the ratios of their seconds; and a step's FLOPs."""
    config = config_of(args)
    tokens = random_tokens(config, args.batch_size, args.sequence_length)
    on_device = torch.from_numpy(tokens).to(backend.device)
    sides = {
        "ours": (OurTrainer(args, config, precision, backend), tokens),
        "pytorch": (pytorch_trainer(args, config, precision, backend, on_device), on_device),
    }
    times, peaks = {name: [] for name in sides}, []
    ours = sides["ours"][0].model.plan.options
    for round_ in range(args.steps + warmup):
        peaks.append(1e12 * measure_matmul_tflops(backend, ours.multiplied_in, other_matmuls(ours.matmul), seconds=0.1))
        for name, (trainer, batch) in sides.items():
            backend.synchronize()
            start = time.perf_counter()
            trainer.step(*batch)
            backend.synchronize()
            times[name].append(time.perf_counter() - start)
    times, peaks = {name: seconds[warmup:] for name, seconds in times.items()}, peaks[warmup:]
    C, L = config.channels, config.num_layers
    in_matmuls = 12 * C * C * L + config.padded_vocab_size * C  # the weights of the matmuls
    flops = args.batch_size * args.sequence_length * flops_per_token(in_matmuls, L, C, args.sequence_length)
    return {
        **{name: statistics.median(seconds) for name, seconds in times.items()},
        **{f"{name}_share": statistics.median(flops / s / peak for s, peak in zip(times[name], peaks)) for name in times},
        "peak": statistics.median(peaks), "flops": flops, "ratios": [a / b for a, b in zip(times["ours"], times["pytorch"])],
    }  # fmt: skip


SWEEP_MODELS, SWEEP_SIZES = ("d6", "d12"), ((4, 64), (16, 64), (4, 256), (1, 1024), (4, 1024))  # B and T


def sweep(args, backend, precisions):
    """Print a table of all sizes, of one model or of all; three steps of each at most, as the large ones take many seconds."""
    args.steps, models = min(args.steps, 3), [args.model] if args.model else SWEEP_MODELS
    print(f"-r {args.recompute} on {backend.name}, torch {torch.__version__}; medians of {args.steps} steps, the two in turn")
    name = name_of_pytorch(args)
    print(f"{'model':<6} {'B':>3} {'T':>5} {'':<5} {'ours ms':>8} {'of matmul peak':>15}  {name} ms  ours/{name}")
    for precision in precisions:
        for args.model, (args.batch_size, args.sequence_length) in product(models, SWEEP_SIZES):
            m = measure_time(args, backend, precision)
            theirs, ratio = f"{m['pytorch'] * 1e3:.0f}", f"{statistics.median(m['ratios']):.3f}"
            print(f"{args.model:<6} {args.batch_size:>3} {args.sequence_length:>5} {precision:<5} {m['ours'] * 1e3:>8.0f} "
                  f"{m['ours_share']:>15.0%} {theirs:>{len(name) + 4}} {ratio:>{len(name) + 6}}", flush=True)  # fmt: skip


def measure_host_side(args, precision):
    """Print what the loader and the log cost per step, measured separately: it is too little to see in a step's time."""
    import tempfile

    from llmc.data.loader import TokenLoader
    from llmc.data.shards import write_shard

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tokens.bin")
        write_shard(path, np.random.default_rng(0).integers(0, 50257, 4_000_000, dtype=np.uint16))
        loader = TokenLoader(path, args.batch_size, args.sequence_length, shuffle=True, vocab_size=50257)
        log = Logger(folder)
        sink = open(os.devnull, "w")
        start, n = time.perf_counter(), 500
        for step in range(n):
            loader.next_batch()
            line = format_step_line(step, n, loss=1.0, loss_z=0.0, norm=1.0, norm_z=0.0, lr=1e-4, dt_ms=1.0, mfu=0.5, tokens_per_s=1.0)
            print(line, file=sink, flush=True)
            log.train(step, 1.0, 1e-4, 1.0)
        per_step = (time.perf_counter() - start) / n
        log.close()
    print(f"{precision}: loader and log {per_step * 1e6:.0f} us a step")


def peak_memory(args, backend, precision) -> str:
    config = config_of(args)
    base = peak_resident_bytes()
    tokens = random_tokens(config, args.batch_size, args.sequence_length)
    if args.only == "ours":
        trainer, batch = OurTrainer(args, config, precision, backend), tokens
    else:
        batch = torch.from_numpy(tokens).to(backend.device)
        trainer = pytorch_trainer(args, config, precision, backend, batch)
    for _ in range(3):
        trainer.step(*batch)
    if backend.kind == "cuda":
        return f"peak {torch.cuda.max_memory_reserved()} bytes"
    peak = peak_resident_bytes()
    planned = f", planned {trainer.model.plan.total_bytes // MIB} MiB" if args.only == "ours" else ""
    print(f"  {args.only}: {(peak - base) // MIB} MiB over the {base // MIB} MiB of python and torch{planned}")
    return f"peak {peak} bytes"


def compare_memory(precision):
    """Run each side in a process of its own, so that neither's peak hides in the other's."""
    peaks = {}
    for side in ("ours", "pytorch"):
        arguments = [a for a in sys.argv[1:] if a != "--memory"]
        command = [sys.executable, __file__, *arguments, "--precision", precision, "--only", side]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            sys.exit(code_of_child(result.returncode))  # it has already said why
        out = result.stdout
        print(*(line for line in out.splitlines() if line.startswith("  ")), sep="\n")
        peaks[side] = int(out.split()[-2])
    print(
        f"{precision}: peak process memory ours {peaks['ours'] // MIB} MiB, "
        f"pytorch {peaks['pytorch'] // MIB} MiB, ratio {peaks['ours'] / peaks['pytorch']:.3f}"
    )


if __name__ == "__main__":
    run_script(main)
