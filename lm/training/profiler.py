"""The optional trace of some steps of a training run (`train.profile`)."""

import os

import jax


class Profiler:
    """A trace of jax.profiler in `folder` over `traced_steps` (first, last), or what a run does of them: one that
    resumes between them traces the rest, one that ends between them keeps what it has. A context manager."""

    def __init__(self, traced_steps: tuple[int, int] | None, folder: os.PathLike):
        self.traced_steps, self.folder, self.running = traced_steps, folder, False

    def at(self, step: int) -> None:
        """Call it before each step is dispatched."""
        traced = self.traced_steps is not None and self.traced_steps[0] <= step <= self.traced_steps[1]
        if traced and not self.running:
            jax.profiler.start_trace(os.fspath(self.folder))
            self.running = True
        elif self.running and not traced:
            self.__exit__()

    def __enter__(self) -> 'Profiler':
        return self

    def __exit__(self, *_) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
