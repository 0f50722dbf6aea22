"""A failed write is one line: this leaves out what Orbax and TensorStore print about it."""

import logging
import sys
from typing import Any

from absl import logging as absl_logging

_FORMAT = logging.Formatter()
HOOKS = ('excepthook', 'unraisablehook')
LOGGERS = (absl_logging.get_absl_logger(), logging.getLogger('asyncio'))


class WriteErrorFilter:
    """Two kinds of tracebacks are not printed from `start` to `stop`. Orbax's threads and tasks log several for one
    failed write. TensorStore's threads report to an event loop that the failure has closed. They may come long after
    the failure: after one failure they are left out for good."""

    def __init__(self):
        self._filter = _Filter()  # an object of its own: two checkpointers may be at work
        self._before: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}

    def start(self) -> None:
        for logger in LOGGERS:
            logger.addFilter(self._filter)
        for name in HOOKS:
            self._before[name] = getattr(sys, name)
            self._ours[name] = _without_closed_loops(self._before[name])
            setattr(sys, name, self._ours[name])

    def keep(self) -> None:
        """Keeps the filters for good, after a failure."""
        self._ours.clear()

    def stop(self) -> None:
        if not self._ours:
            return
        for logger in LOGGERS:
            logger.removeFilter(self._filter)
        for name, hook in self._ours.items():
            if getattr(sys, name) is hook:
                setattr(sys, name, self._before[name])
        self._ours.clear()


def _without_closed_loops(hook: Any) -> Any:
    """Returns `hook`, of either kind, without errors of threads that find their event loop closed."""

    def quiet(*arguments: Any) -> None:
        error = arguments[1] if len(arguments) == 3 else arguments[0].exc_value
        if not (isinstance(error, RuntimeError) and str(error) == 'Event loop is closed'):
            hook(*arguments)

    return quiet


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        text = record.pathname
        if record.name == 'asyncio':  # of a task it names the place, of a future only its exception does
            text = record.getMessage() + (_FORMAT.formatException(record.exc_info) if record.exc_info else '')
        return 'orbax' not in text
