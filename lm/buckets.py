"""File systems of buckets and of the Hugging Face Hub that say what they wait for, and end if a server never answers.

fsspec makes them once `lm.files` has met an address of gs://, s3:// or hf://. The parents of the first two wait for
ever for a silent server, or repeat for a quarter of an hour.
"""

import asyncio
import contextlib
import functools
import logging
import os
import pathlib
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import unquote

import fsspec

from lm.errors import LmError

log = logging.getLogger(__name__)

ANSWER_SECONDS = 6
"""The time after which a try counts as failed if no byte comes."""
MOST_ANSWERS = 15
"""So many times `ANSWER_SECONDS` all tries of a request may take."""
SLOWEST = 1e5
"""Bytes per second; content that is sent more slowly counts as not sent."""
SILENT_SECONDS = 5.0
"""The time after which a line says what a remote call waits for."""
TOLD_SECONDS = 30.0
"""No line follows another one about the same bucket within this time."""
LIMITS = {
    'TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS': str(ANSWER_SECONDS),
    'TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS': str(ANSWER_SECONDS),
    'TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES': '1',
}
"""Variables that give TensorStore's requests the same limit; by default they wait for ever."""
IDENTITIES = {
    'gs': (('GOOGLE_APPLICATION_CREDENTIALS',), '~/.config/gcloud/application_default_credentials.json'),
    's3': (('AWS_ACCESS_KEY_ID', 'AWS_PROFILE', 'AWS_ROLE_ARN'), '~/.aws/credentials'),
}
"""Scheme of a bucket's address → the variables and the file that give this user an identity there."""
_told: dict[str, float] = {}
"""Bucket → when a line said that its server is waited for."""


class NoAnswerError(LmError):
    """A silent server, or none. It is no OSError: packages repeat these, or take the file for one that is missing."""


@contextlib.contextmanager
def waiting_for(path: os.PathLike | str) -> Iterator[None]:
    """A block that waits for the server of `path`: after SILENT_SECONDS a line says so. Local paths have none."""
    timer = threading.Timer(SILENT_SECONDS, _tell_waiting, (os.fspath(path),))
    timer.daemon = True
    if os.fspath(path).partition('://')[0] in MAKERS:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell_waiting(path: str) -> None:
    bucket, now = '/'.join(path.split('/')[:3]), time.monotonic()
    if now - _told.get(bucket, -TOLD_SECONDS) >= TOLD_SECONDS:
        _told[bucket] = now
        log.warning('waiting for an answer about %s%s', path, explain_identity(path))


def explain_identity(path: os.PathLike | str) -> str:
    """Returns a remark for a bucket where neither variables nor a file name this user, such as '; no credentials …'; ''
    elsewhere. A machine in the cloud may have an identity all the same."""
    scheme = os.fspath(path).partition('://')[0]
    if scheme not in IDENTITIES:
        return ''
    variables, file = IDENTITIES[scheme]
    if any(os.environ.get(name) for name in variables) or pathlib.Path(file).expanduser().exists():
        return ''
    return f'; no credentials are set ({variables[0]}, or the identity of this machine: docs/storage.md)'


@contextlib.asynccontextmanager
async def bounding(address: str, content: Any = None) -> AsyncIterator[None]:
    """A block with all tries of one request, which may send content: a line says what it waits for.

    Raises NoAnswerError if a server says nothing, or cannot be reached.
    """
    size = len(content) if isinstance(content, bytes | bytearray | memoryview) else 0
    try:
        # A server that never asks for the content that it is to get is silent as well, and no try ends by itself.
        async with asyncio.timeout(MOST_ANSWERS * ANSWER_SECONDS + size / SLOWEST):
            with waiting_for(address):
                yield
    except Exception as error:
        raise _explain(error, address) from error


def _explain(error: Exception, address: str) -> Exception:
    """Returns the error of a server that said nothing or cannot be reached; any other error as it is."""
    if is_unreachable(error):
        why = f'its server cannot be reached ({error}); see the network of this machine, and the address'
        return NoAnswerError(f'{address}: {why}')
    if not is_silence(error):
        return error
    what = f'{address}: its server has not answered, in several tries of {ANSWER_SECONDS} seconds'
    return NoAnswerError(f'{what}{explain_identity(address)}; try it again later')


def is_silence(error: Exception) -> bool:
    """Returns whether a server has said nothing, or nothing more."""
    return isinstance(error, TimeoutError) or 'Timeout' in type(error).__name__  # of botocore


def is_unreachable(error: Exception) -> bool:
    """Returns whether there was no connection: no such host, or nobody listens there."""
    names = 'ClientConnector', 'EndpointConnection', 'ConnectError'  # of aiohttp, of botocore, and of httpx
    return type(error).__name__.startswith(names)


def make_google_storage() -> type[fsspec.AbstractFileSystem]:
    """Returns the class for gs://."""
    from aiohttp import ClientTimeout

    # `gcsfs.GCSFileSystem` may be an experimental class, which first asks a second server for the bucket's layout.
    from gcsfs.core import GCSFileSystem

    class GoogleStorage(GCSFileSystem):
        """gs://, whose requests end if no byte comes for ANSWER_SECONDS, after six tries."""

        def __init__(self, *arguments: Any, **options: Any):
            limit = ClientTimeout(sock_connect=ANSWER_SECONDS, sock_read=ANSWER_SECONDS)
            super().__init__(*arguments, **{'requests_timeout': limit} | options)

        async def _request(self, method: str, path: str, *arguments: object, **options: object) -> Any:
            place = re.search(r'b/([^/?]+)(?:/o(?:/([^?]+))?)?', path.format(*arguments) if arguments else path)
            async with bounding(
                'gs://' + '/'.join(map(unquote, filter(None, place.groups() if place else ()))), options.get('data')
            ):
                return await super()._request(method, path, *arguments, **options)

    return GoogleStorage


def make_s3_storage() -> type[fsspec.AbstractFileSystem]:
    """Returns the class for s3://."""
    import s3fs
    from fsspec.asyn import sync_wrapper

    class S3Storage(s3fs.S3FileSystem):
        """s3://, whose requests end if no byte comes for ANSWER_SECONDS, after ten tries."""

        retries = 2
        connect_timeout = ANSWER_SECONDS
        read_timeout = ANSWER_SECONDS

        def __init__(self, *arguments: Any, **options: Any):
            given = options.pop('config_kwargs', None) or {}
            config = {'retries': {'total_max_attempts': 5, 'mode': 'standard'}} | given
            super().__init__(*arguments, config_kwargs=config, **options)

        async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
            place = (options.get(name) for name in ('Bucket', 'Key', 'Prefix'))
            async with bounding('s3://' + '/'.join(filter(None, place)), options.get('Body')):
                return await super()._call_s3(method, *arguments, **options)

        call_s3 = sync_wrapper(_call_s3)  # of open files; the parent's is bound to the parent's function

    return S3Storage


def make_hub() -> type[fsspec.AbstractFileSystem]:
    """Returns the class for hf://, which only reads."""
    os.environ.setdefault('HF_HUB_DOWNLOAD_TIMEOUT', str(ANSWER_SECONDS))  # read at the import
    from huggingface_hub import HfFileSystem
    from huggingface_hub.hf_file_system import HfFileSystemFile

    @contextlib.contextmanager
    def asking(path: str) -> Iterator[None]:
        address = f'hf://{path.removeprefix("hf://")}'
        try:
            with waiting_for(address):
                yield
        except OSError:
            raise
        except Exception as error:
            raise _explain(error, address) from error

    class HubFile(HfFileSystemFile):
        """A file that is read in ranges."""

        def _fetch_range(self, start: int, end: int) -> bytes:
            with asking(self.path):
                return super()._fetch_range(start, end)

    class Hub(HfFileSystem):
        """hf://, whose requests end if no byte comes for ANSWER_SECONDS, after six tries."""

        def _open(self, path: str, mode: str = 'rb', block_size: int | None = None, **options: Any) -> Any:
            if mode != 'rb' or block_size == 0:
                return super()._open(path, mode, block_size, **options)
            return HubFile(self, path, mode=mode, **options)

        def ls(self, path: str, *arguments: Any, **options: Any) -> Any:
            with asking(path):
                return super().ls(path, *arguments, **options)

        def info(self, path: str, *arguments: Any, **options: Any) -> Any:
            with asking(path):
                return super().info(path, *arguments, **options)

        def find(self, path: str, *arguments: Any, **options: Any) -> Any:
            with asking(path):
                return super().find(path, *arguments, **options)

    return Hub


@functools.cache
def register(scheme: str) -> None:
    """Makes fsspec use the class for the addresses of a scheme, if its package is installed."""
    with contextlib.suppress(ImportError):
        made = MAKERS[scheme]()
        for name in (made.protocol,) if isinstance(made.protocol, str) else made.protocol:
            fsspec.register_implementation(name, made, clobber=True)


MAKERS = {'gs': make_google_storage, 's3': make_s3_storage, 'hf': make_hub}
"""Scheme → what makes its class: the packages take a second to import."""
