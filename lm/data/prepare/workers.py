"""The worker processes of a preparation, which start anew and end with it."""

import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.context
import multiprocessing.resource_tracker
import signal
from collections.abc import Iterator
from multiprocessing.sharedctypes import SynchronizedArray

from lm.data.prepare import shards


class WorkerContext(multiprocessing.context.SpawnContext):
    """Starts processes that no signal of the terminal reaches before they can ignore it (`shards.initialize`)."""

    class Process(multiprocessing.context.SpawnProcess):
        """A worker."""

        def start(self) -> None:
            with _held_back(signal.SIGINT, signal.SIGHUP):
                super().start()


@contextlib.contextmanager
def start_workers(processes: int) -> Iterator[tuple[concurrent.futures.ProcessPoolExecutor, SynchronizedArray]]:
    """Yields worker processes, and the array in which they count the bytes read and the tokens made.

    Leaving the block ends the workers at once. Shards that they have not finished are done again later.
    """
    _start_tracker()
    context, others = WorkerContext(), multiprocessing.active_children()
    progress = context.Array('q', 2)
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, shards.initialize, (progress,))
    try:
        yield pool, progress
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        ours = [child for child in multiprocessing.active_children() if child not in others]
        for worker in ours:
            worker.terminate()
        for worker in ours:
            while worker.is_alive():  # the pool's own thread may have reaped it, which shows later
                worker.join(0.1)


def wait_for(futures: list[concurrent.futures.Future]) -> Iterator[None]:
    """Yields a few times per second until all are done. Raises the first error."""
    while futures:
        done, _ = concurrent.futures.wait(futures, 0.2, concurrent.futures.FIRST_EXCEPTION)
        for future in done:
            future.result()
        futures = [future for future in futures if future not in done]
        yield


def _start_tracker() -> None:
    """Starts Python's process that removes what a killed process leaves behind, such as semaphores. It ignores SIGINT
    and SIGTERM by itself, and here the signal of a closed terminal, which would end it too early with a warning."""
    with _held_back(signal.SIGHUP):
        multiprocessing.resource_tracker.ensure_running()


@contextlib.contextmanager
def _held_back(*numbers: signal.Signals) -> Iterator[None]:
    """A block whose new processes inherit that these signals wait; for this process they wait until its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
