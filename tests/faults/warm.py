"""Starts `lm` processes whose imports are done: python warm.py SOCKET.

Imports take half of the processor time of a tiny training. The nursery has done them, and nothing else. Each process
that it forks initialises JAX for itself and gets its own signals and limits. It ends with an exit code, like a process
that was started from scratch. The draws of the random battery begin like this, and so do most commands that other tests
start (`tiny.start`). The twenty fixed tests do not.
"""

import array
import contextlib
import gc
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time


class Nursery:
    """The parent of warm processes; a context manager."""

    def __init__(self, environment: dict[str, str]):
        self._folder = tempfile.TemporaryDirectory(prefix='lm_warm.')
        self._path = os.path.join(self._folder.name, 'socket')
        command = [sys.executable, __file__, self._path]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if not self._process.stdout.readline():
            raise RuntimeError('the nursery did not start')

    def start(self, program: list[str], flags: str, errors_apart: bool = False) -> 'Warm':
        """Starts a process of `launchers.main(*program)` with these XLA_FLAGS; its output goes to one pipe,
        or to two."""
        pipes = [os.pipe() for _ in range(1 + errors_apart)]
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        request = json.dumps({'program': program, 'flags': flags}).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [writing for _, writing in pipes]))
        connection.sendmsg([len(request).to_bytes(4, 'big')], [rights])
        connection.sendall(request)
        for _, writing in pipes:
            os.close(writing)
        return Warm(connection, *(open(reading, errors='replace') for reading, _ in pipes))

    def processor_seconds(self) -> float:
        """Returns the processor time of the nursery and of its processes that ended (Linux)."""
        fields = pathlib.Path(f'/proc/{self._process.pid}/stat').read_text().rpartition(')')[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf('SC_CLK_TCK')  # utime, stime, cutime, cstime

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> 'Nursery':
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Warm:
    """A process with the methods of subprocess.Popen that tests need."""

    def __init__(self, connection: socket.socket, stdout, stderr=None):
        self.stdout, self.stderr, self.returncode = stdout, stderr, None
        self._answers = connection.makefile()
        self._connection = connection
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired('lm', timeout)
            select.select([self._connection], [], [], 0.2)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str | None]:
        """Waits and returns the remaining output; kills a process that takes too long."""
        texts: dict = {}
        streams = [stream for stream in (self.stdout, self.stderr) if stream]
        readers = [threading.Thread(target=lambda s=s: texts.update({s: s.read()})) for s in streams]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            for reader in readers:
                reader.join()
        return texts[self.stdout], texts.get(self.stderr)

    def send_signal(self, how: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, how)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def nurse(path: str) -> dict:
    """Forks a process for each request and reports its end; returns the request in each child."""
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(ended, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(64)
    print('ready', flush=True)
    children: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([server, ended, sys.stdin], [], [])
        if sys.stdin in readable:  # closed: the process that started this one is gone
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            sys.exit()
        if ended in readable:
            os.read(ended, 4096)
            for pid in list(children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    with children.pop(pid) as connection, contextlib.suppress(OSError):  # the reader may have gone
                        connection.sendall(f'{os.waitstatus_to_exitcode(status)}\n'.encode())
        if server in readable:
            connection, _ = server.accept()
            head, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
            with connection.makefile('rb', buffering=0) as rest:
                size, data = int.from_bytes(head, 'big'), b''
                while len(data) < size:
                    data += rest.read(size - len(data))
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (server, connection, *children.values()):
                    each.close()
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(descriptors[0], 1)
                os.dup2(descriptors[-1], 2)
                for descriptor in (ended, wakeup, *descriptors):
                    os.close(descriptor)
                return json.loads(data)
            for descriptor in descriptors:
                os.close(descriptor)
            children[pid] = connection
            connection.sendall(f'{pid}\n'.encode())


if __name__ == '__main__':
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    import compile_cache
    import gin.config_parser  # noqa: F401 (imported for its time)
    import jax
    import launchers

    import lm.checkpoint.writer  # it imports Orbax, a third of the processor time of a warm restart
    import lm.cli
    import lm.session.train
    from lm.attention import mechanisms

    mechanisms()
    compile_cache.share()
    if compile_cache.OWN in os.environ:
        jax.config.update('jax_compilation_cache_dir', compile_cache.find_shared())
    gc.freeze()  # imported modules stay in all forked processes
    request = nurse(sys.argv[1])
    lm.cli.end_on_signals('lm')  # as at the beginning of the program
    os.environ['XLA_FLAGS'] = request['flags']
    sys.exit(launchers.main(request['program']))
