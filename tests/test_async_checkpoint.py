"""--async-checkpoint 1: the same files as without it, of the step they say, whole or not at all, whatever happens meanwhile.

The disk is made slow here by a gate: the thread that writes stops in the middle of a file until the gate is opened, while steps go on.
"""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import ranks_program
import torch
from case_a import CONFIG, NoLoader, save_snapshot, write_case_a
from conftest import REPO
from test_loop import QUIET, inputs, losses, ran, run, words_of
from test_resume import (
    Crash, assert_same_end, bf16_model_bytes, crash_at, files_of, kill_thrice, killed_before_each_call, steps_in, stop_at,
)  # fmt: skip

import train_gpt2
from llmc.backend import Backend
from llmc.cards import Budget
from llmc.checkpoint.extra_file import Extra
from llmc.checkpoint.saved_state import SavedState
from llmc.checkpoint.snapshot import begin_snapshot, load_snapshot
from llmc.checkpoint.writer import Writer
from llmc.config import config_from_descriptor
from llmc.errors import UserError
from llmc.files import write_atomically
from llmc.gpt2 import GPT2
from llmc.memory.choose import ways_to_fit
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.report import allocation_lines, legend, level_rows, plan_table, tensor_rows
from llmc.memory.tables import DTYPE_BYTES, num_parameters
from llmc.refusals import check_host_memory
from llmc.units import MIB

N = num_parameters(CONFIG)
# torch's operations: numba's kernels give other last bits in the process that compiles them than in one that finds them compiled
SMALL = "-b 2 -t 32 -d 128 -l 3e-3 -u 3 -q 0.1 -c 0.1 --kernels torch"
ASYNC = "--async-checkpoint 1"


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Path:
    folder = write_case_a(tmp_path_factory.mktemp("case_a"))
    (folder / "bf16.bin").write_bytes(bf16_model_bytes((folder / "model.bin").read_bytes()))
    return folder


def lasting(folder: Path) -> dict[str, bytes]:
    """Every file that two runs of the same steps have in common: times and peaks are left out."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("speed.log", "memory.json")}


def writing() -> bool:
    """Whether the thread that writes a checkpoint is at it."""
    return any(thread.name == "checkpoint" for thread in threading.enumerate())


def finish_writing():
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(30)


class Gate:
    """Stops every file that another thread than the main one writes, after `begun` of its bytes, until it is opened."""

    def __init__(self):
        self.opened, self.reached = threading.Event(), threading.Event()

    def write_atomically(self, path, pieces, **options):
        return write_atomically(path, pieces if threading.current_thread() is threading.main_thread() else self._held(pieces), **options)

    def _held(self, pieces):
        pieces = iter(pieces)
        yield next(pieces)
        self.reached.set()
        assert self.opened.wait(60)
        yield from pieces

    def __enter__(self):
        self._stack = ExitStack()
        for module in ("model_file", "extra_file", "state_file"):
            self._stack.enter_context(patch(f"llmc.checkpoint.{module}.write_atomically", self.write_atomically))
        return self

    def __exit__(self, *_):
        self.opened.set()
        self._stack.close()


# ----------------------------------------------------------------------------
# the same files


@pytest.mark.parametrize("model, flags", [
    ("model.bin", ""), ("model.bin", "-w 0 -r 6"), ("bf16.bin", ""), ("bf16.bin", "--master bits16 --optimizer-state bf16"),
    ("bf16.bin", "-w 0 --optimizer-state bf16"), ("model.bin", "-a 1"),
])  # fmt: skip
def test_the_folder_ends_as_that_of_a_run_that_waits(case, tmp_path, model, flags):
    """Every form of weights and moments, several checkpoints, rotation, validation and samples in between: every byte, main.log too."""
    argv = [*inputs(case), "-e", case / model, SMALL, "-x 8 -n 2 -nk 2 -v 3 -m 2 -s 5 -g 4", flags, "-o"]
    waits, beside = tmp_path / "waits", tmp_path / "beside"
    before = ran(*argv, waits)
    out = ran(*argv, beside, ASYNC)
    assert lasting(beside) == lasting(waits) and steps_in(beside) == [6, 8]
    assert re.findall(r"^Wrote checkpoint at step (\d+)$", out, re.M) == ["2", "4", "6", "8"]
    said = [re.findall(r"^(?:val loss|Writing checkpoint|Deleting) .*|\| loss \S+ ", text, re.M) for text in (before, out)]
    assert sorted(said[0]) == sorted(said[1]) and len(said[0]) == 8 + 4 + 4 + 2
    assert_same_end(beside, waits, 8)


def test_the_kernels_of_a_run_do_not_matter(case, tmp_path):
    """numba's, where it is installed: their run has other working room for m and v."""
    argv = [*inputs(case), "-e", case / "bf16.bin", "-b 2 -t 32 -x 4 -n 2 --optimizer-state bf16", QUIET, "-o"]
    for name, flags in (("compiles", ""), ("waits", ""), ("beside", ASYNC)):
        ran(*argv, tmp_path / name, flags)
    assert lasting(tmp_path / "beside") == lasting(tmp_path / "waits")


def test_on_a_gpu_s_loop_too(case, tmp_path, monkeypatch):
    """Where the next step is launched before the line of the last one."""
    argv = [*inputs(case), SMALL, "-x 6 -n 2 -nk 1", QUIET, "-o"]
    ran(*argv, tmp_path / "waits")
    monkeypatch.setattr(Backend, "asynchronous", True)
    ran(*argv, tmp_path / "beside", ASYNC)
    assert lasting(tmp_path / "beside") == lasting(tmp_path / "waits")


def test_a_run_that_waits_goes_on_from_one_that_does_not_and_back(case, tmp_path):
    argv = [*inputs(case), SMALL, "-n 2 -nk 2 -k constant", QUIET, "-o"]
    ran(*argv, tmp_path / "straight", "-x 6")
    ran(*argv, tmp_path / "mixed", "-x 2", ASYNC)
    ran(*argv, tmp_path / "mixed", "-x 4 -y 1")
    ran(*argv, tmp_path / "mixed", "-x 6 -y 1", ASYNC)
    assert_same_end(tmp_path / "mixed", tmp_path / "straight", 6)


def test_a_checkpoint_holds_its_own_step_though_training_went_on_before_it_was_written(case, tmp_path):
    """Both files stop in the middle while steps 3 to 5 run; until they are whole the checkpoint does not count."""
    argv = [*inputs(case), "-e", case / "bf16.bin", SMALL, "-x 6 -n 3", QUIET, "-o"]
    waits, beside = tmp_path / "waits", tmp_path / "beside"
    ran(*argv, waits)
    seen = []
    with Gate() as gate:

        def after_step(done):
            if done in (4, 5):
                assert gate.reached.wait(60) and writing()
                seen.append(sorted(path.name for path in beside.iterdir() if "00000003" in path.name))
            if done == 5:
                gate.opened.set()

        ran(*argv, beside, ASYNC, after_step=after_step)
    assert seen == 2 * [["model_00000003.bin.tmp"]]
    assert files_of(beside, 3) == files_of(waits, 3) != files_of(waits, 6) == files_of(beside, 6)
    assert lasting(beside) == lasting(waits)


# ----------------------------------------------------------------------------
# order


def test_one_that_is_written_counts_two_steps_later_and_not_only_with_the_next(case, tmp_path):
    """That of step 3, written while step 4 runs, by the time that step 6 has; the next one is due after that."""
    found = {}

    def after_step(step):
        found[step] = steps_in(tmp_path)
        finish_writing()

    ran(*inputs(case), SMALL, "-x 7 -n 3", QUIET, ASYNC, "-o", tmp_path, after_step=after_step)
    assert found[3] == [] and found[6] == [3] and steps_in(tmp_path) == [3, 6, 7]


def test_a_checkpoint_waits_for_the_one_before_and_says_so_once(case, tmp_path):
    """Due every step on a disk that needs longer: one at a time, each complete before the next begins; the note is printed once."""
    argv = [*inputs(case), SMALL, "-x 5 -n 1 -nk 1", QUIET, "-o"]
    real, newest = Writer._write, [0]

    def slow(self, copied):
        threading.Event().wait(0.3)
        real(self, copied)

    def after_step(done):
        steps = steps_in(tmp_path / "beside")
        assert not steps or steps[-1] >= newest[0], "a checkpoint that counted is gone before its successor counts"
        newest[0] = max([*steps, newest[0]])
        for step in steps:
            files_of(tmp_path / "beside", step)

    with patch.object(Writer, "_write", slow):
        out = ran(*argv, tmp_path / "beside", ASYNC, after_step=after_step)
    ran(*argv, tmp_path / "waits")
    assert lasting(tmp_path / "beside") == lasting(tmp_path / "waits") and newest[0] >= 3
    said = re.findall(r"^(Writing|Wrote|Deleting) checkpoint at step (\d)$", out, re.M)
    assert said == [(verb, str(step)) for verb, step in order_of(range(1, 6), keep=1)]
    assert re.findall("^note: the checkpoint.*", out, re.M) == [
        "note: the checkpoint of step 1 is still being written; that of step 2 waits for it, as will others"
    ]


def order_of(steps, keep):
    for step in steps:
        yield "Writing", step
        yield "Wrote", step
        if step > keep:
            yield "Deleting", step - keep


def test_a_signal_waits_for_what_is_being_written_and_then_writes_its_own(case, tmp_path):
    """Stopped in step 3, while the checkpoint of 2 is held in the middle of a file."""
    argv = [*inputs(case), SMALL, "-x 6 -n 2", QUIET, "-o"]
    with Gate() as gate:

        def after_step(done):
            if done == 3:
                signal.raise_signal(signal.SIGTERM)
                threading.Timer(0.3, gate.opened.set).start()

        out = ran(*argv, tmp_path / "beside", ASYNC, after_step=after_step)
    assert steps_in(tmp_path / "beside") == [2, 3] and "SIGTERM: finishing this step" in out and len(losses(out)) == 3
    ran(*argv, tmp_path / "straight")
    ran(*argv, tmp_path / "beside", ASYNC, "-y 1")
    assert_same_end(tmp_path / "beside", tmp_path / "straight", 6)


def test_a_signal_s_checkpoint_is_written_without_a_period_too(case, tmp_path):
    out = ran(*inputs(case), SMALL, "-x 6", QUIET, "-o", tmp_path, ASYNC, after_step=stop_at(3))
    assert steps_in(tmp_path) == [3] and "none is written beside training without -n and -o" in out


# ----------------------------------------------------------------------------
# what goes wrong


@pytest.mark.parametrize("file", ["model_", "extra_", "state_"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_fails_stops_the_run_at_the_next_step_and_costs_one_checkpoint(case, tmp_path, file, number):
    """The sentence is that of a run that waits. The step after is not launched; the checkpoint before stays, and the run can go on."""
    argv = [*inputs(case), SMALL, "-x 8 -n 2", QUIET, "-o"]
    real = os.replace

    def full(source, target):
        if re.fullmatch(rf"{file}00000004.*", Path(target).name):
            raise OSError(number, os.strerror(number))
        return real(source, target)

    with patch("os.replace", full):
        waits = run(*argv, tmp_path / "waits")
        beside = run(*argv, tmp_path / "beside", ASYNC, after_step=lambda done: finish_writing())
    assert waits.code == beside.code == 2
    assert beside.err == waits.err.replace("/waits", "/beside") and os.strerror(number) in beside.err and beside.err.count("\n") == 1
    assert os.strerror(number) not in beside.out, "it is told once"
    assert (len(losses(waits.out)), len(losses(beside.out))) == (4, 5)
    assert steps_in(tmp_path / "beside") == [2] and not list((tmp_path / "beside").glob("*.tmp"))
    assert "Wrote checkpoint at step 2\n" in beside.out and "Wrote checkpoint at step 4\n" not in beside.out
    assert "resuming at step 2" in ran(*argv, tmp_path / "beside", ASYNC, "-y 1")
    ran(*argv, tmp_path / "straight")
    assert_same_end(tmp_path / "beside", tmp_path / "straight", 8)


def test_a_disk_that_fails_at_the_last_checkpoint_is_told_too(case, tmp_path):
    (tmp_path / "state_00000004_00000.bin").mkdir()
    result = run(*inputs(case), SMALL, "-x 4 -n 2", QUIET, "-o", tmp_path, ASYNC)
    assert result.code == 2 and result.err.startswith(f"error: writing the state failed at {tmp_path}/state_00000004_00000.bin")
    assert steps_in(tmp_path) == [2] and not list(tmp_path.glob("*.tmp"))


def test_a_run_that_crashes_finishes_the_checkpoint_it_had_begun(case, tmp_path):
    """Everything it holds was copied, so it counts, as it would have where the run waits."""
    argv = [*inputs(case), SMALL, "-x 8 -n 4", QUIET, "-o"]
    with Gate() as gate, pytest.raises(Crash):
        threading.Timer(1.0, gate.opened.set).start()
        run(*argv, tmp_path / "crashed", ASYNC, after_step=crash_at(5))
    assert steps_in(tmp_path / "crashed") == [4] and not writing()
    ran(*argv, tmp_path / "straight")
    assert files_of(tmp_path / "crashed", 4) == files_of(tmp_path / "straight", 4)
    ran(*argv, tmp_path / "crashed", ASYNC, "-y 1")
    assert_same_end(tmp_path / "crashed", tmp_path / "straight", 8)


def test_a_run_that_crashes_while_the_disk_fails_says_both(case, tmp_path):
    """The reason of the crash is what ends it; the checkpoint is no excuse."""
    (tmp_path / "model_00000004.bin").mkdir()

    def after_step(done):
        if done == 5:
            raise UserError("the data are damaged")

    with Gate() as gate:
        threading.Timer(1.0, gate.opened.set).start()
        result = run(*inputs(case), SMALL, "-x 8 -n 4", QUIET, "-o", tmp_path, ASYNC, after_step=after_step)
    assert (result.code, result.err) == (2, "error: the data are damaged\n")
    assert f"note: writing the model failed at {tmp_path}/model_00000004.bin" in result.out and steps_in(tmp_path) == []


def test_killed_again_and_again_the_newest_checkpoint_is_whole(case, tmp_path, request):
    """SIGKILL at random moments of a run that always writes; each time the newest DONE loads, and the end is the straight run's."""
    folder, argv = tmp_path / "log", [*inputs(case), SMALL, "-x 40", QUIET]
    assert kill_thrice(random.Random(request.node.name), folder, argv, "-n 1 -nk 2 -y 1", ASYNC, most=10) < 40
    ran(*argv, "-n 1 -nk 2 -y 1", ASYNC, "-o", folder)
    ran(*argv, "-n 1 -nk 2 -o", tmp_path / "straight")
    assert_same_end(folder, tmp_path / "straight", 40)
    assert steps_in(folder) == [39, 40], "a crash leaves no old checkpoint behind"


def test_killed_before_any_single_call_that_changes_the_disk_a_run_goes_on(case, tmp_path):
    """As the test of this name of a run that waits. The calls of the two threads come in any order, so the points do too."""
    seen = killed_before_each_call(tmp_path, [*inputs(case), "-b 1 -t 8 -x 2 -n 1 -nk 1 --kernels torch", QUIET, ASYNC], timeout_s=240)
    assert set(seen) == {0, 1, 2}


# ----------------------------------------------------------------------------
# several ranks


def two_ranks(case, folder, *argv) -> list:
    """The program in two processes of this machine: code, out and err of each."""
    return ranks_program.start(2, folder.with_name(f"{folder.name}_ranks"), *inputs(case), SMALL, QUIET, *argv, "-o", folder).ended()


@pytest.mark.parametrize("flags", ["-z 1 --optimizer-state bf16", "-z 3"])
def test_two_ranks_end_with_the_same_folder(case, tmp_path, flags):
    """DONE waits for both; at stage 3 the weights are gathered while they are copied."""
    argv = ["-e", case / "bf16.bin", flags, "-x 6 -n 2 -nk 2"]
    for name, more in (("waits", ""), ("beside", ASYNC)):
        first, second = two_ranks(case, tmp_path / name, *argv, more)
        assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert re.findall("Wrote checkpoint at step (.)", first.out) == ["2", "4", "6"]
    found = lasting(tmp_path / "beside")
    assert found == lasting(tmp_path / "waits") and {"state_00000006_00001.bin", "DONE_00000006", "DONE_00000004"} <= set(found)
    record = json.loads((tmp_path / "beside" / "memory.json").read_text())
    assert record["plan"]["checkpoint_bytes"] == len(found["model_00000006.bin"]) - 1024 + 12 * (N // 2)
    assert record["plan"]["total_bytes"] == sum(record["plan"]["columns"].values())


def test_a_disk_that_fails_on_another_rank_ends_all_of_them_without_a_done(case, tmp_path):
    (tmp_path / "state_00000004_00001.bin").mkdir()
    first, second = two_ranks(case, tmp_path, "-z 0 -x 400 -n 2", ASYNC)
    assert first.code != 0 and second.code != 0
    assert f"writing the state failed at {tmp_path}/state_00000004_00001.bin" in second.err, second.err
    assert steps_in(tmp_path) == [2] and "Wrote checkpoint at step 4" not in first.out and not list(tmp_path.glob("*.tmp"))


def rank_1_fails_while_both_write():
    def launch_step(run, clock, step):
        if step == 3 and run.world.rank == 1:
            raise ZeroDivisionError("a bug")
        return real(run, clock, step)

    real, train_gpt2.launch_step = train_gpt2.launch_step, launch_step
    Writer._write = lambda self, copied: time.sleep(1000)


def test_a_rank_that_fails_tells_the_others_before_its_checkpoint_is_written(case, tmp_path):
    """Which would take a quarter of an hour."""
    argv = [*inputs(case), SMALL, QUIET, "-x 8 -n 2", ASYNC, "-o", tmp_path / "log"]
    ranks = ranks_program.start(2, tmp_path / "ranks", *argv, prepare=rank_1_fails_while_both_write)
    ranks.processes[0].join(60)
    ranks.processes[1].kill()
    first, _ = ranks.ended()
    assert (first.code, steps_in(tmp_path / "log")) == (4, []) and "Writing checkpoint at step 2" in first.out
    assert first.err.startswith("error: rank 1 stopped: ZeroDivisionError: a bug"), first.err


# ----------------------------------------------------------------------------
# the plan


FORMS = [
    PlanOptions(CONFIG, 2, 32, precision="fp32"), PlanOptions(CONFIG, 2, 32, precision="fp32", master="none"),
    PlanOptions(CONFIG, 2, 32), PlanOptions(CONFIG, 2, 32, master="bits16", optimizer_state="bf16"),
    PlanOptions(CONFIG, 2, 32, master="none"),
]  # fmt: skip


@pytest.mark.parametrize("flags, thread", [({}, "MainThread"), ({"async_checkpoint": True}, "checkpoint")])
def test_what_may_take_long_says_with_every_piece_that_it_goes_on(tmp_path, monkeypatch, flags, thread):
    """Drawing weights, writing files in whichever thread, and reading them: else the watch would take it for a hang."""
    said, plan = [], Plan(replace(FORMS[0], **flags))
    model, writer = GPT2(plan), Writer(plan if flags else None)
    monkeypatch.setattr("llmc.checkpoint.snapshot.PIECE_BYTES", 1 << 16)
    monkeypatch.setattr("llmc.checkpoint.writer.PIECE_BYTES", 1 << 16)
    model.sharing.moved = lambda: said.append(threading.current_thread().name)
    model.init_random()
    assert len(said) >= 2 + 4 * CONFIG.num_layers
    said.clear()
    begin_snapshot(writer, tmp_path, 1, model, NoLoader(), Extra({}, {}))
    writer.wait()
    assert set(said) == {thread} and len(said) >= 4 * 4 * N >> 16
    said.clear()
    load_snapshot(tmp_path, 1, model, SavedState(tmp_path, 1, CONFIG))
    assert len(said) >= 3 * 4 * N >> 16


@pytest.mark.parametrize("o", FORMS)
def test_the_copy_is_planned_to_the_byte(o, tmp_path):
    """It is the files without their headers; what a GPU's plan has in host memory beside its total a CPU's has in it."""
    o = replace(o, async_checkpoint=True)
    plan, without = Plan(o), Plan(replace(o, async_checkpoint=False))
    model = GPT2(plan)
    save_snapshot(tmp_path, 1, model, NoLoader(), Extra({}, {}))
    sizes = [(tmp_path / name).stat().st_size - 1024 for name in ("model_00000001.bin", "state_00000001_00000.bin")]
    assert plan.checkpoint_bytes == sum(sizes) == N * DTYPE_BYTES[o.precision] + 4 * N * (2 if o.master == "none" else 3)
    assert plan.total_bytes == without.total_bytes + plan.checkpoint_bytes == sum(plan.columns.values())
    assert (
        list(plan.columns)[-1] == "checkpoint" and "checkpoint" not in without.columns and plan.host_bytes == 0 == without.checkpoint_bytes
    )
    card, card_without = Plan(replace(o, device="cuda")), Plan(replace(o, device="cuda", async_checkpoint=False))
    assert card.total_bytes == card_without.total_bytes == sum(card.columns.values()) and card.columns == card_without.columns
    assert card.host_bytes == card_without.host_bytes + plan.checkpoint_bytes == plan.checkpoint_bytes


@pytest.mark.parametrize("o", FORMS)
@pytest.mark.parametrize("ranks, stage", list(product((2, 4), (0, 1, 2, 3))))
def test_every_rank_plans_what_it_writes(o, ranks, stage):
    """m, v and master, or its share of them from stage 1 on; the weights are rank 0's to write, whole at any stage."""
    o = replace(o, data_ranks=ranks, zero_stage=stage, async_checkpoint=True)
    state = 4 * (2 if o.master == "none" else 3) * N // (ranks if stage else 1)
    for rank in range(ranks):
        plan = Plan(replace(o, rank=rank))
        assert plan.checkpoint_bytes == state + (N * DTYPE_BYTES[o.precision] if rank == 0 else 0)
        assert plan.total_bytes == sum(plan.columns.values()) <= Plan(o).total_bytes
        assert plan.arenas == Plan(replace(o, async_checkpoint=False)).arenas


def test_residuals_and_a_checkpoint_share_the_host():
    o = PlanOptions(config_from_descriptor("d12"), 8, 1024, device="cuda", offload_residual=True, async_checkpoint=True)
    plan = Plan(o)
    residuals = Plan(replace(o, async_checkpoint=False)).host_bytes
    assert plan.residual_bytes == residuals > 0 and plan.host_bytes == residuals + plan.checkpoint_bytes
    assert allocation_lines(plan)[-2:] == [
        f"allocating {residuals // MIB} MiB of pinned host memory for residuals",
        f"allocating {plan.checkpoint_bytes // MIB} MiB of pinned host memory for checkpoints",
    ]
    mib = f"{plan.checkpoint_bytes / MIB:.1f} MiB"
    footer = f"host memory: {plan.host_bytes / MIB:.1f} MiB pinned, beside the total; of it {mib} for checkpoints while they are written"
    assert footer in plan_table(o).splitlines()
    with pytest.raises(UserError) as refused:
        train_gpt2.check_fits(SimpleNamespace(plan=plan, budget=Budget(1 << 60, "a lot"), host_bytes=plan.host_bytes - 1))
    assert str(refused.value).startswith("--offload-residual with --async-checkpoint 1 needs") and "use a smaller -b" in str(refused.value)
    check_host_memory(plan, plan.host_bytes)  # not a byte is left


def test_an_optimizer_and_a_checkpoint_share_the_host():
    o = PlanOptions(config_from_descriptor("d12"), 8, 1024, device="cuda", offload_optimizer=True, async_checkpoint=True)
    plan = Plan(o)
    assert plan.host_bytes == plan.optimizer_bytes + plan.checkpoint_bytes
    [footer] = [line for line in plan_table(o).splitlines() if line.startswith("host memory:")]
    assert f"{plan.host_bytes / MIB:.1f} MiB pinned, beside the total; of it {plan.checkpoint_bytes / MIB:.1f} MiB for" in footer
    assert footer.endswith("while they are written; an update reads 1.5 GB of it over the bus and writes as much, not counted below")
    with pytest.raises(UserError) as refused:
        train_gpt2.check_fits(SimpleNamespace(plan=plan, budget=Budget(1 << 60, "a lot"), host_bytes=plan.host_bytes - 1))
    assert str(refused.value).startswith("--offload-optimizer with --async-checkpoint 1 needs") and "-b" not in str(refused.value)


def test_the_plan_s_forms_show_the_copy():
    """--plan's column, legend and footer, --json and --tensors, and the sum of the last."""
    out = ran("-e d6 -b 2 -t 64 --plan --device cpu --precision bf16", ASYNC)
    plan = Plan(PlanOptions(config_from_descriptor("d6"), 2, 64, async_checkpoint=True))
    mib = f"{plan.checkpoint_bytes / MIB:.1f}"
    assert f"host memory: {mib} MiB for checkpoints while they are written, in the total" in out.splitlines()
    heads, *rows = [re.split(r" {2,}", line.strip()) for line in out.split("\n\n")[1].splitlines()]
    assert {row[heads.index("checkpoint")] for row in rows} == {mib} and legend(plan.columns)[-1].startswith("checkpoint ")
    told = json.loads(ran("-e d6 -b 2 -t 64 --plan --json --device cpu --precision bf16", ASYNC))
    assert told["async_checkpoint"] is True and {row["checkpoint_mib"] for row in told["levels"]} == {plan.checkpoint_bytes / MIB}
    assert {row["checkpoint_mib"] for row in level_rows(replace(plan.options, async_checkpoint=False))} == {0}
    copied = [row for row in tensor_rows(plan) if row["arena"] == "checkpoint"]
    assert [row["name"] for row in copied] == ["parameters", "m", "v", "master"]
    assert sum(row["bytes"] for row in copied) == plan.checkpoint_bytes == copied[-1]["offset"] + copied[-1]["bytes"]
    assert allocation_lines(plan)[-1] == f"allocating {plan.checkpoint_bytes // MIB} MiB of host memory for checkpoints"


def test_waiting_for_checkpoints_is_a_way_to_fit_a_cpu():
    o = PlanOptions(config_from_descriptor("d12"), 4, 256, precision="fp32", async_checkpoint=True)
    least = Plan(replace(o, async_checkpoint=False)).total_bytes
    ways = {way.flags: way for way in ways_to_fit(o, least, 4)}
    assert ways["--async-checkpoint 0"].total_bytes == least
    assert ways["--async-checkpoint 0"].price == "training waits while a checkpoint is written"
    assert ways["--async-checkpoint 0"].cost > 0
    assert not any(
        "async" in way.flags for way in ways_to_fit(replace(o, device="cuda"), Plan(replace(o, device="cuda")).total_bytes - 1, 4)
    )


def test_a_run_with_checkpoints_beside_it_stays_within_5_percent_of_its_plan(tmp_path):
    """A process of its own, in which copies are more than a third; they are there from the start, and nothing grows with the steps."""
    data = write_case_a(tmp_path / "data")
    words = words_of(["-i", data / "train_*.bin", "-j", data / "val.bin", "-e d6 --precision fp32 -b 4 -t 64 -x 4 -n 2 -nk 1 -v 0 -s 0",
                      "--device cpu --threads 1 --kernels torch", ASYNC, "-o", tmp_path / "log"])  # fmt: skip
    result = subprocess.run([sys.executable, "train_gpt2.py", *words], cwd=REPO, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "log" / "memory.json").read_text())
    planned, copied = record["plan"]["total_bytes"], record["plan"]["checkpoint_bytes"]
    assert copied == 4 * 4 * num_parameters(config_from_descriptor("d6")) > planned / 3
    peaks = {phase["phase"]: phase["over_baseline_bytes"] for phase in record["measured"]}
    assert list(peaks) == ["build", "first step", "checkpoint", "end"]
    assert (
        peaks["build"] >= 0.99 * planned and max(peaks.values()) <= 1.05 * planned and peaks["end"] - peaks["first step"] <= 0.01 * planned
    )


# ----------------------------------------------------------------------------
# the writer


def test_a_copy_of_another_size_than_planned_is_a_mistake_of_the_program(tmp_path):
    """More or less: neither is written."""
    plan = Plan(PlanOptions(CONFIG, 1, 8, async_checkpoint=True))
    writer, written = Writer(plan), []
    for n in (plan.checkpoint_bytes - 1, plan.checkpoint_bytes + 1):
        with pytest.raises((AssertionError, RuntimeError)):
            writer.begin(1, [(written.append, [torch.zeros(n, dtype=torch.uint8)])])
        assert writer.step is None and not written and not writer.busy


@pytest.mark.gpu
@pytest.mark.parametrize("o", FORMS)
def test_on_a_card_the_copy_is_of_the_moment_it_is_taken(o, tmp_path):
    """The weights and the state are overwritten right after; what is written are those before."""
    o = replace(o, device="cuda", async_checkpoint=True)
    plan = Plan(o)
    model, writer = GPT2(plan, "cuda"), Writer(plan)
    for flat in model.flat.values():
        flat.view(torch.uint8).random_(0, 60)
    (tmp_path / "now").mkdir()
    (tmp_path / "beside").mkdir()
    save_snapshot(tmp_path / "now", 1, model, NoLoader(), Extra({}, {}))
    begin_snapshot(writer, tmp_path / "beside", 1, model, NoLoader(), Extra({}, {}))
    for flat in model.flat.values():
        flat.zero_()
    writer.wait()
    found = {path.name: path.read_bytes() for path in (tmp_path / "beside").iterdir()}
    assert found == {path.name: path.read_bytes() for path in (tmp_path / "now").iterdir() if "DONE" not in path.name}
