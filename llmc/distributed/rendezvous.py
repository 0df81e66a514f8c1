"""How several processes meet: all connect to rank 0's torch.distributed.TCPStore, claim their ranks there, and wait for the last one.

A process that starts again after a crash may find traces of the previous run: a signpost to its store, or the store itself, about to
disappear. Neither must confuse it, so a store counts only if it answers, says which run it belongs to, and nobody has declared that run
lost. Torchrun's store outlives the runs that torchrun starts again, so it holds no more than a signpost: by its count of restarts they
could not be told apart, as each machine's torchrun counts its own.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import inf

from torch.distributed import DistError, DistStoreError, PrefixStore, TCPStore

from llmc.distributed.network import addresses_for_others, own_address_towards, this_machine
from llmc.distributed.place import Place, rendezvous_path, signpost_name
from llmc.distributed.signpost import Found, SignpostFile, SignpostInStore, knock, leads_to
from llmc.errors import UserError, lines_of

LOST_AFTER_S = 10.0  # without a new beat a rank is lost: on an overloaded machine one was seen to come 5 s late
TAKEN_AFTER_S = 2 * LOST_AFTER_S  # a rank that is still taken is held by a living process: a crashed one would be missed by then
PAUSE_S = 0.2
REMINDER_S = 10.0  # after so long without the others a line says who is waited for
VERDICT_KEY = "verdict"  # why the run ends; empty until then
OTHER_PORT = "choose another port with -ps HOST:PORT or MASTER_PORT"
ADVICE = "start all of them with the same flags, and look at what the others print"


@dataclass(frozen=True, slots=True)
class Member:
    """One of the processes that met. `address` is its own, as the store sees it; `processors` are the ones it may run on."""

    machine: str
    host: str
    process: int
    address: str
    processors: tuple[int, ...] = ()


@dataclass(slots=True)
class Meeting:
    """Rank 0's store, where all have met; `connect` opens one more connection to it, for another thread."""

    place: Place
    address: str
    port: int
    run: str  # a name that no other run has
    store: PrefixStore
    server: TCPStore | None = None  # must be kept: the store lives as long as this object
    members: tuple[Member, ...] = ()

    @property
    def mine(self) -> Member:
        """This process."""
        return self.members[self.place.rank]

    @property
    def here(self) -> list[Member]:
        """The processes of this machine."""
        return [member for member in self.members if member.machine == self.mine.machine]

    def connect(self, timeout_s: float) -> PrefixStore:
        return PrefixStore(self.run, TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=timeout_s)))


def beat_key(rank: int) -> str:
    """The key under which a rank says that it is alive (llmc.distributed.watch)."""
    return f"beat/{rank}"


def member_key(rank: int) -> str:
    return f"member/{rank}"


def read_member(written) -> Member:
    """The Member that is in the store, as JSON, which has no tuples."""
    fields = json.loads(written)
    return Member(**fields | {"processors": tuple(fields["processors"])})


class Gone(Exception):
    """The store that was found belongs to a run that is ending; look again."""


def meet(place: Place, timeout_s: float) -> Meeting:
    """Find the other ranks and wait until all are there. Raises UserError if that takes longer than timeout_s, or this rank is taken."""
    deadline = time.monotonic() + timeout_s
    taken_since = None
    while True:
        try:
            signpost = open_signpost(place, timeout_s, deadline)
            meeting = open_store(place, signpost, timeout_s) if place.rank == 0 else find_store(place, signpost, timeout_s, deadline)
            join(meeting, timeout_s, deadline)
            if place.method == "fs" and place.rank == 0:
                signpost.remove(meeting.run)  # nobody needs it any more
            return meeting
        except Taken as taken:
            taken_since = taken_since or time.monotonic()
            if time.monotonic() > min(taken_since + TAKEN_AFTER_S, deadline):
                raise UserError(str(taken)) from None
        except (Gone, DistError):  # the process that held the store has ended; another may take its place
            if time.monotonic() > deadline:
                raise UserError(f"the process that held the {place.num_processes} together ended before all had come; {ADVICE}") from None
        time.sleep(PAUSE_S)


class Taken(Exception):
    """Another process holds this rank, or held it a moment ago."""


# ----------------------------------------------------------------------------
# rank 0's store


def open_signpost(place: Place, timeout_s: float, deadline: float) -> SignpostFile | SignpostInStore | None:
    """Where rank 0 says where it listens; None if the place itself says it."""
    if place.method == "tcp":
        return None
    if place.method == "fs":
        return SignpostFile(rendezvous_path(place))
    who = f"torchrun's store at {place.address}:{place.port}"
    missing = f"{who} did not answer within {timeout_s:g} s (--timeout); open the port between the machines"
    agent = wait_until_found(lambda: knock(place.address, place.port, says_hello=False), place, who, deadline, missing)
    return SignpostInStore(agent.store, signpost_name(place))


def open_store(place: Place, signpost: SignpostFile | SignpostInStore | None, timeout_s: float) -> Meeting:
    """Rank 0: open the store, listen, and say where. Raises Taken where another run's rank 0 does."""
    if signpost and (there := leads_to(signpost.read())) and not (store := PrefixStore(there.run, there.store)).get(VERDICT_KEY):
        raise Taken(taken_sentence(place, store))
    port = place.port if place.method == "tcp" else 0
    try:
        server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except DistError as error:
        if "EADDRINUSE" in str(error):
            raise Taken(f"port {port} of this machine is in use, where rank 0 should listen; {OTHER_PORT}") from None
        raise UserError(f"rank 0 cannot listen at port {port}: {lines_of(error)[0]}; {OTHER_PORT}") from None
    run = secrets.token_hex(8)
    meeting = Meeting(place, "127.0.0.1", server.port, run, PrefixStore(run, server), server)
    server.set("hello", json.dumps({"run": run, "num_processes": place.num_processes}))
    meeting.store.set(VERDICT_KEY, "")
    if signpost:
        signpost.write({"addresses": addresses_for_others(), "machine": this_machine(), "port": server.port, "run": run})
    return meeting


def find_store(place: Place, signpost: SignpostFile | SignpostInStore | None, timeout_s: float, deadline: float) -> Meeting:
    """The other ranks: look for rank 0's store until it answers."""

    def look():
        return leads_to(signpost.read()) if signpost else knock(place.address, place.port)

    found = wait_until_found(look, place, rank_0_of(place), deadline, not_found_sentence(place, timeout_s))
    if found.num_processes != place.num_processes:
        raise UserError(
            f"-pn {place.num_processes}: rank 0 at {found.address}:{found.port} is one of {found.num_processes} processes; "
            "give all the same -pn"
        )
    return Meeting(place, found.address, found.port, found.run, PrefixStore(found.run, found.store))


def wait_until_found(look: Callable[[], Found | None], place: Place, who: str, deadline: float, missing: str) -> Found:
    """What `look` finds, as soon as it finds something. Raises UserError, with the sentence `missing`, if that is not before the deadline.

    who  is waited for; one rank of a machine says so
    """
    reminder = time.monotonic() + REMINDER_S if place.local_rank == 0 else inf
    while not (found := look()):
        if time.monotonic() > reminder:
            reminder = inf
            print(f"rank {place.rank} of {place.num_processes} is waiting for {who}", flush=True)
        if time.monotonic() > deadline:
            raise UserError(missing)
        refuse_orphan(place)
        time.sleep(PAUSE_S)
    return found


def rank_0_of(place: Place) -> str:
    if place.method == "fs":
        return f"rank 0 to write {rendezvous_path(place)}"
    return "rank 0" if place.method == "agent" else f"rank 0 at {place.address}:{place.port}"


def not_found_sentence(place: Place, timeout_s: float) -> str:
    within = f"within {timeout_s:g} s (--timeout)"
    if place.method == "fs":
        where = f"no {rendezvous_path(place)} of a living rank 0 appeared"
        return f"{where} {within}; start rank 0 with the same -pn and -pp, on a machine that shares this folder"
    if place.method == "agent":
        return f"rank 0 of {place.num_processes} could not be reached {within}; see what it prints, and open the ports between the machines"
    where = f"{place.address}:{place.port}"
    return f"rank 0 did not answer at {where} {within}; start it there, open the port between the machines, or {OTHER_PORT}"


# ----------------------------------------------------------------------------
# all ranks: joining


def join(meeting: Meeting, timeout_s: float, deadline: float) -> None:
    """Claim this rank, wait for all the others, and learn who they are."""
    place, store = meeting.place, meeting.store
    store.set_timeout(timedelta(seconds=timeout_s))
    claim(meeting)
    arrive(meeting, "joined")
    if not all_joined(meeting, min(deadline, time.monotonic() + REMINDER_S)):
        if place.rank == 0 and (missing := missing_ranks(place, store)):
            print(f"waiting for {missing}", flush=True)
        if not all_joined(meeting, deadline) and (missing := missing_ranks(place, store)):
            raise UserError(f"{missing} did not come within {timeout_s:g} s (--timeout); {ADVICE}")
    members = store.multi_get([member_key(rank) for rank in range(place.num_processes)])
    meeting.members = tuple(map(read_member, members))


def claim(meeting: Meeting) -> None:
    """Enter this rank into the store, and which process holds it. Raises Gone or Taken."""
    place, store = meeting.place, meeting.store
    if store.get(VERDICT_KEY):
        raise Gone
    if store.add(f"claim/{place.rank}", 1) > 1:
        raise Taken(taken_sentence(place, store))
    address, processors = own_address_towards(meeting.address), tuple(sorted(os.sched_getaffinity(0)))
    mine = Member(this_machine(), socket.gethostname(), os.getpid(), address, processors)
    store.set(member_key(place.rank), json.dumps(asdict(mine)))
    store.set(beat_key(place.rank), "{}")


def all_joined(meeting: Meeting, deadline: float) -> bool:
    """Wait until every rank has claimed its place. Returns whether that was before the deadline."""
    while not came(meeting.store, "all joined"):
        if time.monotonic() > deadline:
            return False
        refuse_orphan(meeting.place)
    return True


def refuse_orphan(place: Place) -> None:
    """Before the ranks have met there is no watch that would see it."""
    if place.is_orphan:
        raise UserError(place.orphan_sentence)


def wait_for_all_ranks(meeting: Meeting, what: str) -> None:
    """Wait until every rank has made this call."""
    arrive(meeting, what)
    while not came(meeting.store, f"all {what}"):  # in short waits, so that Ctrl-C takes effect between them
        pass


def arrive(meeting: Meeting, what: str) -> None:
    """Say that this rank has come to a point where all must come."""
    if meeting.store.add(what, 1) == meeting.place.num_processes:
        meeting.store.set(f"all {what}", "")


def came(store, key: str) -> bool:
    """Whether a key is in the store, after waiting up to one second for it."""
    try:
        store.wait([key], timedelta(seconds=1))
    except DistStoreError:
        return False
    return True


def taken_sentence(place: Place, store) -> str:
    who = ""
    with suppress(DistError, ValueError):
        if store.check([member_key(place.rank)]):
            holder = read_member(store.get(member_key(place.rank)))
            who = f" by process {holder.process} on {holder.host}"
    return (
        f"rank {place.rank} of {place.num_processes} is taken{who}; give every process a -pr of its own, "
        "and another run of as many processes another -ps or -pp"
    )


def missing_ranks(place: Place, store) -> str:
    """Those that have not come, the first of them by number; empty if all have, since somebody looked."""
    missing = [str(rank) for rank in range(place.num_processes) if not store.check([member_key(rank)])]
    named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"rank{'s' * (len(missing) > 1)} {named} of {place.num_processes}" if missing else ""
