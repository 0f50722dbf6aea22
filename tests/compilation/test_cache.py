"""Compiled programs survive the process; damaged ones are compiled again."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import compile_cache
import pytest
import tiny
from etils import epath
from jax._src.lru_cache import LRUCache

from lm.compilation import cache as cache_module
from lm.compilation.cache import MOST_PROGRAMS, CompileCache

PROGRAM = """
import logging, sys
import jax, jax.numpy as jnp
from lm.compilation.cache import CompileCache

logging.basicConfig(format='%(message)s')
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if 'cache_hits' in event else None)
x = jnp.ones((8, 8))
with CompileCache(sys.argv[1]) as cache:
    def f(x):
        for i in range(40):
            x = jnp.sin(x @ x) + i
        return x
    result = float(jax.jit(f)(x).sum())
    private = str(cache._private)
    cache.publish()
import os
assert not os.path.exists(private)
print(len(hits), result)
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    """Clears the settings of JAX's own cache, which other tests share and which would replace our cache."""
    monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)


def compute(folder) -> tuple[int, str, str]:
    """Returns (programs found in the cache, result, messages) of a process."""
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM, str(folder)],
        env=tiny.environment(XLA_FLAGS=''),  # optimized compilation takes long enough to be worth a file
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    hits, result = done.stdout.split()
    return int(hits), result, done.stderr


def programs(folder) -> list:
    return sorted(path for path in folder.rglob('*') if path.is_file())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    'flipped': flip,
    'truncated': lambda path: path.write_bytes(path.read_bytes()[:-7]),
    'empty': lambda path: path.write_bytes(b''),
}


@pytest.mark.smoke
def test_the_second_process_compiles_nothing_unless_the_file_is_damaged(tmp_path):
    hits, expected, _ = compute(tmp_path)
    assert hits == 0
    kept = len(programs(tmp_path))
    assert kept
    found, result, _ = compute(tmp_path)
    assert found >= kept
    assert result == expected
    shutil.copytree(tmp_path, tmp_path.with_name('moved'))
    hits, result, _ = compute(tmp_path.with_name('moved'))
    assert hits >= found  # a busy machine may have cached one more program
    assert result == expected
    for name, damage in DAMAGES.items():
        for path in programs(tmp_path):
            damage(path)
        hits, result, messages = compute(tmp_path)
        assert (hits, result) == (0, expected), name
        assert 'is damaged and not used' in messages
        hits, result, messages = compute(tmp_path)  # the file was written anew
        assert (hits > 0, result, messages) == (True, expected, ''), name


def test_another_process_never_finds_half_a_program(tmp_path, monkeypatch, caplog):
    """It would delete the half that the first process goes on to write."""
    private, folder, plain, found = tmp_path / 'private', epath.Path(tmp_path / 'folder'), os.replace, []
    private.mkdir()
    (private / 'jit_f-cache').write_bytes(bytes(1000))

    def read() -> list[str]:
        reader, place = CompileCache(None), tmp_path / f'reader-{len(found)}'
        place.mkdir()
        reader._fetch(folder, place)
        assert not reader._damaged
        return [path.name for path in place.iterdir()]

    monkeypatch.setattr(os, 'replace', lambda *paths: found.append(read()) or plain(*paths))
    CompileCache(None)._publish(private, folder)
    assert [*found, read()] == [[], ['jit_f-cache']]
    assert not caplog.text

    def refuse(*paths):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'replace', refuse)
    (private / 'jit_g-cache').write_bytes(b'g')
    with pytest.raises(OSError, match='space'):
        CompileCache(None)._publish(private, folder)
    assert [path.name.partition('.')[0] for path in folder.iterdir()] == ['jit_f-cache']


def test_programs_that_another_process_deletes_meanwhile_are_no_failure(tmp_path, monkeypatch):
    private, folder, reader = (epath.Path(tmp_path / name) for name in ('private', 'folder', 'reader'))
    for place in (private, folder, reader):
        place.mkdir()
    for i in range(MOST_PROGRAMS + 2):
        (private / f'jit_{i}-cache').write_bytes(bytes([i]))
    plain = cache_module._programs
    monkeypatch.setattr(cache_module, '_programs', lambda folder: [*plain(folder), folder / 'jit_gone-cache.0'])
    CompileCache(None)._publish(private, folder)
    CompileCache(None)._fetch(folder, reader)
    assert len(list(folder.iterdir())) == len(list(reader.iterdir())) == MOST_PROGRAMS


def test_tests_write_entries_of_jax_whole(tmp_path, monkeypatch):
    compile_cache.share()
    cache, plain, found = LRUCache(str(tmp_path), max_size=-1), os.replace, []
    monkeypatch.setattr(os, 'replace', lambda *paths: found.append(cache.get('key')) or plain(*paths))
    cache.put('key', b'a program')
    assert (found, cache.get('key')) == ([None], b'a program')
    assert len(list(tmp_path.iterdir())) == 1


def test_processes_that_share_no_folder_have_their_own(tmp_path, monkeypatch):
    monkeypatch.delenv(compile_cache.ROOT)
    monkeypatch.setenv('PYTEST_XDIST_WORKER', 'gw1')
    for given, root in ((None, 'default'), ('given', 'given')):
        monkeypatch.delenv(compile_cache.ROOT, raising=False)
        monkeypatch.delenv(compile_cache.OWN, raising=False)
        if given:
            monkeypatch.setenv(compile_cache.OWN, given)
        compile_cache.choose_folders(pathlib.Path('default'))
        assert (os.environ[compile_cache.OWN], compile_cache.find_shared()) == (f'{root}/gw1', root)
        compile_cache.choose_folders(pathlib.Path('default'))  # as in a process that inherits both
        assert os.environ[compile_cache.OWN] == f'{root}/gw1'
    monkeypatch.setenv(compile_cache.OWN, 'elsewhere/x')
    assert compile_cache.find_shared() == 'elsewhere/x'


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path):
    (tmp_path / 'file').write_text('')
    hits, _, messages = compute(tmp_path / 'file' / 'cache')
    assert hits == 0
    assert 'file' in messages


def test_a_run_keeps_its_programs_and_goes_on_without_them(tiny_flags, reference_run, tmp_path):
    run = tmp_path / 'run'
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(run / 'checkpoints' / '40')
    kept = programs(run / 'compiled')
    assert kept
    for path, damage in zip(kept, [*DAMAGES.values()] * len(kept), strict=False):
        damage(path)
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags)
    assert done.returncode == 0, done.stderr
    assert 'Traceback' not in done.stderr
    assert tiny.losses(run) == tiny.losses(reference_run[0])
    assert tiny.checksums(run, 40) == tiny.checksums(reference_run[0], 40)

    # With complete files again, a start compiles nothing and changes nothing.
    shutil.rmtree(run / 'checkpoints' / '40')
    before = set(run.glob('compiled/*/jit_train-*'))  # the compile time of other programs is near the limit for a file
    assert before
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags)
    assert done.returncode == 0, done.stderr
    assert set(run.glob('compiled/*/jit_train-*')) == before
    assert tiny.checksums(run, 40) == tiny.checksums(reference_run[0], 40)
    assert json.loads((run / 'run.json').read_text())['goodput']['starts'] == 3


def test_a_flag_names_the_folder_of_compiled_programs(tiny_flags, tmp_path):
    run, elsewhere = tmp_path / 'run', tmp_path / 'elsewhere'
    few = tiny.params({'train.steps': 2, 'optimizer.warmup_steps': 1})
    done = tiny.lm('train', '--run_dir', str(run), '--compile_cache', str(elsewhere), *tiny_flags, *few)
    assert done.returncode == 0, done.stderr
    assert programs(elsewhere)
    assert not (run / 'compiled').exists()
    done = tiny.lm('train', '--run_dir', str(tmp_path / 'none'), '--compile_cache', 'none', *tiny_flags, *few)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / 'none' / 'compiled').exists()
