"""Where rank 0's store is, for whom no flag tells it: rank 0 listens anywhere, and leaves a signpost in a file or in torchrun's store.

A signpost may be one of an earlier run. So it leads somewhere only if a store answers there that is of the run that put it up.
"""

import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread

from torch.distributed import DistError, TCPStore

from llmc.distributed.network import this_machine
from llmc.errors import file_error

KNOCK_S = 2  # allowed for opening a connection
ANSWER_S = 5  # allowed for a store to say which run it belongs to


@dataclass(frozen=True, slots=True)
class Found:
    """A store that answered, and what it says about its run."""

    store: TCPStore
    address: str
    port: int
    run: str = ""
    num_processes: int = 0


def knock(address: str, port: int, says_hello: bool = True) -> Found | None:
    """A connection to the store at address:port; None if nothing listens there, or something else does.

    says_hello  whether it is a store of rank 0, which says of which run; torchrun's does not

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
            hello = json.loads(store.get("hello")) if says_hello else {}
            answer.append(Found(store, address, port, **hello))

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_S)
    return answer[0] if answer else None


def leads_to(sign: dict | None) -> Found | None:
    """The store of the run that put a signpost up, if it answers."""
    if sign is None:
        return None
    addresses = ["127.0.0.1"] if sign["machine"] == this_machine() else sign["addresses"]
    for address in addresses:
        found = knock(address, sign["port"])
        if found and found.run == sign["run"]:
            return found
    return None


def sign_of(text: str | bytes) -> dict | None:
    """The addresses, the machine, the port and the name of the run of a rank 0, as it wrote them; None if this is something else."""
    with suppress(ValueError, AttributeError):
        sign = json.loads(text)
        if {"addresses", "machine", "port", "run"} <= sign.keys():
            return sign
    return None


class SignpostFile:
    """One that all processes see."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> dict | None:
        """What rank 0 wrote, in this run or an earlier one; None if there is nothing to read."""
        try:
            return sign_of(self.path.read_bytes())
        except OSError:
            return None

    def write(self, sign: dict) -> None:
        """Under its name the file is whole or not there."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(sign))
            os.replace(temporary, self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise file_error(error, self.path, "writing where rank 0 listens") from error

    def remove(self, run: str) -> None:
        """Remove the file, if it is still this run's."""
        sign = self.read()
        if sign and sign["run"] == run:
            with suppress(OSError):
                self.path.unlink()


class SignpostInStore:
    """A key of torchrun's store, which all ranks reach. It stays there until the next run's rank 0 overwrites it."""

    def __init__(self, store: TCPStore, name: str):
        self.store, self.name = store, name

    def read(self) -> dict | None:
        """As of a file."""
        return sign_of(self.store.get(self.name)) if self.store.check([self.name]) else None

    def write(self, sign: dict) -> None:
        self.store.set(self.name, json.dumps(sign))
