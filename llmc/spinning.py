"""How busy a CPU's cores are with other work, and how long threads that wait for one another spin before they sleep. No torch here.

OpenMP's threads spin while they wait, GNU's for milliseconds, before they sleep. Alone on their cores that is right. If something else
runs there too, a thread that spins keeps the core from the one it waits for, which the scheduler does not prefer: a step of d6 of 135 ms
took 360 to 450 beside one busy process on the two cores of a Zen 5, and 410 to 1750 beside two. With threads that sleep soon it took 280
and 290. On idle cores of such a machine sleeping soon costs up to 1%; on a Zen 3 even ten times as many turns cost up to 10%. So it is
done only where other work runs.
"""

import os
import sys
import time

from llmc.host import within_quota

BUSY = 0.5  # cores kept busy by others: from here on a run is not alone
SHORT_SPIN = "3000"  # turns of the loop, some 20 ns each
WATCH_S = 0.1
WAITING = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # if one of these is set, the user has decided
CPU_TIMES = "/proc/stat"


def sleep_soon_where_busy(threads=0, environ=os.environ) -> list[str]:
    """Have waiting threads sleep soon, if these cores have other work now. Returns the lines that say so. Call it before torch is imported:
    OpenMP reads its environment once.

    threads  of the run; 0: OMP_NUM_THREADS, else as many as it may keep busy
    """
    cores = os.sched_getaffinity(0)
    threads = threads or _first_number(environ.get("OMP_NUM_THREADS", "")) or within_quota(len(cores))
    if threads == 1 or WAITING & environ.keys() or "torch" in sys.modules:
        return []
    before, start = ticks_busy(cores), time.monotonic()
    time.sleep(WATCH_S)
    busy = (ticks_busy(cores) - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)
    spare = max(0, len(cores) - threads)  # cores that this run's threads leave idle
    if busy - spare < BUSY:
        return []
    environ["GOMP_SPINCOUNT"] = SHORT_SPIN
    return [f"note: other work keeps {busy:.1f} of {len(cores)} cores busy, so threads waiting for one another go to sleep sooner"]


def _first_number(text: str) -> int:
    """Of a list with commas, as OMP_NUM_THREADS may be for nested parallelism; 0 if it is none."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def ticks_busy(cores) -> int:
    """Clock ticks, summed over these cores, that were not idle since the system started; ticks that the hypervisor gave to other machines
    count as busy. 0 if the system does not say."""
    try:
        with open(CPU_TIMES) as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
    except OSError:
        return 0
    ticks = 0
    for name, *times in lines:
        if name[3:].isdecimal() and int(name[3:]) in cores:
            user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, times[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks
