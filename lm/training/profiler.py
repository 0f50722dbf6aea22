"""The optional profiler window of a training run (`train.profile`)."""

import os

import jax


class Profiler:
    """A trace of jax.profiler in `folder` over the steps window[0], …, window[1], or what a run does of them: one that
    resumes inside the window traces the rest, one that ends inside it keeps what it has. A context manager."""

    def __init__(self, window: tuple[int, int] | None, folder: os.PathLike):
        self.window, self.folder, self.running = window, folder, False

    def at(self, step: int) -> None:
        """Call it before each step is dispatched."""
        inside = self.window is not None and self.window[0] <= step <= self.window[1]
        if inside and not self.running:
            jax.profiler.start_trace(os.fspath(self.folder))
            self.running = True
        elif self.running and not inside:
            self.__exit__()

    def __enter__(self) -> 'Profiler':
        return self

    def __exit__(self, *_) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
