"""What a process knows of the others of its run, and what they do together outside a step: meet, connect, agree, and end."""

import json
import os
import secrets
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.distributed.place import Place
from llmc.errors import (
    INPUT_CODE, MEMORY_CODE, NotEnoughMemory, RankLost, UserError, interrupt_code, is_out_of_memory, lines_of, unusable_path,
)  # fmt: skip
from llmc.host import processor_quota

if TYPE_CHECKING:
    from llmc.distributed.rendezvous import Meeting
    from llmc.distributed.watch import Watch


@dataclass(frozen=True, slots=True)
class World:
    """Which of how many processes this is. A single process has neither a watch nor a meeting.

    num_local  processes on this machine
    threads    CPU threads for this process, where processes share processors; 0: torch's choice, one per physical core, or the quota
    """

    rank: int = 0
    num_processes: int = 1
    num_local: int = 1
    threads: int = 0
    watch: "Watch | None" = None
    meeting: "Meeting | None" = None

    def progress(self, what: str) -> None:
        """Say what begins now, such as "step 12". If this rank is lost, the others are told where it was."""
        if self.watch:
            self.watch.progress(what)

    def moved(self) -> None:
        """Say that what was begun still goes on. Any thread may call this, any number of times; ranks need not make the same calls."""
        if self.watch:
            self.watch.moved()

    def wait_for_all(self, what: str) -> None:
        """Wait until every rank has come here, however long one of them takes on its way, as a collective would not: the watch ends the run
        only if that one no longer moves. `what` they wait for is told as by `progress`."""
        if self.watch:
            from llmc.distributed.rendezvous import wait_for_all_ranks

            self.progress(what)
            wait_for_all_ranks(self.meeting, f"wait {self.watch.mine.sequence}")


def prepare_torch(place: Place) -> None:
    """Set, for several processes, the environment variables that torch and NCCL read when they are first used.

    A lost rank should be reported in one sentence, the watch's. Without these settings torch adds a C++ stack trace for every
    connection that ends, and aborts the process where NCCL notices the loss first, or where a collective takes longer than --timeout
    though every rank still moves.
    """
    if place.num_processes == 1:
        return
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # torchrun sets it to 1, which cannot be told from a user's wish
    for name, value in {
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "TORCH_NCCL_ENABLE_MONITORING": "0",  # a second watch
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # it has all ranks write files that nobody asked for
        "NCCL_NVLS_ENABLE": "0",  # sums in NVLink's switches differ from call to call (https://github.com/NVIDIA/nccl/issues/1497)
    }.items():
        os.environ.setdefault(name, value)


def device_of(place: Place, device: str) -> str:
    """--device for this process; of several processes each takes a GPU, by local rank. Raises UserError where that is impossible."""
    if place.num_processes == 1 or device == "cpu":
        return device
    if ":" in device:
        if place.num_local > 1:
            raise UserError(
                f"--device {device}: {place.num_local} processes of this machine would share one GPU; "
                "say --device cuda, so that each takes its own, or -pg 1 if there is one process per machine"
            )
        return device
    import torch

    if not torch.cuda.is_available():
        return device  # opening it then takes the CPU, or says that there is no GPU
    count = torch.cuda.device_count()
    if place.local_rank < count:
        return f"cuda:{place.local_rank}"
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return "cuda:0"  # the launcher lets each process see only one GPU, its own
    raise UserError(
        f"rank {place.rank} is process {place.local_rank} of its machine, counted from 0, and there are {count} CUDA devices; "
        f"start {count} processes per machine and say -pg {count}, or use --device cpu"
    )


def meet_world(place: Place, timeout_s: float) -> World:
    """Meet the other ranks before anything else can go wrong: from here on each rank is told why another one ends.

    timeout_s  how long ranks wait for one another, here and later
    Raises UserError if the others cannot be found, RankLost if one of them is lost meanwhile.
    """
    if place.num_processes == 1:
        return World()
    from llmc.distributed.rendezvous import meet
    from llmc.distributed.watch import Watch

    meeting = meet(place, timeout_s)
    try:
        watch = Watch(meeting, timeout_s)
    except RuntimeError as error:
        raise RankLost(f"the process that held the {place.num_processes} together ended as they met; start all of them again") from error
    here = meeting.here
    return World(place.rank, place.num_processes, len(here), own_threads(meeting.mine, here), watch, meeting)


def own_threads(mine, here) -> int:
    """CPU threads for one of the members `here` on a machine: its share of the processors that it may run on, which others may share with
    it, and of the quota of its container or job, which is taken to be the quota of all of them."""
    sharers = sum(not set(mine.processors).isdisjoint(member.processors) for member in here)
    return max(1, int(min(len(mine.processors) // sharers, processor_quota() / len(here))))


def bound_note(world: World) -> list[str]:
    """A line, where a launcher has bound each process of this machine to a core or two of its own, as mpirun does unless it is told not to,
    and there are more."""
    if world.num_processes == 1:
        return []
    each = {member.processors for member in world.meeting.here}
    n, on_machine = len(world.meeting.mine.processors), os.cpu_count() or 1
    if n > 2 or len(each) == 1 or len(set().union(*each)) >= on_machine:
        return []
    found = f"each process is bound to {n} of this machine's {on_machine} processors"
    return [f"note: {found}, as its launcher wants it; mpirun --bind-to none, or srun --cpus-per-task, gives it more"]


def connect_world(world: World, device_kind: str, timeout_s: float) -> None:
    """Make collectives work between all ranks, once each has opened its device.

    device_kind  cpu: gloo carries the collectives; cuda: NCCL does
    Raises UserError if that fails, RankLost if a rank is lost meanwhile.
    """
    if world.num_processes == 1:
        return
    import torch

    from llmc.distributed.gloo import register_gloo
    from llmc.distributed.network import interface_for_gloo

    watch, meeting = world.watch, world.meeting
    for theirs in different_from_first(world, {"device": device_kind}, "devices").values():
        raise UserError(f"rank {world.rank} found a {device_kind} device and rank 0 a {theirs} device; say --device for all, or mend one")
    others = [member.address for member in meeting.members if member.machine != meeting.mine.machine]
    if device_kind == "cpu" and (interface := interface_for_gloo(others, meeting.address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    watch.judge.waits_silently = device_kind == "cuda"
    watch.progress("connecting")
    try:
        torch.distributed.init_process_group(
            "nccl" if device_kind == "cuda" else register_gloo(), store=meeting.store, rank=world.rank, world_size=world.num_processes,
            timeout=timedelta(seconds=timeout_s),
            device_id=torch.device("cuda", torch.cuda.current_device()) if device_kind == "cuda" else None,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise watch.explain(error) or UserError(f"connecting {world.num_processes} processes failed: {lines_of(error)[0]}") from error


def connect_groups(world: World, device_kind: str, timeout_s: float, copies: int):
    """The Groups of this rank, connected; None for one process. copies: of the whole model, the same on all ranks, which divides their
    number. Raises UserError where a library finds no memory for them."""
    if world.num_processes == 1:
        return None
    from llmc.distributed.group import split_world

    try:
        groups = split_world(world.rank, world.num_processes, world.num_processes // copies, timeout_s)
        for group in dict.fromkeys(groups):
            group.set_up(device_kind)
        return groups
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"rank {world.rank} ran out of memory as the ranks connected; end what else takes memory there") from error


def close_world(world: World) -> None:
    """Wait until all ranks are done, so that none takes another for lost, then disconnect."""
    if world.num_processes == 1:
        return
    import torch

    with told(world):
        world.wait_for_all("ending")
    world.watch.close()
    torch.distributed.destroy_process_group()


def smallest(world: World, number: int) -> int:
    """The smallest of all ranks' numbers, the same on every rank. With one process, its own."""
    if world.num_processes == 1:
        return number
    import torch

    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    said = torch.tensor([number], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN)
    return said.item()


def anybody(world: World, says: bool) -> bool:
    """Whether any rank `says` so, the same on every rank."""
    return smallest(world, -int(says)) < 0


def different_from_first(world: World, facts: dict, title: str) -> dict:
    """Facts in which this rank differs from rank 0, or which only rank 0 has: name -> rank 0's value.

    facts  this rank's, plain values by name
    title  key of these facts in the store; every call in a run needs a different one
    """
    if world.num_processes == 1:
        return {}
    store = world.meeting.store
    if world.rank == 0:
        store.set(title, json.dumps(facts))
    return {name: value for name, value in json.loads(store.get(title)).items() if value != facts.get(name)}


def check_shared(world: World, folder) -> None:
    """Raise UserError unless this rank sees what rank 0 writes into the folder of -o, which exists on rank 0's machine."""
    if world.num_processes == 1:
        return
    from llmc.distributed.rendezvous import wait_for_all_ranks

    store, path = world.meeting.store, None
    try:
        if world.rank == 0:
            path = Path(folder) / f"shared_{secrets.token_hex(8)}.tmp"
            path.touch()
            store.set("shared file", path.name)
        if not (Path(folder) / store.get("shared file").decode()).exists():
            raise UserError(f"-o {folder}: rank {world.rank} does not see there what rank 0 writes; give a folder that all machines share")
        wait_for_all_ranks(world.meeting, "saw the shared folder")
    finally:
        if path:
            path.unlink(missing_ok=True)


@contextmanager
def told(world: World):
    """Tell the others why an exception inside ends this rank; turn the error of a collective into RankLost, which says why it failed."""
    if world.num_processes == 1:
        yield
        return
    try:
        yield
    except RankLost as error:
        world.watch.leave(str(error), error.code)  # does nothing if the watch has a verdict already
        raise
    except BaseException as error:
        if lost := world.watch.explain(error):
            raise lost from error
        world.watch.leave(*last_words(error))
        raise


def last_words(error: BaseException) -> tuple[str, int]:
    """The sentence that tells the others of an exception that ends this rank, and the exit code it leads to."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", interrupt_code(error)
    if isinstance(error, SystemExit):
        return "it ended early; see what it printed", 1
    if isinstance(error, (UserError, NotEnoughMemory)):
        return str(error), INPUT_CODE if isinstance(error, UserError) else MEMORY_CODE
    if sentence := unusable_path(error):
        return sentence, INPUT_CODE
    return f"{type(error).__name__}: {error}", INPUT_CODE if isinstance(error, ModuleNotFoundError) else 1
