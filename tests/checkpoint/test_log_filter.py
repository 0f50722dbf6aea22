"""Messages of Orbax and TensorStore around a failed write, also after the checkpointer is closed."""

import errno
import logging
import sys

import pytest

from lm.checkpoint.log_filter import LOGGERS, WriteErrorFilter
from lm.checkpoint.snapshot import describe_error

LATE = 'Task exception was never retrieved\nfuture: <Task finished coro=<write() at /x/orbax/serialization.py:190>>'


@pytest.fixture
def quiet(monkeypatch):
    said = []
    monkeypatch.setattr(sys, 'excepthook', lambda kind, error, traceback: said.append(str(error)))
    for logger in LOGGERS:  # if a write fails in a test, its checkpointer leaves the filter in place for good
        monkeypatch.setattr(logger, 'filters', [])
    one = WriteErrorFilter()
    one.start()
    return one, said


def late_reports() -> None:
    logging.getLogger('asyncio').error(LATE)
    code = compile('raise OSError(27, "File too large")', '/x/orbax/checkpoint/_src/path/async_path.py', 'exec')
    try:
        exec(code)
    except OSError as error:
        logging.getLogger('asyncio').error('Future exception was never retrieved', exc_info=error)
    logging.getLogger('asyncio').error('of somebody else')
    for text in ('Event loop is closed', 'other'):
        sys.excepthook(RuntimeError, RuntimeError(text), None)


@pytest.mark.parametrize('has_failed', [True, False])
def test_a_failed_write_stays_quiet_after_the_end(quiet, caplog, has_failed):
    one, said = quiet
    late_reports()
    assert [r.getMessage() for r in caplog.records] == ['of somebody else']
    assert said == ['other']
    if has_failed:
        one.keep()
    one.stop()
    late_reports()
    assert len(caplog.records) == (2 if has_failed else 4)
    assert len(said) == (2 if has_failed else 3)


def test_a_long_error_is_shortened_to_the_message_of_the_system():
    refusal = f"ValueError: Failed to write: File too large [os_error_code='{errno.EFBIG}'] [" + 'spec ' * 100
    assert describe_error(ValueError('Error writing ' * 20 + refusal)).endswith(' … File too large')
    assert describe_error(ValueError('a ' * 300 + 'last')).endswith(' a last')
    assert describe_error(OSError('short')) == 'OSError: short'
