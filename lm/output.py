"""Output without a reader: a reader that has gone, a full disk behind a redirection, a closed terminal.

Work goes on if its results lie elsewhere. A command that only prints ends there, as other programs do in a pipe. This
module also leaves out messages of native libraries that tell the user nothing.
"""

import contextlib
import errno
import glob
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors after which nothing can be written there again; after others, such as a full disk, each line is tried."""
UNREAD = 128 + signal.SIGPIPE
"""The exit code of a command that ended because its reader had gone, as shells show it for SIGPIPE."""

TPU_DEVICES = ('/dev/accel*', '/dev/vfio/[0-9]*')
"""Device files of TPUs, in the forms of all generations."""
WITHOUT_TPU = {'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_ACCELERATOR_TYPE': 'v5litepod-4'}
"""Variables without which libtpu prints six lines of errors if it finds no TPU."""


class OutputError(OSError):
    """The output of a command that only prints finds no room; the message is one for people."""


def quiet_libtpu() -> None:
    """Keeps libtpu from printing errors on a machine without a TPU: JAX loads libtpu wherever it is installed.

    Nothing changes if there is a TPU, if a variable of TPUs is set, or if JAX_PLATFORMS asks for a TPU.
    """
    has_tpu = any(glob.glob(pattern) for pattern in TPU_DEVICES)
    is_set = any(name.startswith(('TPU_', 'CLOUD_TPU_')) for name in os.environ)
    if not (has_tpu or is_set or 'tpu' in os.environ.get('JAX_PLATFORMS', '')):
        os.environ.update(WITHOUT_TPU)


def leave_out_lines(start: bytes) -> None:
    """Leaves out the lines of native code on stdout that begin with `start`, from now on.

    Python itself then writes to a copy of stdout. Nothing changes if stdout is no file of the system (notebooks).
    """
    stream: Any = sys.stdout._stream if isinstance(sys.stdout, _Lasting) else sys.stdout
    try:
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != 1:
            return
        stream.flush()
    except (OSError, ValueError):
        return
    form = {'encoding': stream.encoding, 'errors': stream.errors}
    copy = open(os.dup(1), 'w', **form)  # noqa: SIM115 (it lasts as long as the process)
    copy.reconfigure(line_buffering=stream.line_buffering, write_through=stream.write_through)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(writing)
    if isinstance(sys.stdout, _Lasting):
        sys.stdout._stream = copy
    else:
        sys.stdout = copy

    def forward() -> None:
        with open(reading, 'rb') as lines:
            for line in lines:
                if not line.startswith(start):
                    with contextlib.suppress(OSError, ValueError):
                        os.write(copy.fileno(), line)

    threading.Thread(target=forward, name='native output', daemon=True).start()


def prepare_streams() -> None:
    """Repairs the streams of a program that was started without some of them (`>&-`), or with a limited encoding.

    Call it before a file takes the number of a missing stream.
    """
    for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding='utf-8'))  # noqa: SIM115
        elif mode == 'w':
            stream.reconfigure(errors='backslashreplace')


@contextlib.contextmanager
def lasting(label: str, ends: bool = False) -> Iterator[None]:
    """Leaves out output of the block that cannot be printed; the first time, a line on stderr reports it if possible.

    With `ends`, a reader that has gone raises SystemExit, and a full disk OutputError. Flush inside of the block what
    Python keeps back.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Lasting(stream, label, ends) for stream in streams)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            getattr(sys.stdout, '_stream', streams[0]).flush()  # it may be a copy by now (`leave_out_lines`)
        sys.stdout, sys.stderr = streams
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                _silence(stream)  # or Python complains about it at its end


class _Lasting:
    """A text stream that swallows errors."""

    def __init__(self, stream: TextIO, label: str, ends: bool):
        self._stream, self._label, self._ends, self._is_told = stream, label, ends, False

    def __getattr__(self, name: str) -> object:
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
            what = f'the output cannot be written ({error.strerror})'
            raise OutputError(f'{what}; make room, then run the same command again') from None
        if not self._is_told:
            self._is_told = True
            print(f'{self._label}: output is lost ({error.strerror}); the work goes on', file=sys.stderr, flush=True)


def _silence(stream: TextIO) -> None:
    """Discards the remaining output of the stream, and all later output."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
