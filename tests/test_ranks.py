"""Several ranks as their user sees them: the same files at every -z, stops, resumes by any number of ranks, refusals."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from case_a import CONFIG, EVAL_EXAMPLES, write_case_a
from conftest import REPO
from ranks import environment
from ranks_program import LONGEST_S, ran, start
from test_errors import another_bit, token
from test_loop import inputs, losses, words_of
from test_resume import keep_only, steps_in

import train_gpt2
from llmc.checkpoint import snapshot, writer
from llmc.memory.tables import PARAMETERS, num_parameters, parameter_shapes

N = num_parameters(CONFIG)
COMMON = "-t 32 -l 3e-3 -u 3 -q 0.1 -c 0.1 --kernels torch"


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Path:
    return write_case_a(tmp_path_factory.mktemp("case_a"))


def state_tensors(folder, step, rank, n=1) -> list[np.ndarray]:
    """m, v and master of a state file, which holds an n-th of them."""
    return np.split(np.fromfile(folder / f"state_{step:08d}_{rank:05d}.bin", "<f4", 3 * N // n, offset=1024), 3)


def share_of(flat, rank, n) -> np.ndarray:
    """llm.c's: of each layer of each tensor the rank's n-th."""
    parts, at = [], 0
    for p, shape in zip(PARAMETERS, parameter_shapes(CONFIG).values()):
        size = int(np.prod(shape))
        parts.append(flat[at : at + size].reshape(shape[0] if p.per_layer else 1, n, -1)[:, rank].ravel())
        at += size
    return np.concatenate(parts)


def files(folder, *names) -> list[bytes]:
    return [(folder / name).read_bytes() for name in names]


# ----------------------------------------------------------------------------
# files and numbers


FLAGS = "-b 2 -x 4 -n 4 -v 2 -m 2 -s 2 -g 6"


@pytest.fixture(scope="module")
def stages(case, tmp_path_factory):
    """(folder, what was printed) of two ranks at -z 0, 1, 2 and 3."""
    runs = []
    for z in range(4):
        folder = tmp_path_factory.mktemp(f"z{z}")
        runs.append((folder / "log", ran(2, folder, *inputs(case), COMMON, FLAGS, "-z", z, "-r", (1, 0, 6, 2)[z], "-o", folder / "log")))
    return runs


def numbers_of(out) -> list[str]:
    """Every loss, norm and rate of steps and validations, and samples, as printed."""
    samples = re.findall(r"generating:\n---\n.*?\n---", out, re.S)
    return re.findall(r"^(?:step .*? lr \S+|val loss \S+)", out, re.M) + samples


def test_every_stage_prints_the_same_numbers_and_writes_the_same_model_and_log(stages):
    (first, printed), *others = stages
    assert len(numbers_of(printed)) == 4 + 3 + 2
    for folder, out in others:
        assert numbers_of(out) == numbers_of(printed)
        assert files(folder, "model_00000004.bin", "main.log") == files(first, "model_00000004.bin", "main.log")
    for z, (folder, out) in enumerate(stages):
        assert "| num_processes         | 2 " in out and f"| zero_stage            | {z} " in out
        assert "| total batch size      | 128 " in out and "=> setting grad_accum_steps=1\n" in out
        assert "batch_size B=2 * seq_len T=32 * num_processes=2 and total_batch_size=128\n" in out
        names = {"main.log", "speed.log", "memory.json", "model_00000004.bin", "DONE_00000004"}
        assert {path.name for path in folder.iterdir()} == names | {
            f"{kind}_00000004_{rank:05d}.{end}" for kind, end in (("state", "bin"), ("extra", "json")) for rank in (0, 1)
        }


def test_speed_log_counts_the_tokens_of_all_ranks(stages):
    for folder, _ in stages:
        steps = re.findall(r"^s:\d+ ms:(\S+) tok/s:(\S+)$", (folder / "speed.log").read_text(), re.M)
        assert len(steps) == 4
        for ms, tokens in steps:
            assert float(tokens) == pytest.approx(128 / float(ms) * 1e3, rel=1e-2)


def test_a_sample_without_a_validation_before_it_is_of_the_step_s_own_weights(case, tmp_path):
    """At -z 3 too, where nobody but the sample asks for them."""
    outs = [ran(2, tmp_path / str(z), *inputs(case), COMMON, "-b 2 -x 3 -v 0 -s 1 -g 8 -l 1e-2 -z", z) for z in (0, 3)]
    assert numbers_of(outs[0]) == numbers_of(outs[1]) and outs[0].count("generating:") == 3


def test_from_stage_1_on_a_rank_s_state_file_is_llmc_s_share_of_each_layer(stages):
    """At stage 0 both hold everything."""
    (first, _), *others = stages
    whole = state_tensors(first, 4, 0)
    assert all(map(np.array_equal, whole, state_tensors(first, 4, 1)))
    for folder, _ in others:
        for rank in (0, 1):
            shares = state_tensors(folder, 4, rank, 2)
            assert all(np.array_equal(share, share_of(tensor, rank, 2)) for share, tensor in zip(shares, whole))
            raw, of_whole = (at / f"state_00000004_{rank:05d}.bin" for at in (folder, first))
            header = np.fromfile(raw, "<i4", 256)
            assert header[:6].tolist() == [20240527, 1, 2, rank, 1, 1] and np.array_equal(header, np.fromfile(of_whole, "<i4", 256))
            assert raw.read_bytes()[1024 + 6 * N :] == of_whole.read_bytes()[1024 + 12 * N :], "the loader's section"


def test_torchrun_s_ranks_are_those_of_the_flags(case, stages, tmp_path):
    argv = words_of([*inputs(case), COMMON, FLAGS, "-z 2 --device cpu --threads 1 -o", tmp_path / "log"])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train_gpt2.py"]
    done = subprocess.run([*torchrun, *argv], cwd=REPO, env=environment(), capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode == 0 and numbers_of(done.stdout) == numbers_of(stages[2][1]), done.stderr
    names = ("model_00000004.bin", "main.log", "state_00000004_00000.bin", "state_00000004_00001.bin")
    assert files(tmp_path / "log", *names) == files(stages[2][0], *names)


def test_several_micro_steps_log_what_one_rank_logs_of_the_same_tokens(case, tmp_path):
    """-a 1 reads data in order: one rank's -b 4 is two ranks' -b 2. Losses are printed to 6 digits, norms to 4."""
    argv = [*inputs(case), COMMON, "-d 256 -a 1 -x 5 -v 0 -s 0"]
    outs = [ran(1, tmp_path / "one", *argv, "-b 4"), *(ran(2, tmp_path / f"two{z}", *argv, "-b 2 -z", z) for z in (0, 2))]
    for out in outs[1:]:
        assert "=> setting grad_accum_steps=2\n" in out
        found, expected = (np.array(re.findall(r"loss (\S+) .*? norm (\S+) ", text), float) for text in (out, outs[0]))
        assert len(found) == 5 and (abs(found - expected) <= [[2e-6, 2e-4]]).all()
    assert numbers_of(outs[1]) == numbers_of(outs[2])


def test_shares_of_an_evaluation_that_are_not_equal_give_what_one_rank_finds(case, tmp_path):
    """50 examples on three ranks, which do not divide C either; -x 0 only evaluates."""
    argv = [*inputs(case), COMMON, "-x 0 -v 1 -m 3 -s 0 -h 1 --hellaswag-data", case / "eval.bin"]
    outs = [ran(1, tmp_path / "one", *argv, "-b 6"), ran(3, tmp_path / "three", *argv, "-b 2")]
    scores = [re.findall(r"^HellaSwag: (\d+)/(\d+)", out, re.M) for out in outs]
    assert scores[0] == scores[1] and scores[0][0][1] == str(EVAL_EXAMPLES)
    found = [float(*re.findall(r"^val loss (\S+)", out, re.M)) for out in outs]
    assert abs(found[0] - found[1]) <= 2e-6


# ----------------------------------------------------------------------------
# stopping and going on


LONG = "-b 2 -x 30 -n 30 -v 10 -m 1 -s 0"


@pytest.mark.parametrize("number, whom, z", [(signal.SIGTERM, [1], 2), (signal.SIGTERM, [0], 3), (signal.SIGINT, [0, 1], 1)])
def test_asked_to_stop_all_ranks_write_one_checkpoint_and_go_on_from_it_to_the_same_bytes(case, tmp_path, number, whom, z):
    argv = [*inputs(case), COMMON, LONG, "-z", z]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    ran(2, tmp_path / "a", *argv, "-o", straight)
    ranks = start(2, tmp_path / "b", *argv, "-o", stopped)
    ranks.await_line("step    3/30")
    for rank in whom:
        os.kill(ranks.processes[rank].pid, number)
    ended = ranks.ended()
    assert [(rank.code, rank.err) for rank in ended] == [(130 if number == signal.SIGINT else 0, "")] * 2
    done = len(losses(ended[0].out))
    assert steps_in(stopped) == [done] and done < 30
    ran(2, tmp_path / "c", *argv, "-y 1 -o", stopped)
    names = ("main.log", "model_00000030.bin", *(f"{kind}_00000030_0000{rank}.{end}" for kind, end in (("state", "bin"), ("extra", "json"))
             for rank in (0, 1)))  # fmt: skip
    assert files(stopped, *names) == files(straight, *names)


def asked_in_a_checkpoint():
    """Rank 1, and nobody else."""
    real = train_gpt2.checkpoint

    def checkpoint(run, step):
        real(run, step)
        if run.world.rank == 1:
            signal.raise_signal(signal.SIGTERM)

    train_gpt2.checkpoint = checkpoint


def test_asked_to_stop_in_a_checkpoint_all_ranks_stop_with_that_one(case, tmp_path):
    argv = [*inputs(case), COMMON, "-b 2 -x 6 -n 2 -v 0 -s 0 -o", tmp_path / "log"]
    ended = start(2, tmp_path, *argv, prepare=asked_in_a_checkpoint).ended()
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * 2
    assert len(losses(ended[0].out)) == 2 and steps_in(tmp_path / "log") == [2]


def endless_evaluations():
    """From step 2 on, a million batches each; and NCCL's watch, with more patience for what stands still than for a beat."""
    for name in ("validate", "score_hellaswag"):
        setattr(train_gpt2, name, partial(endless, getattr(train_gpt2, name)))
        getattr(train_gpt2, name).__name__ = name


PATIENCE_S = 4


def endless(real, run, step):
    if step == 2:
        judge = run.world.watch.judge
        judge.waits_silently, judge.timeout_s = True, PATIENCE_S
        if run.data.eval_loader:
            run.data.eval_loader.num_batches = 10**6
        else:
            run.data = replace(run.data, val_batches=10**6)
        print("from here on", flush=True)
    real(run, step)


@pytest.mark.parametrize("n, flags, whom", [
    (2, "-z 3", 1), (3, "-h 1 --hellaswag-data {eval}", 2), (2, "--tensor-parallel 2 --kernels numba", 1),
])  # fmt: skip
def test_a_signal_in_a_long_evaluation_does_not_wait_for_its_end_nor_for_a_step(case, tmp_path, n, flags, whom):
    """Also where shares of the examples differ. Until then nobody takes the evaluation, in which no step ends, for a hang."""
    argv = [*inputs(case), COMMON, "-b 2 -x 4 -n 4 -v 2 -m 2 -s 0", flags.format(eval=case / "eval.bin")]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    ran(n, tmp_path / "a", *argv, "-o", straight)
    ranks = start(n, tmp_path / "b", *argv, "-o", stopped, prepare=endless_evaluations)
    ranks.await_line("from here on")
    time.sleep(2 * PATIENCE_S)
    assert all(process.is_alive() for process in ranks.processes), ranks.ended()
    os.kill(ranks.processes[whom].pid, signal.SIGTERM)
    asked = time.monotonic()
    ended = ranks.ended()
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * n and time.monotonic() - asked < 20
    assert len(losses(ended[0].out)) == 2 and steps_in(stopped) == [2]
    ran(n, tmp_path / "c", *argv, "-y 1 -o", stopped)
    names = [path.name for path in straight.iterdir() if "00000004" in path.name]
    assert len(names) > (2 if "parallel" in flags else 3) and files(stopped, "main.log", *names) == files(straight, "main.log", *names)


@pytest.mark.parametrize("flags", ["-z 3", "-z 1 --async-checkpoint 1 -v 1 -m 1"])
def test_weights_that_are_no_numbers_end_all_ranks_and_one_says_it(case, tmp_path, flags):
    """What counts was written before; the same command with a good rate goes on from there."""
    argv = [*inputs(case), COMMON, "-b 2 -u 0 -n 1 -s 0 -v 0 -o", tmp_path / "log", flags]
    ran(2, tmp_path / "a", *argv, "-x 2")
    ended = start(2, tmp_path / "b", *argv, "-x 9 -y 1 -l 1e30").ended()
    assert [rank.code for rank in ended] == [2, 2] and ended[1].err == ""
    lost = r"error: step \d+: the .*(nan|inf).*, (which leaves no weight a number|so these weights are of no use); .*\n"
    assert re.fullmatch(lost, ended[0].err), ended[0].err
    assert steps_in(tmp_path / "log") == [1, 2]
    assert "resuming at step 2" in ran(2, tmp_path / "c", *argv, "-x 3 -y 1")


def as_on_a_gpu():
    """Every step is launched before the numbers of the last one are read."""
    train_gpt2.Backend.asynchronous = True


@pytest.mark.parametrize("flags, prepare", [
    ("-z 1 -b 2", None), ("-z 2 -b 2 -d 512", as_on_a_gpu), ("-z 3 -b 4 --tensor-parallel 2 --kernels numba --async-checkpoint 1", None),
])  # fmt: skip
def test_data_that_one_rank_cannot_train_on_end_all_after_a_checkpoint(case, tmp_path, flags, prepare):
    """The rank that will need the token finds it in time. Once it is mended, the end is the straight run's."""
    data = shutil.copytree(case, tmp_path / "data")
    argv = [*inputs(data), COMMON, "-x 20 -n 1000 -v 0 -s 0", flags]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    ran(2, tmp_path / "a", *argv, "-o", straight)
    good = (data / "train_02.bin").read_bytes()
    (data / "train_02.bin").write_bytes(token(3000, 96)(good))
    ended = start(2, tmp_path / "b", *argv, "-o", broken, prepare=prepare).ended()
    step = len(losses(ended[0].out))
    assert [rank.code for rank in ended] == [2, 2] and steps_in(broken) == [step] and 0 < step < 20
    said = "".join(rank.err for rank in ended)
    assert said.startswith(f"error: -i {data}/train_02.bin: token 96 at position 3000 is outside") and said.count("\n") == 1
    assert f"; step {step} is kept in {broken}" in said
    (data / "train_02.bin").write_bytes(good)
    ran(2, tmp_path / "c", *argv, "-y 1 -o", broken)
    names = ["main.log", *(path.name for path in straight.iterdir() if "00000020" in path.name)]
    assert len(names) > 3 and files(broken, *names) == files(straight, *names)


@pytest.mark.parametrize("whom", [0, 1])
def test_a_signal_before_the_first_step_ends_all_ranks_alike(case, tmp_path, whom):
    ranks = start(2, tmp_path, *inputs(case), COMMON, "-b 2 -x 4 -n 1 -v 1 -m 1000000 -s 0 -o", tmp_path / "log")
    ranks.await_line(" -> estimated")
    time.sleep(0.5)
    os.kill(ranks.processes[whom].pid, signal.SIGTERM)
    ended = ranks.ended()
    assert [(rank.code, rank.err) for rank in ended] == [(143, "interrupted before the first step; no checkpoint has changed\n"), (143, "")]
    assert steps_in(tmp_path / "log") == []


def asked_to_stop():
    """Rank 1 is, once it has read the tokens of the first step."""
    real = train_gpt2.look_ahead

    def look_ahead(run, step):
        real(run, step)
        if run.world.rank == 1:
            signal.raise_signal(signal.SIGTERM)

    train_gpt2.look_ahead = look_ahead


def test_a_signal_before_the_first_step_ends_all_ranks_without_an_evaluation_to_agree_in(case, tmp_path):
    argv = (*inputs(case), COMMON, "-b 2 -x 4 -n 1 -v 0 -s 0 -o", tmp_path / "log")
    ended = start(2, tmp_path / "ranks", *argv, prepare=asked_to_stop).ended()
    assert [(rank.code, rank.err) for rank in ended] == [(143, "interrupted before the first step; no checkpoint has changed\n"), (143, "")]
    assert steps_in(tmp_path / "log") == []


def slow_disk():
    """Rank 0 takes 6 s to write a model, a piece at a time, and 6 s to write its state."""
    slow_down(0, 12, 0.5)


def disk_that_hangs():
    """Rank 1 does not come back from writing its state."""
    slow_down(1, 1, 1000)


def slow_down(whom, pieces, seconds):
    real = snapshot.write_moving
    snapshot.PIECE_BYTES = writer.PIECE_BYTES = 1 << 14

    def slowly(write, sharing, each):
        def waited_for():
            for number, piece in enumerate(each):
                if sharing.rank == whom and number < pieces:
                    time.sleep(seconds)
                yield piece
            print(f"waited for {min(number, pieces)} pieces", flush=True)

        real(write, sharing, waited_for())

    snapshot.write_moving = slowly


def slow_to_read():
    """Rank 1 takes 8 s to read the model that all start from."""
    real = snapshot.load_weights

    def load_weights(weights, model):
        real(weights, model)
        if model.sharing.rank == 1:
            for _ in range(16):
                time.sleep(0.5)
                model.sharing.moved()

    snapshot.load_weights = load_weights


def deleted_meanwhile():
    """The run that has written the model to start from deletes it, once all have found it."""
    real = train_gpt2.open_data

    def open_data(run, until_end):
        run.world.wait_for_all("the model's deletion")
        Path(run.source.file).unlink(missing_ok=True)
        return real(run, until_end)

    train_gpt2.open_data = open_data


def test_a_model_that_its_run_deletes_meanwhile_is_looked_at_by_all_ranks(case, tmp_path):
    argv = (*inputs(case), "-b 2 -t 32 -v 1 -m 2 -s 0 -o", tmp_path / "log")
    ran(1, tmp_path / "one", *argv, "-x 1 -n 1")
    ended = start(2, tmp_path / "ranks", *argv, "-x 0 -y 1", prepare=deleted_meanwhile).ended()
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * 2 and "val loss" in ended[0].out, ended
    assert not (tmp_path / "log" / "model_00000001.bin").exists()


def test_reading_a_model_may_take_a_rank_longer_than_a_collective_does(case, tmp_path):
    ended = start(2, tmp_path / "ranks", *inputs(case), COMMON, "-b 2 -x 2 -v 0 -s 0 --timeout 5", prepare=slow_to_read).ended()
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * 2, ended


@pytest.mark.parametrize("flags", ["", "--async-checkpoint 1"])
def test_a_checkpoint_may_take_a_rank_longer_than_a_collective_does(case, tmp_path, flags):
    argv = [*inputs(case), COMMON, "-b 2 -x 2 -n 2 -v 0 -s 0 --timeout 5", flags, "-o", tmp_path / "log"]
    ended = start(2, tmp_path / "ranks", *argv, prepare=slow_disk).ended()
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * 2 and ended[0].out.count("waited for 12 pieces\n") == 2, ended
    assert steps_in(tmp_path / "log") == [2]


def test_a_disk_that_hangs_ends_all_ranks_and_counts_for_nothing(case, tmp_path):
    argv = [*inputs(case), COMMON, "-b 2 -x 2 -n 2 -v 0 -s 0 -z 1 --timeout 5 -o", tmp_path / "log"]
    ended = start(2, tmp_path / "ranks", *argv, prepare=disk_that_hangs).ended()
    assert [rank.code for rank in ended] == [4, 4] and ended[1].err == ""
    words = r"error: rank 1 of 2 \(.*\) hangs: it has not moved for \d+ s, in step 2, checkpoint, while rank 0 waits in the files of "
    assert re.match(words + "checkpoint 2; ", ended[0].err), ended[0].err
    assert steps_in(tmp_path / "log") == []


def record_denied_at_the_first_step():
    deny_the_record_of("first step")


def record_denied_at_the_end():
    deny_the_record_of("end")


def deny_the_record_of(phase):
    """The disk refuses rank 0's memory.json from this phase on."""
    real = os.replace

    def replace(source, target):
        if Path(target).name == "memory.json" and f'"phase": "{phase}"' in Path(source).read_text():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(source, target)

    os.replace = replace


@pytest.mark.parametrize("prepare, steps", [(record_denied_at_the_first_step, 2), (record_denied_at_the_end, 4)])
def test_a_record_that_rank_0_cannot_write_ends_all_after_a_checkpoint(case, tmp_path, prepare, steps):
    """The other rank hears of it with the next step, or at the end."""
    argv = [*inputs(case), COMMON, "-b 2 -x 4 -n 4 -v 0 -s 0 -o", tmp_path / "log"]
    ended = start(2, tmp_path / "ranks", *argv, prepare=prepare).ended()
    assert [rank.code for rank in ended] == [2, 2] and ended[1].err == "" and steps_in(tmp_path / "log") == [steps]
    words = f"error: writing the memory record failed at {tmp_path}/log/memory.json: Permission denied; .*; step {steps} is kept in .*\n"
    assert re.fullmatch(words, ended[0].err), ended[0].err


def missing_a_file():
    """Rank 1 meets a path that it cannot use, where nothing expects that."""
    real = train_gpt2.validate

    def validate(run, step):
        if run.world.rank == 1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/a/file")
        real(run, step)

    train_gpt2.validate = validate


def test_a_path_that_one_rank_cannot_use_is_not_worth_starting_again_for(case, tmp_path):
    ended = start(2, tmp_path, *inputs(case), COMMON, "-b 2 -x 4 -v 1 -m 1 -s 0", prepare=missing_a_file).ended()
    assert [rank.code for rank in ended] == [2, 2]
    assert "error: /a/file: No such file or directory; check the path" in ended[1].err and "Traceback" not in ended[1].err


def losing_its_output():
    """Rank 0 finds in its first validation that nobody reads it any more."""
    real = train_gpt2.validate

    def validate(run, step):
        if run.world.rank == 0:
            run.stop._lose_output(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        real(run, step)

    train_gpt2.validate = validate


def test_output_that_is_lost_before_the_first_step_is_rank_0_s_matter(case, tmp_path):
    argv = [*inputs(case), COMMON, "-b 2 -x 4 -v 1 -m 1 -s 0"]
    ended = start(2, tmp_path, *argv, prepare=losing_its_output).ended()
    assert [rank.code for rank in ended] == [1, 0] and ended[1].err == ""
    assert ended[0].err.startswith("error: printing failed: No space left on device; ")


def test_a_run_goes_on_on_other_numbers_of_ranks_and_serves_its_epoch_once(case, tmp_path):
    """2 ranks, 1, 4 with other -b and -t. However each shared its tensors out, the same bits; no input is trained on twice."""
    ends, served = [], []
    legs = (2, "-b 4 -t 64 -x 4"), (1, "-b 4 -t 64 -x 7"), (4, "-b 1 -t 32 -x 20")
    for zs in ((1, 0, 3), (0, 0, 1)):
        folder = tmp_path / f"z{zs[0]}"
        folder.mkdir()
        for (n, flags), z in zip(legs, zs):
            hook = folder / f"served_by_{n}"
            hook.mkdir()
            argv = [*inputs(case), "-l 1e-3 -k constant --kernels torch -n 100 -v 0 -s 0 -o", folder / "log", flags, "-z", z, "-y 1"]
            out = ran(n, folder / f"ranks_{n}", *argv, hook=hook)
            assert "resuming at step" in out or n == 2
            served += [(folder, *map(int, line.split())) for path in hook.iterdir() for line in path.read_text().splitlines()]
        ends.append(files(folder / "log", "model_00000020.bin", "main.log"))
        assert steps_in(folder / "log") == [4, 7, 20]
        inputs_served = [(shard, p) for at, shard, first, end in served if at == folder for p in range(first, end)]
        assert len(inputs_served) == len(set(inputs_served)) == 4 * 512 + 3 * 256 + 13 * 128
    assert ends[0] == ends[1]


def test_what_one_rank_wrote_and_what_two_shared_out_resume_to_the_same_bits(case, stages, tmp_path):
    """The same checkpoint from -z 0 to 3, gone on with by 4 ranks at other stages."""
    ends = []
    for z, (folder, _) in enumerate(stages):
        target = keep_only(folder, 4, tmp_path / f"from_z{z}")
        argv = [*inputs(case), COMMON, "-b 1 -x 6 -n 6 -v 0 -s 0 -y 1 -o", target, "-z", 3 - z]
        ran(4, tmp_path / f"ranks_{z}", *argv)
        ends.append(files(target, "model_00000006.bin"))
    assert all(end == ends[0] for end in ends)


@pytest.mark.parametrize("name", ["model_00000004.bin", "state_00000004_00000.bin", "state_00000004_00001.bin"])
def test_a_file_that_is_not_the_checkpoint_s_is_noticed_whoever_resumes(case, stages, tmp_path, name):
    """The ranks share out the files; each has one that only the rank that wrote it knows."""
    target = keep_only(stages[1][0], 4, tmp_path / "from_z1")
    path = target / name
    path.write_bytes(another_bit(path.read_bytes()))
    argv = [*inputs(case), COMMON, "-x 6 -n 6 -v 0 -s 0 -y 1 -o", target]
    for n, B in ((1, 4), (2, 2)):
        ranks = start(n, tmp_path / str(n), *argv, f"-b {B}").ended()
        assert [rank.code for rank in ranks] == [2] * n
        assert f"{path} is damaged or another file: its CRC-32 is " in "".join(rank.err for rank in ranks)


# ----------------------------------------------------------------------------
# refusals


REFUSED = {  # name -> ranks, flags, more of rank 1, what each rank that says something must say
    "-z needs equal shares": (3, "-b 1 -z 1", "", "-z 1 shares every tensor out over 3 processes, which do not divide C = 64"),
    "-d of other ranks": (2, "-b 2 -d 192", "", "-d 192 is not a multiple of B*T*processes = 2*32*2 = 128; use -d 128 or 256"),
    "other flags": (2, "-b 2", "-b 4", "-b (--batch-size) is 4 on rank 1 and 2 on rank 0"),
    "another -n": (2, "-b 2", "-n 3", "-n (--checkpoint-every) is 3 on rank 1 and 0 on rank 0"),
    "a missing file": (2, "-b 2", "-j nowhere.bin", "nowhere.bin"),
    "a missing model": (2, "-b 2", "-e nowhere.bin", "-e nowhere.bin: no such file"),
    "other weights": (2, "-b 2", "-e {case}/other.bin", "the model: rank 1 has "),
    "other shards": (2, "-b 2", "-i {case}/train_01.bin", "-i: rank 1 has 1 shards of "),
    "another budget": (2, "-b auto --memory-budget 1GiB", "--memory-budget 2GiB", "--memory-budget is 2GiB on rank 1 and 1GiB on rank 0"),
    "other validation shards": (2, "-b 2", "-j {case}/train_01.bin", "validation with -j: rank 1 has 1 shards of "),
    "-o on one": (2, "-b 2 -n 2", "-o {case}/log", "-o (--output-dir) is a folder on rank 1 and empty on rank 0"),
    "folders apart": (2, "-b 2 -n 2 -o {case}/log", "-o {case}", "rank 1 does not see there what rank 0 writes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_a_sentence_and_code_2_on_every_rank(case, tmp_path, name):
    n, flags, of_rank_1, words = (each if isinstance(each, int) else each.replace("{case}", str(case)) for each in REFUSED[name])
    (case / "other.bin").write_bytes(another_bit((case / "model.bin").read_bytes()))
    argv = [*inputs(case), COMMON, "-x 3 -v 1 -m 1 -s 0", flags]
    ranks = start(n, tmp_path, *argv, own={1: [of_rank_1]}).ended()
    assert [rank.code for rank in ranks] == [2] * n, ranks
    said = [rank.err for rank in ranks if rank.err]
    assert said and all(err.startswith("error: ") and err.count("\n") == 1 and words in err for err in said), said


@pytest.mark.parametrize("mistaken", [[0], [1], [0, 1]])
def test_where_a_launcher_ends_all_ranks_once_one_has_ended_somebody_has_said_why(case, tmp_path, mistaken):
    ranks = start(4, tmp_path, *inputs(case), COMMON, "-b 1 -x 3 -v 0 -s 0", own={rank: ["-i nowhere.bin"] for rank in mistaken})
    ranks.end_after_one()
    said = [rank.err for rank in ranks.ended()]
    assert any("-i nowhere.bin: no such file" in err for err in said), said


def test_a_path_that_cannot_be_printed_ends_no_rank(case, tmp_path):
    """Rank 0 prints it with the byte escaped; the others print it too, to nowhere."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    assert "caf\\udce9" in ran(2, tmp_path, *inputs(case), "--device cpu --threads 1 -b 1 -t 8 -x 0 -v 0 -s 0 -o", folder)


def test_ranks_that_see_different_checkpoints_do_not_train_from_both(case, stages, tmp_path):
    """Worth another try, so not code 2."""
    argv = [*inputs(case), COMMON, "-b 2 -x 6 -v 0 -s 0 -y 1"]
    ranks = start(2, tmp_path, *argv, own={0: ["-o", stages[1][0]], 1: ["-o", tmp_path / "elsewhere"]}).ended()
    assert [rank.code for rank in ranks] == [4, 4] and ranks[1].err == ""
    assert ranks[0].err.startswith("error: -y 1: some ranks found no checkpoint in -o, others that of step 4;")


def test_a_rank_that_cannot_write_its_state_ends_the_others_with_its_sentence(case, tmp_path):
    """Where a file stands in the way of rank 1's checkpoint: nothing is marked complete."""
    folder = tmp_path / "log"
    (folder / "state_00000002_00001.bin").mkdir(parents=True)
    argv = [*inputs(case), COMMON, "-b 2 -x 4 -n 2 -v 0 -s 0 -o", folder]
    ranks = start(2, tmp_path / "ranks", *argv).ended()
    assert [rank.code for rank in ranks] == [2, 2] and steps_in(folder) == []
    assert all("writing the state failed at" in rank.err and rank.err.count("\n") == 1 for rank in ranks)
    assert ranks[0].err.startswith("error: rank 1 stopped: ")
