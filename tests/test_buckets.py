"""Servers that accept a connection and never answer: each call ends in time, and names the address."""

import asyncio
import os
import random
import socket
import subprocess
import sys
import threading
import time

import pytest
from buckets import forget_connections

from lm import buckets
from lm.buckets import NoAnswerError
from lm.files import open_path, read_bytes
from lm.interop.checkpoints import open_checkpoint
from lm.interop.tensor_file import TensorFile


@pytest.fixture
def silent(monkeypatch, tmp_path):
    """Returns the variables that lead to a server that never answers."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        held = []

        def accept():
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        address = f'http://127.0.0.1:{server.getsockname()[1]}'
        yield {
            'STORAGE_EMULATOR_HOST': address,
            'TENSORSTORE_GCS_HTTP_URL': address,
            'AWS_ENDPOINT_URL': address,
            'AWS_ACCESS_KEY_ID': 'key',
            'AWS_SECRET_ACCESS_KEY': 'secret',
            'AWS_REGION': 'us-east-1',
            'HF_ENDPOINT': address,
        }
        server.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


@pytest.fixture
def impatient(monkeypatch):
    """Makes tries short, and lets none wait for the next."""
    monkeypatch.setattr(buckets, 'ANSWER_SECONDS', 0.1)
    monkeypatch.setattr(buckets, 'SILENT_SECONDS', 0.05)
    monkeypatch.setattr(buckets, '_told', {})
    monkeypatch.setattr(random, 'random', lambda: -1000.0)  # gcsfs adds it to its pauses
    forget_connections()
    yield
    monkeypatch.undo()
    forget_connections()


CALLS = {
    'exists': lambda path: path.exists(),
    'is_dir': lambda path: path.is_dir(),
    'iterdir': lambda path: list(path.iterdir()),
    'read_text': lambda path: path.read_text(),
    'read_bytes': read_bytes,
    'open_checkpoint': open_checkpoint,
    'TensorFile': lambda path: TensorFile(path).shapes,
    'write_text': lambda path: path.write_text('x'),
    'unlink': lambda path: path.unlink(),
}


@pytest.mark.parametrize('scheme', ['gs', 's3'])
def test_every_call_ends_and_says_what_it_waits_for(scheme, silent, impatient, monkeypatch, caplog):
    for name, value in silent.items():
        monkeypatch.setenv(name, value)
    for i, (name, call) in enumerate(CALLS.items()):
        path = open_path(f'{scheme}://bucket-{i}/run')
        begun = time.monotonic()
        with pytest.raises(
            NoAnswerError, match=f'^{scheme}://bucket-{i}.*: its server has not answered, in several'
        ) as error:
            call(path)
        assert time.monotonic() - begun < 60, name
        assert '\n' not in str(error.value)
        waiting = f'waiting for an answer about {scheme}://bucket-{i}'
        assert any(message.startswith(waiting) for message in caplog.messages), name


def test_tensorstore_ends_too(silent):
    """Its limits are read once per process."""
    limits = dict.fromkeys(buckets.LIMITS, '1')
    code = (
        'import tensorstore as ts; from lm.files import folder_spec, RETRIES; '
        "RETRIES.update(max_retries=1); kvstore = ts.KvStore.open(folder_spec('gs://bucket/x')).result(); "
        "kvstore.read('y').result()"
    )
    done = subprocess.run(
        [sys.executable, '-c', code], env=os.environ | silent | limits, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert 'ValueError' in done.stderr or 'Timeout' in done.stderr


def test_the_hub_ends_too(silent):
    """Its address and limits are read once per process."""
    pytest.importorskip('huggingface_hub')
    limits = {'HF_HUB_DOWNLOAD_TIMEOUT': '1', 'HF_HUB_ETAG_TIMEOUT': '1'}
    code = "from lm.files import open_source; open_source('hf://datasets/owner/name/train').is_dir()"
    done = subprocess.run(
        [sys.executable, '-c', code], env=os.environ | silent | limits, capture_output=True, text=True, timeout=100
    )
    assert 'NoAnswerError: hf://datasets/owner/name/train: its server has not answered' in done.stderr


def lose_connection(scheme: str) -> Exception:
    """Returns what the package of a scheme raises where no such host is known."""
    if scheme == 's3':
        return pytest.importorskip('botocore.exceptions').EndpointConnectionError(endpoint_url='https://b.example')
    aiohttp = pytest.importorskip('aiohttp')
    key = aiohttp.client_reqrep.ConnectionKey('b.example', 443, True, True, None, None, None)
    return aiohttp.ClientConnectorDNSError(key, OSError(-2, 'Name or service not known'))


@pytest.mark.parametrize('scheme', ['gs', 's3'])
def test_a_server_that_cannot_be_reached_is_one_line(scheme):
    async def ask():
        async with buckets.bounding(f'{scheme}://b/run.json'):
            raise lose_connection(scheme)

    with pytest.raises(
        NoAnswerError, match=rf'^{scheme}://b/run\.json: its server cannot be reached \(.*b\.example.*\); '
    ):
        asyncio.run(ask())
