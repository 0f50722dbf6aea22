"""A training that hangs ends with all its stacks on stderr and exit code 42, so that a supervisor repeats it."""

import collections
import contextlib
import faulthandler
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterator

from lm.signals import end_process

FACTOR = 20
"""A step may take this many times the median step, however long that is."""
REMEMBERED = 101
"""The number of steps in the median."""


class Watchdog:
    """A context manager that ends the process if no step finishes for `minutes`, and for FACTOR median steps.

    Call `step` after each finished step: it costs less than a microsecond. Enclose slow work in `pause`. The watchdog
    begins with the first `step`.

    Args:
        minutes: the least time that counts as a hang; None: there is no watch.
    """

    def __init__(self, minutes: float | None):
        self.minutes = math.inf if minutes is None else minutes
        self._durations: collections.deque[float] = collections.deque(maxlen=REMEMBERED)
        self._last: float | None = None
        self._number = 0
        self._paused = False
        self._closing = threading.Event()

    def __enter__(self) -> 'Watchdog':
        if math.isfinite(self.minutes):
            threading.Thread(target=self._watch, name='watchdog', daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._closing.set()

    def step(self, number: int) -> None:
        """Notes that step `number` begins, and that the step before has finished."""
        now = time.monotonic()
        if self._last is not None:
            self._durations.append(now - self._last)
        self._last, self._number = now, number

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time inside the block out of the step. Do not nest it."""
        self._paused = True
        start = time.monotonic()
        try:
            yield
        finally:
            if self._last is not None:
                self._last += time.monotonic() - start
            self._paused = False

    def compute_limit(self) -> float:
        """Returns the seconds after which a step counts as hanging."""
        durations = list(self._durations)
        return max(60 * self.minutes, FACTOR * statistics.median(durations) if durations else 0.0)

    def _watch(self) -> None:
        while not self._closing.wait(min(5.0, 6 * self.minutes)):
            last = self._last
            if last is None or self._paused:
                continue
            late = time.monotonic() - last
            if late > self.compute_limit() and not self._paused and last == self._last:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                end_process(
                    f'lm train: step {self._number} has not finished for {late / 60:.1f} minutes, train.hang_minutes '
                    f'is {self.minutes:g}: the stacks of all threads are above; run the same command again'
                )
