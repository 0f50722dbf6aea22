"""The optional trace of some steps of a training run (`train.profile`)."""

import os
from collections.abc import Callable

import jax
from absl import logging


class Profiler:
    """A context manager that writes a jax.profiler trace of `traced_steps` (first, last) to `folder`.

    A run that resumes between these steps traces the rest. A run that ends between them keeps its part. A trace may
    fail, for instance in a store that the profiler does not know. Then there is a warning, and the run goes on without
    a trace.
    """

    def __init__(self, traced_steps: tuple[int, int] | None, folder: os.PathLike):
        self.traced_steps, self.folder, self.running = traced_steps, folder, False

    def begin_step(self, step: int) -> None:
        """Starts or ends the trace if it is due. Call it before each step is dispatched."""
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
        """Returns True if the call succeeded; after a failure there is no other trace."""
        try:
            call()
        except Exception as error:  # errors of the profiler, and of the store
            self.traced_steps = None
            reason = next(iter(str(error).splitlines()), '') or type(error).__name__
            logging.warning('train.profile: no trace in %s: %s', os.fspath(self.folder), reason)
            return False
        return True
