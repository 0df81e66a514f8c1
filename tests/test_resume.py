"""A run that stops and goes on writes the bytes of the run that never stopped: stopped by -x, by a signal, by SIGKILL, anywhere.

Compared are the last checkpoint's model, state and extra files and main.log, byte for byte. speed.log and memory.json hold times
and peaks, which differ from run to run: of the first the steps are compared, the second must be whole.
"""

import ctypes
import errno
import fcntl
import gc
import io
import json
import os
import pty
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from case_a import CONFIG, read_state, write_case_a
from conftest import REPO
from forked import LONGEST_S, Program
from test_errors import token
from test_loop import QUIET, inputs, losses, ran, run, words_of

import train_gpt2
from llmc import interrupt as interrupt_module
from llmc.backend import Backend
from llmc.checkpoint import keeper, snapshot
from llmc.gpt2 import GPT2
from llmc.interrupt import StopRequest
from llmc.memory.tables import num_parameters

N = num_parameters(CONFIG)
SMALL = "-b 4 -t 64 -d 512 -l 3e-3 -u 3 -q 0.1 -c 0.1"  # 16 steps to an epoch of 19 + 13 samples


def bf16_model_bytes(fp32: bytes) -> bytes:
    """A model file with every weight rounded to the nearest bf16, ties to even."""
    sizes = np.frombuffer(fp32[:1024], "<i4").copy()
    sizes[1] = 5
    bits = np.frombuffer(fp32[1024:], "<u4")
    return sizes.tobytes() + ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Path:
    folder = write_case_a(tmp_path_factory.mktemp("case_a"))
    (folder / "bf16.bin").write_bytes(bf16_model_bytes((folder / "model.bin").read_bytes()))
    return folder


def files_of(folder: Path, step: int) -> dict[str, bytes]:
    """The checkpoint of a step, which must be complete."""
    assert (folder / f"DONE_{step:08d}").read_bytes() == b""
    names = (f"model_{step:08d}.bin", f"state_{step:08d}_00000.bin", f"extra_{step:08d}_00000.json")
    return {name: (folder / name).read_bytes() for name in names}


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("DONE_" + 8 * "[0-9]"))


def assert_same_end(folder: Path, reference: Path, step: int, log=True) -> None:
    expected, found = files_of(reference, step), files_of(folder, step)
    for name, content in expected.items():
        assert found[name] == content, f"{name} differs"
    if log:
        assert (folder / "main.log").read_text() == (reference / "main.log").read_text()
        trained = [int(s) for s in re.findall(r"^s:(\d+) trl:", (reference / "main.log").read_text(), re.M)]
        assert timed_steps(folder) == timed_steps(reference) == trained == list(range(max(step, len(trained))))
    assert json.loads((folder / "memory.json").read_text())["measured"][-1]["phase"] == "end"
    assert not list(folder.glob("*.tmp"))


def timed_steps(folder: Path) -> list[int]:
    """The steps of speed.log, each line of which must be whole."""
    lines = (folder / "speed.log").read_text().splitlines()
    return [int(re.fullmatch(r"s:(\d+) ms:\d+\.\d\d tok/s:\d+\.\d", line)[1]) for line in lines]


def but_record(folder: Path) -> dict[str, bytes]:
    """Every file and its bytes, memory.json left out: a run that goes on writes its own."""
    return {name: content for name, content in everything_in(folder).items() if name != "memory.json"}


def everything_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def phases(folder: Path) -> list[tuple[str, int]]:
    """The phases that memory.json has measured, each with the step at which it first ended."""
    return [(row["phase"], row["step"]) for row in json.loads((folder / "memory.json").read_text())["measured"]]


def keep_only(folder: Path, step: int, target: Path) -> Path:
    """A copy of the folder in which the checkpoints of all other steps were never written."""
    logs = ("main.log", "speed.log", "memory.json")
    shutil.copytree(folder, target, ignore=lambda _, names: [n for n in names if n not in logs and f"{step:08d}" not in n])
    return target


def stop_at(step: int, number=signal.SIGTERM):
    """An after_step that sends this process the signal when `step` steps are done."""
    return lambda done: signal.raise_signal(number) if done == step else None


class Crash(Exception):
    """What happens to a machine."""


def crash_at(step: int):
    def after_step(done):
        if done == step:
            raise Crash

    return after_step


# ----------------------------------------------------------------------------
# resume equality


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("w", [0, 1])
@pytest.mark.parametrize("r", [0, 2, 6])
def test_stopped_crashed_and_straight_runs_write_the_same_bytes(case, tmp_path, precision, w, r):
    """Stopped by SIGTERM at 3, gone on, crashed at 7 after the checkpoint of 5 and gone on again; validation and samples meanwhile."""
    model = case / {"fp32": "model.bin", "bf16": "bf16.bin"}[precision]
    argv = [*inputs(case), "-e", model, SMALL, "-b 2 -t 32 -d 128 -x 10 -v 3 -m 2 -s 5 -g 4 -n 5 --precision", precision, "-r", r, "-w", w]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    ran(*argv, "-o", straight)
    out = ran(*argv, "-o", broken, "-y 1", after_step=stop_at(3))
    assert "SIGTERM: finishing this step" in out and "-y 1: no complete checkpoint in" in out and steps_in(broken) == [3]
    assert out.endswith(f"stopped at step 3 of 10; step 3 is kept in {broken}: -y 1 goes on there\n")
    with pytest.raises(Crash):
        run(*argv, "-o", broken, "-y 1", after_step=crash_at(7))
    assert steps_in(broken) == [3, 5]
    out = ran(*argv, "-o", broken, "-y 1")
    assert f"resuming at step 5 from {broken}\n" in out and "step    6/10 |" in out and "step    5/10 |" not in out
    assert_same_end(broken, straight, 10)
    state = files_of(straight, 10)["state_00000010_00000.bin"]
    assert len(files_of(straight, 10)["model_00000010.bin"]) == 1024 + N * (4 if precision == "fp32" else 2)
    assert struct.unpack_from("<I", state, 16)[0] == w


@pytest.mark.parametrize("written_in, resumed_in", [
    ("bf16", "fp32"), ("bf16 --master bits16", "fp32 -w 0"), ("fp32", "bf16"), ("fp32", "bf16 --master bits16"), ("fp32", "bf16 -w 0"),
])  # fmt: skip
def test_a_checkpoint_goes_on_in_the_other_precision_with_its_master_weights(case, tmp_path, written_in, resumed_in):
    """To the bit, seen after a step of learning rate 0; bf16 weights are one of the two neighbours of the master."""
    model = case / ("bf16.bin" if "bf16" in written_in else "model.bin")
    argv = [*inputs(case)[:-2], "-e", model, "-b 2 -t 32 -v 0 -s 0 -n 2 -o", tmp_path]
    ran(*argv, "-x 2 -l 1e-2 --precision", written_in)
    _, before = read_state(tmp_path / "state_00000002_00000.bin", N)
    out = ran(*argv, "-x 3 -l 0 -y 1 --precision", resumed_in)
    first, second = written_in[:4], resumed_in[:4]
    assert f"the {first} checkpoint goes on in {second}, from its fp32 master weights\n" in out and len(losses(out)) == 1
    raw = (tmp_path / "model_00000003.bin").read_bytes()[1024:]
    state, after = read_state(tmp_path / "state_00000003_00000.bin", N)
    assert state.use_master_weights == ("-w 0" not in resumed_in) and not np.array_equal(before["m"], after["m"])
    if state.use_master_weights:
        assert after["master"].tobytes() == before["master"].tobytes()
    if second == "fp32":
        assert raw == before["master"].tobytes()
    else:
        up = np.frombuffer(raw, "<u2").astype(np.int64) - (before["master"].view("<u4") >> 16)
        assert set(up) == {0, 1} and not up[before["master"].view("<u4") & 0xFFFF == 0].any()


@pytest.mark.parametrize("written_in, resumed_in", [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_checkpoint_without_master_weights_goes_on_in_its_own_precision_only(case, tmp_path, written_in, resumed_in):
    model = case / ("bf16.bin" if written_in == "bf16" else "model.bin")
    argv = [*inputs(case)[:-2], "-e", model, "-b 2 -t 32 -v 0 -s 0 -n 2 -w 0 -o", tmp_path]
    ran(*argv, "-x 2")
    before = everything_in(tmp_path)
    refusal = f"state_00000002_00000.bin holds no fp32 master weights, from which the {written_in} checkpoint could go on in {resumed_in}"
    for plan in ("", "--plan"):
        result = run(*argv, "-x 3 -y 1 --precision", resumed_in, plan)
        assert result.code == 2 and refusal in result.err
    assert everything_in(tmp_path) == before


def test_a_seed_gives_another_order_and_rounding_and_a_resumed_run_keeps_it(case, tmp_path):
    """Without it they are llm.c's, as tests/test_golden.py has them."""
    argv = [*inputs(case)[:-2], "-e", case / "bf16.bin", "-b 2 -t 32 -v 0 -s 0 -n 2"]
    straight, stopped, other = (tmp_path / name for name in ("straight", "stopped", "other"))
    ran(*argv, "-x 4 --seed 3 -o", straight)
    ran(*argv, "-x 2 --seed 3 -o", stopped)
    ran(*argv, "-x 2 -o", other)
    states = [read_state(folder / "state_00000002_00000.bin", N)[0] for folder in (stopped, other)]
    assert states[0].rng_state != states[1].rng_state
    assert not np.array_equal(*(state.loader.intra_shard_indices for state in states))
    before = everything_in(stopped)
    for seed, folder, has in ((4, stopped, 3), (3, other, 0)):
        result = run(*argv, f"-x 4 -y 1 --seed {seed} -o", folder)
        assert result.code == 2 and f"--seed {seed}: the checkpoint of step 2 in {folder} is of a run with --seed {has}, and" in result.err
    extra = stopped / "extra_00000002_00000.json"
    good = extra.read_text()
    for damaged in ('"3"', "-1", "null", "65536"):
        extra.write_text(good.replace('"seed": 3', f'"seed": {damaged}'))
        result = run(*argv, "-x 4 -y 1 -o", stopped)
        assert result.code == 2 and f"{extra} says seed " in result.err
    extra.write_text(good)
    assert everything_in(stopped) == before
    ran(*argv, "-x 3 -n 1 -y 1 -o", stopped)  # without being told again, twice
    assert json.loads((stopped / "memory.json").read_text())["flags"]["seed"] == 3
    ran(*argv, "-x 4 -y 1 --seed 3 -o", stopped)
    assert_same_end(stopped, straight, 4)


def test_a_run_resumes_on_both_sides_of_a_shard_s_and_an_epoch_s_end(case, tmp_path):
    """18 steps of two micro-steps: the first shard ends after 19 or 13 of them, within a step, the epoch after 32."""
    argv = [*inputs(case), SMALL, "-x 18 -n 1 -v 4 -m 2 -s 0"]
    straight = tmp_path / "straight"
    out = ran(*argv, "-o", straight)
    assert steps_in(straight) == list(range(1, 19)) and len(set(losses(out))) == 18
    for step in (1, 6, 7, 9, 10, 15, 16, 17):
        resumed = keep_only(straight, step, tmp_path / f"from_{step}")
        again = ran(*argv, "-o", resumed, "-y 1 -n 18")
        assert losses(again) == losses(out)[step:]
        assert_same_end(resumed, straight, 18)


def test_a_run_and_the_runs_that_go_on_leave_no_file_to_the_garbage_collector(case, tmp_path):
    """Through the shards, over an epoch's end, and with what another -b left of an epoch; all with an evaluation between steps."""
    flags = [*inputs(case), SMALL, QUIET, "-v 2 -m 20 -n 8 -o", tmp_path]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        for more in ("-x 8", "-x 24 -y 1", "-x 32 -y 1 -b 2"):
            ran(*flags, more)
        gc.collect()
    assert not [str(warning.message) for warning in seen if issubclass(warning.category, ResourceWarning)]


def test_two_straight_runs_give_the_same_bytes(case, tmp_path):
    argv = [*inputs(case), "-e", case / "bf16.bin", SMALL, "-x 6 -n 3 -v 2 -s 2 -g 6"]
    measured = r"\| \S+ ms.*|average.*|memory usage.*|peak memory.*|estimated.*|tmp/.*"
    outs = [re.sub(measured, "", ran(*argv, "-o", tmp_path / name)) for name in "ab"]
    assert outs[0] == outs[1]
    for step in (3, 6):
        assert_same_end(tmp_path / "a", tmp_path / "b", step)


def test_b_auto_goes_on_with_the_batch_of_the_checkpoint(case, tmp_path):
    """Its place in the data is counted in it, so what fits does not matter; the end is the straight run's."""
    argv = [*inputs(case), SMALL, "-x 6 -n 3 -v 3 -m 2 -s 0"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    ran(*argv, "-o", straight)
    keep_only(straight, 3, resumed)
    out = ran(*argv, "-b auto -y 1 -o", resumed)
    assert "-b auto takes -b 4: the checkpoint's" in out and "| micro batch size B    | 4 " in out
    assert_same_end(resumed, straight, 6)


def test_b_auto_takes_what_fits_where_the_checkpoint_names_no_batch(case, tmp_path):
    """As llm.c's do not. The smallest that one may name is 1."""
    argv = [*inputs(case), SMALL, "-x 6 -n 3", QUIET, "-o", tmp_path]
    ran(*argv, "-x 3")
    extra = tmp_path / "extra_00000003_00000.json"
    extra.write_text(extra.read_text().replace('"B": 4', '"B": 1'))
    said = "-b auto takes -b 1: the checkpoint's"
    assert said in ran(*argv, "-b auto -y 1 --plan --memory-budget 1GiB")
    extra.unlink()
    assert said not in ran(*argv, "-b auto -y 1 --plan --memory-budget 1GiB")


def test_b_auto_takes_what_fits_where_the_checkpoint_s_batch_does_not_divide_a_step(case, tmp_path):
    argv = [*inputs(case), SMALL, QUIET, "-o", tmp_path]
    ran(*argv, "-x 3 -n 3")
    for d, said in ((128, "-b auto takes -b 2: "), (256, "-b auto takes -b 4: the checkpoint's")):
        assert said in ran(*argv, "-x 4 -b auto -y 1 -d", d)


def test_r_auto_goes_on_at_any_level_with_the_same_bytes(case, tmp_path):
    """Stopped at -r 0, and resumed in a budget that only the last level fits."""
    argv = [*inputs(case), SMALL, "-x 6 -n 3 -v 3 -m 2 -s 0"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    ran(*argv, "-r 0 -o", straight)
    keep_only(straight, 3, resumed)
    levels = json.loads(ran(*argv, "--plan --json"))["levels"]
    assert levels[-1]["total_mib"] < levels[-2]["total_mib"]
    out = ran(*argv, "-r auto -y 1 -o", resumed, "--memory-budget", f"{levels[-1]['total_mib'] + 0.001:.3f}MiB")
    assert "-r auto takes -r 6: its plan of" in out and "| recompute             | 6 " in out
    assert_same_end(resumed, straight, 6)


def test_the_outlier_windows_are_part_of_a_checkpoint(case, tmp_path):
    """160 steps with skips on both sides of a stop at 140, when the window of 128 is full; without the extra file the end is another."""
    argv = [*inputs(case), "-b 1 -t 8 -l 1e-5 -k constant -x 160 -sl 1 -sg 1.5", QUIET, "-n 1000"]
    straight, stopped, forgetful = (tmp_path / name for name in ("straight", "stopped", "forgetful"))
    out = ran(*argv, "-o", straight)
    before, _, after = out.partition("step  140/160")
    assert "skipping update" in before and after.count("skipping update") > 1
    ran(*argv, "-o", stopped, after_step=stop_at(140))
    shutil.copytree(stopped, forgetful)
    assert re.findall("skipping.*", ran(*argv, "-o", stopped, "-y 1")) == re.findall("skipping.*", after)
    assert_same_end(stopped, straight, 160)
    (forgetful / "extra_00000140_00000.json").unlink()
    assert "skipping" not in ran(*argv, "-o", forgetful, "-y 1")
    assert files_of(forgetful, 160) != files_of(straight, 160)


def test_a_run_resumed_at_its_last_step_measures_again_and_changes_nothing(case, tmp_path):
    argv = [*inputs(case), SMALL, "-x 4 -n 2 -v 2 -m 2 -s 0 -o", tmp_path]
    first = ran(*argv)
    before = but_record(tmp_path)
    again = ran(*argv, "-y 1")
    assert re.findall("val loss .*", again) == re.findall("val loss .*", first)[-1:] and not losses(again) and "Writing" not in again
    assert "nothing left to do" not in again and "note: step 4 is the last of -x 4, so there is nothing left to train" in again
    assert but_record(tmp_path) == before and timed_steps(tmp_path) == [0, 1, 2, 3]
    assert phases(tmp_path) == [("build", 0), ("resume", 4), ("evaluation", 4), ("end", 4)]


def test_a_checkpoint_beyond_the_last_step_says_that_nothing_is_left_to_do(case, tmp_path):
    argv = [*inputs(case), SMALL, "-v 2 -m 1 -s 0 -n 4 -o", tmp_path]
    ran(*argv, "-x 4")
    before = everything_in(tmp_path)
    for steps in (3, 1):
        out = ran(*argv, "-x", steps, "-y 1")
        assert f"step 4 is beyond -x {steps}" in out and "val loss" not in out and not losses(out)
        assert everything_in(tmp_path) == before


def test_a_checkpoint_without_an_extra_file_resumes(case, tmp_path):
    """As llm.c writes it. Below 128 steps the windows decide nothing, so model, state and log still end the same."""
    argv = [*inputs(case), SMALL, "-x 6 -n 3 -v 0 -s 0"]
    straight, other = tmp_path / "straight", tmp_path / "other"
    ran(*argv, "-o", straight)
    keep_only(straight, 3, other)
    (other / "extra_00000003_00000.json").unlink()
    assert f"note: there is no {other / 'extra_00000003_00000.json'}, as in a checkpoint of llm.c" in ran(*argv, "-o", other, "-y 1")
    expected, found = files_of(straight, 6), files_of(other, 6)
    names = ("model_00000006.bin", "state_00000006_00000.bin")
    assert [found[name] for name in names] == [expected[name] for name in names]
    assert (other / "main.log").read_text() == (straight / "main.log").read_text()
    window = json.loads(found["extra_00000006_00000.json"])["loss_outliers"]["window"]
    assert window == json.loads(expected["extra_00000006_00000.json"])["loss_outliers"]["window"][3:]


def test_resuming_ignores_e_when_it_names_the_same_sizes_or_a_file(case, tmp_path):
    """The weights come from the checkpoint, so a run goes on without the file it started from."""
    argv = [*inputs(case), SMALL, "-n 2 -k constant", QUIET]
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    ran(*argv, "-x 4 -o", straight)
    ran(*argv, "-x 2 -o", moved)
    out = ran(*argv, "-x 4 -y 1 -o", moved, "-e", tmp_path / "gone.bin")
    assert "| weight init method    | intermediate checkpoint " in out
    assert files_of(moved, 4) == files_of(straight, 4)


def test_overfitting_one_batch_resumes_too(case, tmp_path):
    """-a 1 does not shuffle: its state file ends after the tensors."""
    argv = [*inputs(case), "-b 4 -t 32 -a 1 -x 6 -n 3", QUIET]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    ran(*argv, "-o", straight)
    keep_only(straight, 3, resumed)
    ran(*argv, "-o", resumed, "-y 1")
    assert_same_end(resumed, straight, 6)
    assert len(files_of(straight, 6)["state_00000006_00000.bin"]) == 1024 + 3 * 4 * N


@pytest.mark.parametrize("writing", ["", "--async-checkpoint 1"], ids=["written at once", "written beside"])
def test_a_folder_that_is_removed_while_a_run_goes_on_is_made_again(case, tmp_path, writing):
    """What was trained since is kept."""
    folder = tmp_path / "a" / "b"
    argv = [*inputs(case), "-b 4 -t 32 -n 2", QUIET, writing, "-o", folder]
    ran(*argv, "-x 3", after_step=lambda done: done == 2 and shutil.rmtree(tmp_path / "a"))
    assert steps_in(folder) == [2, 3]
    assert "resuming at step 3" in ran(*argv, "-x 4 -y 1")


@pytest.mark.parametrize("writing", ["", "--async-checkpoint 1"], ids=["written at once", "written beside"])
def test_a_signal_while_a_checkpoint_is_written_stops_with_that_one(case, tmp_path, monkeypatch, writing):
    begin = keeper.begin_snapshot

    def signalled(*args):
        signal.raise_signal(signal.SIGTERM)
        begin(*args)

    monkeypatch.setattr(keeper, "begin_snapshot", signalled)
    out = ran(*inputs(case), "-b 4 -t 32 -x 9 -n 2", QUIET, writing, "-o", tmp_path)
    assert len(losses(out)) == 2 and steps_in(tmp_path) == [2] and out.endswith(f"; step 2 is kept in {tmp_path}: -y 1 goes on there\n")


def test_a_signal_just_after_no_checkpoint_was_due_is_answered_by_the_next_step_s(case, tmp_path, monkeypatch):
    due = keeper.Checkpoints.due

    def signalled(self, step, *rest):
        is_due = due(self, step, *rest)
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return is_due

    monkeypatch.setattr(keeper.Checkpoints, "due", signalled)
    ran(*inputs(case), "-b 4 -t 32 -x 9 -n 8", QUIET, "-o", tmp_path)
    assert steps_in(tmp_path) == [4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_o_a_signal_ends_the_run_after_the_step_and_writes_nothing(case, tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    code = 130 if number == signal.SIGINT else 0
    out = ran(*inputs(case), "-b 4 -t 32 -x 9 -n 2", QUIET, after_step=stop_at(4, number), code=code)
    assert len(losses(out)) == 4 and "Writing" not in out and "total average iteration time" in out and not list(tmp_path.iterdir())
    assert out.endswith("stopped at step 4 of 9; nothing is kept without -o, a folder for checkpoints\n")


def test_a_signal_during_the_last_evaluation_still_leaves_a_checkpoint_and_a_log_in_order(case, tmp_path):
    """Stopped while validating at step 4: neither HellaSwag nor the sample run, and the resumed run does all three."""
    argv = [*inputs(case), SMALL, "-x 6 -v 2 -m 3 -s 4 -g 3 -n 6 -h 1 --hellaswag-data", case / "eval.bin"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    ran(*argv, "-o", straight)

    real = train_gpt2.validate

    def validate(run, step):
        if step == 4:
            signal.raise_signal(signal.SIGINT)
        real(run, step)

    out = ran(*argv, "-o", stopped, faked={"validate": validate}, code=130)
    assert "generating" not in out and out.count("HellaSwag:") == 1 and steps_in(stopped) == [4]
    ran(*argv, "-o", stopped, "-y 1")
    assert_same_end(stopped, straight, 6)


# ----------------------------------------------------------------------------
# files


def test_rotation_keeps_the_newest_and_the_major_checkpoints(case, tmp_path):
    """-n 2 -x 12: the rule of the contract, delete S - nk*n unless it is a multiple of nm; every file of a step goes with its DONE."""
    for nk, nm, expected in (
        (0, 0, [2, 4, 6, 8, 10, 12]),
        (1, 0, [12]),
        (2, 0, [10, 12]),
        (1, 6, [6, 12]),
        (2, 4, [4, 8, 10, 12]),
        (9, 0, [2, 4, 6, 8, 10, 12]),
    ):
        folder = tmp_path / f"{nk}_{nm}"
        ran(*inputs(case), "-b 1 -t 8 -x 12 -n 2", QUIET, "-nk", nk, "-nm", nm, "-o", folder)
        names = {f"{kind}_{step:08d}{end}" for step in expected for kind, end in
                 (("DONE", ""), ("model", ".bin"), ("state", "_00000.bin"), ("extra", "_00000.json"))}  # fmt: skip
        assert {path.name for path in folder.iterdir()} == names | {"main.log", "speed.log", "memory.json"}, (nk, nm)


def test_rotation_goes_on_in_a_resumed_run(case, tmp_path):
    argv = [*inputs(case), "-b 1 -t 8 -n 2 -nk 2", QUIET, "-o", tmp_path]
    ran(*argv, "-x 4")
    ran(*argv, "-x 8 -y 1")
    assert steps_in(tmp_path) == [6, 8]


def xorshift_states(draws: int) -> list[int]:
    """Vigna's xorshift64* from llm.c's seed: the state before each draw, and after the last."""
    mask, x = 2**64 - 1, 13371337
    states = [x]
    for _ in range(draws):
        x ^= x >> 12
        x = (x ^ (x << 25)) & mask
        x ^= x >> 27
        states.append(x)
    return states


def test_the_state_file_is_llmc_s_read_with_struct_alone(case, tmp_path):
    """5 steps of 2 micro-steps: every field of the header and the section after the tensors, from the contract's offsets."""
    ran(*inputs(case), SMALL, "-x 5 -n 5 -o", tmp_path, QUIET)
    raw = (tmp_path / "state_00000005_00000.bin").read_bytes()
    header = struct.unpack_from("<256i", raw)
    assert header[:6] == (20240527, 1, 1, 0, 1, 1) and header[10] == 5
    # a step draws one seed for each micro-step's embedding and one for each of 16 tensors
    states = xorshift_states(5 * (2 + 16))
    assert struct.unpack_from("<QQ", raw, 80) == (states[-1], states[-17])
    shard_idx, sample_idx = struct.unpack_from("<QQ", raw, 120)
    known = {10, 20, 21, 22, 23, 30, 31, 32, 33}
    assert all(header[i] == 0 for i in range(6, 256) if i not in known)

    m, v, master = (np.frombuffer(raw, "<f4", N, 1024 + 4 * N * i) for i in range(3))
    model = (tmp_path / "model_00000005.bin").read_bytes()
    assert master.tobytes() == model[1024:], "an fp32 model is its own master"
    assert v.min() == 0 < v.max() and m.min() < 0 < m.max() and np.count_nonzero(m) == np.count_nonzero(v)
    padded = slice(CONFIG.vocab_size * CONFIG.channels, CONFIG.padded_vocab_size * CONFIG.channels)
    assert not m[padded].any() and not v[padded].any() and not master[padded].any()

    at = 1024 + 12 * N
    assert struct.unpack_from("<Q", raw, at) == (2,)
    shards = struct.unpack_from("<2i", raw, at + 8)
    assert sorted(shards) == [0, 1] and shard_idx == 0 and sample_idx == 10
    samples = (19, 13)[shards[0]]
    assert struct.unpack_from("<Q", raw, at + 16) == (samples,)
    order = struct.unpack_from(f"<{samples}i", raw, at + 24)
    assert sorted(order) == list(range(samples)) and list(order) != sorted(order)
    seed, left, following, *words = struct.unpack("<QiI624I2I", raw[at + 24 + 4 * samples :])
    assert (seed, words[624:]) == (42, [0, 0x9908B0DF]) and left + following == 625
    assert len(raw) == at + 24 + 4 * samples + 2520


def test_a_bf16_state_holds_a_master_that_rounds_to_the_weights(case, tmp_path):
    """The master is fp32 and not the weights; each weight is one of its two bf16 neighbours."""
    ran(*inputs(case), "-e", case / "bf16.bin", SMALL, "-x 3 -n 3 -o", tmp_path, QUIET)
    files = files_of(tmp_path, 3)
    master = np.frombuffer(files["state_00000003_00000.bin"], "<u4", N, 1024 + 8 * N)
    weights = np.frombuffer(files["model_00000003.bin"], "<u2", N, 1024).astype(np.uint32)
    up = weights - (master >> 16)
    assert ((up == 0) | (up == 1)).all() and 0.2 < up[master & 0xFFFF != 0].mean() < 0.8


# ----------------------------------------------------------------------------
# real signals, real processes


SIGNALLED = "-b 4 -t 32 -d 256 -l 3e-3 -x 60 -v 9 -m 2 -s 0"


@cache
def reference(case: Path, every: int) -> Path:
    """The folder of the straight run that the interrupted ones must end like."""
    folder = case / f"reference_{every}"
    ran(*inputs(case), SIGNALLED, "-n", every, "-nk 2 -o", folder)
    return folder


def start_anew(*argv) -> subprocess.Popen:
    """The program as a shell starts it. It does not outlive LONGEST_S."""
    words = words_of(["--device cpu --threads 1", *argv])
    process = subprocess.Popen(
        [sys.executable, "train_gpt2.py", *words], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whatever pytest was started with
    )  # fmt: skip
    watchdog = threading.Timer(LONGEST_S, process.kill)
    watchdog.daemon = True
    watchdog.start()
    return process


def start(*argv) -> Program:
    """The program in a process that is forked, where nothing hangs on how Python begins and ends."""
    return Program(train_gpt2.main, words_of(["--device cpu --threads 1", *argv]))


def interrupt(process, number: int, awaited: str, delay: float) -> tuple[int, str, str]:
    """Wait for a line that starts with `awaited`, and `delay` seconds more, then send the signal."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(awaited):
            break
    time.sleep(delay)
    process.send_signal(number)
    out, err = process.communicate()
    return process.returncode, "".join(lines) + out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_at_any_moment_stops_cleanly_and_the_run_goes_on(case, tmp_path, request, number):
    """The step is finished, the checkpoint of the steps done is written; the end is the straight run's. After a Ctrl-C the program ends as
    if it had not heard it: a shell would go on with its loop otherwise. Python, at whose end that happens, prints nothing."""
    chance = random.Random(request.node.name)
    argv = [*inputs(case), SIGNALLED, "-n 1000 -nk 2 -o", tmp_path]
    process, ended = (start_anew(*argv), -number) if number == signal.SIGINT else (start(*argv), 0)
    code, out, err = interrupt(process, number, f"step {chance.randint(1, 40):4d}/", chance.uniform(0, 0.03))
    assert (code, err) == (ended, "") and f"{number.name}: finishing this step" in out
    done = len(losses(out))
    assert steps_in(tmp_path) == [done] and 0 < done < 60
    assert len(re.findall("trl", (tmp_path / "main.log").read_text())) == done and timed_steps(tmp_path) == list(range(done))
    ran(*argv, "-y 1")
    assert_same_end(tmp_path, reference(case, 1000), 60)


class Interrupted(io.RawIOBase):
    """A stream, and whoever writes to it gets a SIGTERM meanwhile."""

    def writable(self):
        return True

    def write(self, content):
        os.kill(os.getpid(), signal.SIGTERM)
        return len(content)


def in_a_callback():
    """SIGINT where Python goes on after an exception, and another exception there, which alone it prints."""

    def callback(phase, info):
        if phase == "start":
            signal.raise_signal(signal.SIGINT)
        raise LookupError

    gc.callbacks.append(callback)
    gc.collect()
    gc.callbacks.remove(callback)


def as_another_error():
    """SIGINT in LLVM, as llvmlite tells it."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise RuntimeError("no compiled object yet for <Library '_multiply'>") from None


@pytest.mark.parametrize("interrupted", [in_a_callback, as_another_error])
def test_ctrl_c_before_the_first_step_is_not_lost(case, tmp_path, monkeypatch, interrupted):
    build_model, printed = train_gpt2.build_model, []

    def build(run):
        interrupted()
        build_model(run)

    monkeypatch.setattr(train_gpt2, "build_model", build)
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever pytest was started with
    try:
        done = run(*inputs(case), "-b 1 -t 8 -x 2 -n 1", QUIET, "-o", tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.code, done.err) == (130, "interrupted before the first step; no checkpoint has changed\n")
    assert not losses(done.out) and not steps_in(tmp_path)
    assert [unraisable.exc_type for unraisable in printed] == [LookupError] * (interrupted is in_a_callback)


def test_an_error_of_our_own_is_no_interrupt(case, monkeypatch):
    monkeypatch.setattr(train_gpt2, "build_model", MagicMock(side_effect=RuntimeError("ours")))
    with pytest.raises(RuntimeError, match="ours"):
        run(*inputs(case), "-b 1 -t 8 -x 2", QUIET)


@pytest.mark.parametrize("heard", [True, False])
def test_a_signal_inside_a_print_is_answered_all_the_same(capfd, monkeypatch, heard):
    """Also where nobody reads the answer any more."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(Interrupted())))
    if not heard:
        monkeypatch.setattr("llmc.interrupt.os", SimpleNamespace(write=MagicMock(side_effect=BrokenPipeError)))
    stop = StopRequest()
    try:
        print("step", flush=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    answer = "\nSIGTERM: finishing this step; once more after 5 s to stop at once\n"
    assert stop.agreed and capfd.readouterr().out == (answer if heard else "")


def test_a_run_ends_with_the_first_of_its_errors(monkeypatch):
    """The second may be no more than what comes of it."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which it replaces
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    stop, first = StopRequest(), ValueError("the shard is gone")
    for error in (first, ValueError("so is the log")):
        stop.cannot_go_on(error)
    assert stop.error is first and stop.requested and stop.agreed


@pytest.mark.parametrize("alone", [True, False])
def test_one_of_several_ranks_stops_only_once_all_have_agreed(monkeypatch, alone):
    """The others would wait for it in a collective that it leaves out."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which it replaces
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    stop = StopRequest(alone=alone)
    stop.cannot_go_on(ValueError("the shard is gone"))
    assert stop.requested and stop.agreed == alone


def signalled_twice(words) -> int:
    """The first signal, and a second one, at once or when that is no longer the first one passed on, while a library does not return."""
    first, second, later = map(int, words)
    interrupt_module.PASSED_ON_S = 0.3
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where the tests were started by nohup
    StopRequest()
    signal.raise_signal(first)
    threading.Timer(1.0 if later else 0.0, os.kill, (os.getpid(), second)).start()
    ctypes.CDLL(None).poll(None, 0, 2000)
    return 0


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize("first, second, later, ends", [
    (INT, INT, False, True), (TERM, INT, False, True), (HUP, INT, False, True), (TERM, TERM, True, True), (INT, TERM, True, True),
    (HUP, TERM, True, True), (TERM, TERM, False, False), (INT, TERM, False, False), (TERM, HUP, True, False), (HUP, HUP, True, False),
])  # fmt: skip
def test_a_second_signal_ends_a_run_at_once_unless_it_is_the_first_one_passed_on(first, second, later, ends):
    """By a launcher: Slurm at a time limit, systemd and others signal it and its processes, and then it signals them too."""
    process = Program(signalled_twice, [int(first), int(second), int(later)])
    out, err = process.communicate()
    assert (process.returncode, err) == (-second if ends else 0, "") and out.count("finishing this step") == 1


@pytest.mark.parametrize("flags, position", [
    ("-n 1000", 1500), ("-n 2 -nk 1 --async-checkpoint 1", 1500), ("-n 1000 -sl 5 -sg 5", 1500), ("-n 1000", 1100),
])  # fmt: skip
@pytest.mark.parametrize("asynchronous", [False, True])
def test_data_that_cannot_be_trained_on_end_a_run_with_a_checkpoint_and_once_mended_it_goes_on(
    case, tmp_path, monkeypatch, flags, position, asynchronous
):
    """The next step's tokens are checked before this one is the last, those of its second micro-step (1100) too; also as on a GPU, where a
    step is launched meanwhile."""
    data = shutil.copytree(case, tmp_path / "data")
    argv = [*inputs(data), SMALL, "-x 20 --kernels torch", QUIET, flags, "-o"]
    ran(*argv, tmp_path / "straight")
    good = (data / "train_02.bin").read_bytes()
    (data / "train_02.bin").write_bytes(token(position, 96)(good))
    monkeypatch.setattr(Backend, "asynchronous", asynchronous)
    broken = tmp_path / "broken"
    ended = run(*argv, broken)
    step = len(losses(ended.out))
    assert steps_in(broken)[-1] == step and 2 < step < 16 and ended.code == 2
    assert ended.err == (
        f"error: -i {data}/train_02.bin: token 96 at position {position} is outside the model's vocabulary of 96; prepare the data with "
        f"this model's tokenizer, or choose another model; step {step} is kept in {broken}: once that is mended, -y 1 goes on there\n"
    )
    assert run(*argv, broken, "-y 1").err.startswith("error: -i") and steps_in(broken)[-1] == step
    (data / "train_02.bin").write_bytes(good)
    ran(*argv, broken, "-y 1")
    assert_same_end(broken, tmp_path / "straight", 20)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_validation_data_that_cannot_be_read_cost_no_step_either(case, tmp_path, monkeypatch, asynchronous):
    """The first validation of a run that has a resume behind it may come after many steps."""
    data = shutil.copytree(case, tmp_path / "data")
    argv = [*inputs(data), SMALL, "-v 50 -m -1 -s 0 --kernels torch -n 100 -o"]
    ran(*argv, tmp_path / "straight", "-x 5")
    monkeypatch.setattr(Backend, "asynchronous", asynchronous)
    broken = shutil.copytree(tmp_path / "straight", tmp_path / "broken")
    ran(*argv, tmp_path / "straight", "-x 9 -y 1")
    good = (data / "val.bin").read_bytes()
    (data / "val.bin").write_bytes(token(600, 96)(good))
    ended = run(*argv, broken, "-x 9 -y 1")
    assert ended.code == 2 and "-j" in ended.err and "val.bin: token 96 at position 600" in ended.err
    assert len(losses(ended.out)) == 4 and ended.err.endswith(f"; step 9 is kept in {broken}: once that is mended, -y 1 goes on there\n")
    fresh = run(*argv, tmp_path / "fresh", "-x 9")
    assert fresh.code == 2 and "token 96 at position 600" in fresh.err and "is kept" not in fresh.err and not losses(fresh.out)
    (data / "val.bin").write_bytes(good)
    ran(*argv, broken, "-x 9 -y 1")
    assert_same_end(broken, tmp_path / "straight", 9)


def lost(shard: Path):
    """Take a shard away; what gives it back."""
    shard.rename(shard.with_name("away"))
    return lambda: shard.with_name("away").rename(shard)


def cut(shard: Path):
    """Cut a shard short where it lies, as whoever has it open sees it; what makes it whole again."""
    whole = shard.read_bytes()
    os.truncate(shard, 1100)
    return lambda: shard.write_bytes(whole)


def not_opened(shard: Path):
    """Let the system refuse to open a shard, when what it says of itself was read; what makes it open it again."""

    def refuse(path, *args, **kwargs):
        if Path(path) == shard:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return open(path, *args, **kwargs)

    patched = pytest.MonkeyPatch()
    patched.setattr("llmc.files.open", refuse, raising=False)
    patched.setattr("llmc.data.shards.read_header", lambda path, magic: np.fromfile(path, "<i4", 256))
    return patched.undo


@pytest.mark.parametrize(
    "shard, damage, words, flags",
    [
        ("train_01.bin", lost, "does not exist", ""),
        ("train_01.bin", cut, "truncated by", ""),
        ("train_02.bin", cut, "cut short", ""),  # which is open then
        ("val.bin", lost, "does not exist", "-v 4 -m 2"),
        ("val.bin", cut, "truncated by", "-v 4 -m 2"),
        ("val.bin", not_opened, "cannot be read .Too many open files", "-v 4 -m 2"),
    ],
)
def test_a_shard_that_is_gone_or_cut_costs_no_step_and_once_it_is_back_the_run_goes_on(case, tmp_path, shard, damage, words, flags):
    """Training opens one when it enters it, validation each time."""
    data = shutil.copytree(case, tmp_path / "data")
    argv = [*inputs(data), SMALL, QUIET, "-x 20 -n 100 --kernels torch", flags, "-o"]
    ran(*argv, tmp_path / "straight")
    broken = tmp_path / "broken"
    mend = []
    ended = run(*argv, broken, after_step=lambda done: done == 2 and mend.append(damage(data / shard)))
    step = len(losses(ended.out))
    assert ended.code == 2 and re.fullmatch(f"error: .*{shard} .*({words}).*; step {step} is kept in .*\n", ended.err), ended.err
    assert 2 <= step < 20 and steps_in(broken) == [step]
    mend[0]()
    ran(*argv, broken, "-y 1")
    assert_same_end(broken, tmp_path / "straight", 20)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_validation_whose_data_is_cut_in_its_middle_costs_no_step(case, tmp_path, monkeypatch, asynchronous):
    """What was read of it is computed; the next reading ends the run after a checkpoint. A GPU's reads eight batches at a time."""
    monkeypatch.setattr(Backend, "asynchronous", asynchronous)
    monkeypatch.setattr("train_gpt2.CALLS_PER_STOP_CHECK", {"cpu": 8 if asynchronous else 1})
    data = shutil.copytree(case, tmp_path / "data")
    argv = [*inputs(data), SMALL, "-b 1 -t 16 -d 32 -v 4 -m 20 -s 0 -x 9 -n 100 --kernels torch -o"]
    ran(*argv, tmp_path / "straight")
    broken, computed, mend = tmp_path / "broken", [], []
    token_losses = GPT2.token_losses

    def cut_meanwhile(*args):
        computed.append(args)
        if len(computed) == 23:  # the third batch of the validation at step 4
            mend.append(cut(data / "val.bin"))
        return token_losses(*args)

    with monkeypatch.context() as patched:
        patched.setattr(GPT2, "token_losses", cut_meanwhile)
        ended = run(*argv, broken)
    assert ended.code == 2 and re.search(r"val.bin cannot be read.*cut short.*; step 4 is kept in", ended.err), ended.err
    assert len(computed) == 20 + (8 if asynchronous else 3) + 1 and ended.out.count("val loss") == 1
    mend[0]()
    ran(*argv, broken, "-y 1")
    assert_same_end(broken, tmp_path / "straight", 9)


@pytest.mark.parametrize("name, left", [("model_00000002.bin", 5000), ("state_00000002_00000.bin", 900_000), ("model_00000002.bin", 0)])
def test_a_checkpoint_that_is_cut_after_its_check_is_refused_and_stays_what_it_is(case, tmp_path, monkeypatch, name, left):
    """Its weights and moments are read long after its sizes are, on a slow disk; what was not read must not be taken for numbers."""
    argv = [*inputs(case), SMALL, QUIET, "-n 2 --kernels torch -o", tmp_path]
    ran(*argv, "-x 2")
    before, fill = but_record(tmp_path), snapshot.fill

    def cut_before(*args):
        os.truncate(tmp_path / name, left)
        fill(*args)

    monkeypatch.setattr(snapshot, "fill", cut_before)
    ended = run(*argv, "-x 4 -y 1")
    assert ended.code == 2 and re.fullmatch(f"error: {tmp_path / name} cannot be read .*: it was cut short, or .*\n", ended.err), ended.err
    before[name] = before[name][:left]
    assert but_record(tmp_path) == before


def test_one_batch_that_is_not_trained_on_is_not_read(case, tmp_path):
    data = shutil.copytree(case, tmp_path / "data")
    (data / "val.bin").write_bytes(token(0, 96)((data / "val.bin").read_bytes()))
    argv = [*inputs(data), SMALL, "-v 0 -s 1 -g 3 -a 1 --kernels torch"]
    assert "generating:" in ran(*argv, "-x 0")
    ended = run(*argv, "-x 1")
    assert ended.code == 2 and "val.bin: token 96 at position 0" in ended.err


def test_one_batch_again_and_again_does_not_need_its_file_any_more(case, tmp_path):
    """Gone or cut short, of several micro-steps."""
    data = shutil.copytree(case, tmp_path / "data")
    argv = [*inputs(data), SMALL, QUIET, "-b 2 -x 6 -n 100 -a 1 --kernels torch -o"]
    ran(*argv, tmp_path / "straight")
    ran(*argv, tmp_path / "cut", after_step=lambda done: done == 2 and cut(data / "val.bin"))
    assert_same_end(tmp_path / "cut", tmp_path / "straight", 6)
    shutil.copy(case / "val.bin", data)
    ran(*argv, tmp_path / "gone", after_step=lambda done: done == 2 and (data / "val.bin").unlink())
    assert_same_end(tmp_path / "gone", tmp_path / "straight", 6)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_first_step_that_cannot_be_trained_ends_a_run_that_has_lost_nothing(case, tmp_path, resumed):
    data, folder = shutil.copytree(case, tmp_path / "data"), tmp_path / "log"
    argv = [*inputs(data), SMALL, QUIET, "--kernels torch -n 2 -y 1 -o", folder]
    if resumed:
        ran(*argv, "-x 2")
    before = but_record(folder) if resumed else {"main.log": b"", "speed.log": b""}
    for path in data.glob("train_*.bin"):
        raw = path.read_bytes()
        path.write_bytes(raw[:1024] + b"\x60\0" * (len(raw) // 2 - 512))
    ended = run(*argv, "-x 9")
    assert ended.code == 2 and "is outside the model's vocabulary" in ended.err and not losses(ended.out)
    assert ("; step 2 is kept in" in ended.err) == resumed and but_record(folder) == before


@pytest.mark.parametrize("ends", ["bad data", "a signal", "a signal in its last batch", "a missing file"])
def test_a_run_that_ends_before_its_first_step_leaves_the_folder_as_it_was(case, tmp_path, monkeypatch, ends):
    """That of an earlier run, which it would have replaced."""
    data, folder = shutil.copytree(case, tmp_path / "data"), tmp_path / "log"
    argv = [*inputs(data), SMALL, "-v 4 -s 0 --kernels torch -o", folder, "-m", 1 if "last" in ends else 2]
    ran(*argv, "-x 4 -n 2")
    before = everything_in(folder)
    if ends == "bad data":
        for path in data.glob("train_*.bin"):
            path.write_bytes(path.read_bytes()[:1024] + b"\x60\0" * (path.stat().st_size // 2 - 512))
    elif ends == "a missing file":
        (data / "val.bin").unlink()
    else:
        losses_of = GPT2.token_losses
        monkeypatch.setattr(GPT2, "token_losses", lambda *args: (signal.raise_signal(signal.SIGTERM), losses_of(*args))[1])
    ended = run(*argv, "-x 9")
    assert ended.code == (143 if "signal" in ends else 2) and not losses(ended.out)
    assert everything_in(folder) == before


def test_a_resumed_run_that_is_stopped_before_its_first_step_has_ended_well(case, tmp_path, monkeypatch):
    """Its weights are those of a checkpoint, so there is nothing that was not trained."""
    argv = [*inputs(case), SMALL, "-v 2 -m 2 -s 0 --kernels torch -n 2 -o", tmp_path]
    ran(*argv, "-x 2")
    before = files_of(tmp_path, 2)
    losses_of, once = GPT2.token_losses, iter([signal.SIGTERM])
    monkeypatch.setattr(GPT2, "token_losses", lambda *args: ([signal.raise_signal(number) for number in once], losses_of(*args))[1])
    out = ran(*argv, "-x 9 -y 1")
    assert not losses(out) and files_of(tmp_path, 2) == before and steps_in(tmp_path) == [2]


def test_a_run_that_goes_on_with_other_flags_says_so(case, tmp_path):
    """Of those that change its numbers, against what the checkpoint says; -x is meant to change."""
    argv = [*inputs(case), "-b 4 -t 32 -n 2 -c 0.1", QUIET, "-o", tmp_path]
    ran(*argv, "-x 2 -l 1e-4 -k linear -q 0")
    assert "the checkpoint was written with" not in ran(*argv, "-x 4 -l 1e-4 -k linear -q 0 -y 1")
    out = ran(*argv, "-x 6 -y 1 -k linear -b 2 -d 256")
    line = "note: the checkpoint was written with -l 0.0001 -q 0.0 -d 128, and the run goes on with -l 0.0003 -q 1.0 -d 256\n"
    assert line in out and "the checkpoint was written with" not in ran(*argv, "-x 7 -y 1 -k linear -b 2 -d 256")


@pytest.mark.parametrize("flags, damage, said", [
    ("-a 1", None, "resume with the -a"), ("", lambda text: text.replace('"loss_outliers"', '"losses"'), "lacks loss_outliers"),
])  # fmt: skip
def test_a_checkpoint_that_cannot_be_gone_on_from_is_refused_before_the_model_is_made(case, tmp_path, flags, damage, said):
    """Which for a large one takes minutes, as reading its tensors does."""
    argv = [*inputs(case), SMALL, QUIET, "-n 2 -o", tmp_path]
    ran(*argv, "-x 2")
    extra = tmp_path / "extra_00000002_00000.json"
    if damage:
        extra.write_text(damage(extra.read_text()))
    refused = run(*argv, "-x 4 -y 1", flags)
    assert refused.code == 2 and said in refused.err and "allocating" not in refused.out


def test_a_folder_that_another_run_writes_is_refused_and_left_alone(case, tmp_path):
    argv = [*inputs(case), SMALL, QUIET, "-x 60 -n 1000 -o", tmp_path]
    process = start(*argv)
    for line in process.stdout:
        if line.startswith("step    2/"):
            break
    process.send_signal(signal.SIGSTOP)
    try:
        before = everything_in(tmp_path)
        for more in ("", "-y 1"):
            ended = run(*argv, more)
            assert ended.code == 2 and f"error: {tmp_path} is being written by process {process.pid} on " in ended.err, ended.err
        assert everything_in(tmp_path) == before
    finally:
        process.kill()
    process.communicate()
    assert "step    2/" in ran(*argv, "-x 2"), "who is gone holds nothing"


def test_a_checkpoint_is_looked_for_when_no_other_run_can_write_one_any_more(case, tmp_path, monkeypatch):
    argv = [*inputs(case), SMALL, QUIET, "-n 1 -nk 1 -o", tmp_path]
    ran(*argv, "-x 1")
    finds, refused = train_gpt2.find_source, []

    def late(settings):
        monkeypatch.undo()
        refused.append(run(*argv, "-x 3 -y 1").err)
        return finds(settings)

    monkeypatch.setattr(train_gpt2, "find_source", late)
    assert "resuming at step 1" in ran(*argv, "-x 4 -y 1") and len(refused) == 1
    assert f"{tmp_path} is being written by process {os.getpid()}" in refused[0]


def test_a_higher_checkpoint_of_an_earlier_run_is_named_where_y_1_would_take_it(case, tmp_path):
    data, folder = shutil.copytree(case, tmp_path / "data"), tmp_path / "log"
    argv = [*inputs(data), SMALL, QUIET, "--kernels torch -x 20 -o", folder]
    ran(*argv, "-n 20")
    ended = run(*argv, after_step=lambda done: done == 2 and cut(data / "train_02.bin"))
    step = len(losses(ended.out))
    kept = f"; step {step} is kept in {folder}: once that is mended, -y 1 goes on there, if DONE_00000020 of an earlier run is moved away\n"
    assert ended.code == 2 and ended.err.endswith(kept) and steps_in(folder) == [step, 20]


def test_a_run_without_standard_output_trains_and_hears_signals(case, tmp_path):
    """Nor standard input, nor errors: none of its files may take their numbers, which others print to."""
    argv = [*inputs(case), SIGNALLED, "-n 1000 -o"]
    command = [sys.executable, "train_gpt2.py", *words_of([*argv, tmp_path / "log"])]
    process = subprocess.Popen(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *command], cwd=REPO)
    try:
        deadline = time.monotonic() + LONGEST_S
        while not (tmp_path / "log" / "speed.log").exists() or len(timed_steps(tmp_path / "log")) < 5:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        assert process.wait(timeout=LONGEST_S) == 0
    finally:
        process.kill()
    done = len(timed_steps(tmp_path / "log"))
    assert steps_in(tmp_path / "log") == [done] and 5 <= done < 60
    ran(*argv, tmp_path / "log", "-y 1")
    assert_same_end(tmp_path / "log", reference(case, 1000), 60)


def test_a_run_that_nobody_reads_any_more_leaves_a_checkpoint_and_goes_on_from_there(case, tmp_path):
    """As `| head` does it: exit code 1, and no word on stderr. The end is the straight run's."""
    argv = [*inputs(case), SIGNALLED, "-n 1000 -nk 2 -o", tmp_path]
    process = start_anew(*argv)
    for line in process.stdout:
        if line.startswith("step    7/"):
            break
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=LONGEST_S)) == ("", 1)
    done = len(timed_steps(tmp_path))
    assert steps_in(tmp_path) == [done] and 7 <= done < 60
    ran(*argv, "-y 1")
    assert_same_end(tmp_path, reference(case, 1000), 60)


def test_a_full_disk_under_what_is_printed_ends_a_run_with_a_checkpoint_and_a_sentence(case, tmp_path, monkeypatch):
    failures = []

    class Full(io.StringIO):
        def write(self, text):
            if text.startswith("step    3/") and not failures:  # then nobody is told any more
                failures.append(text)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(text)

    monkeypatch.setattr("llmc.interrupt.print_nothing_more", lambda: None)  # pytest has use for this process's descriptor
    monkeypatch.setattr("test_loop.io", SimpleNamespace(StringIO=Full))
    done = run(*inputs(case), SMALL, "-x 9", QUIET, "-o", tmp_path)
    assert (done.code, done.err) == (1, "error: printing failed: No space left on device; send the output elsewhere, or make room\n")
    assert steps_in(tmp_path) == [3] and "total average iteration time" in done.out


@pytest.mark.parametrize("ignored", [False, True], ids=["", "nohup"])
def test_a_closed_terminal_leaves_a_checkpoint_and_ends_no_run_that_ignores_it(case, tmp_path, ignored):
    """A terminal of its own, whose other side is closed: the kernel sends SIGHUP, and what is printed from then on fails."""
    ours, its = pty.openpty()

    def as_a_session():
        os.setsid()
        fcntl.ioctl(its, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    words = words_of(["--device cpu --threads 1", *inputs(case), SIGNALLED, "-n 1000 -o", tmp_path])
    log = tmp_path / "log"  # as nohup has it
    with log.open("wb") if ignored else os.fdopen(os.dup(its), "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "train_gpt2.py", *words], cwd=REPO, stdin=its, stdout=out, stderr=out, preexec_fn=as_a_session
        )
    os.close(its)
    seen = b""
    while b"step    4/" not in seen:
        assert process.poll() is None
        time.sleep(0.01)
        seen = log.read_bytes() if ignored else seen + os.read(ours, 1 << 16)
    os.close(ours)
    process.wait(timeout=120)
    done = len(timed_steps(tmp_path))
    assert process.returncode == 0 and steps_in(tmp_path) == [done]
    assert done == 60 if ignored else 4 <= done < 60


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_in_a_long_validation_does_not_wait_for_its_end(case, tmp_path, number):
    """Validation of a million batches, two hours: stopped within a batch, nothing is logged. Before the first step nothing is to be saved,
    which 0 would promise."""
    argv = [*inputs(case), "-b 4 -t 32 -x 3 -v 1 -m 1000000 -n 1 -s 0 -o", tmp_path]
    code, out, err = interrupt(start(*argv), number, " -> estimated", 0.3)
    assert (code, err) == (128 + number, "interrupted before the first step; no checkpoint has changed\n")
    assert "val loss" not in out and not losses(out)
    assert f"{number.name}: finishing this step" in out and steps_in(tmp_path) == []
    assert (tmp_path / "main.log").read_text() == (tmp_path / "speed.log").read_text() == ""


def test_ctrl_c_before_the_loop_ends_without_a_traceback(case, tmp_path):
    """While the device is measured or the model built; 130 is what a shell reports for SIGINT."""
    process = start(*inputs(case), SIGNALLED, "-o", tmp_path)
    code, _, err = interrupt(process, signal.SIGINT, "+--", 0.1)
    assert code == 130 and "Traceback" not in err and not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc to watch torch being imported in")
def test_ctrl_c_while_torch_is_imported_ends_without_a_traceback(case, tmp_path):
    """That comes before the first line is printed."""
    process = start_anew(*inputs(case), SIGNALLED, "-o", tmp_path)
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LONGEST_S)
    assert (process.returncode, out) == (-signal.SIGINT, "") and "Traceback" not in err and not list(tmp_path.iterdir())


def test_a_signal_while_the_terminal_is_stuck_does_not_end_in_a_traceback(case, tmp_path):
    """A full pipe blocks print; the handler must not print through the same buffer."""
    process = start(*inputs(case), "-b 1 -t 8 -x 100000 -v 0 -s 1 -g 64 -o", tmp_path)
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # the smallest: full after a few steps
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step "):
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)  # the handler runs while print still waits
    out, err = process.communicate()
    out = "".join(lines) + out
    assert (process.returncode, err) == (0, "") and "SIGTERM: finishing this step" in out and steps_in(tmp_path) == [len(losses(out))]


def kill_thrice(chance, folder, argv, *writing, most) -> int:
    """SIGKILL at random moments, `most` steps apart at most, of a run with the flags `writing`; each time the newest DONE must load, in
    a copy. The step that was reached."""
    reached = 0
    for _ in range(3):
        process = start(*argv, *writing, "-o", folder)
        code, _, err = interrupt(process, signal.SIGKILL, f"step {reached + chance.randint(3, most):4d}/", chance.uniform(0, 0.03))
        assert (code, err) == (-signal.SIGKILL, "")
        newest = max(steps_in(folder))
        assert newest > reached
        reached = newest
        copy = folder.with_name(f"copy_{reached}")
        shutil.copytree(folder, copy)
        assert f"resuming at step {reached}" in ran(*argv, "-y 1 -n 0 -x", reached, "-o", copy)
    return reached


def test_killed_again_and_again_the_newest_checkpoint_is_whole(case, tmp_path, request):
    """SIGKILL at random moments of a run that always writes; each time the newest DONE loads, and the end is the straight run's."""
    folder, argv = tmp_path / "log", [*inputs(case), SIGNALLED]
    assert kill_thrice(random.Random(request.node.name), folder, argv, "-n 1 -nk 2 -y 1", most=14) < 60
    ran(*argv, "-n 1 -nk 2 -y 1 -o", folder)
    assert_same_end(folder, reference(case, 1), 60)
    assert steps_in(folder) == [59, 60], "a crash leaves no old checkpoint behind"


# forks a child for each call that changes the disk, and kills it there: before the call, or in the middle of it. The first run is so that
# they find everything imported
KILLER = """
import contextlib, os, signal, sys
import torch, train_gpt2
from pathlib import Path

folder, argv = sys.argv[1], sys.argv[2:]
train_gpt2.measure_matmul_tflops = lambda *_: 1.0

def child(fatal):
    calls = 0
    def deadly(real):
        def call(*arguments, **keywords):
            nonlocal calls
            calls += 1
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)
        return call
    os.fsync, os.replace, Path.unlink = deadly(os.fsync), deadly(os.replace), deadly(Path.unlink)
    sys.stdout = open(os.devnull, "w")
    os._exit(train_gpt2.main([*argv, "-o", f"{folder}/{fatal}"]))

with contextlib.redirect_stdout(None):
    assert train_gpt2.main([*argv, "-o", f"{folder}/first"]) == 0
fatal = 1
while True:
    pid = os.fork()
    if not pid:
        child(fatal)
    status = os.waitpid(pid, 0)[1]
    if not os.WIFSIGNALED(status):
        print(fatal, os.waitstatus_to_exitcode(status))
        break
    fatal += 1
"""


def killed_before_each_call(folder, argv, timeout_s=120) -> list[int]:
    """Run argv to step 2, killed before each fsync, rename and removal in turn; the checkpoint that each left. Each goes on to the files
    of a run that was never killed."""
    straight = folder / "straight"
    ran(*argv, "-o", straight)
    words = words_of([folder, "--device cpu --threads 1", *argv])
    result = subprocess.run([sys.executable, "-c", KILLER, *words], cwd=REPO, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, result.stderr
    points, code = map(int, result.stdout.split())
    # 2 checkpoints of 4 files and the record of start, first step, checkpoint and end, each synced, renamed and synced again, and 1 removed
    assert code == 0 and points > 39
    seen = []
    for left in (folder / str(fatal) for fatal in range(1, points)):
        before = max(steps_in(left), default=0)
        if (left / "memory.json").exists():
            assert phases(left)[0] == ("build", 0), "it is whole at any time"
        out = ran(*argv, "-y 1", "-o", left)
        assert ("resuming at step" in out) == (before > 0) and len(losses(out)) == 2 - before
        assert_same_end(left, straight, 2)
        names = {path.name for path in left.iterdir()}
        assert names - {"main.log.1", "speed.log.1"} == {path.name for path in straight.iterdir()}  # of steps before a checkpoint
        seen.append(before)
    return seen


def test_killed_before_any_single_call_that_changes_the_disk_a_run_goes_on(case, tmp_path):
    """Two checkpoints with -nk 1. A checkpoint that is marked done is never lost."""
    seen = killed_before_each_call(tmp_path, [*inputs(case), "-b 1 -t 8 -x 2 -n 1 -nk 1 --kernels torch", QUIET])
    assert seen == sorted(seen) and set(seen) == {0, 1, 2}


def test_a_disk_call_list_that_changes_is_noticed():
    """The killer patches what write_atomically and delete call; if they call something else, the test above watches nothing."""
    names = ("files.py", "checkpoint/store.py", "checkpoint/snapshot.py", "memory/record.py")
    text = "".join((REPO / "llmc" / name).read_text() for name in names)
    assert set(re.findall(r"(?:os|shutil)\.(fsync|replace|rename|unlink|remove|rmtree)\b", text)) == {"fsync", "replace"}
