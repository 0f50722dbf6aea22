"""Saves by time: a checkpoint after so many minutes, at the same step in all processes."""

import time

import jax
import numpy as np
from jax.experimental import multihost_utils


class SaveClock:
    """Decides when `minutes` have passed since the last save.

    Of several processes, process 0 reads its clock and sends the answer to the others. It does so at steps that all
    processes know: after each answer, half-way to the expected deadline.
    """

    def __init__(self, minutes: float | None):
        self.seconds = None if minutes is None else minutes * 60
        self.start, self.next_look = time.monotonic(), 0
        self.first_step: int | None = None

    def reset(self, step: int) -> None:
        """Starts anew: `step` has been saved."""
        self.start, self.first_step, self.next_look = time.monotonic(), step, step + 1

    def is_due(self, step: int) -> bool:
        """Returns whether a save is due after `step`, the same in all processes."""
        if self.seconds is None:
            return False
        if self.first_step is None:
            self.first_step = step - 1
        elapsed = time.monotonic() - self.start
        due = elapsed >= self.seconds
        if jax.process_count() == 1 or step < self.next_look:
            return due and jax.process_count() == 1
        steps = max(1, step - self.first_step)
        remaining = steps * (self.seconds - elapsed) / max(elapsed, 1e-9)
        answer = np.array([due, max(1, min(remaining / 2, steps))], np.int32)
        due, wait = multihost_utils.broadcast_one_to_all(answer)
        self.next_look = step + int(wait)
        return bool(due)
