"""How several processes meet: all connect to one torch.distributed.TCPStore, claim their ranks there, and wait for the last one.

A process that starts again after a crash may find traces of the previous run: a file, or a store that is about to disappear. Neither
must confuse it, so a store counts only if it answers, says which run it belongs to, and nobody has declared that run lost.
"""

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from threading import Thread

from torch.distributed import DistError, DistStoreError, PrefixStore, TCPStore

from llmc.distributed.network import addresses_for_others, own_address_towards, this_machine
from llmc.distributed.place import Place, rendezvous_path
from llmc.errors import UserError, file_error, lines_of

KNOCK_S = 2  # allowed for opening a connection
ANSWER_S = 5  # allowed for a store to say which run it belongs to
LOST_AFTER_S = 10.0  # without a new beat a rank is lost: on an overloaded machine one was seen to come 5 s late
TAKEN_AFTER_S = 2 * LOST_AFTER_S  # a rank that is still taken is held by a living process: a crashed one would be missed by then
PAUSE_S = 0.2
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
    """The store where all have met; `connect` opens one more connection to it, for another thread."""

    place: Place
    address: str
    port: int
    prefix: str
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
        return PrefixStore(self.prefix, TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=timeout_s)))


def beat_key(rank: int) -> str:
    """The key under which a rank says that it is alive (llmc.distributed.watch)."""
    return f"beat/{rank}"


def member_key(rank: int) -> str:
    return f"member/{rank}"


class Gone(Exception):
    """The store that was found belongs to a run that is ending; look again."""


def meet(place: Place, timeout_s: float) -> Meeting:
    """Find the other ranks and wait until all are there. Raises UserError if that takes longer than timeout_s, or this rank is taken."""
    deadline = time.monotonic() + timeout_s
    opens = place.rank == 0 and place.method != "agent"
    taken_since = None
    while True:
        try:
            meeting = open_store(place, timeout_s) if opens else find_store(place, timeout_s, deadline)
            join(meeting, timeout_s, deadline)
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
# rank 0: the store


def open_store(place: Place, timeout_s: float) -> Meeting:
    """Open the store and listen; with -pi fs, write where it listens into a file."""
    if (
        place.method == "fs"
        and (there := answers(read_card(place)))
        and not (store := PrefixStore(there.run, there.store)).get(VERDICT_KEY)
    ):
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
    greet(meeting, server, run)
    if place.method == "fs":
        write_card(place, {"addresses": addresses_for_others(), "machine": this_machine(), "port": server.port, "run": run})
    return meeting


def greet(meeting: Meeting, store, run: str) -> None:
    """Put into the store what others must know before they join: the run's key and size."""
    store.set("hello", json.dumps({"run": run, "num_processes": meeting.place.num_processes}))
    meeting.store.set(VERDICT_KEY, "")


def write_card(place: Place, card: dict) -> None:
    """Write the file of -pi fs: under its name it is whole or not there."""
    path = rendezvous_path(place)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(card))
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise file_error(error, path, "writing where rank 0 listens") from error


def read_card(place: Place) -> dict | None:
    """What rank 0 wrote into the file, in this run or an earlier one; None if there is nothing to read."""
    try:
        card = json.loads(rendezvous_path(place).read_text())
        return card if {"addresses", "machine", "port", "run"} <= card.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def remove_card(place: Place, run: str) -> None:
    """Remove this run's file: once all have joined nobody needs it."""
    card = read_card(place)
    if card and card["run"] == run:
        with suppress(OSError):
            rendezvous_path(place).unlink()


# ----------------------------------------------------------------------------
# the other ranks: finding the store


def find_store(place: Place, timeout_s: float, deadline: float) -> Meeting:
    """Look for rank 0's store, or torchrun's, until it answers."""
    while True:
        if place.method == "fs":
            found = answers(read_card(place))
        elif place.method == "agent":
            found = knock(place.address, place.port, agent=True)
        else:
            found = knock(place.address, place.port)
        if found:
            break
        if time.monotonic() > deadline:
            raise UserError(not_found_sentence(place, timeout_s))
        time.sleep(PAUSE_S)
    if place.method == "agent":
        prefix = f"llmc/{place.key}"
        meeting = Meeting(place, found.address, place.port, prefix, PrefixStore(prefix, found.store))
        if place.rank == 0:
            greet(meeting, meeting.store, prefix)
        return meeting
    if found.num_processes != place.num_processes:
        raise UserError(
            f"-pn {place.num_processes}: rank 0 at {found.address}:{found.port} is one of {found.num_processes} processes; "
            "give all the same -pn"
        )
    return Meeting(place, found.address, found.port, found.run, PrefixStore(found.run, found.store))


def not_found_sentence(place: Place, timeout_s: float) -> str:
    if place.method == "fs":
        where = f"no {rendezvous_path(place)} of a living rank 0 appeared"
        return f"{where} within {timeout_s:g} s (--timeout); start rank 0 with the same -pn and -pp, on a machine that shares this folder"
    return (
        f"rank 0 did not answer at {place.address}:{place.port} within {timeout_s:g} s (--timeout); "
        f"start it there, open the port between the machines, or {OTHER_PORT}"
    )


@dataclass(frozen=True, slots=True)
class Found:
    """A store that answered, and what it says about its run."""

    store: TCPStore
    address: str
    port: int
    run: str = ""
    num_processes: int = 0


def answers(card: dict | None) -> Found | None:
    """The store that a card leads to, if it still belongs to the run that wrote the card."""
    if card is None:
        return None
    addresses = ["127.0.0.1"] if card["machine"] == this_machine() else card["addresses"]
    for address in addresses:
        found = knock(address, card["port"])
        if found and found.run == card["run"]:
            return found
    return None


def knock(address: str, port: int, agent: bool = False) -> Found | None:
    """A connection to the store at address:port; None if nothing listens there, or something else does.

    The store is asked in a thread of its own, because torch waits for ever for the greeting of a listener that is not a store.
    """
    try:
        socket.create_connection((address, port), timeout=KNOCK_S).close()
    except OSError:
        return None
    answer = []

    def ask():
        with suppress(DistError, RuntimeError, ValueError, KeyError, TypeError):
            store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))
            hello = {} if agent else json.loads(store.get("hello"))
            answer.append(Found(store, address, port, **hello))

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_S)
    return answer[0] if answer else None


# ----------------------------------------------------------------------------
# all ranks: joining


def join(meeting: Meeting, timeout_s: float, deadline: float) -> None:
    """Claim this rank, wait for all the others, and learn who they are."""
    place, store = meeting.place, meeting.store
    store.set_timeout(timedelta(seconds=timeout_s))
    claim(meeting)
    if not everybody(meeting, "joined", deadline):
        raise UserError(missing_sentence(place, store, timeout_s))
    members = store.multi_get([member_key(rank) for rank in range(place.num_processes)])
    meeting.members = tuple(Member(*who, tuple(processors)) for *who, processors in map(json.loads, members))
    if place.rank == 0 and place.method == "fs":
        remove_card(place, meeting.prefix)


def claim(meeting: Meeting) -> None:
    """Enter this rank into the store, and which process holds it. Raises Gone or Taken."""
    place, store = meeting.place, meeting.store
    if place.method != "agent" and store.get(VERDICT_KEY):
        raise Gone
    if store.add(f"claim/{place.rank}", 1) > 1:
        raise Taken(taken_sentence(place, store))
    mine = [this_machine(), socket.gethostname(), os.getpid(), own_address_towards(meeting.address), sorted(os.sched_getaffinity(0))]
    store.set(member_key(place.rank), json.dumps(mine))
    store.set(beat_key(place.rank), "{}")


def everybody(meeting: Meeting, what: str, deadline: float = inf) -> bool:
    """Wait until every rank has made this call. Returns whether that was before the deadline."""
    store = meeting.store
    if store.add(what, 1) == meeting.place.num_processes:
        store.set(f"all {what}", "")
    while not came(store, f"all {what}"):  # in short waits, so that Ctrl-C takes effect between them
        if time.monotonic() > deadline:
            return False
    return True


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
            holder = Member(*json.loads(store.get(member_key(place.rank))))
            who = f" by process {holder.process} on {holder.host}"
    return (
        f"rank {place.rank} of {place.num_processes} is taken{who}; give every process a -pr of its own, "
        "and another run of as many processes another -ps or -pp"
    )


def missing_sentence(place: Place, store, timeout_s: float) -> str:
    missing = [str(rank) for rank in range(place.num_processes) if not store.check([member_key(rank)])]
    named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"rank{'s' * (len(missing) > 1)} {named} of {place.num_processes} did not come within {timeout_s:g} s (--timeout); {ADVICE}"
