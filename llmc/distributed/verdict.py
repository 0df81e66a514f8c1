"""What is wrong with a run of several processes, judged from their beats. The store and the threads are in llmc.distributed.watch.

How long something has not changed is measured by the observer's own clock: the clocks of different machines are never compared. Time
in which the observer itself was suspended does not count.
"""

from dataclasses import dataclass, field

from llmc.distributed.place import START_AGAIN
from llmc.distributed.rendezvous import LOST_AFTER_S, Member
from llmc.errors import HANGUP_CODE, INPUT_CODE, INTERRUPT_CODE, LOST_CODE, MEMORY_CODE, TERMINATED_CODE

DOUBTFUL_AFTER_S = 2.0  # from here on a rank may be gone, so nobody is judged for anything else
SETTLE_S = LOST_AFTER_S + 2  # if no lost rank has shown by then, a collective failed for another reason
LONGEST_LOOK_S = 1.0  # the longest time counted between two looks: in any more, this process did not run
# of a rank that stopped: starting all again cannot help then, or is not wanted, as after Ctrl-C, SIGHUP and SIGTERM
FINAL_CODES = (INPUT_CODE, MEMORY_CODE, HANGUP_CODE, INTERRUPT_CODE, TERMINATED_CODE)
DONE = "done"


@dataclass(frozen=True, slots=True)
class Beat:
    """What a process says of itself."""

    count: int = 0
    sequence: int = 0  # calls of progress(): every rank makes the same ones, so a rank with fewer is behind
    moves: int = 0  # calls of moved(): they say only that this rank does something
    progress: str = "its start"
    left: str = ""  # why it ended: DONE, or what the others should know
    code: int = 0  # with which exit code
    failed: str = ""  # the error of a collective that failed
    read: bool = False  # whether it knows the verdict


@dataclass(frozen=True, slots=True)
class Heard:
    """What the store said last. beats: all ranks' for rank 0, rank 0's for the others. verdict: as published, or empty."""

    exchanges: int = 0
    beats: dict[int, Beat] = field(default_factory=dict)
    verdict: str = ""
    lost: bool = False  # the store does not answer any more


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the run cannot go on. Only rank `speaker` prints it; if that is None, each machine settles who does."""

    sentence: str
    code: int = LOST_CODE
    speaker: int | None = None
    gone: int | None = None  # the rank that is, if that is why


class Judge:
    """Rank 0 judges all ranks; the others only notice when rank 0, whose store it is, is gone."""

    def __init__(self, rank: int, members: tuple[Member, ...], timeout_s: float):
        self.rank, self.members, self.timeout_s = rank, members, timeout_s
        self.waits_silently = False  # True where a collective that lasts too long raises nothing, as NCCL's do: the judge notices it
        self.seconds, self.last_look = 0.0, None
        self.since: dict[object, tuple] = {}  # what is observed -> (its value, since when it has had it)

    def look(self, now: float) -> None:
        """Advance the time that durations are measured by. now: from a clock that only this process reads."""
        if self.last_look is not None:
            self.seconds += min(now - self.last_look, LONGEST_LOOK_S)
        self.last_look = now

    def unchanged_s(self, what, value) -> float:
        """For how long something has had the same `value`."""
        if what not in self.since or self.since[what][0] != value:
            self.since[what] = value, self.seconds
        return self.seconds - self.since[what][1]

    def silent_s(self, rank: int, beat: Beat) -> float:
        return self.unchanged_s(("beat", rank), beat.count)

    def verdict(self, heard: Heard) -> Verdict | None:
        """What ends the run, if anything does."""
        silent_s = self.unchanged_s("store", heard.exchanges)
        if heard.lost or silent_s > LOST_AFTER_S:
            return self.gone(0, heard.beats.get(0, Beat()), silent_s)
        if self.rank == 0:
            return self.verdict_on_all({rank: beat for rank, beat in heard.beats.items() if beat.left != DONE})
        for beat in heard.beats.values():
            silent_s = self.silent_s(0, beat)
            if silent_s > LOST_AFTER_S and not beat.left:
                return self.gone(0, beat, silent_s)
        return None

    def verdict_on_all(self, beats: dict[int, Beat]) -> Verdict | None:
        """What ends the run, if anything: a rank that said why it stopped, else one that is silent, else one that does not move."""
        silent_s = {rank: self.silent_s(rank, beat) for rank, beat in beats.items()}
        unmoved_s = {rank: self.unchanged_s(("progress", rank), (beat.sequence, beat.moves)) for rank, beat in beats.items()}
        failed = [rank for rank, beat in beats.items() if beat.failed]
        failed_s = self.unchanged_s("failed", bool(failed))
        for rank, beat in beats.items():
            if beat.left:
                speaker = min((other for other in beats if other != rank and silent_s[other] < LOST_AFTER_S), default=None)
                return Verdict(f"rank {rank} stopped: {beat.left}", beat.code if beat.code in FINAL_CODES else LOST_CODE, speaker)
        for rank, beat in beats.items():
            if silent_s[rank] > LOST_AFTER_S:
                return self.gone(rank, beat, silent_s[rank], speaker=0)
        if not beats or max(silent_s.values()) > DOUBTFUL_AFTER_S:
            return None
        return self.hangs(beats, unmoved_s, failed if failed_s > SETTLE_S else [])

    def hangs(self, beats: dict[int, Beat], unmoved_s: dict[int, float], failed: list[int]) -> Verdict | None:
        """All ranks beat: the one that hangs is behind and does not move, or was not waiting when the others' collectives timed out."""
        ahead = max(beats, key=lambda rank: (rank in failed, beats[rank].sequence))
        hung = [rank for rank in beats if unmoved_s[rank] > self.timeout_s and beats[rank].sequence < beats[ahead].sequence]
        timed_out = not hung and any("timed out" in beats[rank].failed.lower() for rank in failed)
        if timed_out:
            hung = [rank for rank in beats if rank not in failed]
        slow = f"{START_AGAIN}, and raise --timeout (now {self.timeout_s:g} s) if it is only slow"
        if hung:
            rank = min(hung, key=lambda rank: beats[rank].sequence)
            found = f"hangs: it has not moved for {unmoved_s[rank]:.0f} s"
            if timed_out and unmoved_s[rank] < SETTLE_S:  # it moved after the others' collectives had failed
                found = "takes longer than the others wait for it: it still moves"
            where = f"in {beats[rank].progress}, while rank {ahead} waits in {beats[ahead].progress}"
            return Verdict(f"{self.name(rank)} {found}, {where}; {slow}", speaker=0)
        if failed:
            return self.collective_failed(failed[0], beats[failed[0]], speaker=0)
        if self.waits_silently and min(unmoved_s.values()) > self.timeout_s:
            sentence = f"none of the {len(self.members)} ranks has moved for {self.timeout_s:g} s, in {beats[ahead].progress}; {slow}"
            return Verdict(sentence, speaker=0)
        return None

    def gone(self, rank: int, beat: Beat, silent_s: float, speaker: int | None = None) -> Verdict:
        when = f"{silent_s:.0f} seconds ago" if silent_s >= LOST_AFTER_S else "just now"
        what = f"it stopped answering {when}, in {beat.progress}; see what it printed last, then {START_AGAIN}"
        return Verdict(f"{self.name(rank)} is gone: {what}", speaker=speaker, gone=rank)

    def collective_failed(self, rank: int, beat: Beat, speaker: int | None = None) -> Verdict:
        return Verdict(f"a collective of {self.name(rank)} failed in {beat.progress}: {beat.failed}; {START_AGAIN}", speaker=speaker)

    def name(self, rank: int) -> str:
        member = self.members[rank]
        return f"rank {rank} of {len(self.members)} (host {member.host}, process {member.process})"
