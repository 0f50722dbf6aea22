"""The worker processes of a preparation, which start anew and end with it."""

import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import signal
from collections.abc import Iterator
from multiprocessing.sharedctypes import SynchronizedArray

from lm.data.prepare import shards


@contextlib.contextmanager
def start_workers(processes: int) -> Iterator[tuple[concurrent.futures.ProcessPoolExecutor, SynchronizedArray]]:
    """Yields worker processes, and the array in which they count the bytes read and the tokens made.

    Leaving the block ends the workers at once. Shards that they have not finished are done again later.
    """
    _start_tracker()
    context, others = multiprocessing.get_context('spawn'), multiprocessing.active_children()
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # a new process inherits it
    try:
        multiprocessing.resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
