"""The one door to other processes. One process is rank 0 of 1; more come with a later version."""
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """Which of how many processes this is."""

    rank: int = 0
    num_processes: int = 1
