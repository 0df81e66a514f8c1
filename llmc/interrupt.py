"""SIGINT and SIGTERM, as a question the loop asks between steps: should we stop?"""

import signal
from contextlib import suppress


class StopRequest:
    """Remembers the first SIGINT or SIGTERM. A second one gets the system's own treatment: the process ends at once.

    requested  whether this process was asked
    agreed     whether the run stops: with several processes once all know that one was asked, which they tell each other every step,
               and every few batches of an evaluation
    """

    def __init__(self, alone=True):
        self.requested = self.agreed = False
        self._alone = alone
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number, frame):
        self.requested = True
        self.agreed |= self._alone
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        with suppress(RuntimeError):  # the signal landed inside another print
            print(f"\n{signal.Signals(number).name}: finishing this step; once more to stop at once", flush=True)
