"""A failed write is said in one line: what Orbax and TensorStore print besides is left out."""

import logging
import sys

from absl import logging as absl_logging


class Quiet:
    """From `start` to `stop`, this is not printed: the tracebacks that each of Orbax's threads and tasks logs for one
    failed write, and those of TensorStore's threads, which report to an event loop that the failure has closed. They
    report late: after `failed` it stays so to the end of the process."""

    def __init__(self):
        self._filter = _Filter()  # an object of its own: two checkpointers may be at work
        self._hook = None
        self._has_failed = False

    def start(self) -> None:
        for logger in (absl_logging.get_absl_logger(), logging.getLogger('asyncio')):
            logger.addFilter(self._filter)
        previous = sys.excepthook

        def hook(kind, error, traceback) -> None:
            if not (kind is RuntimeError and str(error) == 'Event loop is closed'):
                previous(kind, error, traceback)

        self._hook, self._previous = hook, previous
        sys.excepthook = hook

    def failed(self) -> None:
        """A write has failed."""
        self._has_failed = True

    def stop(self) -> None:
        if self._has_failed:
            return
        for logger in (absl_logging.get_absl_logger(), logging.getLogger('asyncio')):
            logger.removeFilter(self._filter)
        if self._hook is not None and sys.excepthook is self._hook:
            sys.excepthook = self._previous
        self._hook = None


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        is_theirs = 'orbax' in (record.getMessage() if record.name == 'asyncio' else record.pathname)
        return not (record.levelno >= logging.ERROR and is_theirs)
