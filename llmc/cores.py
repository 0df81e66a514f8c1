"""How busy a CPU's cores are with other work, and what threads that wait for one another do about it. No torch here.

OpenMP's threads wait in a loop, GNU's for milliseconds, before they sleep. Alone on their cores that is right. Where something else runs
there too, one that loops keeps the core from the one it waits for, which the system takes for no more urgent: a step of d6 of 135 ms
took 360 to 450 beside one busy process on the two cores of a Zen 5, and 410 to 1750 beside two. Where they soon sleep it took 280 and
290. Alone, on such a machine, soon sleeping cost up to 1%; on a Zen 3 ten times as many turns cost up to 10%. So it is for who is not
alone.
"""

import os
import sys
import time

BUSY = 0.5  # cores, from which on a run is not alone
SHORT_SPIN = "3000"  # turns of the loop, of some 20 ns
WATCH_S = 0.1
WAITING = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # who has set one of these has decided
CPU_TIMES = "/proc/stat"


def sleep_soon_where_busy(environ=os.environ) -> list[str]:
    """Have threads that wait sleep soon, if these cores have other work now; a line that says so. To be called before torch is imported."""
    if WAITING & environ.keys() or "torch" in sys.modules:
        return []
    cores = os.sched_getaffinity(0)
    before, start = ticks_busy(cores), time.monotonic()
    time.sleep(WATCH_S)
    busy = (ticks_busy(cores) - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)
    if busy < BUSY:
        return []
    environ["GOMP_SPINCOUNT"] = SHORT_SPIN
    return [f"note: other work keeps {busy:.1f} of {len(cores)} cores busy, so threads that wait for one another soon sleep"]


def ticks_busy(cores) -> int:
    """That these cores have not been idle since the system started; those that a hypervisor gave to others count. 0 where nobody says."""
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
