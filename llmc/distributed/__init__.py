"""The one door to other processes. One process is rank 0 of 1; more come with a later version."""

import os
from dataclasses import dataclass

from llmc.errors import UserError

# how launchers tell a process how many there are: Open MPI, MPICH and PMI, torchrun
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class World:
    """Which of how many processes this is."""

    rank: int = 0
    num_processes: int = 1


def open_world() -> World:
    """This process's place. Raises UserError under a launcher of several processes: each would be rank 0 and write the same files."""
    for name in SIZE_VARIABLES:
        if os.environ.get(name, "1") != "1":
            raise UserError(
                f"{name} is {os.environ[name]}: this process was started as one of several, which is not built yet; "
                "start it alone, and use -d to accumulate to the same batch"
            )
    return World()
