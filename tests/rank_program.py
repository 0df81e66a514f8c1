"""One rank of several: meets the others, adds up numbers with them step by step, and at step 10 does what its first word says.

    python rank_program.py end|kill|once|stop|hang|user|stuck|bug|deaf|torchrun WHO FLAGS...

WHO is the rank that does it. once: it is killed, and leaves the file $ONCE, with which all come to their end. torchrun: that is killed.
deaf: all the others sleep, as in a collective that never ends, and WHO is killed. stuck: WHO has said why it ends, as with user, and then
waits for ever. A rank that came to its end prints its number and the sum.
"""

import os
import signal
import sys
import time

from llmc.distributed.place import find_place
from llmc.distributed.world import close_world, connect_world, meet_world, prepare_torch, told
from llmc.errors import RankLost, UserError
from llmc.flags import parse


def main(words) -> int:
    what, who, flags = words[0], int(words[1]), words[2:]
    if what == "once":
        what = "end" if os.path.exists(os.environ["ONCE"]) else "once"
    settings = parse(flags)
    try:
        place = find_place(settings)
        prepare_torch(place)
        world = meet_world(place, settings.timeout)
        with told(world):
            connect_world(world, "cpu", settings.timeout)
            total = steps(world, what, who)
        close_world(world)
        print(f"rank {world.rank} of {world.num_processes}: {total}\n", end="", flush=True)  # one write: torchrun mixes them
        return 0
    except RankLost as error:
        if not error.said_elsewhere:
            print(f"error: {error}", file=sys.stderr)
        return error.code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if what == "stuck":
            time.sleep(1000)
        return 2


def steps(world, what: str, who: int) -> int:
    """20 steps, or as many as it takes; the sum of all ranks' numbers from 1."""
    import torch

    for step in range(20 if what == "end" else 10**6):
        world.progress(f"step {step}")
        if step == 10 and what != "end":
            happen(what, world.rank == who)
        number = torch.tensor(world.rank + 1)
        torch.distributed.all_reduce(number)
        time.sleep(0.01 if what == "end" else 0.2)  # a beat tells the progress of up to a second ago
    return number.item()


def happen(what: str, mine: bool):
    if what == "deaf":
        time.sleep(1 if mine else 1000)  # the others sleep by then
    if not mine:
        return
    if what == "once":
        open(os.environ["ONCE"], "x").close()
    if what in ("kill", "once", "deaf"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "torchrun":
        os.kill(os.getppid(), signal.SIGKILL)
        return
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "hang":
        time.sleep(1000)
    if what in ("user", "stuck"):
        raise UserError("the disk is full; make room")
    raise ZeroDivisionError("a bug")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
