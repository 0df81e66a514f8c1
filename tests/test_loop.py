"""The program as its user sees it: what it prints, in which order, with which numbers, and what each flag of the loop does.

`run` is the whole program without a new process, which costs 20 times less; test_resume.py and test_errors.py use it too.
"""

import io
import json
import math
import re
import signal
import sys
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from case_a import CONFIG, header, token_stream, write_case_a
from conftest import REPO

import train_gpt2
from llmc.backend import Backend
from llmc.checkpoint.extra_file import read_extra
from llmc.checkpoint.model_file import write_model
from llmc.checkpoint.store import held_folder
from llmc.checkpoint.writer import Writer
from llmc.config import config_from_descriptor
from llmc.data.shards import write_shard
from llmc.data.tokenizer import Tokenizer
from llmc.errors import UserError
from llmc.gpt2 import GPT2
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.largest_batch import largest_batch
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tables import num_parameters
from llmc.outlier import WINDOW_SIZE, OutlierDetector
from llmc.units import MIB

GOLDEN = Path(__file__).parent / "golden"
QUIET = "-v 0 -s 0"
LOSS_DIGITS = r"\d+\.\d{6}"


def words_of(argv) -> list[str]:
    """A command line: texts are split at spaces, everything else (a path, a number) is one word."""
    return [word for part in argv for word in (part.split() if isinstance(part, str) else [str(part)])]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(*argv, after_step=lambda step: None, faked=None, out_to=None) -> SimpleNamespace:
    """train_gpt2.main on the CPU, one thread: its exit code, what it printed, its error text.

    after_step  called with the number of steps done, inside the loop: may raise, or send a signal
    faked       more names of train_gpt2 to replace
    out_to      what makes the file that it prints to, if not a StringIO
    """

    def step_line(step, *rest, **values):
        after_step(step + 1)
        return real_step_line(step, *rest, **values)

    real_step_line, out, err = train_gpt2.format_step_line, (out_to or io.StringIO)(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    threads = torch.get_num_threads()
    fakes = {"format_step_line": step_line, "measure_matmul_tflops": lambda *_: 1.0, **(faked or {})}  # a measurement costs 0.5 s
    try:
        with ExitStack() as stack:
            for name, fake in fakes.items():
                stack.enter_context(patch.object(train_gpt2, name, fake))
            stack.enter_context(redirect_stdout(out))
            stack.enter_context(redirect_stderr(err))
            code = train_gpt2.main(words_of(["--device cpu --threads 1", *argv]))
    finally:
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


def ran(*argv, code=0, **options) -> str:
    """What a run that must succeed, or end with another exit code, printed; no error."""
    result = run(*argv, **options)
    assert result.code == code and not result.err, result.err
    return result.out


def inputs(case: Path) -> list:
    """-i, -j and -e of case A."""
    return ["-i", case / "train_*.bin", "-j", case / "val.bin", "-e", case / "model.bin"]


def losses(out: str) -> list[str]:
    return re.findall(rf"\| loss ({LOSS_DIGITS}) ", out)


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Path:
    return write_case_a(tmp_path_factory.mktemp("case_a"))


@pytest.fixture(scope="module")
def golden_run(case, tmp_path_factory):
    """The command line of golden/train_A.jsonl, with a checkpoint, samples and HellaSwag added, which must not disturb it."""
    folder = tmp_path_factory.mktemp("golden") / "log"
    argv = [*inputs(case), "-b 4 -t 32 -d 256 -l 3e-3 -u 3 -q 0.1 -c 0.1 -x 40 -k cosine -v 5 -m 4 -s 20 -g 24 -h 1 --hellaswag-data",
            case / "eval.bin", "-n 20 -o", folder, "--precision fp32 --kernels torch"]  # fmt: skip
    return ran(*argv), folder


# ----------------------------------------------------------------------------
# the lines


def test_every_line_a_script_may_grep_appears_in_llmc_s_order(golden_run):
    """Each pattern once it is due, searched from where the one before was found; sizes are the plan's own."""
    out, folder = golden_run
    arenas = Plan(PlanOptions(CONFIG, 4, 32, precision="fp32", sample_length=24)).arenas
    mib = {name: n_bytes // MIB for name, n_bytes in arenas.items()}
    step_line = (rf"step %4s/40 \| loss {LOSS_DIGITS} \(\+nanz\)\| norm \d+\.\d{{4}} \(\+nanz\)\| lr \d\.\d\de-0\d \| \d+\.\d\d ms \| "
                 r"\d+\.\d%% bf16 MFU \| \d+ tok/s")  # fmt: skip
    sample_lines = ("generating:", "---", r"\d+( \d+){22}", "---")
    checkpoint_lines = ("Writing model to {0}/model_000000{1}.bin", "Writing state to {0}/state_000000{1}_00000.bin")
    in_order = [
        r"\| Parameter +\| Value +\|", r"\| micro batch size B +\| 4 +\|", r"\| num_parameters +\| 162368 +\|",
        r"\| train_num_batches +\| 40 +\|",
        "num_parameters: 162368 => bytes: 649472", f"allocated {mib['parameters']} MiB for model parameters",
        r"batch_size B=4 \* seq_len T=32 \* num_processes=1 and total_batch_size=256", "=> setting grad_accum_steps=2",
        f"allocating {mib['gradients']} MiB for parameter gradients", f"allocating {mib['activations']} MiB for activations",
        f"allocating {mib['m']} MiB for AdamW optimizer state m", f"allocating {mib['v']} MiB for AdamW optimizer state v",
        r"device memory usage: \d+ MiB / \d+ MiB", f"memory per sequence: {arenas['activations'] // 4 // MIB} MiB",
        r" -> estimated maximum batch size: \d+",
        f"val loss {LOSS_DIGITS}", step_line % 1, step_line % 5, f"val loss {LOSS_DIGITS}", r"HellaSwag: \d+/50 = 0\.\d{6}", step_line % 20,
        f"val loss {LOSS_DIGITS}", "HellaSwag: .*", *sample_lines, *(line.format(re.escape(str(folder)), 20) for line in checkpoint_lines),
        step_line % 21, step_line % 40, f"val loss {LOSS_DIGITS}", "HellaSwag: .*", *sample_lines,
        *(line.format(re.escape(str(folder)), 40) for line in checkpoint_lines), r"total average iteration time: \d+\.\d{6} ms",
        r"peak memory: \d+ MiB more than before the model was made, \d MiB planned",
    ]  # fmt: skip
    at = 0
    for pattern in in_order:
        found = re.compile(f"^{pattern}$", re.MULTILINE).search(out, at)
        assert found, f"no line {pattern} after\n{out[:at][-300:]}"
        at = found.end()
    assert not out[at:].strip()


def test_losses_norms_rates_and_scores_are_llmc_s(golden_run):
    """Against golden/train_A.jsonl and eval_A.json, through the program."""
    out, _ = golden_run
    rows = [json.loads(line) for line in (GOLDEN / "train_A.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    printed = re.findall(r"\| loss (\S+) .*?\| norm (\S+) .*?\| lr (\S+) \|", out)
    assert len(printed) == len(steps) == 40
    for row, found in zip(steps, printed):
        assert float(found[0]) == pytest.approx(row["loss"], abs=2e-4)
        assert float(found[1]) == pytest.approx(row["norm"], rel=2e-3)
        assert found[2] == f"{row['lr']:.2e}"
    vals = [row["val"] for row in rows if "val" in row]
    assert [float(v) for v in re.findall(r"val loss (\S+)", out)] == pytest.approx(vals, abs=2e-4)
    sampled = next(row["sample"] for row in rows if "sample" in row)
    assert out.split("generating:\n---\n")[2].splitlines()[0] == " ".join(map(str, sampled))


def test_main_log_holds_the_printed_numbers_in_llmc_s_format(golden_run):
    """Line for line what was printed, with the digits of the log; nothing else."""
    out, folder = golden_run
    expected, step = [], 0
    for line in out.splitlines():
        if line.startswith("val loss "):
            expected.append((step, "tel", line.split()[-1]))
        elif line.startswith("HellaSwag: "):
            expected.append((step, "eval", line.split()[-1]))
        elif line.startswith("step "):
            expected.append((step, "trl", *re.search(r"loss (\S+) .*norm (\S+) .*lr (\S+)", line).groups()))
            step += 1
    lines = (folder / "main.log").read_text().splitlines()
    assert len(lines) == len(expected) == 40 + 9 + 8
    for line, (s, kind, *values) in zip(lines, expected):
        form = {
            "tel": r"s:(\d+) tel:(\d+\.\d{4})",
            "eval": r"s:(\d+) eval:(\d\.\d{4})",
            "trl": r"s:(\d+) trl:(\d+\.\d{4}) lr:(\d\.\d{6}) norm:(\d+\.\d\d)",
        }
        found = re.fullmatch(form[kind], line)
        assert found, f"{line!r} is not a {kind} line"
        order = (0, 2, 1) if kind == "trl" else (0,)
        assert int(found[1]) == s
        for text, value in zip(found.groups()[1:], (values[i] for i in order)):
            digits = len(text.partition(".")[2])
            # a rate is printed with three digits and logged with six decimals
            assert float(text) == pytest.approx(float(value), abs=0.51 * 10**-digits + 1e-6, rel=0.006 if digits == 6 else 0)


def test_speed_log_holds_the_time_of_every_step_and_nothing_else(golden_run):
    """As printed; the tokens per second are this step's own, not the printed mean."""
    out, folder = golden_run
    lines = [re.fullmatch(r"s:(\d+) ms:(\d+\.\d\d) tok/s:(\d+\.\d)", line) for line in (folder / "speed.log").read_text().splitlines()]
    assert [int(line[1]) for line in lines] == list(range(40))
    assert [line[2] for line in lines] == re.findall(r"\| (\S+) ms \|", out)
    for line in lines:
        expected = 256 / float(line[2]) * 1e3
        assert abs(float(line[3]) - expected) <= 0.051 + 0.0051 / float(line[2]) * expected  # both numbers are rounded


def test_memory_json_holds_the_plan_the_flags_and_the_peak_of_each_phase(golden_run):
    """In the order in which phases first ended; the plan is the program's own, and peaks never fall."""
    out, folder = golden_run
    record = json.loads((folder / "memory.json").read_text())
    plan = Plan(PlanOptions(CONFIG, 4, 32, precision="fp32", sample_length=24))
    assert record["plan"]["total_bytes"] == plan.total_bytes == sum(record["plan"]["columns"].values())
    assert record["plan"]["arenas"] == plan.arenas and record["plan"]["columns"] == plan.columns
    assert (record["flags"]["batch_size"], record["flags"]["output_dir"], record["flags"]["max_steps"]) == (4, str(folder), 40)
    phases = [("build", 0), ("evaluation", 0), ("first step", 0), ("HellaSwag", 5), ("sampling", 20), ("checkpoint", 20), ("end", 40)]
    measured = record["measured"]
    assert [(row["phase"], row["step"]) for row in measured] == phases
    peaks = [row["peak_bytes"] for row in measured]
    assert peaks == sorted(peaks) and [row["over_baseline_bytes"] for row in measured] == [p - record["baseline_bytes"] for p in peaks]
    assert f"peak memory: {measured[-1]['over_baseline_bytes'] // MIB} MiB more than before" in out
    assert f"made, {plan.total_bytes // MIB} MiB planned\n" in out
    printed = float(re.search("total average iteration time: (\\S+) ms", out)[1])
    assert record["speed"]["average_step_ms"] == pytest.approx(printed, abs=1e-6)
    assert record["speed"]["tokens_per_s"] == pytest.approx(256 / printed * 1e3, rel=1e-5)


# ----------------------------------------------------------------------------
# --plan, --help, nothing at all


def test_a_cpu_without_bf16_widens_factors_says_so_and_measures_what_it_multiplies_in(case, tmp_path, monkeypatch):
    """The losses are those of bf16 matmuls to bf16's precision, the peak that MFU is relative to is fp32's."""
    weights = torch.randn(num_parameters(CONFIG), generator=torch.Generator().manual_seed(1)) * 0.02
    write_model(tmp_path / "bf16.bin", CONFIG, "bf16", [weights.bfloat16().view(torch.uint8).numpy()])
    peaks, runs = [], {}
    monkeypatch.setattr("llmc.processor.cpu_favours_numba", lambda precision: False)
    for native in (True, False):
        for module in ("processor", "backend"):
            monkeypatch.setattr(f"llmc.{module}.cpu_gains_from_bf16", lambda: native)
        measured = {"measure_matmul_tflops": lambda backend, precision, others: peaks.append((precision, len(others))) or 1.0}
        data = ["-i", case / "train_*.bin", "-j", case / "val.bin", "-e", tmp_path / "bf16.bin"]
        runs[native] = ran(*data, "-b 2 -t 32 -x 3 -v 0 -s 0", faked=measured)
    assert peaks == [("bf16", 0), ("fp32", 0)]
    assert ", matmul: torch, graphs: o" in runs[True] and "TFLOP/s in bf16\n" in runs[True]
    assert ", matmul: torch of factors widened to fp32, graphs: off\n" in runs[False] and "TFLOP/s in fp32\n" in runs[False]
    native, widened = (np.array([float(loss) for loss in losses(out)]) for out in runs.values())
    assert len(native) == 3 and abs(native - widened).max() <= 0.01 * native.max()


def test_numba_s_matmuls_train_as_torch_s_do_and_are_measured_beside_them(case):
    """The losses are the same to a few roundings of fp32."""
    pytest.importorskip("numba")
    measured, runs = [], {}
    for matmul in ("native", "numba"):
        fakes = {"measure_matmul_tflops": lambda backend, precision, others: measured.append(len(others)) or 1.0}
        data = ["-i", case / "train_*.bin", "-j", case / "val.bin", "-e", case / "model.bin"]
        runs[matmul] = ran(*data, "-b 4 -t 32 -x 3 -v 0 -s 0 --kernels numba --matmul", matmul, faked=fakes)
    assert measured == [0, 1]
    assert ", matmul: torch, graphs: on\n" in runs["native"] and ", matmul: numba, graphs: on\n" in runs["numba"]
    native, numba = (np.array([float(loss) for loss in losses(out)]) for out in runs.values())
    assert len(native) == 3 and abs(native - numba).max() <= 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plan_prints_a_row_per_level_that_adds_up(case, precision):
    """Each row is the plan's, its parts sum to the total to the byte, and more recompute never needs more. JSON has every digit."""
    model, config = (["-e", case / "model.bin"], CONFIG) if precision == "fp32" else (["-e d12"], config_from_descriptor("d12"))
    argv = [*model, "-b 4 -t 32 -r 2 --plan --device cpu --kernels torch --matmul native --memory-budget 24GiB --precision", precision]
    out, levels = ran(*argv), json.loads(ran(*argv, "--json"))["levels"]
    rows = [line.split() for line in out.splitlines() if re.match(r" *\d\*? ", line)]
    assert [row[0] for row in rows] == ["0", "1", "2*", "3", "4", "5", "6"]
    parts = ("parameters", "gradients", "optimizer", "kept", "shared", "head", "scratch", "library")
    totals, batches = [], []
    for level, (row, exact) in enumerate(zip(rows, levels, strict=True)):
        plan = Plan(PlanOptions(config, 4, 32, precision=precision, recompute=level))
        mib = [exact[f"{part}_mib"] for part in parts]
        assert mib == [plan.columns[part] / MIB for part in parts] and exact["total_mib"] == plan.total_bytes / MIB
        assert sum(mib) == exact["total_mib"]  # bytes over 2^20: floats hold them and their sum exactly
        assert row[1:10] == [f"{n:.1f}" for n in (*mib, exact["total_mib"])]
        assert int(row[11]) == exact["largest_batch"] == largest_batch(plan.options, 24 << 30)
        totals.append(plan.total_bytes)
        batches.append(exact["largest_batch"])
    assert totals == sorted(totals, reverse=True) and batches == sorted(batches)
    assert (", fp32 master weights" in out) == (precision == "bf16")


def test_plan_of_d12_is_gpt2_s_size_and_touches_nothing(tmp_path, monkeypatch):
    """124475904 parameters with the padded rows: 474.8 MiB in fp32, twice that for m and v. No data, no folder, no device is needed."""
    monkeypatch.chdir(tmp_path)
    out = ran("-e d12 -b 1 -t 64 --plan --precision fp32 -o log")
    row = next(line.split() for line in out.splitlines() if line.lstrip().startswith("1*"))
    assert row[1:4] == ["474.8", "474.8", "949.7"] and not list(tmp_path.iterdir())


def test_no_arguments_and_no_data_say_what_to_run(tmp_path, monkeypatch):
    """The commands in the sentence exist and are spelled right."""
    monkeypatch.chdir(tmp_path)
    result = run()
    assert result.code == 2 and not result.out and result.err.count("\n") == 1
    script, command = re.search(r"python (scripts/\w+\.py).*: (python train_gpt2\.py [^,]*)", result.err).groups()
    assert (REPO / script).is_file()
    assert train_gpt2.parse(command.split()[2:]).model == "d6"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_win_over_a_wrong_line(flag):
    out = ran("-b nonsense --bogus", flag)
    assert out.startswith("usage: " if flag == "--help" else "llmc ")


# ----------------------------------------------------------------------------
# the loop's flags


def test_v_0_s_0_do_neither(case):
    out = ran(*inputs(case), "-b 4 -t 32 -x 3 -v 0 -s 0")
    assert "val loss" not in out and "generating" not in out and "| val_num_batches       | 0 " in out and len(losses(out)) == 3


def test_v_0_needs_no_validation_data(case, tmp_path):
    assert len(losses(ran(*inputs(case), "-j", tmp_path / "none.bin", "-b 4 -t 32 -x 2", QUIET))) == 2


def test_x_0_only_evaluates_and_leaves_the_weights(case, tmp_path):
    """One validation, one sample, no step; with -n the checkpoint holds the model byte for byte."""
    out = ran(*inputs(case), "-b 4 -t 32 -x 0 -m 4 -g 5 -n 1 -o", tmp_path)
    assert not losses(out) and len(re.findall("val loss", out)) == 1 and out.count("generating:") == 1
    assert float(re.search("val loss (.*)", out)[1]) == pytest.approx(4.5850554, abs=2e-4)  # golden/train_A.jsonl
    assert (tmp_path / "model_00000000.bin").read_bytes() == (case / "model.bin").read_bytes()
    out = ran(*inputs(case), "-b 4 -t 32 -x 2 -y 1 -o", tmp_path, QUIET)  # it holds the place in -j, so the order of -i is another
    assert "resuming at step 0 from" in out and len(losses(out)) == 2


def test_m_minus_1_averages_the_whole_split(case):
    """2000 tokens in batches of 4*32 are 15; the mean of -m 1 over other data orders would differ."""
    whole, all_15, one = (ran(*inputs(case), "-b 4 -t 32 -x 0 -s 0 -m", m) for m in (-1, 15, 1))
    value = [re.search("val loss (.*)", out)[1] for out in (whole, all_15, one)]
    assert value[0] == value[1] != value[2] and "| val_num_batches       | 15 " in whole


def test_m_minus_1_takes_no_batch_of_short_shards_twice(case, tmp_path):
    """Three shards of 250 tokens are 750, in which 4*32 go five times; but each shard has one batch."""
    for number in range(3):
        write_shard(tmp_path / f"val_{number}.bin", np.random.default_rng(number).integers(0, 96, 250, dtype=np.uint16))
    assert "| val_num_batches       | 3 " in ran(*inputs(case), "-j", tmp_path / "val_*.bin", "-b 4 -t 32 -x 0 -s 0 -m -1")


def test_x_minus_1_is_one_epoch(case):
    """8333 tokens // 512 = 16 steps, over which the learning rate falls as over 16 that were asked for."""
    out, asked = (ran(*inputs(case), "-b 8 -t 64 -u 2 -q 0", steps, QUIET) for steps in ("", "-x 16"))
    assert len(losses(out)) == 16 and "| train_num_batches     | 16 " in out and "step   16/16 |" in out
    rates, expected = (re.findall(r"\| lr (\S+) ", text) for text in (out, asked))
    assert rates == expected and len(set(rates)) > 10


@pytest.mark.parametrize("processes", [1, 4])
def test_mfu_is_of_what_each_process_does(capsys, processes):
    """A thousand tokens of 1 GFLOP each in half a second, on a card that does 10 TFLOP/s."""
    run, clock = MagicMock(), MagicMock()
    run.settings.log_gpu_every, run.world.num_processes, run.total_batch_size = 0, processes, 1000 * processes
    run.flops_per_token, run.peak_tflops, run.max_steps = 10**9, 10.0, 9
    clock.count.return_value, clock.tokens_per_s = 0.5, 2000.0 * processes
    result = SimpleNamespace(loss=1.0, norm=1.0, loss_z=0.0, norm_z=0.0, checkpoints_written=0)
    train_gpt2.finish_step(run, clock, SimpleNamespace(step=0, result=result, lr=1e-4, started=0, ended=1, skipped=False))
    assert "| 500.00 ms | 20.0% bf16 MFU |" in capsys.readouterr().out


def test_val_and_samples_are_due_on_their_periods_and_at_the_end(case):
    """-v 3 -s 4 -x 7: validation before steps 1, 4, 7 and at the end; samples before step 5 and at the end, not at the start."""
    out = ran(*inputs(case), "-b 4 -t 32 -x 7 -v 3 -m 1 -s 4 -g 3")
    events = re.findall(r"^(val|generating|step +\d+)", out, re.MULTILINE)
    expected = ["val", 1, 2, 3, "val", 4, "generating", 5, 6, "val", 7, "val", "generating"]
    assert events == [f"step {e:4d}" if isinstance(e, int) else e for e in expected]


def test_a_1_learns_the_first_validation_batch_by_heart(case, tmp_path):
    """Training and validation see the same batch, so the loss falls, and the first training loss is the first -m 1 validation loss."""
    argv = [*inputs(case), "-i", tmp_path / "not_needed.bin", "-b 4 -t 32 -x 30 -a 1 -l 1e-2 -v 1 -m 1 -s 0"]
    out = ran(*argv)
    trained, validated = [float(x) for x in losses(out)], [float(x) for x in re.findall(r"val loss (\S+)", out)]
    assert trained == pytest.approx(validated[:-1], abs=2e-6)  # the same batch at every step
    assert validated[-1] < 0.5 * validated[0] and "-j" not in out


def test_accumulation_gives_one_large_batch_s_losses(case):
    """-b 4 -d 256 walks the data as -b 4 does, two micro-steps to a step: each loss is the mean of two."""
    frozen = "-l 0 -t 32 -b 4"
    single = [float(x) for x in losses(ran(*inputs(case), frozen, QUIET, "-x 12"))]
    double = [float(x) for x in losses(ran(*inputs(case), frozen, QUIET, "-x 6 -d 256"))]
    assert double == pytest.approx([(a + b) / 2 for a, b in zip(single[::2], single[1::2])], abs=2e-6)


def test_recompute_levels_print_the_same_losses(case):
    assert len({tuple(losses(ran(*inputs(case), "-b 4 -t 32 -x 6", QUIET, "-r", r))) for r in NOT_KEPT}) == 1


def test_head_chunk_changes_no_digit_of_the_first_loss(case):
    assert len({losses(ran(*inputs(case), "-b 4 -t 32 -x 1", QUIET, "--head-chunk", rows))[0] for rows in (0, 1, 7, 128, 10**6)}) == 1


def test_a_skipped_update_leaves_weights_optimizer_and_windows_as_they_were(case, tmp_path):
    """The last of 140 steps has a z-score above the limit; straight to 139 gives the same weights, moments and windows."""
    argv = [*inputs(case), "-b 1 -t 8 -k constant -l 1e-5", QUIET, "-n 1000"]
    zs = re.findall(r"loss \S+ \((\S+)z\)\| norm \S+ \((\S+)z\)", ran(*argv, "-x 160"))
    assert all(loss_z == norm_z == "+nan" for loss_z, norm_z in zs[:128]), "the window is full after 128 values"
    for flag, column in (("-sl", 0), ("-sg", 1)):
        score = [float(pair[column]) for pair in zs]
        at = next(i for i in range(130, 160) if score[i] > max(1.0, *score[128:i]))
        limit = max(0.9 * score[at], *(s + 0.01 for s in score[128:at]))
        before, after = tmp_path / f"before{flag}", tmp_path / f"after{flag}"
        ran(*argv, "-x", at, "-o", before, flag, limit)
        out = ran(*argv, "-x", at + 1, "-o", after, flag, limit)
        what = {"-sl": "loss", "-sg": "grad"}[flag]
        assert re.findall("skipping update due to (.*) z-score of", out) == [what]
        assert (before / f"model_{at:08d}.bin").read_bytes() == (after / f"model_{at + 1:08d}.bin").read_bytes()
        extras = [read_extra(folder / f"extra_{step:08d}_00000.json") for folder, step in ((before, at), (after, at + 1))]
        assert replace(extras[0], crc32={}) == replace(extras[1], crc32={}), "only the state's number of the step differs"
        moments = slice(1024, 1024 + 3 * 4 * num_parameters(CONFIG))
        assert (before / f"state_{at:08d}_00000.bin").read_bytes()[moments] == (after / f"state_{at + 1:08d}_00000.bin").read_bytes()[
            moments
        ]


def slow_down_writing(monkeypatch):
    """A checkpoint that is written beside training takes more than a step."""
    monkeypatch.setattr(Writer, "_write", lambda *args, write=Writer._write: (time.sleep(0.3), write(*args)))


@pytest.mark.parametrize("writing", ["", "--async-checkpoint 1"], ids=["written at once", "written beside"])
@pytest.mark.parametrize("device_waits", [True, False], ids=["one by one", "a step ahead"])
def test_a_loss_that_is_no_number_ends_the_run_before_its_weights_are_a_checkpoint(case, tmp_path, monkeypatch, device_waits, writing):
    """The first update is far too large. Also where the next step is launched before the loss is read, and where the disk is slow."""
    monkeypatch.setattr(Backend, "asynchronous", property(lambda backend: not device_waits))
    if writing:
        slow_down_writing(monkeypatch)
    done = run(*inputs(case), "-b 4 -t 32 -l 1e30 -x 9 -n 1", QUIET, writing, "-o", tmp_path)
    assert done.code == 2 and "Traceback" not in done.err
    found = re.fullmatch(
        r"error: step (\d+): the loss is \S+ and the gradient's norm \S+, which leaves no weight a number; lower -l, raise -u, "
        rf"skip such updates with -sg, or look at .*; (DONE_0*(\d+) removed again, )?(-y 1 resumes from step (\d+)|no checkpoint is "
        rf"left) in {re.escape(str(tmp_path))}\n", done.err,
    )  # fmt: skip
    step = int(found[1])
    assert found[3] == (None if writing else str(step - 1))  # the other was not marked yet
    assert found[5] == (str(step - 2) if step > 2 else None)  # what is left
    assert f"s:{step - 1} trl:" in (tmp_path / "main.log").read_text() and 2 <= step <= 4
    assert [f.name for f in sorted(tmp_path.glob("DONE_*"))] == [f"DONE_{n:08d}" for n in range(1, step - 1)]
    weights = np.fromfile(tmp_path / f"model_{step - 1:08d}.bin", np.float32, offset=1024)
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("last, found", [("-v 1 -m 1", "validation loss is"), ("-v 0", "loss is now")], ids=["validated", "not validated"])
def test_a_last_update_that_leaves_no_number_does_not_replace_the_good_checkpoint(case, tmp_path, last, found):
    """Its own loss was still one: validation comes before the checkpoint, and without it one more loss before the deletion."""
    argv = [*inputs(case), "-b 4 -t 32 -s 0 -n 1 -nk 1", last, "-o", tmp_path]
    assert run(*argv, "-x 2").code == 0
    assert [f.name for f in tmp_path.glob("DONE_*")] == ["DONE_00000002"]
    good = (tmp_path / "model_00000002.bin").read_bytes()
    done = run(*argv, "-x 3 -y 1 -l 1e30")
    assert done.code == 2 and re.match(rf"error: step 3: the {found} (-?nan|inf), so these weights are of no use; lower -l", done.err)
    assert [f.name for f in tmp_path.glob("DONE_*")] == ["DONE_00000002"] and (tmp_path / "model_00000002.bin").read_bytes() == good
    if "-v 0" in last:
        assert "DONE_00000003 removed again" in done.err and (tmp_path / "model_00000003.bin").exists()
        (tmp_path / "DONE_00000003").touch()  # as a run that was killed before that loss leaves it
        done = run(*argv, "-x 4 -y 1")
        assert done.code == 2 and f"remove DONE_00000003 from {tmp_path} to resume from an earlier one" in done.err
        (tmp_path / "DONE_00000003").unlink()
    assert "resuming at step 2" in ran(*argv, "-x 4 -y 1")
    assert "DONE_00000004" in [f.name for f in tmp_path.glob("DONE_*")] and not (tmp_path / "DONE_00000002").exists()


def without_numbers(case, path: Path) -> Path:
    """Write the case's model with a nan as the last weight, of lnfb, so that every logit is one."""
    path.write_bytes((case / "model.bin").read_bytes()[:-4] + np.float32(math.nan).tobytes())
    return path


@pytest.mark.parametrize("flags", ["", "-y 1"], ids=["from a file", "resumed"])
def test_weights_of_no_use_at_the_start_are_not_blamed_on_an_update(case, tmp_path, flags):
    ran(*inputs(case), "-b 4 -t 32 -x 1 -n 1", QUIET, "-o", tmp_path / "log")
    path = tmp_path / "log" / "model_00000001.bin" if flags else tmp_path / "nan.bin"
    (tmp_path / "log" / "extra_00000001_00000.json").unlink()  # which knows the file that was written
    without_numbers(case, path)
    done = run(*inputs(case)[:4], "-e", path, "-b 4 -t 32 -x 3 -v 1 -m 1 -s 0 -o", tmp_path / "log", flags)
    advice = "look at the data and at the weights that it began with"
    found = f"error: step {1 if flags else 0}: the validation loss is nan, so these weights are of no use; {advice}"
    assert done.code == 2 and done.err.startswith(found)


@pytest.mark.parametrize("writing", ["", "--async-checkpoint 1"], ids=["written at once", "written beside"])
@pytest.mark.parametrize("flag, what", [("-sl", "loss"), ("-sg", "grad")])
def test_an_update_of_a_loss_that_is_no_number_is_skipped_where_outliers_are(case, tmp_path, monkeypatch, flag, what, writing):
    """Also while the window of outliers is not full yet. No checkpoint keeps such weights, and at the end it is said that they are of no
    use."""
    if writing:
        slow_down_writing(monkeypatch)
    path, files = without_numbers(case, tmp_path / "nan.bin"), inputs(case)[:4]
    done = run(*files, "-e", path, "-b 4 -t 32 -x 2 -n 1", QUIET, writing, "-o", tmp_path / "out", flag, "3")
    assert done.code == 2 and done.out.count(f"skipping update due to {what} of nan\n") == 2
    assert done.err.startswith("error: step 2: the loss is now nan, so these weights are of no use; lower -l, raise -u, or look at")
    assert done.err.endswith(f"; no checkpoint is left in {tmp_path / 'out'}\n")
    for step in (1, 2):
        assert f"no checkpoint at step {step}: the last loss was nan or infinite, and no update was made since\n" in done.out
    assert not list((tmp_path / "out").glob("*.bin")) and not list((tmp_path / "out").glob("DONE_*"))
    done = run(*files, "-e", path, "-b 4 -t 32 -x 2", QUIET)
    assert done.code == 2 and done.err.startswith("error: step 1: the loss is nan and the gradient's norm nan, which leaves no weight")


def test_a_run_whose_weights_are_lost_to_an_update_keeps_the_checkpoint_before_it(case, tmp_path):
    """Where its losses are skipped ever after, so that nothing else ends the run."""
    argv = *inputs(case), "-b 4 -t 32 -n 2 -nk 1", QUIET, "-o", tmp_path / "log"
    ran(*argv, "-x 2")
    done = run(*argv, "-x 4 -y 1 -l 1e30 -u 0 -sg 3")
    assert done.code == 2 and "no checkpoint at step 4: the last loss was nan or infinite" in done.out
    assert done.err.endswith(f"; -y 1 resumes from step 2 in {tmp_path / 'log'}\n")
    assert [f.name for f in (tmp_path / "log").glob("DONE_*")] == ["DONE_00000002"]
    assert (tmp_path / "log" / "model_00000002.bin").exists()


def test_a_run_of_which_every_update_is_skipped_ends(case, tmp_path):
    path = without_numbers(case, tmp_path / "nan.bin")
    done = run(*inputs(case)[:4], "-e", path, "-b 1 -t 8 -x 1000 -sl 3", QUIET)
    assert done.code == 2 and done.out.count("skipping update") == WINDOW_SIZE
    found = f"error: step {WINDOW_SIZE}: {WINDOW_SIZE} losses or norms in a row were nan or infinite, and no update was made; lower -l"
    assert done.err.startswith(found)


def test_printed_z_scores_are_the_detector_s(case):
    """Recomputed from the printed losses, up to the digits printed."""
    out, detector = ran(*inputs(case), "-b 1 -t 8 -x 150", QUIET), OutlierDetector()
    printed = re.findall(r"loss (\S+) \((\S+)z\)", out)
    assert len(printed) == 150
    for loss, z in printed:
        expected = detector.update(float(loss))
        assert (z == "+nan") == math.isnan(expected) and (z == "+nan" or float(z) == pytest.approx(expected, abs=0.02))


@pytest.mark.parametrize("B", range(1, 9))
def test_hellaswag_scores_the_same_with_any_batch(case, B):
    """golden/eval_A.json, also for batches that cut an example in two."""
    expected = json.loads((GOLDEN / "eval_A.json").read_text())
    out = ran(*inputs(case), "-x 0 -t 32 -h 1 -b", B, QUIET, "--hellaswag-data", case / "eval.bin")
    correct, total = expected["correct"], expected["num_examples"]
    assert f"HellaSwag: {correct}/{total} = {correct / total:f}\n" in out and "| run hellaswag         | yes " in out


def test_hellaswag_says_on_a_terminal_how_far_it_is(case):
    """Every ten batches of its 50 examples of four rows each, as llm.c does; but not where the line would stay, in a file."""
    argv = [*inputs(case), "-x 0 -t 32 -h 1 -b 8", QUIET, "--hellaswag-data", case / "eval.bin"]
    said = [f"evaluating HellaSwag: {batch}/25\r" for batch in (0, 10, 20)]
    assert "".join(said) + "\r\x1b[KHellaSwag: " in run(*argv, out_to=Terminal).out  # which clears the line
    in_a_file = ran(*argv)
    assert "evaluating" not in in_a_file and "\x1b" not in in_a_file


def test_hellaswag_is_due_when_validation_is_but_not_at_the_start(case, tmp_path):
    ran(*inputs(case), "-b 4 -t 32 -x 5 -v 2 -m 1 -s 0 -h 1 --hellaswag-data", case / "eval.bin", "-o", tmp_path)
    log = (tmp_path / "main.log").read_text()
    assert re.findall(r"s:(\d+) eval", log) == ["2", "4", "5"] and re.findall(r"s:(\d+) tel", log) == ["0", "2", "4", "5"]


def tokenizer_bytes(table: list[bytes], end_of_text: int) -> bytes:
    return header(20240328, 2, len(table), end_of_text) + b"".join(bytes([len(token)]) + token for token in table)


@pytest.mark.parametrize("where", ["flag", "cwd", "beside the data", "beside the data, whose folder is a pattern", "beside -j, by -a 1"])
def test_samples_are_text_where_a_tokenizer_is(case, tmp_path, monkeypatch, where):
    """Token i is a letter of its own, so the text must be the ids of the run without a tokenizer; control characters are not printed."""
    table = [chr(0x4E00 + i).encode() for i in range(94)] + [b"\x07", b"<|endoftext|>"]
    data = write_case_a(tmp_path / "data")
    argv = [*inputs(data), "-b 1 -t 8 -x 0 -v 0 -g 40"]
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    plain = ran(*argv)
    assert "samples are printed as token ids" in plain
    ids = [int(i) for i in plain.split("---\n")[1].split()]
    path = {"flag": tmp_path / "t.bin", "cwd": work / "gpt2_tokenizer.bin"}.get(where, data / "gpt2_tokenizer.bin")
    path.write_bytes(tokenizer_bytes(table, 95))
    more = {
        "flag": ["--tokenizer", path], "beside -j, by -a 1": ["-a 1 -i", work / "none.bin"],
        "beside the data, whose folder is a pattern": ["-i", tmp_path / "d*" / "train_*.bin"],
    }  # fmt: skip
    out = ran(*argv, *more.get(where, []))
    assert len(ids) == 39 and out.split("---\n")[1] == "".join(table[i].decode() for i in ids if i != 94) + "\n"
    assert "token ids" not in out


@pytest.mark.parametrize("flags, called", [("-x 1 -s 1 -v 0", 3), ("-x 0 -s 1 -v 0", 1)])
def test_a_signal_in_a_sample_ends_it_before_its_next_token(case, tmp_path, monkeypatch, flags, called):
    next_logits, calls = GPT2.next_logits, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == called:
            signal.raise_signal(signal.SIGINT)
        return next_logits(*args)

    monkeypatch.setattr(GPT2, "next_logits", interrupted)
    done = run(*inputs(case), "-b 1 -t 8 -g 64 -n 1", flags, "-o", tmp_path)
    assert len(calls) == called and re.search(r"generating:\n---\n(\nSIGINT: .*\n)?\d+( \d+)*\n(.*\n)*---\n", done.out), done.out
    assert "SIGINT: finishing this step" in done.out
    assert (done.code, (tmp_path / "DONE_00000001").exists()) == (130, "-x 1" in flags)


def test_a_gpu_that_stops_answering_about_itself_ends_no_run(case, monkeypatch):
    """It is asked once at the start, where what it says ends the run; then after steps 1, 2 and 3."""
    lines = iter(["asked at the start", "fine", UserError("-lg could not ask the GPU: lost"), "fine again"])

    def device_line(backend):
        line = next(lines)
        if isinstance(line, UserError):
            raise line
        return line

    out = ran(*inputs(case), QUIET, "-b 1 -t 8 -x 3 -lg 1", faked={"device_line": device_line})
    assert re.sub(r"step +(\d).*", r"\1", out[out.index("step    1") :]).split("\n")[:6] == [
        "1", "fine", "2", "note: -lg could not ask the GPU: lost", "3", "fine again"
    ]  # fmt: skip


def test_a_gpu_is_asked_about_itself_after_every_lg_steps(case):
    out = ran(*inputs(case), QUIET, "-b 1 -t 8 -x 5 -lg 2", faked={"device_line": lambda backend: "asked"})
    assert re.findall(r"^step +(\d)|^(asked)", out, re.MULTILINE) == [
        ("1", ""), ("2", ""), ("", "asked"), ("3", ""), ("4", ""), ("", "asked"), ("5", "")
    ]  # fmt: skip


def sampled(*argv, **options) -> list[int]:
    return [int(token) for token in re.search(r"generating:\n---\n(.*)\n---", ran(*argv, **options))[1].split()]


def test_a_sample_goes_on_from_the_prompt(case):
    """With the likeliest token at each place, a prompt of what is said anyway changes nothing, and another one what comes after it."""
    argv = (*inputs(case), "-b 1 -t 8 -x 0 -v 0 -s 1 -g 20 --prompt text --temperature 0")
    said = sampled(*argv, faked={"encode_prompt": lambda *_: []})
    assert len(said) == 19
    for prompt in (said[:1], said[:7], said[:18], [5, 3, 1]):
        found = sampled(*argv, faked={"encode_prompt": lambda *_, prompt=prompt: prompt})
        assert found[: len(prompt)] == prompt and len(found) == 19 and (found == said) == (prompt == said[: len(prompt)])


def test_every_sample_of_a_run_begins_with_the_prompt(case):
    out = ran(*inputs(case), "-b 1 -t 8 -x 3 -v 0 -s 1 -g 9 --prompt text", faked={"encode_prompt": lambda *_: [5, 3, 1]})
    samples = re.findall(r"generating:\n---\n(.*)\n---", out)
    assert len(samples) == 3 and all(s.startswith("5 3 1 ") and len(s.split()) == 8 for s in samples)


def test_a_prompt_is_text_of_the_data_s_tokenizer(case, tmp_path):
    """With GPT-2's vocabulary of bytes, 11 of them and the end-of-text; -g counts both."""
    tokenizer, prompt = tmp_path / "tokenizer.bin", Path("Es war einmal ß")  # one word of a command line
    Tokenizer.from_bytes_only().write(tokenizer)
    sizes = "-b 1 -t 8 -x 0 -v 0 -s 1"
    common = (*inputs(case)[:4], "-e d6 --precision fp32", sizes, "--tokenizer", tokenizer, "--prompt", prompt)
    assert re.search(f"generating:\n---\n{prompt}.+\n---", ran(*common, "-g 18"))
    for argv, sentence in (
        ((*common, "-g 17"), "--prompt and the end-of-text before it are 17 tokens, which leaves none of -g 17 to generate; use a larger"),
        ((*inputs(case), sizes, "--prompt", prompt), "--prompt needs the tokenizer that the data were made with"),
    ):
        refused = run(*argv)
        assert refused.code == 2 and f"error: {sentence}" in refused.err


def test_a_tokenizer_of_another_vocabulary_found_by_chance_is_not_used(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2_tokenizer.bin").write_bytes(tokenizer_bytes([b"x"] * 5, 4))
    assert re.search(r"generating:\n---\n\d+ \d+\n---", ran(*inputs(case), "-b 1 -t 8 -x 0 -v 0 -g 3"))
    data = write_case_a(tmp_path / "data")
    (data / "gpt2_tokenizer.bin").write_bytes(tokenizer_bytes([b"y"] * 95 + [b"end"], 95))
    assert "yy\n---" in ran(*inputs(data), "-b 1 -t 8 -x 0 -v 0 -g 3")  # and keeps none from the next place that is looked at
    (tmp_path / "gpt2_tokenizer.bin").write_bytes(b"damaged")
    assert run(*inputs(data), "-b 1 -t 8 -x 0 -v 0 -s 1").code == 2
    assert run(*inputs(data), "-b 1 -t 8 -x 0 -v 0 -s 0").code == 0


def test_a_tokenizer_that_cuts_characters_prints_a_replacement(case, tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(tokenizer_bytes([b"\xe4"] * 95 + [b"end"], 95))
    assert "\N{REPLACEMENT CHARACTER}" in ran(*inputs(case), "-b 1 -t 8 -x 0 -v 0 -g 5 --tokenizer", path)


@pytest.mark.parametrize("length", [0, 1, 2, 64])
def test_samples_are_g_tokens_long_with_their_start(case, length):
    """-g counts the end-of-text it starts from."""
    out = ran(*inputs(case), "-b 1 -t 8 -x 0 -v 0 -g", length)
    assert len(out.split("---\n")[1].split()) == max(0, length - 1)


def test_a_new_run_begins_a_log_and_keeps_those_before(case, tmp_path, monkeypatch):
    """But not of a run that only evaluated. Without -o nothing is written."""
    monkeypatch.chdir(tmp_path)
    argv = [*inputs(case), "-b 4 -t 32 -x 2", QUIET]
    ran(*argv, "-n 1")
    assert not list(tmp_path.iterdir())
    logs = ["main.log", "speed.log"]
    ran(*argv, "-x 0 -v 1 -m 1 -o", tmp_path)
    first = ran(*argv, "-o", tmp_path) and [(tmp_path / name).read_text() for name in logs]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["main.log", "memory.json", "speed.log"]
    assert "stay there under other names, such as main.log.1\n" in ran(*argv, "-o", tmp_path)
    assert (tmp_path / "main.log").read_text() == first[0] and first[0].count("\n") == 2
    assert [(tmp_path / f"{name}.1").read_text() for name in logs] == first
    ran(*argv, "-x 1 -o", tmp_path)
    ran(*argv, "-x 3 -o", tmp_path)
    found = {path.name: len(path.read_text().splitlines()) for path in tmp_path.iterdir() if path.name != "memory.json"}
    assert found == {f"{name}{number}": lines for name in logs for number, lines in {"": 3, ".1": 2, ".2": 2, ".3": 1}.items()}
    assert json.loads((tmp_path / "memory.json").read_text())["flags"]["max_steps"] == 3


def test_validation_data_that_may_mislead_are_noted(case, tmp_path):
    """More batches than there are, and tokens of bytes beside others."""
    write_shard(tmp_path / "bytes.bin", np.arange(300) % 96)
    write_shard(tmp_path / "others.bin", np.arange(300) + 200)
    sizes = "-b 1 -t 32 -x 1 -s 0"
    noted = "note: -m 16 takes some of -j's batches more than once, as there are 15; -m -1 takes each once"
    assert noted in ran(*inputs(case), "-b 4 -t 32 -x 0 -s 0 -m 16")
    for train, val in (("bytes", "others"), ("others", "bytes"), ("others", "others"), ("bytes", "bytes")):
        out = ran("-i", tmp_path / f"{train}.bin", "-j", tmp_path / f"{val}.bin", "-e d6 -m 1", sizes)
        noted = re.findall("the tokens of (..) are single bytes and those of (..) are not", out)
        assert noted == ([] if train == val else [("-i", "-j") if train == "bytes" else ("-j", "-i")])


@pytest.mark.parametrize("logs", [True, False], ids=["with its logs", "without them"])
def test_x_0_y_1_looks_at_the_newest_checkpoint_and_leaves_the_folder(case, tmp_path, logs):
    """Whatever the rest of the training command says; it is the same as naming the model. Another run may be writing there."""
    argv = [*inputs(case), "-b 4 -t 32 -v 1 -m 2 -s 1 -g 5"]
    ran(*argv, "-x 4 -n 2 -o", tmp_path)
    if not logs:
        for name in ("main.log", "speed.log", "memory.json"):
            (tmp_path / name).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with held_folder(tmp_path):
        looked = ran(*argv, "-x 0 -y 1 -n 2 -o", tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    named = ran(*argv, "-x 0 -e", model := tmp_path / "model_00000004.bin")
    found = [re.search(r"val loss .*\ngenerating:\n.*\n.*\n", out)[0] for out in (looked, named)]
    assert found[0] == found[1] and looked.count("val loss") == 1 and "parameter gradients" not in looked
    assert "| weight init method" in looked and "model_00000004.bin" in looked
    planned = [ran(*argv, "--plan --json --memory-budget 1GiB", *words) for words in (("-x 0 -y 1 -n 2 -o", tmp_path), ("-x 0 -e", model))]
    assert planned[0] == planned[1]


def test_x_0_y_1_needs_a_checkpoint_of_the_model_that_is_meant(case, tmp_path):
    argv = [*inputs(case), "-b 4 -t 32 -x 0 -y 1 -v 0 -s 0"]
    (tmp_path / "none").mkdir()
    for folder in ("none", "nowhere"):
        refused = run(*argv, "-o", tmp_path / folder)
        assert refused.code == 2 and f"looks at the newest checkpoint in {tmp_path / folder}, which has none; leave -y out" in refused.err
    assert run(*argv).err.startswith("error: -y 1 resumes from the folder that -o names, and there is no -o")
    ran(*inputs(case), "-b 4 -t 32 -x 1 -n 1 -v 0 -s 0 -o", tmp_path)
    assert "resume with the -e of the run that wrote it" in run(*argv, "-e d6 -o", tmp_path).err


def test_a_disk_without_room_for_the_checkpoints_is_noted(case, tmp_path, monkeypatch):
    argv, n = [*inputs(case), "-b 4 -t 32 -v 0 -s 0 -n 2 -o", tmp_path], num_parameters(CONFIG)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2 * 16 * n))  # fp32: the model, m, v and the master
    line = f"note: a checkpoint takes {-(-16 * n // MIB)} MiB, and {tmp_path} has no room for that of step "
    assert "no room" not in ran(*argv, "-x 4")
    assert f"{line}9; -nk 1 keeps the newest alone\n" in ran(*argv, "-x 9 -y 1 -nk 4")  # 6, 8 and the end, beside those of 2 and 4
    assert "no room" not in ran(*argv, "-x 9 -nk 1")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=16 * n - 1))
    assert f"{line}2; make room\n" in ran(*argv, "-x 3 -nk 1")
    assert "no room for that of step 2; make room\n" in ran(*argv, "-x 3 -o", tmp_path / "another")  # where -nk 1 would not help
    resumed = [*argv, "-o", tmp_path / "resumed"]
    ran(*resumed, "-x 4 -nk 1")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=16 * n))
    assert "no room" not in ran(*resumed, "-x 6 -y 1")  # of the checkpoints before, which -nk 1 has deleted, none comes again


def test_a_checkpoint_s_bytes_are_those_of_its_model_and_of_every_rank_s_state():
    """At stage 0 each rank writes all of m, v and the master, which are fp32 in files; from stage 1 on its share."""
    o, n = PlanOptions(CONFIG, 4, 32, precision="bf16", data_ranks=2), num_parameters(CONFIG)
    assert o.checkpoint_file_bytes == (2 + 2 * 12) * n
    assert replace(o, zero_stage=1).checkpoint_file_bytes == (2 + 12) * n
    assert replace(o, data_ranks=1, master="none", optimizer_state="bf16").checkpoint_file_bytes == (2 + 8) * n


def test_another_seed_is_another_sample(case):
    texts = [ran(*inputs(case), "-b 1 -t 8 -x 0 -v 0 -g 20 --seed", seed).split("---\n")[1] for seed in (0, 1, 2, 1)]
    assert len(set(texts)) == 3 and texts[1] == texts[3]


def test_a_temperature_of_0_takes_the_likeliest_tokens_whatever_the_seed(case):
    argv = (*inputs(case), "-b 1 -t 8 -x 0 -v 0 -g 20")
    drawn = [ran(*argv, flags).split("---\n")[1] for flags in ("", "--temperature 1", "--temperature 0", "--temperature 0 --seed 5")]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_a_folder_as_a_model_is_told_the_newest_in_it(case, tmp_path):
    argv = [*inputs(case), "-b 4 -t 32", QUIET]
    ran(*argv, "-x 4 -n 2 -o", tmp_path)
    refused = run(*argv, "-e", tmp_path)
    newest = tmp_path / "model_00000004.bin"
    assert refused.code == 2 and refused.err == f"error: -e {tmp_path} is a folder; name a model in it, such as {newest}\n"
    (tmp_path / "none").mkdir()
    assert "none is a folder; name a model .bin" in run(*argv, "-e", tmp_path / "none").err
    (tmp_path / "none" / "config.json").touch()
    advice = f"python scripts/convert_hf.py to-bin {tmp_path / 'none'} model.bin"
    assert f"none is a folder; a Hugging Face model becomes a model .bin by: {advice}\n" in run(*argv, "-e", tmp_path / "none").err


def test_an_evaluation_needs_no_training_data(case, tmp_path):
    """And finds the tokenizer beside the validation data as well."""
    argv = ["-j", case / "val.bin", "-e", case / "model.bin", "-b 4 -t 32 -x 0 -s 1 -g 4 -i", tmp_path / "none.bin"]
    with_both = ran(*argv, "-i", case / "train_*.bin")
    assert ran(*argv).partition("val loss")[2].partition("total")[0] == with_both.partition("val loss")[2].partition("total")[0]
    assert "generating" in ran(*argv, "-v 0")
    assert "-j nowhere.bin: no such file" in run(*argv, "-j nowhere.bin").err
    assert "-j nowhere.bin: no such file" in run(*argv, "-v 0 -j nowhere.bin").err, "not -i, of which an evaluation needs none"


def test_n_without_o_says_that_nothing_is_written(case):
    out = ran(*inputs(case), "-b 4 -t 32 -x 1 -n 1", QUIET)
    assert "note: -n 1 writes no checkpoints without -o" in out and "Writing" not in out


def test_z_1_of_one_process_says_so_and_changes_nothing(case):
    plain, sharded = (ran(*inputs(case), "-b 4 -t 32 -x 3", QUIET, "-z", z) for z in (0, 1))
    assert losses(plain) == losses(sharded) and "-z 1 is the same as -z 0" in sharded


def test_schedulers_print_their_own_rates(case):
    """10 steps of each; the closed forms of the contract."""
    forms = {
        "constant": lambda s: 1.0,
        "cosine": lambda s: (s + 1) / 2 if s < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (s - 2) / 8)),
        "linear": lambda s: (s + 1) / 2 if s < 2 else 1 - 0.9 * (s - 2) / 8,
        "wsd": lambda s: (s + 1) / 2 if s < 2 else 1.0 if s < 8 else 0.1 + (1 - math.sqrt((s - 8) / 2)) * 0.9,
    }
    for kind, form in forms.items():
        out = ran(*inputs(case), "-b 1 -t 8 -x 10 -l 1e-3 -u 2 -q 0.1", QUIET, "-k", kind)
        assert [float(lr) for lr in re.findall(r"lr (\S+) \|", out)] == pytest.approx([1e-3 * form(s) for s in range(10)], rel=0.006)


def test_bf16_starts_from_a_descriptor_s_rounded_draws(case, tmp_path):
    """A run from random weights writes them at -x 0: fp32 and bf16 come from the same draws, bf16 rounded to nearest even."""
    tokens = token_stream(600)
    (tmp_path / "tokens.bin").write_bytes(header(20240520, 1, len(tokens)) + tokens.tobytes())
    tiny = {6: (64, 2)}
    arrays = {}
    with patch("llmc.config.GPT2_DEPTHS", tiny):
        for precision in ("fp32", "bf16"):
            folder = tmp_path / precision
            out = ran("-e d6 -i", tmp_path / "tokens.bin", "-b 1 -t 8 -x 0 -n 1 -o", folder, "--precision", precision, QUIET)
            assert f"| precision             | {precision.upper()} " in out and "| weight init method    | d6 " in out
            arrays[precision] = (folder / "model_00000000.bin").read_bytes()[1024:]
    bits = np.frombuffer(arrays["fp32"], "<u4")
    assert np.array_equal(np.frombuffer(arrays["bf16"], "<u2"), ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2"))


def test_importing_the_program_prints_nothing_and_needs_no_torch():
    import subprocess

    code = "import sys, train_gpt2; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_each_batch_is_asked_for_once_and_validation_starts_over(case):
    """Structure of the loader's work: one next_batch per micro-step, -m per validation after one reset, nothing else."""
    from llmc.data.loader import TokenLoader

    calls, real = [], {name: getattr(TokenLoader, name) for name in ("next_batch", "reset")}

    def counted(name):
        def method(self):
            calls.append((self.flag, name))
            return real[name](self)

        return method

    with patch.object(TokenLoader, "next_batch", counted("next_batch")), patch.object(TokenLoader, "reset", counted("reset")):
        ran(*inputs(case), "-b 4 -t 32 -d 256 -x 4 -v 2 -m 3 -s 0")
    validation, step = [("-j", "reset")] + [("-j", "next_batch")] * 3, [("-i", "next_batch")] * 2
    assert calls == validation + step + step + validation + step + step + validation


def recorded_calls(*argv, asynchronous=False):
    """What the loop does to the model and asks of the loader, in order: main's output, and names of calls.

    "fetch" starts to bring loss and norm to the host, "read" waits for them. `asynchronous` as a GPU is, though nothing runs beside.
    """
    from llmc.data.loader import TokenLoader

    calls, real = [], {name: getattr(GPT2, name) for name in ("train", "grad_norm", "update")}
    real_order, real_later, real_checkpoint = TokenLoader.token_order, Backend.read_later, train_gpt2.checkpoint

    def order(self):
        calls.append("order")
        return real_order(self)

    def train(self, inputs, targets, grad_accum_steps, micro_step, order):
        calls.append("train")
        assert np.array_equal(np.repeat(order.tokens, np.diff(order.starts)), inputs.ravel()[order.positions])  # of this very batch
        return real["train"](self, inputs, targets, grad_accum_steps, micro_step, order)

    def grad_norm(self):
        calls.append("norm")
        return real["grad_norm"](self)

    def update(self, *args):
        calls.append("update")
        return real["update"](self, *args)

    def read_later(self, *numbers):
        calls.append("fetch")
        wait = real_later(self, *numbers)

        def read():
            calls.append("read")
            return wait()

        return read

    def checkpoint(run, step):
        calls.append("checkpoint")
        return real_checkpoint(run, step)

    with ExitStack() as stack:
        for name, fake in dict(train=train, grad_norm=grad_norm, update=update).items():
            stack.enter_context(patch.object(GPT2, name, fake))
        stack.enter_context(patch.object(TokenLoader, "token_order", order))
        stack.enter_context(patch.object(Backend, "read_later", read_later))
        stack.enter_context(patch.object(Backend, "asynchronous", asynchronous))
        stack.enter_context(patch.object(train_gpt2, "checkpoint", checkpoint))
        return ran(*argv, "--kernels torch"), calls  # which are not compiled on a model of their own first


@pytest.mark.parametrize("flags, may_skip", [("", False), ("-sl 0 -sg 0", False), ("-sl 3", True), ("-sg 3", True), ("-sl 3 -sg 3", True)])
def test_the_update_is_launched_before_the_loss_is_read_unless_it_may_be_skipped(case, flags, may_skip):
    """The device has work while the host waits for loss and norm; with -sl or -sg these decide, so they are read first. The same losses."""
    out, calls = recorded_calls(*inputs(case), "-b 4 -t 32 -d 256 -x 3", QUIET, flags)
    step = ["order", "train", "order", "train", "norm", "fetch", *(["read", "update"] if may_skip else ["update", "read"])]
    assert calls == step * 3
    assert losses(out) == losses(ran(*inputs(case), "-b 4 -t 32 -d 256 -x 3 --kernels torch", QUIET))


def test_a_gpu_has_the_next_step_before_the_loss_of_the_last_is_read_but_not_across_a_checkpoint(case, tmp_path):
    argv = [*inputs(case), "-b 4 -t 32 -x 5 -n 3", QUIET, "-o"]
    out, calls = recorded_calls(*argv, tmp_path / "gpu", asynchronous=True)
    step = ["order", "train", "norm", "fetch", "update"]
    assert calls == [*step, *step, "read", *step, "read", "read", "checkpoint", *step, *step, "read", "read", "checkpoint"]
    plain = ran(*argv, tmp_path / "cpu", "--kernels torch")
    assert losses(out) == losses(plain) and len(losses(out)) == 5
    assert (tmp_path / "gpu/main.log").read_text() == (tmp_path / "cpu/main.log").read_text()
    written = (tmp_path / "gpu/speed.log").read_text()
    assert re.findall(r"^s:(\d+)", written, re.MULTILINE) == list("01234")


def test_what_comes_between_two_steps_of_a_gpu_is_in_the_time_of_neither(case, tmp_path, monkeypatch):
    """Validation takes an hour here, by the device's clock."""
    now, real_validate = iter(range(10**9)), train_gpt2.validate
    hours = []

    def validate(run, step):
        real_validate(run, step)
        hours.append(3600.0)

    validate.__name__ = "validate"
    monkeypatch.setattr(Backend, "mark", lambda backend: next(now) * 1e-3 + sum(hours))
    monkeypatch.setattr(Backend, "asynchronous", True)
    ran(*inputs(case), "-b 4 -t 32 -x 6 -v 2 -m 1 -s 0 --kernels torch -o", tmp_path, faked={"validate": validate})
    times = [float(ms) for ms in re.findall(r" ms:(\S+)", (tmp_path / "speed.log").read_text())]
    assert len(times) == 6 and len(hours) == 4 and max(times) < 1000


def test_as_many_batches_are_read_as_are_trained_on(case, monkeypatch):
    """What lies behind the last one need not be good data."""
    from llmc.data.loader import TokenLoader

    pieces, read = [], TokenLoader._read
    monkeypatch.setattr(TokenLoader, "_read", lambda loader, piece: (pieces.append(piece), read(loader, piece))[1])
    ran(*inputs(case), "-b 2 -t 32 -d 128 -x 4", QUIET)
    assert len(pieces) == 8
    pieces.clear()
    ran(*inputs(case), "-b 2 -t 32 -x 0 -v 1 -m 3 -s 0", faked={"CALLS_PER_STOP_CHECK": {"cpu": 2}})  # a validation's, as on a GPU
    assert len(pieces) == 3


def test_a_step_that_was_done_is_logged_though_the_next_one_fails(case, tmp_path, monkeypatch):
    """On a GPU step 1 is launched, and fails, before step 0 is printed."""
    real, calls = GPT2.train, []

    def fails_later(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise UserError("the data are damaged")
        return real(self, *args)

    monkeypatch.setattr(GPT2, "train", fails_later)
    monkeypatch.setattr(Backend, "asynchronous", True)
    result = run(*inputs(case), "-b 4 -t 32 -x 5 --kernels torch", QUIET, "-o", tmp_path)
    assert result.code == 2 and result.err == "error: the data are damaged\n" and len(losses(result.out)) == 1
    assert "s:0 trl" in (tmp_path / "main.log").read_text()


def test_a_step_that_is_skipped_launches_no_update(case):
    """As many updates as steps without the words, each after its own reading."""
    out, calls = recorded_calls(*inputs(case), "-b 1 -t 8 -k constant -l 1e-5 -x 150", QUIET, "-sl 0.1")
    skips = out.count("skipping update due to loss z-score")
    assert 0 < skips < 22 and calls.count("update") == 150 - skips
    turns = "".join({"update": "u", "read": "r"}.get(call, "") for call in calls)
    assert re.fullmatch("(ru?)*", turns)


def test_on_a_gpu_a_skipped_update_is_told_between_the_line_of_the_step_before_and_its_own(case):
    argv = [*inputs(case), "-b 1 -t 8 -k constant -l 1e-5 -x 150", QUIET, "-sl 0.1"]
    out, _ = recorded_calls(*argv, asynchronous=True)
    plain = ran(*argv, "--kernels torch")

    def said(text):
        return [re.sub(r"lr.*", "", line) for line in text.splitlines() if line.startswith(("step", "skipping"))]

    assert said(out) == said(plain) and "skipping" in out


@pytest.mark.parametrize("graphs, asynchronous, steps", [(False, True, 1), (True, True, 2), (True, False, 1)])
def test_the_second_step_sets_up_too_where_it_captures_cuda_graphs(graphs, asynchronous, steps):
    assert train_gpt2.steps_of_setting_up(SimpleNamespace(graphs=graphs, backend=SimpleNamespace(asynchronous=asynchronous))) == steps


def test_tokens_per_second_and_mfu_follow_from_the_time(case):
    """First step: tok/s = tokens / ms; MFU = flops per token * tok/s / peak, which is faked to 1 TFLOP/s."""
    out = ran(*inputs(case), "-b 4 -t 32 -x 1", QUIET)
    ms, mfu, rate = map(float, re.search(r"\| (\S+) ms \| (\S+)% bf16 MFU \| (\S+) tok/s", out).groups())
    assert rate == pytest.approx(128 / ms * 1e3, rel=0.01 / ms + 1e-3 + 1 / rate)
    flops = 6 * num_parameters(CONFIG) + 6 * 3 * 64 * 32
    assert mfu == pytest.approx(100 * flops * rate / 1e12, abs=0.06)


def test_log_steps_of_a_longer_run_have_no_gap(golden_run):
    steps = [int(s) for s in re.findall(r"s:(\d+) trl", (golden_run[1] / "main.log").read_text())]
    assert all(b == a + 1 for a, b in pairwise(steps)) and (steps[0], steps[-1]) == (0, 39)


def test_a_signal_ends_a_hellaswag_evaluation_early(case, monkeypatch):
    """The whole of it can take an hour; what it found so far is no score and is not printed."""
    calls, whole = [], GPT2.token_losses

    def interrupted_once(self, inputs, targets):
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return whole(self, inputs, targets)

    monkeypatch.setattr(train_gpt2, "compile_kernels", lambda run: None)  # which evaluates a tiny model
    monkeypatch.setattr(GPT2, "token_losses", interrupted_once)
    done = run(*inputs(case), "-x 0 -b 4 -t 32 -h 1", QUIET, "--hellaswag-data", case / "eval.bin")
    assert len(calls) == 1 and "HellaSwag:" not in done.out and "SIGINT: finishing" in done.out and done.code == 130


def test_a_rank_says_what_it_begins_before_it_begins_it(case, monkeypatch):
    """Which the others name where it is lost there."""
    said = []
    monkeypatch.setattr(train_gpt2.World, "progress", lambda _, what: said.append(what))
    ran(*inputs(case), "-b 4 -t 32 -d 256 -x 2 -v 2 -m 1 -s 2 -g 3", after_step=lambda done: said.append(f"done {done}"))
    assert said[:3] == ["planning", "opening the data", "building the model"]
    steps = [what for what in said if re.fullmatch(r"(step|done) \d+", what)]
    assert steps == ["step 1", "done 1", "step 2", "done 2"]  # as the printed lines count them
    assert "step 0, validate, call 0" in said and said[-1] == "step 2, sample, call 1"


def test_ranks_agree_on_flags_before_they_are_grouped_and_are_grouped_before_free_memory_is_counted(case, monkeypatch):
    """Ranks of other --tensor-parallel would make other groups, and wait for ever; NCCL takes a GPU's memory for groups."""
    names, calls = ("check_agreement", "connect_groups", "run_budget"), []
    for name in names:
        real = getattr(train_gpt2, name)
        monkeypatch.setattr(train_gpt2, name, lambda *args, name=name, real=real: calls.append(name) or real(*args))
    ran(*inputs(case), "-b 1 -t 8 -x 0 -v 0 -s 0")
    assert tuple(calls) == names
