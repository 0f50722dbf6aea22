"""A failed write is said in one line: what Orbax and TensorStore print besides is left out."""

import logging
import sys

from absl import logging as absl_logging


class Quiet:
    """From `start` to `stop`, two things are not printed: the tracebacks that each of Orbax's threads logs for one
    failed write, and those of TensorStore's threads, which report to an event loop that the failure has closed."""

    def __init__(self):
        self._filter = _Filter()  # an object of its own: two checkpointers may be at work
        self._hook = None

    def start(self) -> None:
        absl_logging.get_absl_logger().addFilter(self._filter)
        previous = sys.excepthook

        def hook(kind, error, traceback) -> None:
            if not (kind is RuntimeError and str(error) == 'Event loop is closed'):
                previous(kind, error, traceback)

        self._hook, self._previous = hook, previous
        sys.excepthook = hook

    def stop(self) -> None:
        absl_logging.get_absl_logger().removeFilter(self._filter)
        if self._hook is not None and sys.excepthook is self._hook:
            sys.excepthook = self._previous
        self._hook = None


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.levelno >= logging.ERROR and 'orbax' in record.pathname)
