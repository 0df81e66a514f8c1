"""Memory of the whole program: memory.json says what was planned and what was measured, and the two agree through every phase of a run.

Each run is a process of its own, so that nothing before it is in its peak.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from case_a import header, token_stream, write_case_a
from conftest import REPO
from test_loop import ran

from llmc.checkpoint.model_file import write_model
from llmc.config import ModelConfig
from llmc.flags import parse
from llmc.kernels_cpu import not_installed
from llmc.memory.plan import Plan
from llmc.memory.record import RECORD_NAME
from llmc.memory.tables import num_parameters
from llmc.request import plan_options, settle_kernels
from llmc.units import MIB

WIDE = ModelConfig(max_seq_len=64, vocab_size=96, num_layers=6, num_heads=2, channels=64, padded_vocab_size=128)
PHASES = ["build", "first step", "evaluation", "HellaSwag", "sampling", "checkpoint", "resume", "end"]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Case A's eval file, longer shards, and a model whose activations dwarf its weights, in both precisions."""
    folder = write_case_a(tmp_path_factory.mktemp("wide"))
    tokens = token_stream(90_000)
    (folder / "long.bin").write_bytes(header(20240520, 1, len(tokens)) + tokens.tobytes())
    weights = torch.randn(num_parameters(WIDE), generator=torch.Generator().manual_seed(1)) * 0.02
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        write_model(folder / f"{precision}.bin", WIDE, precision, [weights.to(dtype).view(torch.uint8).numpy()])
    return folder


def program(case, precision, folder, *more):
    """(memory.json, phase -> peak over the baseline) of a run that must succeed."""
    data = ["-i", case / "long.bin", "-j", case / "long.bin", "-e", case / f"{precision}.bin", "--hellaswag-data", case / "eval.bin"]
    words = [*data, "-o", folder, *"--device cpu --threads 1 -m 1 -g 64".split(), *" ".join(more).split()]
    done = subprocess.run([sys.executable, REPO / "train_gpt2.py", *map(str, words)], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / RECORD_NAME).read_text())
    return record, {m["phase"]: m["over_baseline_bytes"] for m in record["measured"]}


# fp32 at level 0 keeps everything; bf16 at level 2, with a state that is converted on its way to the files and back
@pytest.mark.parametrize("precision, flags", [
    ("fp32", "-b 448 -t 64 -r 0"),
    ("bf16", "-b 1344 -t 64 -r 2 --master bits16 --optimizer-state bf16 -h 1"),
])  # fmt: skip
def test_every_phase_of_a_run_stays_within_5_percent_of_the_plan(case, tmp_path, precision, flags):
    """Train, evaluate, score, sample, save, resume: the peak of the process over what it held before the first arena.

    What oneDNN compiles and keeps for matmuls, 20 to 40 MiB whatever the model, is in no plan, and below 5% of one of this size.
    """
    record, first = program(case, precision, tmp_path / "run", flags, "-x 1 -v 1 -s 1 -n 1")
    planned = record["plan"]["total_bytes"]
    assert record["plan"]["arenas"]["activations"] > 0.8 * planned > 400 * MIB  # activations dominate
    scored = ["HellaSwag"] if "-h" in flags else []
    assert list(first) == ["build", "evaluation", "first step", *scored, "sampling", "checkpoint", "end"]
    assert abs(first["build"] - (planned - record["plan"]["columns"]["library"])) <= 0.01 * planned
    record, second = program(case, precision, tmp_path / "run", flags, "-x 2 -v 1 -s 1 -n 1 -y 1")
    assert set(second) == {*first, "resume"} and record["plan"]["total_bytes"] == planned
    for phase, peak in (*first.items(), *second.items()):
        assert peak <= 1.05 * planned, f"{phase}: {peak / planned:.3f} of the plan"
    for run in (first, second):  # flat from the first step on
        assert run["end"] - run["first step"] <= 0.02 * planned


def test_the_record_holds_the_flags_the_plan_and_every_phase(case, tmp_path):
    flags = "-b 1 -t 32 -r 5 --grad-dtype fp32"
    record, measured = program(case, "bf16", tmp_path / "run", flags, "-x 1 -v 1 -s 1 -n 1 -h 1")
    plan = planned(case, flags)
    assert record["plan"]["arenas"] == plan.arenas and record["plan"]["columns"] == plan.columns
    assert record["plan"]["total_bytes"] == plan.total_bytes == sum(plan.columns.values())
    gradients = [t["bytes"] for t in record["plan"]["tensors"] if t["arena"] == "gradients"]
    assert sum(gradients) == plan.arenas["gradients"] == 4 * num_parameters(WIDE)
    assert record["flags"]["recompute"] == 5 and record["flags"]["grad_dtype"] == "fp32" and record["flags"]["max_steps"] == 1
    assert set(measured) == set(PHASES) - {"resume"}
    peaks = [m["peak_bytes"] for m in record["measured"]]
    assert peaks == sorted(peaks)
    assert [m["peak_bytes"] - record["baseline_bytes"] for m in record["measured"]] == list(measured.values())


def planned(case, flags) -> Plan:
    """The plan of a bf16 run with these flags."""
    settings, _ = settle_kernels(parse(["-e", str(case / "bf16.bin"), *flags.split()]), "cpu", not_installed())
    return Plan(plan_options(settings, WIDE, "bf16", "cpu"))


def test_speed_in_the_record_is_that_of_all_steps_but_the_first(case, tmp_path):
    argv = ["-i", case / "train_*.bin", "-j", case / "val.bin", "-e", case / "model.bin", "-b 2 -t 32 -x 6 -v 0 -s 0", "-o", tmp_path]
    ran(*argv)
    speed = json.loads((tmp_path / RECORD_NAME).read_text())["speed"]
    times = [float(line.split()[1].removeprefix("ms:")) for line in (tmp_path / "speed.log").read_text().splitlines()]
    assert len(times) == 6 and abs(speed["average_step_ms"] - np.mean(times[1:])) <= 0.01
    assert abs(speed["tokens_per_s"] * speed["average_step_ms"] / 1e3 - 64) <= 1e-6


LIMITED = """
import resource, sys
import torch, train_gpt2
import llmc.gpt2

train_gpt2.measure_matmul_tflops = lambda *_: 1.0
real = llmc.gpt2.operations

def operations(*kinds):
    ops = real(*kinds)
    ops.attention_forward = limited(ops.attention_forward)
    return ops

def limited(forward):
    return lambda *args: attention(forward, *args)

def attention(forward, atty, *rest):
    # from here on the process gets a little more, for the message: what a library call in the middle of a step would need is refused
    if atty.numel() > 10**6:
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + atty.nbytes // 2, resource.getrlimit(resource.RLIMIT_AS)[1]))
        torch.empty_like(atty)
    return forward(atty, *rest)

llmc.gpt2.operations = operations
sys.exit(train_gpt2.main(sys.argv[1:]))
"""


def test_memory_that_runs_out_in_a_step_after_all_is_one_message_with_ways_out(case):
    """The allocator really refuses. One sentence, the plan's table, three ways to fit as flags; exit code 3, no traceback."""
    flags = "-b 1280 -t 64 -r 1"
    data = ["-i", case / "long.bin", "-j", case / "long.bin", "-e", case / "bf16.bin"]
    words = [*data, *flags.split(), *"--device cpu --threads 1 -v 0 -s 0 -x 1".split()]
    done = subprocess.run([sys.executable, "-c", LIMITED, *map(str, words)], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert "ran out of memory within a plan of" in done.stderr and "MiB/seq" in done.stderr
    ways = done.stderr[done.stderr.index("the cheapest ways to fit") :].splitlines()[1:]
    assert len(ways) == 3
    for way in ways:
        assert planned(case, f"{flags} {way.strip().split('  ')[0]}").total_bytes <= 0.9 * planned(case, flags).total_bytes
