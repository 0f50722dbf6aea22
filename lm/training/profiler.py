"""The optional trace of some steps of a training run (`train.profile`)."""

import os
from collections.abc import Callable

import jax
from absl import logging


class Profiler:
    """A trace of jax.profiler in `folder` over `traced_steps` (first, last), or what a run does of them: one that
    resumes between them traces the rest, one that ends between them keeps what it has. A context manager.

    A trace may fail, for instance in a store that the profiler does not know. Then there is a warning, and the run goes
    on without a trace.
    """

    def __init__(self, traced_steps: tuple[int, int] | None, folder: os.PathLike):
        self.traced_steps, self.folder, self.running = traced_steps, folder, False

    def begin_step(self, step: int) -> None:
        """Call it before each step is dispatched."""
        traced = self.traced_steps is not None and self.traced_steps[0] <= step <= self.traced_steps[1]
        if traced and not self.running:
            self.running = self._try(lambda: jax.profiler.start_trace(os.fspath(self.folder)))
        elif self.running and not traced:
            self.__exit__()

    def __enter__(self) -> 'Profiler':
        return self

    def __exit__(self, *_) -> None:
        if self.running:
            self.running = False
            self._try(jax.profiler.stop_trace)

    def _try(self, call: Callable[[], None]) -> bool:
        """Returns True if the call succeeded; if not, there will be no other trace."""
        try:
            call()
        except Exception as error:  # errors of the profiler and of the store
            self.traced_steps = None
            reason = next(iter(str(error).splitlines()), '') or type(error).__name__
            logging.warning('train.profile: no trace in %s: %s', os.fspath(self.folder), reason)
            return False
        return True
