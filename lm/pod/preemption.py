"""Requests to stop: SIGTERM, a closed terminal and Ctrl-C ask for a checkpoint instead of killing the process.

With one process, a Python signal handler sets a flag. With several, the handler that jax.distributed installs passes
the notice to all processes. They agree on one poll at which all of them stop.
"""

import logging
import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

log = logging.getLogger(__name__)


class Preemption:
    """A context manager inside which SIGTERM only makes `is_requested` return True.

    This holds at any moment: while a program compiles, during evaluation, and for a second SIGTERM. SIGHUP does the
    same unless it is ignored, and so does the first SIGINT (Ctrl-C); the second raises KeyboardInterrupt. Make it
    after jax.distributed.initialize, in the main thread.
    """

    def __init__(self):
        self._polls = 0
        self._flag: signal.Signals | None = None
        self._stop = False
        # Handlers must not ask JAX: while it starts, the main thread holds a lock that this would wait for, forever.
        self._several = jax.process_count() > 1
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> 'Preemption':
        if threading.current_thread() is threading.main_thread():
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
                self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._pass_on)
            if not self._several:
                self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._notice)
        if self._several:  # only the handler of jax.distributed can tell the other processes
            install_notices()
        return self

    def __exit__(self, *_) -> None:
        while self._previous:
            number, previous = self._previous.popitem()
            # None: Python did not install that handler, and cannot restore it.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def is_requested(self, step: int | None = None) -> bool:
        """Returns whether to save and stop now; once True, always True.

        Poll it in every long loop: before each training step, after each batch of an evaluation. In runs of several
        processes all must poll at the same points of the program. All get True at the same poll, one or a few after the
        signal.

        Args:
            step: the name of this moment in the log line.
        """
        if not self._stop:
            self._polls += 1
            if self._several:
                # A count of polls, not of steps: the agreement needs a number that grows at every call.
                self._stop = multihost_utils.reached_preemption_sync_point(self._polls)
            else:
                self._stop = self._flag is not None
            if self._stop and jax.process_index() == 0:
                name = (self._flag or signal.SIGTERM).name
                log.warning('told to stop (%s)%s: saving', name, '' if step is None else f' at step {step}')
        return self._stop

    def _notice(self, signum: int, frame: object) -> None:
        self._flag = signal.Signals(signum)

    def _interrupt(self, signum: int, frame: object) -> None:
        """Handles the first Ctrl-C."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b'\nstopping after this step, which is saved; Ctrl-C again stops at once\n')
        self._pass_on(signum, frame)

    def _pass_on(self, signum: int, frame: object) -> None:
        self._notice(signum, frame)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)  # jax.distributed tells the others


def install_notices() -> None:
    """Makes jax.distributed take SIGTERM as a notice to pass on, if it does not yet."""
    from jax._src.distributed import global_state

    if global_state.preemption_sync_manager is None:
        jax.config.update('jax_enable_preemption_service', True)
        global_state.initialize_preemption_sync_manager()
