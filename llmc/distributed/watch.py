"""Ends this process, with a sentence and an exit code, when another one of the run is gone, hangs or has stopped.

Each process beats: about once a second it puts a counter and its progress into the store. Rank 0 reads all beats and publishes a
verdict, which the others read. Threads do this, because the main thread may wait for ever in a collective. There are two: one talks
to the store, which may never answer again, and one judges by what was last heard (llmc.distributed.verdict).
"""

import atexit
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from threading import Event, Lock, Thread

from torch.distributed import DistError

from llmc.distributed.rendezvous import VERDICT_KEY, Meeting, beat_key
from llmc.distributed.verdict import DONE, LOST_AFTER_S, SETTLE_S, Beat, Heard, Judge, Verdict
from llmc.errors import LOST_CODE, RankLost

PERIOD_S = 1.0  # between beats
TICK_S = 0.25  # between looks at them
FAREWELL_S = 3.0  # allowed for a last message to be read, or printed
EXPLAIN_S = SETTLE_S + 2 * FAREWELL_S  # allowed for a verdict, once a collective has failed
END_S = 10.0  # allowed for the main thread to end by itself once it knows why


class Watch:
    """The beat of this process, and its view of the others."""

    def __init__(self, meeting: Meeting, timeout_s: float):
        self.place, self.rank, self.members, self.process = meeting.place, meeting.place.rank, meeting.members, os.getpid()
        self.judge = Judge(self.rank, self.members, timeout_s)
        self.store = meeting.connect(LOST_AFTER_S)
        self.mine, self.moves, self.heard = Beat(), 0, Heard()
        self.verdict: Verdict | None = None
        self.speaks = True  # whether this rank prints the verdict; False if another one does
        self.explaining = self.closing = self.stopping = False
        self.lock, self.wake, self.sent, self.decided, self.heard_out = Lock(), Event(), Event(), Event(), Event()
        atexit.register(self._at_exit)
        self.threads = [Thread(target=run, daemon=True) for run in (self._exchange, self._watch)]
        for thread in self.threads:
            thread.start()

    # ---- what the program calls

    def progress(self, what: str) -> None:
        """Say what the main thread begins now. Every rank makes the same calls, so their number tells who is behind, and names what all of
        them wait for (World.wait_for_all)."""
        with self.lock:
            self.mine = replace(self.mine, sequence=self.mine.sequence + 1, progress=what)

    def moved(self) -> None:
        """Say that this rank still goes on with what it began. Ranks need not make the same calls: none falls behind by these."""
        self.moves += 1  # if several threads do this at once, an increment may be lost, which does not matter

    def leave(self, reason: str, code: int) -> None:
        """Say why this process is about to end with an exit code, so that the others end too. The first reason counts."""
        if self.mine.left or self.verdict:
            return
        self._say(left=" ".join(reason.split()), code=code)
        if self.rank == 0:  # the store may end with it, and the others have yet to read the verdict there
            self.heard_out.wait(2 * FAREWELL_S)

    def explain(self, error: BaseException) -> RankLost | None:
        """Why a collective failed, after waiting for a verdict on who is gone. None if `error` is not from a collective."""
        if not is_of_a_collective(error):
            return None
        with self.lock:
            self.explaining = True
        self._say(failed=" ".join(str(error).split())[:400])
        if not self.decided.wait(EXPLAIN_S):
            self.verdict = self.judge.collective_failed(self.rank, self.mine)
        return RankLost(self.verdict.sentence, self.verdict.code, said_elsewhere=not self.speaks)

    def close(self) -> None:
        """End in an orderly way, once every rank has come here."""
        self.closing = True
        self._say(left=DONE)
        deadline = time.monotonic() + FAREWELL_S
        while self.rank == 0 and time.monotonic() < deadline and not all(beat.left for beat in self.heard.beats.values()):
            self.wake.set()  # the others need rank 0's store for their last message
            time.sleep(TICK_S)
        self.stopping = True
        self.wake.set()
        for thread in self.threads:  # Python must not shut down under them
            thread.join(2 * PERIOD_S)

    # ---- talking to the store

    def _say(self, **fields):
        """Change this beat, and put it into the store at once, or as soon as the store answers."""
        with self.lock:
            self.mine = replace(self.mine, **fields)
        self.sent.clear()
        self.wake.set()
        self.sent.wait(2 * PERIOD_S)

    def _exchange(self):
        """Write this process's beat and read the others', until the end."""
        ranks = range(len(self.members)) if self.rank == 0 else range(1)
        keys, count = [*map(beat_key, ranks), VERDICT_KEY], 0
        try:
            while not self.stopping:
                said, count = self.mine, count + 1
                self.store.set(beat_key(self.rank), json.dumps(asdict(said) | {"count": count, "moves": self.moves}))
                *beats, verdict = self.store.multi_get(keys)
                self.heard = Heard(count, {rank: Beat(**json.loads(beat)) for rank, beat in zip(ranks, beats)}, verdict.decode())
                if said is self.mine:
                    self.sent.set()
                self.wake.wait(PERIOD_S)
                self.wake.clear()
        except RuntimeError:  # which all of torch's errors are
            self.heard = replace(self.heard, lost=True)
            self.sent.set()

    # ---- ending

    def _watch(self):
        """Look again and again, until there is a verdict or the run is done."""
        while not self.closing:
            self.judge.look(time.monotonic())
            heard = self.heard
            verdict = Verdict(**json.loads(heard.verdict)) if heard.verdict else self._orphaned() or self.judge.verdict(heard)
            if verdict and not self.closing:
                self._carry_out(verdict)
                return
            time.sleep(TICK_S)

    def _orphaned(self) -> Verdict | None:
        """What rank 0 says if its torchrun is gone. Another rank tells rank 0 about its own, as of anything else for which it ends."""
        if self.place.is_orphan:
            if self.rank == 0:
                return Verdict(self.place.orphan_sentence)
            self.leave(self.place.orphan_sentence, LOST_CODE)
        return None

    def _carry_out(self, verdict: Verdict):
        """Let the others know, then end this process: by its main thread if that is waiting in explain(), else here and at once."""
        if self.rank == 0:
            self._publish(verdict)
        elif not self.mine.left and verdict.speaker is not None:  # else there is nobody to tell
            self._say(read=True)
        if self.mine.left:  # it ends by itself, for its own reason, unless that waits for a GPU, and so for a collective that never ends
            time.sleep(END_S)
            os._exit(self.mine.code)
        self.speaks = self._speaks(verdict)
        if verdict.speaker is None:
            time.sleep(2 * PERIOD_S)  # other ranks on this machine, which notice a little later, check whether this one is alive
        if not self.speaks:
            time.sleep(FAREWELL_S)  # a launcher ends all ranks as soon as one has ended: first those that say why
        with self.lock:
            self.verdict = verdict
            explaining = self.explaining
        if explaining:
            self.decided.set()
            time.sleep(END_S)
        elif self.speaks:
            os.write(2, f"error: {verdict.sentence}\n".encode())  # not print: the main thread may hold its lock
        os._exit(verdict.code)

    def _publish(self, verdict: Verdict):
        """Put the verdict where the others read it, and wait until those that are alive have read it."""
        deadline = time.monotonic() + FAREWELL_S
        with suppress(RuntimeError):
            if not self.heard.lost:
                self.store.set(VERDICT_KEY, json.dumps(asdict(verdict)))
            while time.monotonic() < deadline and not self.heard.lost and not all(map(self._knows, self.heard.beats)):
                self.wake.set()
                time.sleep(TICK_S)
                self.judge.look(time.monotonic())
        self.heard_out.set()

    def _knows(self, rank: int) -> bool:
        """Whether a rank has read the verdict, or never will."""
        beat = self.heard.beats[rank]
        return rank == 0 or beat.read or bool(beat.left) or self.judge.silent_s(rank, beat) > LOST_AFTER_S

    def _speaks(self, verdict: Verdict) -> bool:
        """Whether this rank prints the verdict. Where the verdict names no speaker, the lowest living rank of each machine does."""
        if verdict.speaker is not None:
            return self.rank == verdict.speaker
        machine, lower = self.members[self.rank].machine, enumerate(self.members[: self.rank])
        return not any(member.machine == machine and rank != verdict.gone and is_alive(member.process) for rank, member in lower)

    def _at_exit(self):
        """The last message of a process that does not end in an orderly way.

        Torch would abort if collectives are unfinished, and Python if a thread is in the store, so os._exit gives neither the chance.
        """
        if self.mine.left == DONE or os.getpid() != self.process:
            return
        if self.verdict is None:
            self.leave("it ended early; see what it printed", 1)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(self.verdict.code if self.verdict else self.mine.code)


def is_of_a_collective(error: BaseException) -> bool:
    """Whether an error comes from torch's collectives, which raise RuntimeError for everything."""
    return isinstance(error, DistError) or isinstance(error, RuntimeError) and any(sign in str(error) for sign in ("gloo", "NCCL", "c10d"))


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs, that is, has neither ended nor been suspended."""
    try:
        with open(f"/proc/{process}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZTtX"
    except OSError:
        return False
