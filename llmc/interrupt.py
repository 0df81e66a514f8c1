"""The question that the loop asks between steps: should we stop? Reasons are SIGINT, SIGTERM, SIGHUP, output that can no longer be
printed, data that cannot be trained on, and a log that cannot be written. And SIGINT before there is a loop."""

import _thread
import ctypes
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress

from llmc.errors import LOST_OUTPUT, print_nothing_more

# A SIGTERM this soon after the first signal is the same request: where a launcher and its processes are all signalled, as by Slurm at a
# job's time limit or by systemd when it stops a service, the launcher passes it on to processes that have it already
PASSED_ON_S = 5


class EarlySigint:
    """SIGINT's handler until a StopRequest takes over: it raises KeyboardInterrupt, as Python's own, and remembers that it did."""

    def __init__(self):
        self.came = False

    def __call__(self, number, frame):
        self.came = True
        raise KeyboardInterrupt


@contextmanager
def early_sigint_kept():
    """See that SIGINT ends what is inside. From a callback of ctypes, such as LLVM's compiler makes, or of the garbage collector no
    exception comes out: Python would print it, which is prevented here, and goes on, and a StopRequest raises it again. In another
    callback of LLVM it becomes another error: that becomes KeyboardInterrupt here."""
    handler, told = EarlySigint(), sys.unraisablehook
    sys.unraisablehook = lambda lost: None if handler.came and lost.exc_type is KeyboardInterrupt else told(lost)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in a shell's background job, where it is ignored
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    except Exception as error:
        if handler.came:
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = told


class StopRequest:
    """Remembers the first SIGINT, SIGTERM or SIGHUP. After it a SIGINT has the system's default effect: the process ends at once. So does a
    SIGTERM, once PASSED_ON_S seconds have passed, before which it is ignored. Another SIGHUP is ignored, as a closed terminal may send
    several; where nohup has SIGHUP ignored, it stays so.

    requested    whether this process was asked to stop
    agreed       whether the run stops: with several processes, once all know that one was asked. They tell each other every step, and
                 every few calls of the model in an evaluation or a sample
    number       the signal that this process was asked by, if any
    lost_output  the error for which nothing can be printed any more, if that is the reason
    error        the error with which the run ends, if that is the reason
    """

    def __init__(self, alone=True):
        """Raises KeyboardInterrupt if an EarlySigint came and that was lost."""
        if getattr(signal.getsignal(signal.SIGINT), "came", False):
            raise KeyboardInterrupt
        self.requested = self.agreed = False
        self.number = self.lost_output = self.error = None
        self._alone = alone
        sys.stdout = StillPrinting(sys.stdout, self._lose_output)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._remember)

    def cannot_go_on(self, error: Exception):
        """Ask to stop because the next step, or a validation, or writing what they produced, is impossible. The first error counts."""
        self.error = self.error or error
        self._ask()

    def _ask(self):
        self.requested = True
        self.agreed |= self._alone

    def _lose_output(self, error):
        if not self.requested:  # else a checkpoint is on its way, and Ctrl-C ends what reads our output too
            self.lost_output = error
            self._ask()

    def _remember(self, number, frame):
        self._ask()
        self.number = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _thread.start_new_thread(_end_by_sigterm_later, ())  # takes no lock, which what the signal interrupted might hold
        after = f" after {PASSED_ON_S} s" if number == signal.SIGTERM else ""
        words = f"\n{signal.Signals(number).name}: finishing this step; once more{after} to stop at once"
        try:
            print(words, flush=True)
        except RuntimeError:  # the signal landed inside another print, which holds the buffer
            with suppress(OSError):
                os.write(1, f"{words}\n".encode())


def _end_by_sigterm_later():
    """In a thread of its own: the main one may wait for a library, a GPU or a disk, perhaps for ever, and hears of no signal meanwhile."""
    time.sleep(PASSED_ON_S)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:  # nobody has taken it over
        ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, None)  # the default; signal.signal is for the main thread alone


class StillPrinting:
    """Standard output of a run that may outlive it: the end of its reader, a full disk or a closed terminal must not cost the checkpoint.
    The first such failure is passed to lost(error); what is printed from then on goes nowhere."""

    def __init__(self, stream, lost):
        self._stream, self._lost = stream, lost

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        return self._or_nowhere(self._stream.write, text)

    def flush(self):
        self._or_nowhere(self._stream.flush)

    def _or_nowhere(self, act, *args):
        try:
            return act(*args)
        except OSError as error:
            if error.errno not in LOST_OUTPUT:
                raise
            print_nothing_more()
            self._lost(error)
            return act(*args)
