"""Files of other people: what is in them steers no terminal, runs nothing, and takes no more memory than it needs."""

import csv
import json
import os
import pathlib
import shutil
import socket
import stat
import time

import jax
import made_up_runs
import numpy as np
import pytest
import tensorstore as ts
import tiny

from lm.attention.softmax import Softmax
from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.snapshot import _sha256
from lm.cli import main
from lm.compilation.cache import CompileCache
from lm.data import store
from lm.files import parse_json
from lm.lease import _name, _parse, is_held

ESCAPE = '\x1b]0;mine\x07\x1b[2J\u202e'
DEEP = '[' * 100_000 + ']' * 100_000


def make_run(folder: pathlib.Path) -> pathlib.Path:
    """Writes a run without checkpoints."""
    run = made_up_runs.write_run(folder, Softmax(), steps=20)
    shutil.rmtree(run / 'checkpoints')
    return run


def say(capfd, *arguments: object) -> tuple[int, str]:
    """Returns (exit code, everything printed) of a command."""
    code = main([str(argument) for argument in arguments])
    printed = capfd.readouterr()
    return code, printed.out + printed.err


def rewrite(path: pathlib.Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize('name', ['plain', '[bold]x :bomb:', '<b>x', '[x](http:x)', '=1+1', 'a\x1b[2Jb', '`x`'])
def test_texts_of_a_run_are_shown_as_they_are(name, tmp_path, capfd):
    run = make_run(tmp_path / 'runs' / name)
    make_run(tmp_path / 'runs' / 'other')
    rewrite(run / 'run.json', lambda info: info.update(device_kind=f'chip{ESCAPE}', git_commit=ESCAPE, started=ESCAPE))
    with (run / 'metrics.jsonl').open('a') as file:
        file.write(json.dumps({'kind': 'eval', 'step': 20, 'loss': 1.0, 'split': f'test{ESCAPE}'}) + '\n')
        wrong = {'kind': 'train', 'step': 20, 'loss': 1, 'grad_norm': 1, 'tokens': 1, 'seconds': 1, 'mfu': 'x'}
        file.write(json.dumps(wrong) + '\n')
    code, shown = say(capfd, 'inspect', run)
    assert code == 0, shown
    assert not set('\x1b\x07\u202e') & set(shown)
    assert name.replace('\x1b', r'\x1b') in shown
    code, shown = say(capfd, 'report', tmp_path / 'runs', '--out', tmp_path / 'out', '--no_pictures')
    assert code == 0, shown
    text = (tmp_path / 'out' / 'report.md').read_text()
    assert not set('\x1b\x07\u202e') & set(shown + text + (tmp_path / 'out' / 'report.html').read_text())
    assert not [mark for mark in ('<b>', '[x](', '`x`') if mark in text.replace(f'\\{mark[0]}', '')]
    names = [row['run'] for row in csv.DictReader((tmp_path / 'out' / 'runs.csv').open())]
    assert sorted(names) == sorted([{'=1+1': "'=1+1"}.get(name, name.replace('\x1b', r'\x1b')), 'other'])


@pytest.mark.parametrize(
    'change',
    [
        {'versions': []},
        {'resumed': 5},
        {'branch': {'from': 1, 'step': 'x'}},
        {'starts': [{'versions': 'x'}]},
        {'data': [1]},
    ],
    ids=str,
)
def test_a_run_json_of_other_types_counts_as_damaged(change, tmp_path, capfd):
    run = make_run(tmp_path / 'run')
    rewrite(run / 'run.json', lambda info: info.update(change))
    assert say(capfd, 'inspect', run)[0] == 0
    assert say(capfd, 'report', run, '--out', tmp_path / 'out', '--no_pictures')[0] == 0


def test_a_configuration_without_numbers_is_no_run(tmp_path, capfd):
    run = make_run(tmp_path / 'run')
    text = (run / 'config.gin').read_text()
    (run / 'config.gin').write_text(text.replace('train.steps = 20', "train.steps = 'x'"))
    code, shown = say(capfd, 'inspect', run)
    assert code == 2
    assert 'its config.gin is not one of lm train' in shown


def test_deep_json_is_an_error_of_its_reader_and_no_recursion(tmp_path, capfd):
    for text in (DEEP, '{"a":' * 80 + '1' + '}' * 80):
        with pytest.raises(ValueError, match='nested too deep'):
            parse_json(text)
    assert parse_json('{"a": [1, {"b": null}]}') == {'a': [1, {'b': None}]}
    run = make_run(tmp_path / 'run')
    (run / 'run.json').write_text(DEEP)
    (run / 'evaluations').mkdir()
    (run / 'evaluations' / 'step-20.json').write_text(DEEP)
    with (run / 'metrics.jsonl').open('a') as file:
        file.write(DEEP + '\n')
    assert say(capfd, 'inspect', run)[0] == 0
    (tmp_path / 'sweep').mkdir()
    (tmp_path / 'sweep' / 'sweep.json').write_text(DEEP)
    assert say(capfd, 'inspect', tmp_path / 'sweep')[0] == 44


@pytest.mark.parametrize(
    'change',
    [
        {'pid': 'x'},
        {'pid': -1},
        {'pid': 10**30},
        {'host': []},
        {'renewed': None},
        {'renewed': float('inf')},
        {'boot': {}},
        {'inode': 'x'},
    ],
    ids=str,
)
def test_a_lock_of_other_types_is_a_damaged_lock(change, tmp_path):
    owner = {
        'host': socket.gethostname(),
        'pid': os.getpid(),
        'since': ESCAPE,
        'boot': '',
        'renewed': time.time(),
        'uuid': 'u',
    }
    assert '\x1b' not in _name(_parse(json.dumps(owner).encode()))
    assert _parse(json.dumps(owner | change).encode()) == {}
    (tmp_path / 'lock.json').write_text(json.dumps(owner | change))
    assert not is_held(tmp_path)
    assert _parse(DEEP.encode()) == {}


WRONG = {
    'vocab_size': lambda info: info['tokenizer'].update(vocab_size=-5),
    'eod_id': lambda info: info['tokenizer'].update(eod_id=10**9),
    'file': lambda info: info['tokenizer'].update(file='../../secret'),
    'tokens': lambda info: info['splits']['train'].update(tokens='many'),
    'documents': lambda info: info['splits']['train'].update(documents=-1),
    'splits': lambda info: info['splits'].update({'../../x': info['splits']['train']}),
    'dtype': lambda info: info.update(dtype='float64'),
    'source': lambda info: info.update(source=None),
}


@pytest.mark.parametrize('entry', WRONG)
def test_a_store_with_entries_that_no_store_has_is_refused(entry, tokens, tmp_path, capfd):
    copy = shutil.copytree(tokens, tmp_path / 'store')
    info = json.loads((copy / 'dataset.json').read_text())
    WRONG[entry](info)
    (copy / 'dataset.json').write_text(json.dumps(info | {'checksum': store._checksum(info)}))
    code, shown = say(capfd, 'inspect', copy)
    assert code == 44
    assert entry in shown


def test_tokens_beyond_the_vocabulary_are_refused(tokens, tmp_path):
    copy = shutil.copytree(tokens, tmp_path / 'store')
    info = json.loads((copy / 'dataset.json').read_text())
    info['tokenizer'] |= {'vocab_size': 20, 'eod_id': 3}
    (copy / 'dataset.json').write_text(json.dumps(info | {'checksum': store._checksum(info)}))
    with pytest.raises(store.MismatchError, match=r"split 'train': token \d+ is beyond the 20 pieces"):
        store.TokenStore.open(str(copy)).read('train', 0, 100)


def test_a_chunk_larger_than_its_array_is_damage_and_is_not_decoded(reference_run, tmp_path, capfd):
    run = shutil.copytree(reference_run[0], tmp_path / 'run')
    state = run / 'checkpoints' / '40' / 'state'
    entry = {'driver': 'ocdbt', 'base': {'driver': 'file', 'path': f'{state}/'}}
    kvstore = ts.KvStore.open(entry).result()
    name = next(key for key in kvstore.list().result() if key.endswith(b'.zarray') and b'params' in key)
    array = json.loads(kvstore.read(name).result().value)
    kvstore.write(name, json.dumps(array | {'chunks': [2**20, *array['shape'][1:]]}).encode()).result()
    code, shown = say(capfd, 'inspect', run, '--verify')
    assert code == 44
    assert 'are larger than itself' in shown


@pytest.mark.parametrize(
    'change', [{'leaves': []}, {'metadata': {'seconds': 'x'}}, {'metrics': {'loss': []}}, {'step': None}], ids=str
)
def test_a_record_of_other_types_falls_back_to_the_step_before(change, reference_run, tiny_flags, tmp_path):
    run = shutil.copytree(reference_run[0], tmp_path / 'run')
    path = run / 'checkpoints' / '40' / 'metadata' / 'metadata'
    record = json.loads(path.read_text()) | change
    record.pop('sha256')
    path.write_text(json.dumps(record | {'sha256': _sha256(record)}))
    found = json.loads(tiny.lm('inspect', str(run), '--json').stdout)
    assert [c['sound'] for c in found['checkpoints']] == [True, False]
    if 'metadata' in change:
        done = tiny.lm('train', '--run_dir', str(run), *tiny_flags)
        assert done.returncode == 0, done.stderr
        assert 'resumed from step 30' in done.stdout + done.stderr


@pytest.fixture
def own_cache():
    """Clears the setting of JAX's own cache, which other tests share and which would replace our cache."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update('jax_compilation_cache_dir', None)
    yield
    jax.config.update('jax_compilation_cache_dir', before)


@pytest.mark.parametrize('planted', ['file', 'folder', 'above'])
def test_programs_to_which_others_may_write_are_not_used(planted, tmp_path, own_cache, caplog):
    cache = CompileCache(tmp_path / 'compiled')
    cache.folder.mkdir(parents=True, mode=0o755)
    program = cache.folder / f'jit_x-cache.{"0" * 32}'
    program.write_bytes(b'')
    cases = {'file': program, 'folder': cache.folder, 'above': cache.folder.parent}
    os.chmod(cases[planted], stat.S_IMODE(os.stat(cases[planted]).st_mode) | 0o022)
    with CompileCache(tmp_path / 'compiled') as used:
        assert used.folder is None
    assert f'others may write to {cases[planted]}' in caplog.text


def test_programs_of_another_user_are_not_used(tmp_path, own_cache, monkeypatch, caplog):
    (tmp_path / 'compiled').mkdir(mode=0o755)
    real = os.stat
    monkeypatch.setattr(
        'lm.compilation.cache.os.stat', lambda path: os.stat_result((*real(path)[:4], os.getuid() + 7, *real(path)[5:]))
    )
    with CompileCache(tmp_path / 'compiled') as used:
        assert used.folder is None
    assert 'belongs to another user' in caplog.text


def test_numbers_of_an_array_that_fits_are_read(tmp_path):
    """The check of chunks refuses no array that Orbax writes: scalars and arrays of one chunk."""

    state = {'a': np.float32(3), 'c': np.arange(6.0).reshape(2, 3)}
    with Checkpointer(tmp_path / 'c') as checkpointer:
        state = jax.tree.map(jax.numpy.asarray, state)
        checkpointer.save(1, state)
        checkpointer.wait()
        restored = checkpointer.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))[0]
    np.testing.assert_array_equal(restored['c'], state['c'])
