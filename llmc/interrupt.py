"""SIGINT and SIGTERM, as a question the loop asks between steps: should we stop?"""

import signal
from contextlib import suppress


class StopRequest:
    """Remembers the first SIGINT or SIGTERM. A second one gets the system's own treatment: the process ends at once."""

    def __init__(self):
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number, frame):
        self.requested = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        with suppress(RuntimeError):  # the signal landed inside another print
            print(f"\n{signal.Signals(number).name}: finishing this step; once more to stop at once", flush=True)
