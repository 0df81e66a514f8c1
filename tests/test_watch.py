"""A rank that is gone, hangs or stops ends all the others, with one sentence that names it and an exit code for a restart loop.

The judge is tested alone, with a clock that the test turns; then real processes are killed, suspended and made to hang, all runs at once,
since what they do is mostly to wait.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ranks import KILLED, LONGEST_S, PROGRAM, ends, environment, free_port, start_all

from llmc.distributed.rendezvous import Member
from llmc.distributed.verdict import DONE, DOUBTFUL_AFTER_S, LOST_AFTER_S, SETTLE_S, Beat, Heard, Judge, Verdict
from llmc.distributed.watch import Watch

MEMBERS = tuple(Member("machine", f"host{rank}", 100 + rank, "") for rank in range(3))
TIMEOUT_S = 60


class Case:
    """A judge, and what it hears: everybody beats unless told otherwise."""

    def __init__(self, rank: int = 0, waits_silently: bool = False):
        self.judge = Judge(rank, MEMBERS, TIMEOUT_S)
        self.judge.waits_silently = waits_silently
        self.beats = {each: Beat(progress="step 7") for each in (range(3) if rank == 0 else (0,))}
        self.silent, self.store_answers, self.now, self.heard = set(), True, 0.0, Heard()

    def says(self, rank: int, **fields):
        self.beats[rank] = replace(self.beats[rank], **fields)

    def passes(self, seconds: float):
        """Time; the first verdict on the way, or None."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            self.judge.look(self.now)
            if self.store_answers:
                for rank in self.beats.keys() - self.silent:
                    self.says(rank, count=self.beats[rank].count + 1)
                self.heard = Heard(self.heard.exchanges + 1, dict(self.beats))
            if verdict := self.judge.verdict(self.heard):
                return verdict
        return None


def test_a_run_in_which_all_beat_goes_on():
    """However long a step takes, as long as nobody is ahead; also for a rank that looks at rank 0 only."""
    assert Case().passes(10 * TIMEOUT_S) is None
    assert Case(rank=2).passes(10 * TIMEOUT_S) is None


@pytest.mark.parametrize("who", [1, 2])
def test_a_rank_that_is_silent_too_long_is_gone(who):
    case = Case()
    assert case.passes(3) is None
    case.silent.add(who)
    assert case.passes(LOST_AFTER_S - 1) is None
    verdict, ago = case.passes(2), f"{LOST_AFTER_S + 0.5:.0f} seconds ago"
    assert verdict.sentence.startswith(
        f"rank {who} of 3 (host host{who}, process {100 + who}) is gone: it stopped answering {ago}, in step 7; "
    )
    assert verdict.sentence.endswith("start all ranks again, with -y 1 to resume") and (verdict.code, verdict.speaker) == (4, 0)


def test_the_others_miss_rank_0_themselves():
    """Its beat, or its store, which answers no more."""
    for what in "beat", "store":
        case = Case(rank=2)
        case.passes(1)
        case.silent = {0} if what == "beat" else set()
        case.store_answers = what != "store"
        assert case.passes(LOST_AFTER_S - 1) is None
        verdict = case.passes(3)
        assert verdict.sentence.startswith("rank 0 of 3 (host host0, process 100) is gone") and verdict.speaker is None


def test_a_store_that_breaks_off_is_lost_at_once():
    case = Case(rank=1)
    case.passes(1)
    case.store_answers, case.heard = False, replace(case.heard, lost=True)
    assert "rank 0 of 3 (host host0, process 100) is gone: it stopped answering just now, in step 7" in case.passes(0.5).sentence


def test_a_pause_of_the_observer_is_nobody_s_silence():
    """This process was suspended for an hour, and the others' last beats are as old."""
    case = Case()
    case.passes(3)
    case.now += 3600
    case.silent = {1, 2}
    assert case.passes(2) is None
    case.silent = set()
    assert case.passes(20) is None


@pytest.mark.parametrize("code,expected", [(1, 4), (2, 2), (3, 3), (130, 130), (-9, 4)])
def test_a_rank_that_stops_says_why(code, expected):
    """Where trying again would stop it again, the others' restart loops end too."""
    case = Case()
    case.says(2, left="the disk is full; make room", code=code)
    verdict = case.passes(1)
    assert (verdict.sentence, verdict.code, verdict.speaker) == ("rank 2 stopped: the disk is full; make room", expected, 0)


def test_rank_0_s_own_stop_is_said_by_the_lowest_that_lives():
    case = Case()
    case.passes(1)
    case.silent.add(1)
    case.passes(LOST_AFTER_S - 1)
    case.says(0, left="a bug", code=1)
    assert case.passes(0.5).speaker == 1
    case = Case()
    case.says(0, left="a bug")
    case.says(1, left="the same bug")
    assert (case.passes(1).speaker, case.passes(1).sentence) == (1, "rank 0 stopped: a bug")


def test_who_is_done_is_not_missed():
    case = Case()
    for rank in (1, 2):
        case.says(rank, left=DONE)
    case.silent = {1, 2}
    assert case.passes(10 * TIMEOUT_S) is None
    case.says(0, left=DONE)
    assert case.passes(10 * TIMEOUT_S) is None
    other = Case(rank=2)
    other.says(0, left=DONE)
    other.silent = {0}
    assert other.passes(10 * TIMEOUT_S) is None


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_behind_that_does_not_move_hangs(who):
    case = Case()
    case.passes(1)
    for rank in {0, 1, 2} - {who}:
        case.says(rank, sequence=1, progress="step 8")
    assert case.passes(TIMEOUT_S - 3) is None
    sentence = case.passes(5).sentence
    assert sentence.startswith(
        f"rank {who} of 3 (host host{who}, process {100 + who}) hangs: it has not moved for 60 s, in step 7, while rank"
    )
    assert "waits in step 8" in sentence and "raise --timeout (now 60 s)" in sentence


def test_a_rank_behind_that_moves_does_not_hang():
    case = Case()
    case.says(0, sequence=100)
    for step in range(10):
        for rank in (1, 2):
            case.says(rank, sequence=step)
        assert case.passes(TIMEOUT_S - 5) is None


def test_who_did_not_time_out_where_the_others_did_hangs():
    """All are as far: the one that waits for nobody is the one they wait for."""
    case = Case()
    case.passes(1)
    for rank in (0, 2):
        case.says(rank, failed="Timed out waiting 3000ms for recv operation to complete")
    assert case.passes(SETTLE_S - 1) is None
    assert case.passes(2).sentence.startswith("rank 1 of 3 (host host1, process 101) hangs")


def test_who_still_moves_where_the_others_timed_out_is_slow_and_does_not_hang():
    case = Case()
    case.passes(1)
    for rank in (0, 2):
        case.says(rank, failed="Timed out waiting 3000ms for recv operation to complete")
    assert case.passes(SETTLE_S - 1) is None
    case.says(1, moves=1)
    assert case.passes(2).sentence.startswith(
        "rank 1 of 3 (host host1, process 101) takes longer than the others wait for it: it still moves, in step 7, while rank"
    )


def test_a_collective_that_fails_while_all_live_is_quoted():
    case = Case()
    case.passes(1)
    case.says(1, failed="[gloo] Connection reset by peer")
    assert case.passes(SETTLE_S - 1) is None
    sentence = case.passes(2).sentence
    assert sentence.startswith("a collective of rank 1 of 3 (host host1, process 101) failed in step 7: [gloo] Connection reset by peer;")


def test_a_collective_that_failed_because_somebody_is_gone_is_not_what_is_said():
    case = Case()
    case.passes(1)
    case.silent.add(2)
    for rank in (0, 1):
        case.says(rank, failed="Connection closed by peer")
    assert "rank 2 of 3 (host host2, process 102) is gone" in case.passes(SETTLE_S).sentence


def test_nobody_is_blamed_for_being_slow_while_another_may_be_dying():
    """Rank 1 is behind and does not move, but rank 2, for which it may wait, has not been heard for a while."""
    case = Case()
    case.passes(1)
    for rank in (0, 2):
        case.says(rank, sequence=1, progress="step 8")
    assert case.passes(TIMEOUT_S - DOUBTFUL_AFTER_S - 2) is None
    case.silent.add(2)
    assert case.passes(DOUBTFUL_AFTER_S + 4) is None
    assert case.passes(LOST_AFTER_S).sentence.startswith("rank 2 of 3 (host host2, process 102) is gone")


def test_where_collectives_wait_for_ever_nobody_moving_is_a_hang():
    case = Case(waits_silently=True)
    case.passes(1)
    assert case.passes(TIMEOUT_S - 3) is None
    assert case.passes(5).sentence.startswith("none of the 3 ranks has moved for 60 s, in step 7;")


def test_one_rank_that_moves_is_waited_for_however_long_it_takes():
    """As while rank 0 writes the model. When it does not move any more it counts as all the others do."""
    case = Case(waits_silently=True)
    for piece in range(10):
        case.says(0, moves=piece)
        assert case.passes(TIMEOUT_S - 5) is None
    assert case.passes(10).sentence.startswith("none of the 3 ranks has moved for 60 s, in step 7;")


def test_who_moves_less_often_is_not_behind():
    """Rank 0 had something to do alone; where all are as far nobody waits for the others."""
    case = Case()
    case.says(0, moves=1000)
    assert case.passes(10 * TIMEOUT_S) is None


def test_a_rank_behind_hangs_once_it_moves_no_more():
    """However often it moved before, and however often those move who wait for it."""
    case = Case(waits_silently=True)
    for rank in (0, 2):
        case.says(rank, sequence=1, progress="step 8")
    for piece in range(10):
        case.says(1, moves=1000 + piece)
        assert case.passes(TIMEOUT_S - 5) is None
    case.says(0, moves=1)
    assert case.passes(10).sentence.startswith(
        "rank 1 of 3 (host host1, process 101) hangs: it has not moved for 60 s, in step 7, while rank"
    )


# ----------------------------------------------------------------------------
# who prints it

TORCHRUN_GONE, RANK_0_GONE = Verdict("torchrun is gone"), Verdict("rank 0 is gone", gone=0)
NO_PROCESS = 2**30  # more than Linux counts to


@pytest.mark.parametrize("verdict,machines,dead,speakers", [
    (TORCHRUN_GONE, "aaa", [], [0]),
    (TORCHRUN_GONE, "aaabb", [0, 3], [1, 4]),
    (RANK_0_GONE, "aaa", [], [1]),  # it hangs, perhaps: its process is there
    (RANK_0_GONE, "abab", [1], [2, 3]),
    (replace(RANK_0_GONE, speaker=2), "aaa", [], [2]),
])  # fmt: skip
def test_one_living_rank_of_each_machine_speaks(verdict, machines, dead, speakers):
    """Where nobody could say who does."""
    members = [Member(machine, "host", NO_PROCESS if rank in dead else os.getpid(), "") for rank, machine in enumerate(machines)]
    living = [rank for rank in range(len(machines)) if rank not in dead and rank != verdict.gone]
    assert [rank for rank in living if Watch._speaks(SimpleNamespace(rank=rank, members=members), verdict)] == speakers


# ----------------------------------------------------------------------------
# real processes

GONE = "rank {who} of {size} (host"
RUNS = {  # what happens -> to whom, of how many; the code of the others; --timeout; how often what is said of it
    "kill the store's": ("kill", 0, 3, 4, 60, GONE, "is gone: it stopped answering just now, in step"),
    "kill another": ("kill", 1, 2, 4, 60, GONE, "is gone: it stopped answering", "in step", "; see what it printed last"),
    "kill, collectives waiting for ever": ("deaf", 1, 3, 4, 60, GONE, "is gone: it stopped answering", "in step 10;"),
    "suspend": ("stop", 1, 2, 4, 60, GONE, "is gone: it stopped answering"),
    "suspend the store's": ("stop", 0, 2, 4, 60, GONE, f"is gone: it stopped answering {LOST_AFTER_S:.0f} seconds ago, in step"),
    "hang": ("hang", 1, 2, 4, 10, GONE, "hangs: it has not moved for", "raise --timeout (now 10 s)"),
    "an error of one": ("user", 1, 2, 2, 60, "rank {who} stopped: the disk is full; make room"),
    "an error of the store's": ("user", 0, 3, 2, 60, "rank {who} stopped: the disk is full; make room"),
    "an error of one that does not get to its end": ("stuck", 1, 2, 2, 60, "rank {who} stopped: the disk is full; make room"),
    "an error of the store's, which does not": ("stuck", 0, 2, 2, 60, "rank {who} stopped: the disk is full; make room"),
    "a bug of one": ("bug", 1, 2, 4, 60, "rank {who} stopped: ZeroDivisionError: a bug"),
}  # fmt: skip
OWN_CODE = {"kill": KILLED, "deaf": KILLED, "stop": KILLED, "hang": 4, "user": 2, "stuck": 2, "bug": 1}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every run's ranks, ended. A few at a time: a rank is missed if it does not get a processor for so long."""

    def result(name):
        what, who, size, _, timeout, *_ = RUNS[name]
        anew = name == "kill another"  # there torch is imported after the program has told it to say nothing
        return ends(start_all(what, who, size, "-pi", "fs", "-pp", tmp_path_factory.mktemp("run"), "--timeout", timeout, anew=anew))

    tmp_path_factory.getbasetemp()  # made by whoever asks first, which must not be several threads
    with ThreadPoolExecutor(6) as pool:
        return dict(zip(RUNS, pool.map(result, RUNS)))


@pytest.mark.parametrize("name", RUNS)
def test_the_others_end_and_one_of_them_says_why(results, name):
    what, who, size, code, _, *words = RUNS[name]
    words = [word.format(who=who, size=size) for word in words]
    ranks = results[name]
    others = [rank for rank in range(size) if rank != who]
    assert [ranks[rank].code for rank in others] == [code] * len(others), ranks
    assert ranks[who].code == OWN_CODE[what], ranks[who]
    said = [ranks[rank].err for rank in others]
    assert [err for err in said if err] == [said[0]] and said[0].count("\n") == 1 and said[0].startswith("error: "), said
    assert all(word in said[0] for word in words), said[0]
    own = "error: the disk is full; make room\n" if what in ("user", "stuck") else ""
    assert ranks[who].err == own or what == "bug" and "ZeroDivisionError: a bug" in ranks[who].err
    assert not any(rank.out for rank in ranks)


def test_ranks_whose_torchrun_is_killed_end(tmp_path):
    """Nobody else would end them, or start them again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    said = tmp_path / "said"
    with open(said, "w") as f:
        torchrun = subprocess.Popen([*command, PROGRAM, "torchrun", "0"], env=environment(), stdout=f, stderr=f, text=True)
    assert torchrun.wait(LONGEST_S) == KILLED
    await_text(said, sentence := f"error: torchrun (process {torchrun.pid} on ")
    assert said.read_text().count(sentence) == 1 and said.read_text().count("error") == 1, said.read_text()


def test_a_rank_whose_torchrun_is_killed_tells_the_others(tmp_path):
    """It is one of two machines' here."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    said = [tmp_path / "0", tmp_path / "1"]
    torchruns = []
    for node in range(2):
        words = [*command, "--node-rank", str(node), PROGRAM, "torchrun", "1"]
        with open(said[node], "w") as f:
            torchruns.append(subprocess.Popen(words, env=environment(), stdout=f, stderr=f, text=True))
    assert torchruns[1].wait(LONGEST_S) == KILLED
    await_text(said[0], f"error: rank 1 stopped: torchrun (process {torchruns[1].pid} on ")
    assert torchruns[0].wait(LONGEST_S) == 1


def await_text(path, text: str) -> None:
    deadline = time.monotonic() + LONGEST_S
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.1)
