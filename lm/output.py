"""Output that nobody takes any more: a reader that has gone, a full disk behind a redirection, a closed terminal.

It stops no work whose results lie elsewhere. A command that does nothing but print ends there, as others do in a pipe.
"""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, TextIO

GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Nothing can be written there ever again. Elsewhere, as on a full disk, it is tried again with each line."""
UNREAD = 128 + signal.SIGPIPE
"""The exit code of a command that ended because nobody read on: what shells show for those that the signal kills."""


def prepare_streams() -> None:
    """Repairs the streams of a program that was started without some of them (`>&-`), or with an encoding that lacks
    characters. Call it before a file takes the number of a missing stream."""
    for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding='utf-8'))  # noqa: SIM115
        elif mode == 'w':
            stream.reconfigure(errors='backslashreplace')


@contextlib.contextmanager
def lasting(label: str, ends: bool = False) -> Iterator[None]:
    """Inside the block, output that cannot be printed is left out. The first time, a line on stderr reports it if
    possible.

    With `ends`, SystemExit is raised where the reader has gone, and nothing else is different.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Lasting(stream, label, ends) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                _silence(stream)  # or Python complains of it when it ends


class _Lasting:
    """A text stream whose errors stop nothing."""

    def __init__(self, stream: TextIO, label: str, ends: bool):
        self._stream, self._label, self._ends, self._is_told = stream, label, ends, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._lost(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if error.errno in GONE:
            _silence(self._stream)
            if self._ends:
                raise SystemExit(UNREAD) from None
        elif self._ends:
            raise error
        if not self._is_told:
            self._is_told = True
            print(f'{self._label}: output is lost ({error.strerror}); the work goes on', file=sys.stderr, flush=True)


def _silence(stream: TextIO) -> None:
    """Sends what the stream still holds, and all that comes, nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
