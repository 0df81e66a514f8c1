"""How unusual is this loss, or this gradient norm? A z-score against the last 128 values. Source: llm.c llmc/outlier_detector.h.

The sums are updated, not recomputed, in the order llm.c updates them, so scores equal llm.c's bit for bit. Three things are more
forgiving here: a value whose update was skipped can be taken back out (undo); a loss of nan or inf, which would turn the sums into nan
for the rest of the run, never enters; and after values that dwarfed all others, by a factor of some ten thousand, the sums are recomputed.
"""

from math import isfinite, nan, sqrt

from llmc.errors import RESUME_FROM_ANOTHER, UserError

WINDOW_SIZE = 128
DWARFS = 1e6  # if the sum of squares has been this many times what it is now, digits are lost that subtracting does not restore


class OutlierDetector:
    """A ring of the last WINDOW_SIZE values with their running sum and sum of squares, in doubles.

    lost  how many of the newest values in a row were nan or inf
    """

    def __init__(self):
        self.lost = 0
        self._window: list[float] = []
        self._index = 0  # of the oldest value, once the window is full
        self._sum = 0.0
        self._sum_sq = 0.0
        self._largest = 0.0  # the largest sum of squares since the sums were last recomputed
        self._undo = None  # what update() overwrote

    def update(self, x: float) -> float:
        """Take x into the window and return its z-score against the window it is now part of; nan for the first WINDOW_SIZE.

        Values that never vary score 0. A nan or inf scores nan and stays out.
        """
        x = float(x)
        length = len(self._window)
        oldest = self._window[self._index] if length == WINDOW_SIZE else None
        self._undo = length, self._index, oldest, self._sum, self._sum_sq, self._largest
        self.lost = 0 if isfinite(x) else self.lost + 1
        if self.lost:
            return nan
        if oldest is None:
            self._window.append(x)
            self._add(x)
            return nan
        self._sum -= oldest
        self._sum_sq -= oldest * oldest
        self._window[self._index] = x
        self._add(x)
        if not self._largest <= DWARFS * self._sum_sq:
            self._sum, self._sum_sq = sum(self._window), sum(y * y for y in self._window)
            self._largest = self._sum_sq
        self._index = (self._index + 1) % WINDOW_SIZE
        return self._z(x)

    def undo(self) -> None:
        """Take the last update's value out of the window again, which is then what it was before, to the bit. At most once per update."""
        assert self._undo is not None, "nothing to undo"
        # the saved sums come back: subtracting x would leave a rounding error behind
        length, self._index, oldest, self._sum, self._sum_sq, self._largest = self._undo
        if oldest is None:
            del self._window[length:]
        else:
            self._window[self._index] = oldest
        self._undo = None

    def state(self) -> dict:
        """Everything a resumed run needs, for JSON; numbers are float.hex, so nothing is rounded."""
        return {
            "window": [x.hex() for x in self._window],
            "index": self._index,
            "sum": self._sum.hex(),
            "sum_sq": self._sum_sq.hex(),
            "largest": self._largest.hex(),
        }

    def restore(self, state: dict, source: str = "the checkpoint") -> None:
        """Become what `state()` described. Raises UserError, naming `source`, if that is damaged."""
        try:
            window = [float.fromhex(x) for x in state["window"]]
            index, total, total_sq = state["index"], float.fromhex(state["sum"]), float.fromhex(state["sum_sq"])
            largest = float.fromhex(state.get("largest", state["sum_sq"]))  # older checkpoints lack it
            if len(window) > WINDOW_SIZE or index not in range(WINDOW_SIZE if len(window) == WINDOW_SIZE else 1):
                raise ValueError(f"{len(window)} values, the oldest at {index}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{source} holds a damaged outlier window ({error!r}); expected up to {WINDOW_SIZE} hexadecimal floats and their sums; "
                f"{RESUME_FROM_ANOTHER}"
            ) from error
        self._window, self._index, self._sum, self._sum_sq, self._undo = window, index, total, total_sq, None
        self._largest = largest

    def _add(self, x: float) -> None:
        self._sum += x
        self._sum_sq += x * x
        self._largest = max(self._largest, self._sum_sq)

    def _z(self, x: float) -> float:
        mean = self._sum / WINDOW_SIZE
        variance = self._sum_sq / WINDOW_SIZE - mean * mean
        return (x - mean) / sqrt(variance) if variance > 0 else 0.0  # rounding can make it slightly negative
