"""SIGINT and SIGTERM, as a question the loop asks between steps: should we stop?"""

import os
import signal


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
        words = f"\n{signal.Signals(number).name}: finishing this step; once more to stop at once"
        try:
            print(words, flush=True)
        except RuntimeError:  # the signal landed inside another print, which has the buffer
            os.write(1, f"{words}\n".encode())
