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
"""A piece of work may take this many times the median piece of its kind, however long that is."""
REMEMBERED = 101
"""The number of pieces in the median."""
PATIENCE = 6
"""Work between steps may take this many times as long as a step: it compiles, and it waits for storage."""
START_MINUTES = 60.0
"""The least time for the start of a session, which restores and compiles."""


class Watchdog:
    """A context manager that ends the process where its work stands still.

    The work is a sequence of pieces: a step, a batch of an evaluation, a save. A step may take `minutes`, and a piece
    of another phase PATIENCE times as long. Both may take FACTOR times the median piece of their phase. The first
    phase is the start of the session. Call `step` after each finished step: it costs less than a microsecond.

    Args:
        minutes: the least time that counts as a hang; None: there is no watch.
    """

    def __init__(self, minutes: float | None):
        self.minutes = math.inf if minutes is None else minutes
        self._durations: dict[str, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=REMEMBERED)
        )
        self._phase, self._number = 'start', 0
        self._last = time.monotonic()
        self._closing = threading.Event()

    def __enter__(self) -> 'Watchdog':
        if math.isfinite(self.minutes):
            self._last = time.monotonic()
            threading.Thread(target=self._watch, name='watchdog', daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._closing.set()

    def step(self, number: int) -> None:
        """Notes that step `number` begins, and that the step before has finished."""
        if self._phase == 'step':
            self.beat()
        self._number = number
        self.begin('step')

    def begin(self, phase: str) -> None:
        """Notes that another phase begins."""
        self._phase, self._last = phase, time.monotonic()

    def beat(self) -> None:
        """Notes that a piece of the present phase has finished."""
        now = time.monotonic()
        self._durations[self._phase].append(now - self._last)
        self._last = now

    @contextlib.contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        """Makes the block a phase of its own, which is not part of the step around it."""
        outer, spent = self._phase, time.monotonic() - self._last
        self.begin(phase)
        try:
            yield
        finally:
            self.beat()
            self.begin(outer)
            self._last -= spent

    def compute_limit(self) -> float:
        """Returns the seconds after which the present piece counts as hanging."""
        durations = list(self._durations[self._phase])
        minutes = self.minutes if self._phase == 'step' else PATIENCE * self.minutes
        if self._phase == 'start':
            minutes = max(minutes, START_MINUTES)
        return max(60 * minutes, FACTOR * statistics.median(durations) if durations else 0.0)

    def _watch(self) -> None:
        while not self._closing.wait(min(5.0, 6 * self.minutes)):
            last, limit = self._last, self.compute_limit()
            late = time.monotonic() - last
            if late > limit and last == self._last:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                what = 'it' if self._phase == 'step' else f'its {self._phase}'
                end_process(
                    f'lm train: step {self._number}: {what} has not gone on for {late / 60:.1f} minutes (limit '
                    f'{limit / 60:.1f}, which train.hang_minutes = {self.minutes:g} decides): the stacks of all '
                    'threads are above; run the same command again'
                )
