"""Ranks of real runs killed at random points, twelve in all, each run started again until it is done: it ends as one that nobody disturbed.

Four ways to start a run and to start it again. SIGKILLs come while ranks meet or load, in a step, between steps, or by chance while a
checkpoint is written or an old one deleted: four for ways that start quickly, two for a launcher's. Whoever is left must end long before
the time-out of a collective, and say who is gone; what a checkpoint lacks keeps it from being resumed; the last step's files are, to the
bit, those of the undisturbed run.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from case_a import write_case_a
from conftest import REPO
from ranks import KILLED, environment, free_port
from ranks_program import LONGEST_S, ran, start
from test_loop import inputs, words_of
from test_resume import steps_in

LAST = 48
FIRST_WORDS = "| Parameter "  # of each try
RUN = f"--device cpu --threads 1 -t 32 -l 3e-3 -x {LAST} -n 3 -nk 2 -v 7 -m 1 -s 0 -y 1"
RUNS = {
    "flags": "-b 2 --kernels torch -z 1",
    "flags, four ranks": "-b 2 -z 3 --tensor-parallel 2 --async-checkpoint 1",
    "torchrun --max-restarts": "-b 2 --kernels torch -z 1",
    "run_until_done.sh": "-b 2 --kernels torch -z 1 --async-checkpoint 1",
}
KILLS = dict(zip(RUNS, (4, 4, 2, 2)))  # a launcher takes torch's time to start, for itself and each rank


@dataclass
class Moments:
    """When to kill whom: a rank, and after which printed step, or None for a try that is killed before its first."""

    chance: random.Random
    ranks: int
    kills: int

    def draw(self, folder: Path) -> tuple[int, str, float]:
        """(rank, the words to wait for, how many seconds more)."""
        whom = self.chance.randrange(self.ranks)
        if self.chance.random() < 0.25:
            return whom, FIRST_WORDS, self.chance.uniform(0, 0.5)
        apart = LAST // (self.kills + 1)  # at most, so that none comes after the end
        step = max(steps_in(folder), default=0) + self.chance.randint(1, apart - 3)
        return whom, f"step {step:4d}/{LAST}", self.chance.uniform(0, 0.1)


# ----------------------------------------------------------------------------
# the four ways


def killed_by_flags(folder: Path, argv, n: int, moments: Moments) -> list[str]:
    """Each try is started by hand. All others must end with code 4, one of them with a sentence that names the rank."""
    said = []
    for number in range(moments.kills):
        whom, words, more = moments.draw(folder)
        resumed = max(steps_in(folder), default=0)
        ranks = start(n, folder.parent / f"{folder.name}_ranks", *argv, "-o", folder)
        ranks.await_line(words)
        time.sleep(more)
        os.kill(ranks.processes[whom].pid, signal.SIGKILL)
        ended = ranks.ended()
        assert [rank.code for rank in ended] == [KILLED if rank == whom else 4 for rank in range(n)], (whom, words, ended)
        errors = [rank.err for rank in ended if rank.err]
        assert len(errors) == 1 and re.fullmatch(rf"error: rank {whom} of {n} \(host \S+, process \d+\) is gone: .*\n", errors[0]), errors
        assert resumed == 0 or f"resuming at step {resumed}" in ended[0].out or words == FIRST_WORDS, ended[0].out
        said.append(f"{number}: rank {whom}, {words}, at {max(steps_in(folder), default=0)}: {errors[0]}")
    assert max(steps_in(folder), default=0) < LAST
    ran(n, folder.parent / f"{folder.name}_ranks", *argv, "-o", folder)
    return said


def killed_by_launcher(folder: Path, command, n: int, moments: Moments, **variables) -> list[str]:
    """The command starts ranks again by itself, and must succeed in the end."""
    out, said = folder.with_suffix(".out"), []
    with open(out, "w") as file:
        process = subprocess.Popen(
            words_of(command), cwd=REPO, env=environment(**variables), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        for number in range(moments.kills):
            await_words(process, out, number, FIRST_WORDS)  # until then a rank that was left may complete a checkpoint
            whom, words, more = moments.draw(folder)
            await_words(process, out, number, words)
            time.sleep(more)
            pid = pids_of_ranks(folder)[whom]
            os.kill(pid, signal.SIGKILL)
            said.append(f"{number}: rank {whom}, process {pid}, {words}, at {max(steps_in(folder), default=0)}")
        assert process.wait(LONGEST_S) == 0, out.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert out.read_text().count(FIRST_WORDS) == moments.kills + 1, "every kill was of another try"
    return said


def await_words(process, out: Path, number: int, words: str):
    """Until try `number` has printed them."""
    deadline = time.monotonic() + LONGEST_S
    while words not in "".join(re.split(f"(?={re.escape(FIRST_WORDS)})", out.read_text())[number + 1 : number + 2]):
        assert time.monotonic() < deadline and process.poll() is None, f"{words} of try {number}: {out.read_text()}"
        time.sleep(0.01)


def pids_of_ranks(folder: Path) -> dict[int, int]:
    """rank -> process, of those that torchrun started with this folder."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = ((path / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:  # it ended, or is another user's
            continue
        ranks = [variable for variable in variables if variable.startswith(b"RANK=")]
        if ranks and str(folder).encode() in words:
            found[int(ranks[0][5:])] = int(path.name)
    return found


def disturbed(name: str, folder: Path, argv) -> list[str]:
    """What was done to the run of that name, which has come to its end."""
    n = 4 if "four" in name else 2
    moments = Moments(random.Random(name), n, KILLS[name])
    if name.startswith("flags"):
        return killed_by_flags(folder, argv, n, moments)
    # a port for each: before torch 2.13 all have the same one
    torchrun = f"{sys.executable} -m torch.distributed.run --master-port {free_port()} --nproc-per-node {n} --max-restarts {{}}"
    if name.startswith("torchrun"):
        return killed_by_launcher(folder, [torchrun.format(moments.kills), "train_gpt2.py", *argv, "-o", folder], n, moments)
    launch = {"LAUNCH": torchrun.format(0) + " --no-python", "PYTHON": sys.executable, "RETRY_AFTER_S": "0"}
    return killed_by_launcher(folder, ["scripts/run_until_done.sh", folder, LAST, *argv], n, moments, **launch)


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Path:
    return write_case_a(tmp_path_factory.mktemp("case_a"))


@pytest.fixture(scope="module")
def undisturbed(case, tmp_path_factory) -> dict[int, Path]:
    """The folder of a run that nobody disturbed, by its number of ranks."""
    folders = {n: tmp_path_factory.mktemp(f"straight_{n}") for n in (2, 4)}
    for n, name in ((2, "flags"), (4, "flags, four ranks")):
        ran(n, folders[n], *inputs(case), RUN, RUNS[name], "-o", folders[n] / "log")
    return {n: folder / "log" for n, folder in folders.items()}


@pytest.fixture(scope="module")
def ends(case, undisturbed, tmp_path_factory) -> dict:
    """What became of each run, all of them beside each other: they mostly wait for a lost rank's silence to be long enough."""
    folder = tmp_path_factory.mktemp("disturbed")
    with ThreadPoolExecutor(len(RUNS)) as pool:
        ends = {
            name: (at := folder / re.sub(r"\W+", "_", name), pool.submit(disturbed, name, at, [*inputs(case), RUN, flags]))
            for name, flags in RUNS.items()
        }
    return ends


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc to find a launcher's ranks in")
@pytest.mark.parametrize("name", RUNS)
def test_killed_again_and_again_a_run_ends_with_the_bytes_of_an_undisturbed_one(ends, undisturbed, name):
    folder, done = ends[name]
    print(*done.result(), sep="\n")
    straight = undisturbed[4 if "four" in name else 2]
    assert steps_in(folder) == steps_in(straight) == [LAST - 3, LAST], "a crash leaves no old checkpoint behind"
    names = sorted(path.name for path in straight.iterdir() if path.name.endswith((".bin", "main.log")) or "extra" in path.name)
    assert len([name for name in names if "state" in name]) == 4 and f"model_{LAST:08d}.bin" in names
    for name in names:
        assert (folder / name).read_bytes() == (straight / name).read_bytes(), f"{name} differs"
