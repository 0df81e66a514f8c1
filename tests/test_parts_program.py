"""The program with --tensor-parallel: it logs, samples, writes and resumes what one process does, and says what it cannot split.

One run is torchrun's.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ranks_program
from case_a import CONFIG, write_case_a
from conftest import REPO
from ranks import environment
from test_loop import words_of
from test_resume import bf16_model_bytes, files_of, keep_only

import train_gpt2
from llmc.checkpoint.saved_state import SavedState
from llmc.checkpoint.store import model_path, state_path
from llmc.kernels_cpu import not_installed
from llmc.memory.tables import num_parameters

pytestmark = pytest.mark.skipif(bool(not_installed()), reason="no numba here, and torch's operators take no part of the tokens")
LONGEST_S = 300
STEPS, STOP = 4, 2
AWAY = 1e-5  # of weights and moments after four steps, as a part of their norm; measured: 3e-6
TRAIN = f"-t 64 -d 512 -l 3e-3 -u 3 -x {STEPS} -n {STOP}"
EVALUATE = "-v 2 -m 3 -h 1 -s 4 -g 12"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    case = write_case_a(tmp_path_factory.mktemp("case_a"))
    (case / "bf16.bin").write_bytes(bf16_model_bytes((case / "model.bin").read_bytes()))
    return case


def ran(n, folder, name, *argv, model="model.bin", start=None) -> SimpleNamespace:
    """A run that must succeed: its folder, what rank 0 printed and its log. start: a folder to go on from."""
    output = folder / name
    if start:
        keep_only(start, STOP, output)
    data = ["-i", folder / "train_*.bin", "-j", folder / "val.bin", "--hellaswag-data", folder / "eval.bin", "-e", folder / model]
    ranks = ranks_program.start(n, folder / f"{name}_ranks", *data, TRAIN, "-o", output, "-y", 1 if start else 0, *argv).ended()
    assert [(rank.code, rank.err) for rank in ranks] == [(0, "")] * n
    assert all(rank.out == "" for rank in ranks[1:])
    return SimpleNamespace(folder=output, out=ranks[0].out, log=numbers(output))


def numbers(folder) -> dict:
    """(step, kind) -> number in main.log."""
    lines = re.findall(r"^s:(\d+) (\w+):(\S+)(?: lr:(\S+) norm:(\S+))?", (folder / "main.log").read_text(), re.M)
    found = {(int(step), kind): float(value) for step, kind, value, *_ in lines}
    return found | {(int(step), "norm"): float(norm) for step, _, _, _, norm in lines if norm}


@pytest.mark.parametrize("flags, why", [
    ("-z 1", "with one process"), ("-pn 2 --tensor-parallel 2 -z 3", "where --tensor-parallel 2 takes all processes"),
    ("-pn 4 --tensor-parallel 2 -z 3", None), ("-pn 2 --tensor-parallel 2", None),
])  # fmt: skip
def test_zero_says_where_it_has_nothing_to_shard(folder, capsys, flags, why):
    assert train_gpt2.main(words_of(["--plan --device cpu -b 4 -t 64 -e", folder / "model.bin", flags])) == 0
    said = "\n".join(line for line in capsys.readouterr().out.splitlines() if "nothing to shard" in line)
    assert said == (f"{why} ZeRO has nothing to shard: -z {flags[-1]} is the same as -z 0" if why else "")


def samples(text) -> list[str]:
    return re.findall(r"generating:\n---\n(.*?)\n---", text, re.S)


STEP = r"^step.* "  # begins its line


def losses(text, before=r"\b") -> np.ndarray:
    """Of every step and evaluation, to six digits."""
    return np.array(re.findall(before + r"loss (\d+\.\d{6})", text, re.M), float)


@pytest.fixture(scope="module")
def undivided(folder):
    """How many ranks have data of their own -> a run without parts. Which batches there are depends on their number."""
    return {1: ran(1, folder, "alone", "-b 4", EVALUATE), 2: ran(2, folder, "pair", "-b 4 -z 1", EVALUATE)}


@pytest.fixture(scope="module")
def in_parts(folder):
    """Name -> a run of as many steps: two parts; two times two parts with ZeRO."""
    return {
        "parts": ran(2, folder, "parts", "-b 4 -z 1 --tensor-parallel 2 --tp-recompute-allgather 0", EVALUATE),
        "zero1": ran(4, folder, "zero1", "-b 4 --tensor-parallel 2 -z 1", EVALUATE),
        "zero3": ran(4, folder, "zero3", "-b 4 --tensor-parallel 2 -z 3 -r 2", EVALUATE),
    }


each = pytest.mark.parametrize("name, copies", [("parts", 1), ("zero1", 2), ("zero3", 2)])


def model_of(folder, step=STEPS) -> np.ndarray:
    return np.fromfile(model_path(folder, step), "<f4", offset=1024)


def away(mine, theirs) -> float:
    """The norm of the difference, as a part of theirs."""
    return np.linalg.norm(np.subtract(mine, theirs, dtype=np.float64)) / np.linalg.norm(theirs.astype(np.float64))


@each
def test_the_log_and_the_sample_are_those_without_parts(undivided, in_parts, name, copies):
    """Losses to the last of six digits or two, what main.log says to the last digit; as many HellaSwag answers, the same tokens."""
    want, run = undivided[copies], in_parts[name]
    for counted in (r"total_batch_size=\d+", r"grad_accum_steps=\d+", r"train_num_batches +\| \d+"):  # parts read the same data
        assert re.findall(counted, run.out) == re.findall(counted, want.out) != []
    assert ("ZeRO has nothing to shard: -z 1 is the same as -z 0" in run.out) == (name == "parts")
    assert len(losses(run.out)) >= STEPS + 3 and np.abs(losses(run.out) - losses(want.out)).max() <= 3e-6
    assert run.log.keys() == want.log.keys() and len(want.log) == STEPS * 2 + 3 + 2
    for (step, kind), value in want.log.items():
        last_digit = {"trl": 1e-4, "tel": 1e-4, "norm": 1e-2, "eval": 0}[kind]
        assert abs(run.log[step, kind] - value) <= 1.01 * last_digit, (step, kind)
    assert samples(run.out) == samples(want.out) != []


@each
def test_checkpoints_are_those_of_whole_models(undivided, in_parts, name, copies):
    """Files of the same sizes, one state for each rank with data of its own; the same numbers but for the order of sums."""
    want, run = undivided[copies].folder, in_parts[name].folder
    sizes = {path.name: path.stat().st_size for path in want.glob(f"*_{STEPS:08d}_*.bin")}
    assert sizes == {path.name: path.stat().st_size for path in run.glob(f"*_{STEPS:08d}_*.bin")} and len(sizes) == copies
    assert model_path(run, STEPS).read_bytes()[:1024] == model_path(want, STEPS).read_bytes()[:1024]
    assert away(model_of(run), model_of(want)) < AWAY
    saved, theirs = (SavedState(folder, STEPS, CONFIG) for folder in (run, want))
    assert (saved.num_processes, saved.sharded) == (theirs.num_processes, theirs.sharded) == (copies, copies > 1)
    for name in ("m", "v"):
        assert away(*(state.read(name, 0, num_parameters(CONFIG)) for state in (saved, theirs))) < AWAY


def test_every_zero_stage_writes_the_same_files(in_parts):
    one, three = (in_parts[name].folder for name in ("zero1", "zero3"))
    assert model_path(one, STEPS).read_bytes() == model_path(three, STEPS).read_bytes()
    for rank in range(2):
        assert state_path(one, STEPS, rank).read_bytes() == state_path(three, STEPS, rank).read_bytes()


def test_runs_go_on_in_other_parts(folder, undivided, in_parts):
    """What two parts wrote in one process, and what one wrote in two times two, as it does in two."""
    joined = ran(1, folder, "joined", "-b 4", start=in_parts["parts"].folder)
    both, split = (
        ran(n, folder, f"in_{n}", "-b 4 -z 2", *more, start=undivided[1].folder) for n, more in ((2, []), (4, ["--tensor-parallel 2"]))
    )
    for want, run in ((undivided[1], joined), (both, split)):
        assert np.abs(losses(run.out, STEP)[-2:] - losses(want.out, STEP)[-2:]).max() <= 3e-6
        assert away(model_of(run.folder), model_of(want.folder)) < AWAY


@pytest.mark.parametrize("n, form, how", [
    (2, "fp32", ""), (2, "bf16", ""), (4, "bits16", "-z 3 --master bits16 --optimizer-state bf16"),
])  # fmt: skip
def test_a_run_that_stopped_and_goes_on_writes_the_bytes_of_one_that_never_did(folder, n, form, how):
    flags = ("-b 2 --tensor-parallel 2", how)
    model = "model.bin" if form == "fp32" else "bf16.bin"
    straight = ran(n, folder, f"{form}_straight", *flags, model=model)
    again = ran(n, folder, f"{form}_again", *flags, model=model, start=straight.folder)
    want, found = files_of(straight.folder, STEPS), files_of(again.folder, STEPS)
    assert all(found[name] == content for name, content in want.items())
    assert (again.folder / "main.log").read_text() == (straight.folder / "main.log").read_text()
    if n == 4:
        assert state_path(again.folder, STEPS, 1).read_bytes() == state_path(straight.folder, STEPS, 1).read_bytes()


def test_torchrun_starts_parts(folder, in_parts):
    """A -- keeps it from taking --master for its own."""
    shutil.rmtree(folder / "torchrun", ignore_errors=True)
    flags = words_of([
        "-i", folder / "train_*.bin", "-e", folder / "model.bin", TRAIN, "-v 0 -s 0 -b 4 --tensor-parallel 2 --master fp32",
        "--device cpu --threads 1 -o", folder / "torchrun",
    ])  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--", "train_gpt2.py", *flags]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode == 0, done.stderr
    assert model_path(folder / "torchrun", STEPS).read_bytes() == model_path(in_parts["parts"].folder, STEPS).read_bytes()


# ----------------------------------------------------------------------------
# what cannot be split


@pytest.mark.parametrize("flags, sentence", [
    ("-pn 3 --tensor-parallel 2", "--tensor-parallel 2 does not divide the 3 processes"),
    ("--tensor-parallel 2", "--tensor-parallel 2 does not divide the 1 processes"),
    ("--tensor-parallel 5", "--tensor-parallel 5 does not divide the 64 channels"),  # nor would any number of processes help
    ("-pn 8 --tensor-parallel 8", "--tensor-parallel 8 is more than there are heads, 4"),
    ("-pn 2 --tensor-parallel 2 -t 33", "--tensor-parallel 2 does not divide the 33 tokens of -t"),
    ("-pn 2 --tensor-parallel 2 --kernels torch", "--tensor-parallel needs kernels that take a part's tokens"),
    ("--tp-recompute-allgather 0", "there is none; leave it out"),
    ("-pn 2 --tensor-parallel 2 --tp-recompute-allgather 0 -r 2", "-r 2 does not keep them; use -r 0 or -r 1"),
    ("-pn 2 --tensor-parallel 2 -ge 1", "-ge 1 fuses GELU into matmuls of a GPU"),
    ("-pn 2 --tensor-parallel 2 --offload-residual", "--offload-residual moves residuals from a GPU"),
    ("-pn 2 --tensor-parallel 2 --cuda-graph 1", "--cuda-graph 1: what several processes tell each other is not captured"),
    ("-pn 2 --tensor-parallel 2 --cuda-graph 1 --device cuda", "--cuda-graph 1: what several processes tell each other is not captured"),
    ("-pn 6 --tensor-parallel 2 -z 1", "-z 1 shares every tensor out over 3 processes, which do not divide both C / 2 = 32"),
    ("-pn 2 --tensor-parallel 0", "--tensor-parallel"),
    ("-pn 2 --tensor-parallel 2 --tp-recompute-allgather 2", "--tp-recompute-allgather"),
])  # fmt: skip
def test_what_cannot_be_split_is_said_in_one_sentence(folder, capsys, flags, sentence):
    words = words_of(["--plan --device cpu -b 4 -t 64 -e", folder / "model.bin", flags])
    assert train_gpt2.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert sentence in printed.err
