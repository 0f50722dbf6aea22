"""A program that `lm reproduce` starts and waits for: it is asked to save and end if this process is asked or dies."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from lm.errors import Preempted
from lm.signals import ENDING, INTERRUPTED, handle_signals


def run_program(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Runs a command, with variables besides its own, and returns its exit code.

    Raises Preempted, once the program has ended, where a signal stopped it or this process.
    """
    told: list[int] = []

    def pass_on(number: int, *_: object) -> None:
        told.append(number)
        if process is not None:
            process.send_signal(signal.SIGTERM)

    def install() -> None:
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, pass_on)

    process = None
    with handle_signals(install):
        process = subprocess.Popen(
            [sys.executable, '-m', 'lm.sweep.child', str(os.getpid()), '--', *command],
            env=os.environ | (environment or {}),
            start_new_session=True,  # Ctrl-C reaches this process alone, so the program hears of it once
        )
        if told:  # before there was a process
            process.send_signal(signal.SIGTERM)
        code = process.wait()
    if told or code in INTERRUPTED:
        raise Preempted('stopped: run the same command again')
    return code
