"""Errors for people: one line that names the field, the value and the remedy, and the exit code of the command.

| code | meaning                                                             | safe to retry |
|------|---------------------------------------------------------------------|---------------|
| 2    | bad usage or configuration                                          | no            |
| 42   | preempted: the state is saved, run the same command again           | yes           |
| 43   | the run diverged                                                    | no            |
| 44   | data, tokenizer or checkpoint do not match or are damaged           | no            |
"""

import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn


class LmError(Exception):
    """Base of the errors that the `lm` command prints as one line, without a traceback."""

    exit_code = 1


class ConfigError(LmError):
    """A wrong command line, gin file or value."""

    exit_code = 2


class Preempted(LmError):
    """The process was told to stop; the state is saved and the same command continues it."""

    exit_code = 42


class Diverged(LmError):
    """Too many non-finite steps in a row; the last good checkpoint is kept."""

    exit_code = 43


class MismatchError(LmError):
    """Data, tokenizer or checkpoint are damaged, missing or belong to something else."""

    exit_code = 44


def end_process(message: str, code: int = Preempted.exit_code) -> NoReturn:
    """Ends this process at once, from any thread, with one line on stderr: for what no exception can end, such as a
    main thread that waits for a process that is gone. Nothing is cleaned up."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        print(f'lm: {message}', file=sys.stderr, flush=True)
    os._exit(code)


def end_early_on_sigterm() -> None:
    """Makes SIGTERM end the process with 42 and one line, until `lm.training.preemption` or another handler is there.

    A thread does it: Python's own handlers wait until the main thread comes back from what it does in C, such as
    waiting for the other processes of a job. A signal that already has a handler, or is ignored, keeps it.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    first = threading.Lock()

    def end(*_) -> None:
        if first.acquire(blocking=False):
            end_process('told to stop (SIGTERM) before there was anything to save: run the same command again')

    def listen(pipe: int) -> None:
        while number := os.read(pipe, 1):
            if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is end:
                end()

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=listen, args=(reading,), name='sigterm', daemon=True).start()
