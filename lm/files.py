"""Files, local ones and those in buckets: what an address is, and writing whole files."""

import contextlib
import errno
import importlib.util
import json
import logging
import os
import pathlib
import re
import stat
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from etils import epath
from fsspec.config import conf as fsspec_conf
from fsspec.core import url_to_fs

from lm.buckets import LIMITS, NoAnswerError, explain_identity, register, waiting_for
from lm.errors import ConfigError, MismatchError, MissingPackageError, require

AnyPath = pathlib.Path | epath.Path

log = logging.getLogger(__name__)

PACKAGES = {'gs': 'gcsfs', 's3': 's3fs'}
"""Scheme of a bucket's address → the package that epath reads it with, where tensorflow is not installed."""
HUB = 'hf'
"""The scheme of the Hugging Face Hub, which is read and never written."""
DAMAGE = ('DATA_LOSS', 'NOT_FOUND', 'INVALID_ARGUMENT', 'OUT_OF_RANGE', 'FAILED_PRECONDITION')
"""Beginnings of TensorStore's errors where files are missing or damaged; the last one comes from decompression."""
RETRIES = {'max_retries': 6, 'initial_delay': '1s', 'max_delay': '16s'}
"""TensorStore's tries of one request: less than a minute; by default a quarter of an hour."""
MOST_NESTED = 64
"""Levels of objects and lists in a JSON file, at most."""
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""The errors of the system where a file is missing."""


def is_remote(path: os.PathLike | str) -> bool:
    """Returns whether `path` is an address such as gs://bucket/folder; file:// is a local path."""
    text = os.fspath(path)
    return '://' in text and not text.startswith('file://')


def check_scheme(path: os.PathLike | str, name: str) -> None:
    """Raises ConfigError for an address that is neither file:// nor in a bucket; `name` is the field or flag.

    An address that is almost in a bucket, and would be a folder of this machine, also raises it.
    """
    text = os.fspath(path)
    scheme, separator, rest = text.partition('://')
    if scheme == HUB and separator:
        raise ConfigError(f'{_label(path, name)}: only the text of lm prepare is read from the hub; use a folder')
    if separator and scheme not in (*PACKAGES, 'file'):
        raise ConfigError(f'{_label(path, name)}: {scheme}:// is not supported; use a folder, gs://… or s3://…')
    if separator and scheme in PACKAGES and not rest.partition('/')[0]:
        raise ConfigError(f'{_label(path, name)}: names no bucket; write {scheme}://BUCKET/FOLDER')
    if re.search(r'(^|/)\$(\w|\{)', text) and not os.path.exists(text):
        raise ConfigError(f'{_label(path, name)}: variables of the environment are not expanded; write the path out')
    # pathlib makes one slash of the two in an address.
    if not separator and (meant := re.match(rf'({"|".join(PACKAGES)})(?::|//)/*', text)):
        address = f'{meant[1]}://{text[meant.end() :]}'
        raise ConfigError(f'{_label(path, name)}: would be a folder of this machine; write {address!r}')


def local_path(path: os.PathLike | str, name: str = 'path') -> pathlib.Path:
    """Returns the path of a local file or folder, without file:// and with ~ expanded.

    Raises ConfigError for an address, which would else become a folder called `gs:`, and for an unknown ~user. `name`
    is the field or flag that holds `path`.
    """
    if is_remote(path):
        raise ConfigError(f'{_label(path, name)}: must lie on a disk of this machine; copy it from or to there')
    try:
        return pathlib.Path(os.fspath(path).removeprefix('file://')).expanduser()
    except RuntimeError:
        raise ConfigError(f'{_label(path, name)}: no such user; write the path out') from None


def refuse_special_files(folder: pathlib.Path) -> None:
    """Raises MismatchError if a folder holds a pipe, a socket or a device: whoever reads one may wait for ever."""
    with contextlib.suppress(OSError):  # no folder, or one that nobody may read: others say so
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # a link to nothing, or one that is gone by now
                mode = path.stat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    raise MismatchError(f'{path}: is a pipe or a device, not a file; remove it')


def open_path(path: os.PathLike | str, name: str = 'path') -> AnyPath:
    """Returns a pathlib path, or the path of epath for a bucket, which has no `**` patterns.

    Raises ConfigError for an address of another kind, a bucket whose package is missing and a ~user that there is not.
    """
    check_scheme(path, name)
    if not is_remote(path):
        return local_path(path, name)
    scheme = os.fspath(path).partition('://')[0]
    package = PACKAGES[scheme]
    if not any(importlib.util.find_spec(module) for module in (package, 'tensorflow')):
        raise MissingPackageError(_label(path, name), package)
    # TensorStore and other processes write beside fsspec, which would not notice: it may not remember what it has seen.
    fsspec_conf.setdefault(scheme, {})['use_listings_cache'] = False
    register(scheme)
    logging.getLogger(package).setLevel(logging.CRITICAL)  # it logs tracebacks of errors that it also raises
    return epath.Path(path)


def open_source(path: os.PathLike | str, name: str = 'path') -> AnyPath:
    """Returns the path of text that is only read: as `open_path`, or hf://datasets/OWNER/NAME[@REVISION]/… of the hub.

    Raises ConfigError as `open_path` does, and for an address of the hub that names no data set.
    """
    text = os.fspath(path)
    if not text.startswith(f'{HUB}://'):
        return open_path(path, name)
    if not re.match(rf'{HUB}://datasets/[^/]+/[^/]', text):
        raise ConfigError(f'{_label(path, name)}: names no data set; write {HUB}://datasets/OWNER/NAME/FOLDER')
    require('huggingface_hub', _label(path, name), 'hub')
    register(HUB)
    return epath.Path(path)


def folder_spec(path: os.PathLike | str) -> dict[str, Any]:
    """TensorStore's specification of a folder, local or in a bucket.

    For s3:// it holds what TensorStore reads from no environment variable: the endpoint of a server that is not
    Amazon's (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL), the region, and that conditional writes are the server's.
    """
    if not is_remote(path):
        return {'driver': 'file', 'path': os.path.abspath(local_path(path)) + '/'}
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
    scheme, _, rest = os.fspath(path).partition('://')
    bucket, _, inner = rest.strip('/').partition('/')
    where = {'bucket': bucket, 'path': f'{inner}/' if inner else ''}
    if scheme == 'gs':
        return {'driver': 'gcs', **where, 'gcs_request_retries': RETRIES}
    spec = {'driver': 's3', **where, 'use_conditional_write': True, 's3_request_retries': RETRIES}
    if endpoint := os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL'):
        region = os.environ.get('AWS_REGION') or os.environ.get('AWS_DEFAULT_REGION') or 'us-east-1'
        spec |= {'endpoint': endpoint, 'aws_region': region}
    if 'AWS_ACCESS_KEY_ID' in os.environ:
        spec['aws_credentials'] = {'type': 'environment'}  # the search for others complains on stderr
    return spec


def write_atomically(path: os.PathLike | str, content: str | bytes | Iterable[Any], mode: int | None = None) -> int:
    """Writes a file: a reader, or a crash, finds the old content or the new. Object stores do so by themselves.

    Args:
        path: its folder exists.
        content: text (as UTF-8), bytes, or parts that hold bytes, such as arrays.
        mode: of a local file; None: as the process is set.

    Returns:
        The size in bytes.
    """
    content = content.encode() if isinstance(content, str) else content
    parts = [content] if isinstance(content, bytes) else content
    if is_remote(path):
        with reaching(path):
            return epath.Path(path).write_bytes(b''.join(bytes(part) for part in parts))
    path = pathlib.Path(path)
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp')  # machines share disks
    try:
        with open(temporary, 'wb') as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return size


def settle(path: os.PathLike | str) -> None:
    """Returns when the disk has a local folder, what is in it, and its name: a crash of the machine takes none."""
    path = pathlib.Path(path)
    for place in (path, *path.rglob('*'), path.parent):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # a file system that has no such thing
                raise
        finally:
            os.close(descriptor)


JsonObject = dict[str, Any]
"""An object of JSON."""


def parse_json(content: str | bytes) -> Any:
    """Returns the value of JSON text. Raises ValueError where the text is no JSON or nests deeper than MOST_NESTED, as
    no file of ours does: readers that go down into a value would fail with a RecursionError."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError('nested too deep') from None
    # Most files are small: they open too few objects and lists to nest so deep.
    opened = content.encode(errors='replace') if isinstance(content, str) else content
    if opened.count(b'{') + opened.count(b'[') <= MOST_NESTED:
        return value
    level, depth = [value], 0
    while level := [
        part for v in level if isinstance(v, dict | list) for part in (v.values() if isinstance(v, dict) else v)
    ]:
        depth += 1
        if depth > MOST_NESTED:
            raise ValueError('nested too deep')
    return value


def parse_json_object(content: str | bytes) -> dict[str, object]:
    """Returns the entries of an object of JSON. Raises the error of `parse_json` for text with another value, too."""
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError('no object')
    return value


def find_entries(content: str | bytes | None) -> JsonObject:
    """Returns the entries of an object of JSON; {} where the text is missing or something else: others report that."""
    try:
        return {} if content is None else parse_json_object(content)
    except ValueError:
        return {}


def is_damage(error: Exception | str) -> bool:
    """Returns whether a read with TensorStore failed because the data are gone, cut off, or do not match their
    checksum. Else the storage or this machine has failed, and another try may succeed."""
    if isinstance(error, str | ValueError):
        status = re.match(r'([A-Z]+(?:_[A-Z]+)*): ', str(error))  # INVALID_ARGUMENT is often left out
        return status is None or status[1] in DAMAGE
    return isinstance(error, GONE)


def file_size(path: AnyPath) -> int:
    """Returns the bytes of a file."""
    return path.stat().st_size if isinstance(path, pathlib.Path) else path.stat().length


def read_bytes(path: AnyPath) -> bytes:
    """Reads a whole file that another process may replace meanwhile, in a bucket by one request.

    The open files of gcsfs and s3fs ask for the size first. If the file is another one by then, gcsfs cuts the new one
    off at the old size, and s3fs raises an error.
    """
    package = PACKAGES.get(os.fspath(path).partition('://')[0])
    if package is None or not importlib.util.find_spec(package):
        return path.read_bytes()
    system, name = url_to_fs(os.fspath(path))
    return system.cat_file(name)


@contextlib.contextmanager
def reaching(path: os.PathLike | str) -> Iterator[None]:
    """A block that reads or writes `path`, in which every failure of a bucket is an OSError: its packages have errors
    of their own for a server that does not answer or refuses."""
    try:
        with waiting_for(path):
            yield
    except OSError:
        raise
    except Exception as error:
        if not is_remote(path):
            raise
        if isinstance(error, NoAnswerError):
            raise OSError(str(error)) from error
        text = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
        raise OSError(text + explain_identity(path)) from error


def _label(path: os.PathLike | str, name: str) -> str:
    shown = repr(os.fspath(path)[:150])
    return f'{name} {shown}' if name.startswith('--') else f'{name} = {shown}'
