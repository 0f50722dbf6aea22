"""The signals that end a process."""

import os
import signal
import sys
import time

import pytest

from lm import signals


class Callback:
    """Is told to stop while Python ignores exceptions, as it does in callbacks of the garbage collector."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_during_a_callback_ends_the_block(monkeypatch, capsys):
    monkeypatch.setattr(signals, 'AGAIN_SECONDS', 0.01)
    monkeypatch.setattr('sys.unraisablehook', lambda ignored: pytest.fail('ignored'))
    is_ended = False
    with signals.handle_signals(signals.end_plainly):
        try:
            Callback()
            time.sleep(10)
        except KeyboardInterrupt:
            is_ended = True
    assert is_ended
    assert capsys.readouterr().err == ''


def test_other_exceptions_of_callbacks_are_told_as_before(monkeypatch):
    class Failing:
        def __del__(self):
            raise ValueError

    told = []
    monkeypatch.setattr('sys.unraisablehook', lambda ignored: told.append(ignored.exc_type))
    before = sys.unraisablehook
    with signals.handle_signals(signals.end_plainly):
        Failing()
    assert told == [ValueError]
    assert sys.unraisablehook == before
