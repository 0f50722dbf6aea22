"""Paths, atomic writes and locks."""

import importlib.util
import pathlib
import time

import numpy as np
import pytest
import tensorstore as ts
from etils import epath

from lm import buckets, files
from lm.errors import ConfigError
from lm.files import (
    RETRIES,
    folder_spec,
    is_remote,
    local_path,
    open_path,
    reaching,
    write_atomically,
)


def test_paths_with_a_scheme_are_remote():
    assert is_remote('gs://bucket/x')
    assert is_remote(epath.Path('s3://bucket/x'))
    assert not any(map(is_remote, ('runs/x', '/x', '~/x', 'file:///x', epath.Path('x'))))


def test_paths_are_opened_or_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    assert open_path('~/x') == open_path(f'file://{tmp_path}/x') == tmp_path / 'x'
    for path, message in (
        ('http://host/x', r"data.path = 'http://host/x': http:// is not supported; use a folder, gs://… or s3://…"),
        ('nonsense://x', 'nonsense:// is not supported'),
        ('gs:///runs/x', r"data.path = 'gs:///runs/x': names no bucket; write gs://BUCKET/FOLDER"),
        (pathlib.PurePosixPath('gs://bucket/x'), r"would be a folder of this machine; write 'gs://bucket/x'"),
        ('s3:bucket/x', r"write 's3://bucket/x'"),
        ('gs//bucket/x', r"write 'gs://bucket/x'"),
        ('~nosuchuser/x', "data.path = '~nosuchuser/x': no such user"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_path(path, 'data.path')
    with pytest.raises(ConfigError, match=r"^--run_dir 'ftp://x': ftp:// is not"):
        open_path('ftp://x', '--run_dir')
    with pytest.raises(ConfigError, match=r"^path = '~nosuchuser'"):
        local_path('~nosuchuser')
    with pytest.raises(ConfigError, match=r"^--out 'gs://b/x': must lie on a disk of this machine"):
        local_path('gs://b/x', '--out')


@pytest.mark.parametrize(('scheme', 'package'), files.PACKAGES.items())
def test_a_bucket_says_what_to_install(scheme, package, monkeypatch):
    buckets.register(scheme)  # imports packages that look for others themselves
    present: set[str] = set()
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name if name in present else None)
    with pytest.raises(ConfigError, match=rf"jsonl.path = '{scheme}://b/x': .*pip install {package}$"):
        open_path(f'{scheme}://b/x', 'jsonl.path')
    present.add(package)
    assert str(open_path(f'{scheme}://b/x')) == f'{scheme}://b/x'


def test_a_file_is_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / 'x'
    assert write_atomically(path, 'é\n') == 3
    assert path.read_bytes() == 'é\n'.encode()
    assert write_atomically(str(path), b'abc') == 3
    numbers = np.arange(3, dtype=np.int64)
    assert write_atomically(path, (part for part in (numbers, numbers[:1]))) == 32
    np.testing.assert_array_equal(np.fromfile(path, np.int64), [0, 1, 2, 0])

    def breaks():
        yield b'half'
        raise RuntimeError('stop')

    with pytest.raises(RuntimeError, match='stop'):
        write_atomically(path, breaks())
    assert path.stat().st_size == 32
    assert list(tmp_path.iterdir()) == [path]


def test_buckets_get_the_whole_content_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(files, 'is_remote', lambda path: True)
    write_atomically(tmp_path / 'x', [b'ab', np.array([99], np.uint8)])
    assert (tmp_path / 'x').read_bytes() == b'abc'


def test_an_unreachable_bucket_raises_an_os_error(monkeypatch):
    def write_bytes(self, data):
        raise RuntimeError('no\nanswer')

    monkeypatch.setattr(type(epath.Path('s3://b/x')), 'write_bytes', write_bytes)
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'key')
    with pytest.raises(OSError, match=r'^RuntimeError: no answer$'):
        write_atomically('s3://b/x', b'')
    with pytest.raises(ZeroDivisionError), reaching('/x'):
        _ = 1 / 0


def test_a_remote_call_says_what_it_waits_for_and_which_identity_is_missing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(buckets, 'SILENT_SECONDS', 0.01)
    monkeypatch.setattr(buckets, '_told', {})
    monkeypatch.setenv('HOME', str(tmp_path))
    for name in ('GOOGLE_APPLICATION_CREDENTIALS', 'AWS_ACCESS_KEY_ID', 'AWS_PROFILE', 'AWS_ROLE_ARN'):
        monkeypatch.delenv(name, raising=False)

    def be_refused():
        with reaching('gs://bucket/x'):
            time.sleep(0.2)
            raise RuntimeError('refused')

    with pytest.raises(OSError, match=r'RuntimeError: refused; no credentials are set .GOOGLE_APPLICATION_CREDENTIALS'):
        be_refused()
    assert caplog.messages[0].startswith('waiting for an answer about gs://bucket/x; no credentials are set')
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'key')
    for path in ('s3://bucket/x', str(tmp_path)):
        with reaching(path):
            time.sleep(0.2)
    assert caplog.messages[1:] == ['waiting for an answer about s3://bucket/x']


def test_what_tensorstore_opens(tmp_path, monkeypatch):
    for name in ('AWS_ENDPOINT_URL', 'AWS_ENDPOINT_URL_S3', 'AWS_REGION', 'AWS_DEFAULT_REGION', 'AWS_ACCESS_KEY_ID'):
        monkeypatch.delenv(name, raising=False)
    assert folder_spec(tmp_path) == folder_spec(f'file://{tmp_path}') == {'driver': 'file', 'path': f'{tmp_path}/'}
    assert folder_spec('gs://bucket/x/y') == {
        'driver': 'gcs',
        'bucket': 'bucket',
        'path': 'x/y/',
        'gcs_request_retries': RETRIES,
    }
    plain = {'driver': 's3', 'bucket': 'bucket', 'path': '', 'use_conditional_write': True}
    plain |= {'s3_request_retries': RETRIES}
    assert folder_spec('s3://bucket/') == plain
    monkeypatch.setenv('AWS_ENDPOINT_URL', 'http://one')
    assert folder_spec('s3://bucket') == plain | {'endpoint': 'http://one', 'aws_region': 'us-east-1'}
    monkeypatch.setenv('AWS_ENDPOINT_URL_S3', 'http://two')
    monkeypatch.setenv('AWS_DEFAULT_REGION', 'here')
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'key')
    found = folder_spec(epath.Path('s3://bucket/x'))
    assert found == plain | {
        'path': 'x/',
        'endpoint': 'http://two',
        'aws_region': 'here',
        'aws_credentials': {'type': 'environment'},
    }
    for spec in (plain, found):
        assert ts.KvStore.Spec(spec).to_json()['use_conditional_write'] is True
    for spec in (plain, folder_spec('gs://bucket/x')):
        (tries,) = [value for name, value in ts.KvStore.Spec(spec).to_json().items() if name.endswith('_retries')]
        assert tries['max_retries'] == 6  # 1, 2, … 32 s lie between seven tries
