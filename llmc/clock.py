"""How long steps take, on a device that may run asynchronously to the host."""


class StepClock:
    """Times steps: the last one, a moving average of tokens/s that forgets 5% a step, and the mean of all but those that set things up.

    On a GPU a step begins where the one before ended, unless something came between: time in which it waits for the host counts.
    """

    def __init__(self, backend, *, tokens: int, setting_up: int):
        """tokens: of a step, on all ranks. setting_up: how many steps at the start are left out of both means."""
        self._backend, self._tokens, self._setting_up = backend, tokens, setting_up
        self._steps, self._total, self._ema, self._last_end = 0, 0.0, 0.0, None
        self.tokens_per_s = 0.0

    def start(self):
        """The mark at which a step starts."""
        return self._last_end or self._backend.mark()

    def end(self):
        """The mark at which a step ends."""
        mark = self._backend.mark()
        self._last_end = mark if self._backend.asynchronous else None
        return mark

    def pause(self):
        """Say that something other than training took time, which belongs to no step."""
        self._last_end = None

    def count(self, started, ended) -> float:
        """Seconds of a step that is over; it enters the means."""
        dt = self._backend.seconds_between(started, ended)
        self.tokens_per_s = self._tokens / dt
        self._steps += 1
        if self._counted > 0:
            self._total += dt
            self._ema = 0.95 * self._ema + 0.05 * self._tokens / dt
            self.tokens_per_s = self._ema / (1 - 0.95**self._counted)
        return dt

    @property
    def average_ms(self) -> float | None:
        """Mean time of a step; None before any step counts."""
        return self._total / self._counted * 1e3 if self._counted > 0 else None

    @property
    def _counted(self) -> int:
        """Number of steps in the means."""
        return self._steps - self._setting_up
