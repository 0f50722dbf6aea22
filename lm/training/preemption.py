"""Being told to stop: SIGTERM asks for a checkpoint instead of killing the process.

One process: a Python signal handler sets a flag. Several: the handler that jax.distributed installs passes the notice
to all processes, which agree on one poll at which all of them stop.
"""

import logging
import signal
import threading

import jax
from jax.experimental import multihost_utils

log = logging.getLogger(__name__)


class Preemption:
    """Context manager inside which SIGTERM does nothing but make `requested` answer True, at any moment: while a
    program compiles, during evaluation, and again when a second SIGTERM follows. Enter it after
    jax.distributed.initialize, in the main thread; SIGINT stays Python's."""

    def __init__(self):
        self._polls = 0
        self._flag = False
        self._stop = False
        self._installed = False
        self._previous = None

    def __enter__(self) -> 'Preemption':
        # Python's handler would replace that of jax.distributed, which alone can tell the other processes.
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._notice)
            self._installed = True
        return self

    def __exit__(self, *_) -> None:
        if self._installed:
            # None: a handler that was not installed from Python, and cannot be put back from here
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
            self._installed = False

    def requested(self, step: int | None = None) -> bool:
        """Whether to save and stop now. Poll it in every loop that can last: before each training step, after each
        batch of an evaluation. In runs of several processes all must poll at the same points of the program, and all
        get True at the same poll, one or a few after the signal. Once True, always True.

        Args:
            step: what the log line calls this moment.
        """
        if not self._stop:
            self._polls += 1
            if jax.process_count() > 1:
                # A count of polls, not of steps: the agreement needs a number that grows at every call.
                self._stop = multihost_utils.reached_preemption_sync_point(self._polls)
            else:
                self._stop = self._flag
            if self._stop and jax.process_index() == 0:
                log.warning('told to stop (SIGTERM)%s: saving', '' if step is None else f' at step {step}')
        return self._stop

    def _notice(self, signum, frame) -> None:
        self._flag = True
