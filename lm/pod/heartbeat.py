"""A watch over the other processes of the job: when one is gone, this one ends too, so that a supervisor repeats the
job.

JAX notices a death on its own, but late, and then aborts (SIGABRT). No supervisor can tell this from a bug. Here each
process keeps one TCP connection to process 0. The kernel closes it when a process dies, whatever killed it. A host that
froze or lost its power is detected by its silence. Either way the survivors end with exit code 42.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from lm.errors import exit_code_of
from lm.pod.job import joined
from lm.signals import end_process

CONNECT_SECONDS, ACCEPT_SECONDS = 30.0, 1.0
MOST_GREETING = 100
"""Bytes beyond which nobody is listened to who connects."""
ERROR_SECONDS = 2.0
"""Seconds that an exception waits: a dead peer raises errors in collectives a moment before its connection ends."""

log = logging.getLogger(__name__)


class Peers:
    """A context manager around a training. A single process needs no watch, and the context does nothing.

    Enter it as soon as the processes have joined, before `meet`. It then also notices a process that dies while others
    wait for its devices. Leaving it with an exception sends the exit code to the others. Errors that all processes
    raise (a preemption, a divergence) end as they would alone. An error of one process ends the others with the same
    code.

    Args:
        silence: seconds without a sign of life after which a process counts as gone.
    """

    def __init__(self, silence: float):
        self.silence = silence
        self.index, self.count = joined()
        self._ended: dict[int, int] = {}
        self._ended_at: float | None = None
        self._connections: dict[int, _Connection] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> 'Peers':
        if self.count > 1:
            _delay_aborts(True)
            self._connect()
            self._thread = threading.Thread(target=self._watch, name='peers', daemon=True)
            self._thread.start()
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        if self._thread is None:
            return
        code = 0
        if error is not None:
            code = exit_code_of(error)
            if code == 1:
                time.sleep(ERROR_SECONDS)
        self._end(self.index, code)
        if error is not None:
            end = time.monotonic() + self.silence
            while len(self._ended) < self.count and self._connections and time.monotonic() < end:
                time.sleep(0.02)
        self._closing = True
        self._thread.join(timeout=5)
        if error is not None and len(self._ended) < self.count:
            # The others are gone, or hang in a collective that waits for this process: JAX must not wait for them.
            atexit.register(_leave, code)
        else:
            _delay_aborts(False)

    def _connect(self) -> None:
        """Connects this process: process 0 listens, and the others find its address and a secret in jax.distributed's
        store.

        A process that cannot connect says so in that store; JAX will notice its fate later. All processes were there a
        moment ago, so a process that says nothing is gone.
        """
        from jax._src.distributed import global_state

        client, address = global_state.client, global_state.coordinator_address
        assert client is not None and address is not None, 'there are several processes'  # noqa: PT018
        host = address.rpartition(':')[0].strip('[]')
        if self.index:
            try:
                found = client.blocking_key_value_get('lm/peers/0', int(CONNECT_SECONDS * 1000))
            except jax.errors.JaxRuntimeError:
                self._end_as_lost(0, 'is gone')
            if found:
                port, secret = found.split()
                with self._report_failure(client):
                    connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
                    connection.sendall(f'{secret} {self.index}\n'.encode())
                    self._connections[0] = _Connection(connection)
            return
        with self._report_failure(client), _listen(host) as server:
            self._accept(server, client)

    @contextlib.contextmanager
    def _report_failure(self, client: Any) -> Iterator[None]:
        """Tells the others if this process cannot be watched."""
        try:
            yield
        except OSError as error:
            log.warning('process %d cannot watch the others (%s): JAX will, later', self.index, error)
            client.key_value_set(f'lm/peers/{self.index}', '', allow_overwrite=True)

    def _accept(self, server: socket.socket, client: Any) -> None:
        """Accepts the connections of all other processes that can connect."""
        secret = secrets.token_hex(16)
        client.key_value_set('lm/peers/0', f'{server.getsockname()[1]} {secret}')
        server.setblocking(False)
        greetings = {f'{secret} {index}'.encode(): index for index in range(1, self.count)}
        missing, end = set(greetings.values()), time.monotonic() + CONNECT_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while missing:
                if time.monotonic() > end:
                    self._end_as_lost(min(missing), 'is gone')
                if not (ready := selector.select(ACCEPT_SECONDS)):
                    missing -= {int(key.rpartition('/')[2]) for key, _ in client.key_value_dir_get('lm/peers/')}
                for key, _ in ready:
                    if key.fileobj is server:
                        self._admit(server, selector)
                        continue
                    guest, greeting = key.data, key.data.read_greeting()
                    if greeting is None:
                        continue
                    selector.unregister(guest.socket)
                    if (index := greetings.pop(greeting, None)) is None:
                        guest.socket.close()
                    else:
                        self._connections[index] = guest
                        missing.discard(index)
            guests = [key.data for key in selector.get_map().values() if key.data]
        for guest in guests:
            guest.socket.close()

    def _admit(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        """Waits for the greeting of one who connects. Anybody on the network can, and nobody else waits for them."""
        with contextlib.suppress(OSError):
            connected, _ = server.accept()
            connected.setblocking(False)
            selector.register(connected, selectors.EVENT_READ, _Connection(connected))

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for index, connection in self._connections.items():
            connection.socket.setblocking(False)
            selector.register(connection.socket, selectors.EVENT_READ, index)
        interval = min(self.silence / 5, 5.0)
        beat = 0.0
        while not self._closing:
            for key, _ in selector.select(min(interval, 0.2)):
                if not self._read(key.data):
                    selector.unregister(key.fileobj)
                    del self._connections[key.data]
            now = time.monotonic()
            if now - beat >= interval:
                beat = now
                self._send('beat')
            for index, connection in self._connections.items():
                if now - connection.heard > self.silence and not self._may_leave(index):
                    self._end_as_lost(index, f'has been silent for {self.silence:.0f} s')
            is_late = self._ended_at is not None and now - self._ended_at > self.silence
            if (failed := self._find_failed()) and self.index not in self._ended and is_late:
                self._end_as_lost(*failed)
        for connection in self._connections.values():
            connection.socket.close()

    def _read(self, index: int) -> bool:
        """Reads the messages of process `index`; returns False once it has closed the connection properly."""
        connection = self._connections[index]
        try:
            data = connection.socket.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            data = b''
        connection.heard = time.monotonic()
        *lines, connection.rest = (connection.rest + data).split(b'\n')
        for line in lines:
            if line.startswith(b'end '):
                self._end(*map(int, line.split()[1:]))
        if not data and not self._may_leave(index):
            self._end_as_lost(index, 'is gone')
        return bool(data)

    def _may_leave(self, index: int) -> bool:
        """Tells whether process `index` may go: it has announced its end, or this process ends with an error."""
        return index in self._ended or self._ended.get(self.index, 0) != 0

    def _end(self, index: int, code: int) -> None:
        """Notes that process `index` ends with `code`, and passes it on."""
        self._ended[index] = code
        self._ended_at = self._ended_at or time.monotonic()
        if index == self.index or self.index == 0:
            self._send(f'end {index} {code}')

    def _send(self, line: str) -> None:
        with self._lock:
            for connection in list(self._connections.values()):
                with contextlib.suppress(OSError):  # reading finds out what became of it
                    connection.socket.sendall(line.encode() + b'\n')

    def _find_failed(self) -> tuple[int, int] | None:
        """Returns (process, exit code) of a process that has announced an error."""
        return next(((index, code) for index, code in self._ended.items() if code), None)

    def _end_as_lost(self, index: int, what: Any) -> NoReturn:
        """Ends this process: with the code of a process that failed, or else to be repeated."""
        if failed := self._find_failed():
            end_process(
                f'lm train: process {failed[0]} of {self.count} ended with exit code {failed[1]}: see its message',
                failed[1],
            )
        end_process(f'lm train: process {index} of {self.count} {what}: run the same command again on all of them')


class _Connection:
    def __init__(self, connected: socket.socket):
        self.socket, self.heard, self.rest = connected, time.monotonic(), b''

    def read_greeting(self) -> bytes | None:
        """Reads on. Returns the first line; None while it is not whole; b'' if the other side leaves or says more."""
        try:
            data = self.socket.recv(MOST_GREETING)
        except BlockingIOError:
            return None
        except OSError:
            data = b''
        self.heard = time.monotonic()
        line, end, rest = (self.rest + data).partition(b'\n')
        self.rest = rest if end else line
        if end:
            return line
        return None if data and len(line) < MOST_GREETING else b''


def _listen(host: str) -> socket.socket:
    """Opens a server on a free port; a job on one machine is not visible from outside."""
    if host in ('localhost', '127.0.0.1', '::1'):
        return socket.create_server((host if host != 'localhost' else '127.0.0.1', 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(('', 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(('', 0))


def _delay_aborts(delay: bool) -> None:
    """Delays the death by SIGABRT by six seconds (its number is the argument that `sleep` gets).

    When process 0 dies, JAX's client aborts within milliseconds, in a thread that no Python code can stop. With the C
    function `sleep` as handler of the signal, the thread of `Peers` has the time to end the process properly.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p) if delay else None)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
