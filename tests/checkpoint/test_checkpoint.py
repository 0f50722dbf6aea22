"""Checkpoints: no wrong state is loaded silently, no saved state is lost, and the right steps stay."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from lm.checkpoint.checksum import checksums
from lm.checkpoint.folder import agree_on_steps
from lm.checkpoint.snapshot import Agreement, Damaged, Snapshot, describe_error, flatten, list_last, make_record
from lm.errors import ConfigError, LmError, MismatchError

ROOT = Path(__file__).parents[2]
FINGERPRINTS = {'data': 'd1', 'tokenizer': 't1'}
EVERYTHING = CheckpointConfig(save_every_steps=1, save_every_minutes=None, keep_last=100)


def make_state(step: int) -> dict:
    """Returns a small training state, a function of `step`: several dtypes, an empty part, a real optimizer state."""
    params = {
        'dense': jax.random.normal(jax.random.key(step), (64, 48)),
        'layers': [jnp.full((8, 6), step, jnp.bfloat16), jnp.arange(10) % 3 == step % 3],
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)).init(params)
    return {'params': params, 'buffers': {}, 'optimizer': optimizer, 'step': jnp.int32(step)}


def same(a, b) -> bool:
    """Returns whether both states have the same bits, dtypes and structure."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def save_steps(directory, steps, config=EVERYTHING, **kwargs) -> None:
    with Checkpointer(directory, config, FINGERPRINTS) as checkpointer:
        for step in steps:
            assert checkpointer.save(step, make_state(step), **kwargs)


def test_every_field_is_explained():
    assert [f.name for f in dataclasses.fields(CheckpointConfig) if not f.metadata['help']] == []


def restore(directory, state=None, step=None, fingerprints=FINGERPRINTS):
    return Checkpointer(directory, EVERYTHING, fingerprints).restore(make_state(0) if state is None else state, step)


@pytest.fixture(scope='module')
def two_steps(tmp_path_factory) -> Path:
    """Returns a directory with steps 10 and 20; tests copy it."""
    directory = tmp_path_factory.mktemp('checkpoints')
    save_steps(directory, (10, 20))
    return directory


@pytest.fixture
def settled(monkeypatch) -> list:
    """Returns a list of the files that the disk was asked to write at once. A crash of the machine loses all other
    files."""
    found, fsync = [], os.fsync
    monkeypatch.setattr(os, 'fsync', lambda number: (fsync(number), found.append(os.fstat(number).st_ino)))
    return found


def test_a_complete_step_survives_a_crash_of_the_machine(tmp_path, settled):
    counted = []

    def on_saved(step: int) -> None:
        missing = [p for p in (tmp_path, *tmp_path.rglob('*')) if p.stat().st_ino not in settled]
        counted.append((step, missing))

    with Checkpointer(tmp_path, EVERYTHING, FINGERPRINTS, on_saved) as checkpointer:
        checkpointer.save(1, {'x': jnp.ones(4)})
    assert counted == [(1, [])]


def test_a_read_only_disk_is_named(tmp_path, monkeypatch):
    """On a file system that the system has made read-only, half-written files cannot be removed either."""

    def refuse(*_, **__):
        raise OSError(30, 'Read-only file system')

    monkeypatch.setattr('lm.checkpoint.writer.Writer.write', refuse)
    with Checkpointer(tmp_path, EVERYTHING, FINGERPRINTS) as checkpointer:
        (tmp_path / '1.orbax-checkpoint-tmp').mkdir()
        monkeypatch.setattr(checkpointer, '_tidy', lambda: None)
        monkeypatch.setattr(type(checkpointer.directory), 'rmtree', refuse)
        with pytest.raises(LmError, match=r'step 1 could not be written to .*Read-only file system.*make room'):
            checkpointer.save(1, {'x': jnp.ones(4)})


def test_a_save_that_is_interrupted_before_it_begins_is_no_failure(tmp_path, monkeypatch, caplog):
    """The second Ctrl-C of a user may come there."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr('lm.checkpoint.writer.Writer.write', interrupt)
    with pytest.raises(KeyboardInterrupt), Checkpointer(tmp_path, EVERYTHING, FINGERPRINTS) as checkpointer:
        checkpointer.save(1, {'x': jnp.ones(4)})
    assert caplog.text == ''


@pytest.fixture
def copied(two_steps, tmp_path) -> Path:
    return Path(shutil.copytree(two_steps, tmp_path / 'checkpoints'))


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob('*') if path.is_file())


# A restored state equals the saved state.


def test_round_trip(two_steps):
    state, step, metadata = restore(two_steps)
    assert (step, metadata) == (20, {})
    assert same(state, make_state(20))
    state, step, _ = restore(two_steps, step=10)
    assert step == 10
    assert same(state, make_state(10))


def test_an_empty_directory_holds_nothing(tmp_path):
    assert restore(tmp_path) is None
    assert restore(tmp_path / 'absent') is None
    assert not (tmp_path / 'absent').exists()
    assert Checkpointer(tmp_path).latest_step() is None


def test_metadata_and_part_of_the_state(tmp_path):
    save_steps(tmp_path, [3000], metadata={'seconds': 1.5, 'note': [1, None]}, metrics={'loss': float('nan')})
    weights = {name: make_state(0)[name] for name in ('params', 'buffers')}
    state, step, metadata = restore(tmp_path, weights)
    assert (step, metadata) == (3000, {'seconds': 1.5, 'note': [1, None]})
    assert same(state['params'], make_state(3000)['params'])
    assert Checkpointer(tmp_path).read_record(3000)['metrics'] == {'loss': 'nan'}
    Checkpointer(tmp_path).verify(3000)


def test_partial_restore_takes_what_is_there(two_steps):
    part = {
        'params': {'dense': make_state(0)['params']['dense'], 'new': {'x': jnp.zeros(3)}},
        'none': {'y': jnp.ones(2)},
    }
    with pytest.raises(MismatchError, match=r'lacks none\.y'):
        restore(two_steps, part)
    state, step, _ = Checkpointer(two_steps).restore(part, partial=True)
    assert step == 20
    assert same(state, {'params': {'dense': make_state(20)['params']['dense']}})
    part['params']['dense'] = part['params']['dense'][:3]
    with pytest.raises(MismatchError, match=r'params\.dense is'):
        Checkpointer(two_steps).restore(part, partial=True)


def test_the_digest_of_a_record_does_not_depend_on_the_order_of_its_parts():
    parts = {'first': 1, 'second': [2.5, None]}
    records = [make_record(7, {}, {}, {}, dict(order)) for order in (parts.items(), reversed(parts.items()))]
    assert records[0]['sha256'] == records[1]['sha256']
    assert records[0]['sha256'] != make_record(8, {}, {}, {}, parts)['sha256']
    with pytest.raises(ValueError, match='JSON'):  # other readers of JSON could not read it
        make_record(7, {}, {}, {}, {'seconds': float('nan')})


def test_another_format_is_refused_by_its_number(copied):
    assert make_record(7, {}, {}, {}, {})['format'] == 1  # all checkpoints so far have this format
    path = copied / '20' / 'metadata' / 'metadata'
    record = json.loads(path.read_text()) | {'format': 2}
    del record['sha256']
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(record | {'sha256': digest}))
    with pytest.raises(MismatchError, match='checkpoint format 2, this version reads 1; use the version of the run'):
        restore(copied)


def test_a_directory_of_odd_name(tmp_path):
    directory = tmp_path / 'a b%20ü#?'
    save_steps(directory, [1])
    assert restore(directory)[1] == 1


@pytest.mark.smoke
def test_donated_state_is_saved_as_it_was(tmp_path):
    # save returns while the files are being written, and the training step reuses the buffers at once.
    advance = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros((512, 1024))
    with Checkpointer(tmp_path, EVERYTHING) as checkpointer:
        for step in range(6):
            checkpointer.save(step, {'x': x})
            for _ in range(5):
                x = advance(x)
    for step in range(6):
        state, _, _ = restore(tmp_path, {'x': x}, step, {})
        assert same(state, {'x': jnp.full_like(x, 5 * step)})


def test_restores_onto_other_device_counts(tmp_path):
    def place(leaf, count):
        mesh = Mesh(np.array(jax.devices()[:count]), ('fsdp',))
        spec = PartitionSpec('fsdp') if leaf.ndim == 2 else PartitionSpec()
        return NamedSharding(mesh, spec)

    state = make_state(1)
    expected = checksums(flatten(state))
    sharded = jax.device_put(state, jax.tree.map(lambda x: place(x, 8), state))
    assert checksums(flatten(sharded)) == expected
    with Checkpointer(tmp_path, EVERYTHING) as checkpointer:
        checkpointer.save(1, sharded)
    for count in (8, 4, 2, 1):
        abstract = jax.tree.map(
            lambda x, count=count: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x, count)), state
        )
        restored, _, _ = restore(tmp_path, abstract, fingerprints={})
        assert len(restored['params']['dense'].sharding.device_set) == count
        assert checksums(flatten(restored)) == expected
        assert same(restored, state)


# A damaged state is never loaded.


def flip_bits(directory: Path, count: int, caplog) -> None:
    """Flips `count` single bits, one at a time, spread over all files of step 20."""
    rng = random.Random(count)
    targets = files(directory / '20')
    harmful = 0
    for i in range(count):
        path = targets[i % len(targets)]
        intact = path.read_bytes()
        position = rng.randrange(8 * len(intact))
        damaged = bytearray(intact)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        caplog.clear()
        state, step, _ = restore(directory)
        assert same(state, make_state(step)), f'bit {position} of {path}: silently wrong'
        if step != 20:
            harmful += 1
            [warning] = [r.getMessage() for r in caplog.records]
            assert 'step 20 is damaged' in warning
            assert str(path) in warning or any(name in warning for name in flatten(make_state(0)))
        path.write_bytes(intact)
    assert harmful > count / 10


@pytest.mark.smoke
def test_flipped_bits(copied, caplog):
    flip_bits(copied, 40, caplog)


@pytest.mark.slow
def test_many_flipped_bits(copied, caplog):
    flip_bits(copied, 200, caplog)


def test_every_bit_of_a_value_counts():
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    [intact] = checksums({'x': jnp.asarray(x)}).values()
    seen = {intact}
    for bit in range(32):
        damaged = x.copy()
        damaged.view(np.uint32)[3, 2] ^= np.uint32(1 << bit)
        seen.update(checksums({'x': jnp.asarray(damaged)}).values())
    assert len(seen) == 33
    # Two flipped signs, or two exchanged values: a plain weighted sum of the bits would miss the flipped signs.
    signs, exchanged = x.copy(), x.copy()
    signs[0, 0], signs[6, 4] = -signs[0, 0], -signs[6, 4]
    exchanged[0, 0], exchanged[0, 1] = x[0, 1], x[0, 0]
    assert intact not in checksums({'a': jnp.asarray(signs), 'b': jnp.asarray(exchanged)}).values()


def test_checksums_are_those_of_every_version():
    """The values were recorded once. With other checksums, all earlier checkpoints would count as damaged."""
    x = np.arange(6).reshape(2, 3)
    arrays = {
        'float32': (x / 4).astype(np.float32),
        'bfloat16': x.astype(jnp.bfloat16),
        'uint8': x.astype(np.uint8),
        'int32': x.astype(np.int32) - 3,
        'bool': x % 2 == 0,
        'complex64': (x + 1j * x[::-1]).astype(np.complex64),
        'scalar': np.float32(1.5),
        'empty': np.zeros((0, 3), np.float32),
    }
    expected = {
        'float32': 1189835709,
        'bfloat16': 2007373506,
        'uint8': 3634414594,
        'int32': 1937810520,
        'bool': 3592272832,
        'complex64': 2143139716,
        'scalar': 1507380066,
        'empty': 0,
    }
    on_devices = jax.tree.map(jnp.asarray, arrays)
    assert checksums(on_devices) == expected, 'a program computes them: NumPy computes none of more than 32 bits'
    del on_devices['complex64'], expected['complex64']
    assert checksums(on_devices) == expected, 'NumPy computes them'


@pytest.mark.parametrize('how', ['truncated', 'deleted', 'empty'])
def test_bad_files(copied, how, caplog):
    needed = 0
    for path in files(copied / '20'):
        intact = path.read_bytes()
        if how == 'deleted':
            path.unlink()
        else:
            path.write_bytes(intact[: len(intact) // 2] if how == 'truncated' else b'')
        state, step, _ = restore(copied)
        assert same(state, make_state(step))
        needed += step == 10
        path.write_bytes(intact)
    assert needed >= 3
    assert restore(copied)[1] == 20


def refuse_array(monkeypatch, error: Exception) -> None:
    real = Snapshot._read_array
    monkeypatch.setattr(
        Snapshot, '_read_array', lambda self, *rest: real(self, *rest) if self.step != 20 else raised(error)
    )


def refuse_file(monkeypatch, name: str, error: Exception) -> None:
    real = type(epath.Path('/')).read_bytes

    def read(path):
        return raised(error) if os.fspath(path).endswith(name) else real(path)

    monkeypatch.setattr(type(epath.Path('/')), 'read_bytes', read)


def raised(error: Exception):
    raise error


@pytest.mark.parametrize(
    'refuse',
    [
        lambda patch: refuse_array(patch, ValueError('UNAVAILABLE: Error reading "a/0": HTTP 503')),
        lambda patch: refuse_array(patch, ValueError('UNKNOWN: Error reading "a/0": Input/output error')),
        lambda patch: refuse_array(patch, jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory')),
        lambda patch: refuse_file(patch, '20/metadata/metadata', OSError(5, 'Input/output error')),
        lambda patch: refuse_file(patch, '20/commit_success.txt', PermissionError(13, 'Permission denied')),
    ],
)
def test_storage_that_fails_is_no_damage(copied, monkeypatch, refuse):
    with Checkpointer(copied, EVERYTHING, FINGERPRINTS) as checkpointer:
        with monkeypatch.context() as patch:
            refuse(patch)
            with pytest.raises(LmError, match=r'which is no damage.*run the same command again') as failure:
                checkpointer.restore(jax.eval_shape(lambda: make_state(0)))
        assert failure.value.exit_code == 1
        assert checkpointer.latest_step() == 20
        checkpointer.save(30, make_state(30))
    assert sorted(path.name for path in copied.iterdir()) == ['10', '20', '30']


def test_missing_commit_marker(copied, caplog):
    (copied / '20' / 'commit_success.txt').unlink()
    assert restore(copied)[1] == 10
    assert 'commit_success.txt is missing' in caplog.text


def test_never_starts_from_scratch_when_all_are_damaged(copied):
    for step in (10, 20):
        (copied / str(step) / 'state' / 'manifest.ocdbt').unlink()
    with pytest.raises(MismatchError, match=r'no checkpoint is sound \(tried 10, 20\)'):
        restore(copied)
    assert sorted(p.name for p in copied.iterdir()) == ['10', '20']


@pytest.mark.parametrize('gone', [(10, 20), (20,)])
def test_a_step_that_is_deleted_while_it_is_read_does_not_end_the_restore(copied, tmp_path, monkeypatch, gone):
    """A continuing run saves and deletes: the newest step counts, and no older step that was kept."""
    save_steps(tmp_path / 'later', (30,))
    real, reads = Snapshot.restore, []

    def restore_meanwhile(self, *rest):
        reads.append(self.step)
        if len(reads) == 1:
            (tmp_path / 'later' / '30').rename(copied / '30')
            for step in gone:
                shutil.rmtree(copied / str(step))
        return real(self, *rest)

    monkeypatch.setattr(Snapshot, 'restore', restore_meanwhile)
    state, step, _ = restore(copied)
    assert (reads, step) == ([20, 30], 30)
    assert same(state, make_state(30))


def test_an_explicit_step_does_not_fall_back(copied):
    (copied / '20' / 'state' / 'manifest.ocdbt').unlink()
    with pytest.raises(MismatchError, match=r'step 20 is damaged: optimizer.* in .*/20/state'):
        restore(copied, step=20)
    with pytest.raises(MismatchError, match='step 20 is damaged'):
        Checkpointer(copied).verify(20)
    with pytest.raises(ConfigError, match=r'step 15: not in .*, which has 10, 20'):
        restore(copied, step=15)
    Checkpointer(copied).verify(10)


def test_a_damaged_step_does_not_block_the_next_save(copied, caplog):
    (copied / '20' / 'state' / 'manifest.ocdbt').unlink()
    (copied / '30.orbax-checkpoint-tmp').mkdir()
    with Checkpointer(copied, EVERYTHING, FINGERPRINTS) as checkpointer:
        assert checkpointer.restore(make_state(0))[1] == 10
        assert (copied / '20').exists(), 'reading must not change the directory'
        assert checkpointer.save(20, make_state(20))
    assert sorted(p.name for p in copied.iterdir()) == ['10', '20', '20.damaged']
    assert '20.damaged' in caplog.text
    assert restore(copied)[1] == 20


def test_continuing_from_an_older_step_abandons_the_newer(copied):
    with Checkpointer(copied, EVERYTHING, FINGERPRINTS) as checkpointer:
        checkpointer.restore(make_state(0), step=10)
        checkpointer.save(15, make_state(15))
    assert restore(copied)[1] == 15
    assert (copied / '20.abandoned').exists()


def test_the_state_of_another_run_is_refused(two_steps):
    with pytest.raises(MismatchError, match='tokenizer is t1, of this run t2'):
        restore(two_steps, fingerprints=FINGERPRINTS | {'tokenizer': 't2'})
    with pytest.raises(MismatchError, match='template is None, of this run x'):
        restore(two_steps, fingerprints={'template': 'x'})

    def changed(change):
        state = make_state(0)
        change(state['params'])
        return state

    def message(change):
        with pytest.raises(MismatchError) as error:
            restore(two_steps, changed(change))
        return str(error.value)

    dtype = message(lambda params: params.update(dense=params['dense'].astype(jnp.bfloat16)))
    assert 'params.dense is float32[64, 48], of this run bfloat16[64, 48]' in dtype
    shape = message(lambda params: params.update(dense=params['dense'][:32]))
    assert 'params.dense is float32[64, 48], of this run float32[32, 48]' in shape
    assert 'lacks params.new' in message(lambda params: params.update(new=params['dense']))
    assert 'has params.dense, which this run lacks' in message(lambda params: params.pop('dense'))


@pytest.fixture
def remote(monkeypatch):
    """Treats local folders as folders of a bucket: nothing is renamed, a marker makes a step complete."""
    for module in ('checkpointer', 'folder'):
        monkeypatch.setattr(f'lm.checkpoint.{module}.is_remote', lambda path: '.checkpoints' in str(path))


def test_an_object_store_has_markers_and_no_renames(two_steps, tmp_path, remote, caplog):
    directory = Path(shutil.copytree(two_steps, tmp_path / '.checkpoints'))
    (directory / '30').mkdir()
    (directory / 'notes').mkdir()
    assert Checkpointer(directory).all_steps() == [10, 20]
    with Checkpointer(directory, EVERYTHING, FINGERPRINTS) as checkpointer:
        assert agree_on_steps(checkpointer.directory) == [10, 20]
        checkpointer.rewind(10)
        assert sorted(path.name for path in directory.iterdir()) == ['10', 'notes']
        [warning] = [record.getMessage() for record in caplog.records]
        assert warning == f'abandoned checkpoint {directory / "20"} deleted'


def test_an_old_step_with_a_damaged_file_does_not_stop_a_new_one(copied):
    for path in files(copied / '10'):
        if path.name in ('_CHECKPOINT_METADATA', '_METADATA', 'metadata'):
            path.write_bytes(b'\x00 no JSON')
    config = CheckpointConfig(save_every_steps=1, save_every_minutes=None, keep_last=9, keep_best=1)
    with Checkpointer(copied, config, FINGERPRINTS) as checkpointer:
        assert checkpointer.save(30, make_state(30))
    assert restore(copied)[1] == 30


def test_rewinding_twice_replaces_what_was_abandoned_before(copied, caplog):
    for _ in range(2):
        with Checkpointer(copied, EVERYTHING, FINGERPRINTS) as checkpointer:
            checkpointer.rewind(10)
            checkpointer.save(20, make_state(20))
    assert sorted(path.name for path in copied.iterdir()) == ['10', '20', '20.abandoned']
    assert caplog.text.count('abandoned checkpoint moved to') == 2


def test_messages_are_short():
    assert describe_error(ValueError('two\n  lines')) == 'ValueError: two lines'
    assert describe_error(OSError('x' * 400)) == 'OSError: ' + 'x' * 400
    assert describe_error(OSError('x' * 200 + 'y' * 201)) == 'OSError: ' + 'x' * 180 + ' … ' + 'y' * 200
    assert [list_last(list(range(n))) for n in (0, 4, 5)] == ['none', '0, 1, 2, 3', '… 1, 2, 3, 4']


@pytest.mark.parametrize(
    ('mine', 'others', 'told', 'expected'),
    [
        (None, 0, 0, None),
        (None, 1, 0, Damaged),
        (None, 1001, 0, LmError),
        (None, 1044, 0, LmError),
        (Damaged, 0, 1, Damaged),
        (Damaged, 1001, 1, LmError),
        (MismatchError, 1, 1044, MismatchError),
        (LmError, 0, 1001, LmError),
        (RuntimeError, 0, 1001, RuntimeError),
        (RuntimeError, 1044, 1001, LmError),
    ],
)
def test_processes_fail_together(monkeypatch, mine, others, told, expected):
    """Each process sends 0, 1 (damaged) or 1000 and its exit code; the worst value counts for all processes."""
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(multihost_utils, 'process_allgather', lambda x: [int(x), others] if x == told else 9)
    with contextlib.nullcontext() if expected is None else pytest.raises(expected) as error, Agreement(7):
        if mine:
            raise mine('my own')
    if expected:
        assert str(error.value) == (
            'my own' if told >= others else 'checkpoint step 7: see the message of another process'
        )
    if others >= 1000:
        assert error.value.exit_code == others - 1000


def test_leaves_of_the_same_name_are_refused():
    with pytest.raises(ValueError, match='two leaves of the state have the same name'):
        flatten({'a': {'b': 1}, 'a.b': 2})


# Which steps are saved, and which steps stay.


class Time:
    """A clock that stands still between the moments that a test names."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr('lm.checkpoint.clock.time.monotonic', lambda: self.now)


def test_one_process_looks_at_its_clock_at_each_step(monkeypatch):
    time = Time(monkeypatch)
    config = CheckpointConfig(save_every_steps=None, save_every_minutes=0.5)
    checkpointer = Checkpointer('unused', config)
    for step, seconds, is_due in ((1, 10, False), (2, 19.9, False), (3, 0.2, True), (4, 0, True)):
        time.now += seconds
        assert checkpointer.should_save(step) is is_due
    checkpointer._clock.reset(4)
    assert not checkpointer.should_save(5)
    time.now += 30
    assert checkpointer.should_save(6)
    never = Checkpointer('unused', CheckpointConfig(save_every_steps=None, save_every_minutes=None))
    time.now += 1e9
    assert not never.should_save(7)


def test_several_processes_look_together_and_ever_more_often_towards_the_deadline(monkeypatch):
    """Only process 0 looks, at steps that all processes know: half-way to the expected deadline, at most at twice the
    present step."""
    time, looks = Time(monkeypatch), []
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(multihost_utils, 'broadcast_one_to_all', lambda x: looks.append(step) or x)
    config = CheckpointConfig(save_every_steps=None, save_every_minutes=100 / 60)
    checkpointer, due = Checkpointer('unused', config), []
    for step in range(1, 131):
        time.now += 1.0
        if checkpointer.should_save(step):
            due.append(step)
            checkpointer._clock.reset(step)
    assert due == [100]
    assert looks == [1, 2, 4, 8, 16, 32, 64, 82, 91, 95, 97, 98, 99, 100, 101, 102, 104, 108, 116]


def test_keep_best_keeps_steps_that_are_at_least_as_good(tmp_path):
    config = CheckpointConfig(save_every_steps=None, save_every_minutes=None, keep_last=1, keep_best=2)
    with Checkpointer(tmp_path / 'new' / 'folder', config) as checkpointer:
        assert checkpointer.is_among_best(5.0)
        assert not checkpointer.is_among_best(float('nan'))
        for step, loss in enumerate((3.0, 2.0, 2.0, 4.0), 1):
            assert checkpointer.is_among_best(loss) is (loss < 4.0)
            checkpointer.save(step, {'x': jnp.int32(step)}, metrics={'loss': loss})
        assert [checkpointer.is_among_best(loss) for loss in (1.0, 2.0, 2.5)] == [True, True, False]
        checkpointer.wait()
        assert checkpointer.all_steps() == [2, 3, 4]  # the earlier steps of equal loss, and the newest step
    assert Checkpointer(tmp_path, CheckpointConfig(keep_best=0)).is_among_best(0.0) is False


def test_losses_of_another_measure_do_not_compete(tmp_path):
    """A run resumed with a harder text keeps its best step on it, and the best step on the text before."""
    config = CheckpointConfig(save_every_steps=None, save_every_minutes=None, keep_last=1, keep_best=1)
    for measure, losses in (('', {1: 3.0}), ('easy', {2: 2.0, 3: 2.5}), ('hard', {4: 9.0, 5: 7.0, 6: 8.0})):
        with Checkpointer(tmp_path, config, measure=measure) as checkpointer:
            for step, loss in losses.items():
                assert checkpointer.is_among_best(loss) is (step not in (3, 6))
                checkpointer.save(step, {'x': jnp.int32(step)}, metrics={'loss': loss})
    assert Checkpointer(tmp_path).all_steps() == [2, 5, 6]
    assert Checkpointer(tmp_path).read_record(5)['metrics'] == {'loss': 7.0, 'measure': 'hard'}


def test_a_loss_added_later_counts_like_a_saved_loss(tmp_path):
    config = CheckpointConfig(save_every_steps=None, save_every_minutes=None, keep_last=1, keep_best=1)

    def save(step, **rest):
        with Checkpointer(tmp_path, config) as checkpointer:
            checkpointer.save(step, {'x': jnp.int32(step)}, **rest)

    save(5, metrics={'loss': 3.0})
    save(10)  # the run stopped in its evaluation, which the next session repeats
    with Checkpointer(tmp_path, config) as checkpointer:
        assert checkpointer.restore({'x': jnp.int32(0)})[1] == 10
        checkpointer.add_loss(10, 1.0)
        assert not checkpointer.is_among_best(2.0)
    for step in 20, 30:
        save(step)
        assert Checkpointer(tmp_path).all_steps() == [10, step]
    assert Checkpointer(tmp_path).restore({'x': jnp.int32(0)}, 10)[0]['x'] == 10


def test_the_right_steps_are_kept(tmp_path):
    config = CheckpointConfig(save_every_steps=10, save_every_minutes=None, keep_last=2, keep_every=40, keep_best=1)
    losses = {25: 3.0, 50: 2.0, 75: 4.0, 100: float('nan')}
    for first in (0, 60):  # after the restart in between, the best step is still known
        with Checkpointer(tmp_path, config) as checkpointer:
            for step in range(first + 1, first + 61):
                metrics = {'loss': losses[step]} if step in losses else None
                due = checkpointer.should_save(step) or (metrics and checkpointer.is_among_best(losses[step]))
                assert bool(due) == (step % 10 == 0 or step in (25, 50))
                assert not due or checkpointer.save(step, {'x': jnp.int32(step)}, metrics=metrics)
            checkpointer.wait()
    assert Checkpointer(tmp_path).all_steps() == [40, 50, 80, 110, 120]


def test_time_based_saves_are_temporary(tmp_path):
    config = CheckpointConfig(save_every_steps=5, save_every_minutes=0.1 / 60, keep_last=1, keep_every=5)
    saved = []
    with Checkpointer(tmp_path, config) as checkpointer:
        for step in range(1, 13):
            time.sleep(0.06)
            if checkpointer.should_save(step):
                checkpointer.save(step, {'x': jnp.int32(step)})
                saved.append(step)
    assert {5, 10} < set(saved) < set(range(1, 13))
    assert Checkpointer(tmp_path).all_steps() == sorted({5, 10, saved[-1]})


def test_the_remains_of_a_failed_save_may_vanish_by_themselves(tmp_path, monkeypatch):
    """Orbax, too, removes them, in the background."""
    gone = tmp_path / '5.orbax-checkpoint-tmp'
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(on_failed_save='continue'))
    path = type(checkpointer.directory)(gone)
    monkeypatch.setattr(type(path), 'iterdir', lambda folder: iter([path] if folder == checkpointer.directory else []))
    checkpointer._failed(5, OSError('No space left on device'))
    assert checkpointer.latest_step() is None


def test_the_same_step_is_saved_once(tmp_path):
    with Checkpointer(tmp_path, EVERYTHING) as checkpointer:
        assert checkpointer.save(1, {'x': jnp.int32(1)})
        assert not checkpointer.save(1, {'x': jnp.int32(2)})
    assert restore(tmp_path, {'x': jnp.int32(0)}, fingerprints={})[0]['x'] == 1
    with Checkpointer(
        tmp_path, EVERYTHING
    ) as checkpointer:  # another run, from the start: its first save is not dropped
        assert checkpointer.save(1, {'x': jnp.int32(3)})
        assert not checkpointer.save(1, {'x': jnp.int32(4)})
        assert checkpointer.save(1, {'x': jnp.int32(5)}, force=True)
    assert restore(tmp_path, {'x': jnp.int32(0)}, fingerprints={})[0]['x'] == 5


def test_a_restored_step_is_not_saved_again(copied):
    with Checkpointer(copied, EVERYTHING, FINGERPRINTS) as checkpointer:
        assert checkpointer.restore(make_state(0))[1] == 20
        assert not checkpointer.save(20, make_state(5))
    assert same(restore(copied)[0], make_state(20))


def test_saving_does_not_poll_for_preemption(tmp_path, monkeypatch):
    # The service accepts one growing sequence of numbers, which lm.pod.preemption sends. A step would spoil the
    # sequence.
    calls = []
    monkeypatch.setattr(multihost_utils, 'reached_preemption_sync_point', calls.append)
    save_steps(tmp_path, [1, 2])
    assert calls == []


def test_default_values():
    assert CheckpointConfig() == CheckpointConfig(
        save_every_steps=1000,
        save_every_minutes=15.0,
        keep_last=2,
        keep_every=None,
        keep_best=0,
        on_failed_save='stop',
    )


@pytest.mark.parametrize('name', ['save_every_steps', 'save_every_minutes', 'keep_last', 'keep_every', 'keep_best'])
def test_the_smallest_allowed_values(name):
    least = {'save_every_minutes': 1e-9, 'keep_best': 0}.get(name, 1)
    assert getattr(CheckpointConfig(**{name: least}), name) == least
    with pytest.raises(ConfigError, match=rf'checkpoint\.{name} = '):
        CheckpointConfig(**{name: -1 if name == 'keep_best' else 0})


def test_wrong_values_are_refused():
    with pytest.raises(ConfigError, match=r'checkpoint\.keep_last'):
        CheckpointConfig(keep_last=0)
    with pytest.raises(ConfigError, match=r'checkpoint\.on_failed_save'):
        CheckpointConfig(on_failed_save='ignore')


# Processes that fail.

PREAMBLE = """
import sys, signal, resource, jax, jax.numpy as jnp, numpy as np, logging
from lm.checkpoint.checkpointer import *
directory = sys.argv[1]
"""


def start(code: str, *arguments, devices: int = 1) -> subprocess.Popen:
    environment = os.environ | {
        'PYTHONPATH': str(ROOT),
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices} {tiny.COMPILE_QUICKLY}',
    }
    command = [sys.executable, '-c', PREAMBLE + code, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def finish(process: subprocess.Popen, quiet: bool = False) -> str:
    try:
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    assert not (quiet and 'Traceback' in errors), errors[-3000:]
    return ''.join(line for line in out.splitlines(keepends=True) if not line.startswith('[Gloo]'))


FULL_DISK = """
config = CheckpointConfig(save_every_steps=1, save_every_minutes=None, keep_last=1, on_failed_save=sys.argv[2])
state = lambda step: {'x': jax.random.normal(jax.random.key(step), (512, 1024))}
with Checkpointer(directory, config) as checkpointer:
    checkpointer.save(1, state(1))
    checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
    try:
        for step in range(2, 5):
            print('saving', step, checkpointer.save(step, state(step)), flush=True)
            try:
                checkpointer.wait()
            finally:
                print('steps', checkpointer.all_steps(), flush=True)
    except LmError as error:
        assert type(error) is LmError
        print('error:', error)
    restored, step, _ = checkpointer.restore(state(0))
    print('restored', step, bool((restored['x'] == state(1)['x']).all()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print('saving', 9, checkpointer.save(9, state(9)))
print('steps', checkpointer.all_steps())
import os
print('files', sorted(os.listdir(directory)))
"""


def test_a_full_disk_raises_an_error_at_the_next_step(tmp_path):
    processes = [start(FULL_DISK, tmp_path / option, option) for option in ('stop', 'continue')]
    stop, go_on = (finish(process, quiet=True) for process in processes)
    assert stop.count('saving') == 2
    assert 'error: checkpoint step 2 could not be written' in stop
    assert 'the newest complete one is 1' in stop
    assert go_on.count('saving') == 4
    for out in (stop, go_on):
        assert 'restored 1 True' in out
        assert out.endswith("steps [9]\nfiles ['9']\n")


def test_leaving_because_of_an_error_reports_that_error(tmp_path):
    class Interruption(Exception):
        pass

    checkpointer = Checkpointer(tmp_path, EVERYTHING)
    checkpointer.wait = lambda: (_ for _ in ()).throw(LmError('second'))
    with pytest.raises(Interruption), checkpointer:
        raise Interruption
    with pytest.raises(LmError, match='second'), checkpointer:
        pass


KILLED = """
advance = jax.jit(lambda x: x * 3 + 1, donate_argnums=0)
x = jnp.arange(2**16, dtype=jnp.uint32)
with Checkpointer(directory, CheckpointConfig()) as checkpointer:
    found = checkpointer.restore({'x': x})
    first = 0
    if found:
        state, first, _ = found
        for _ in range(first):
            x = advance(x)
        assert (np.asarray(state['x']) == np.asarray(x)).all()
        x = state['x']
    print('restored', first, flush=True)
    for step in range(first + 1, 10**9):
        x = advance(x)
        checkpointer.save(step, {'x': x})
        if step % 5 == 0:
            checkpointer.wait()
            print('complete', step, flush=True)
"""


def kill_repeatedly(directory: Path, count: int) -> None:
    """Kills a loop that saves all the time at random moments, by SIGKILL. Every restart must find the
    complete steps."""
    rng, complete = random.Random(count), 0
    for turn in range(count):
        process = start(KILLED, directory)
        line = process.stdout.readline()
        assert line.startswith('restored'), line + process.stderr.read()[-3000:]
        assert int(line.split()[1]) >= complete
        if turn == 0:  # on any machine, however slow, there is then a step to lose
            complete = int(process.stdout.readline().split()[1])
        time.sleep(rng.uniform(0.0, 0.6))
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL
        complete = max([complete] + [int(line.split()[1]) for line in out.splitlines() if line.startswith('complete')])
    unfinished = [path for path in directory.iterdir() if 'tmp' in path.name]
    assert len(unfinished) <= 1


def test_killed_while_saving(tmp_path):
    kill_repeatedly(tmp_path, 2)


@pytest.mark.slow
def test_killed_28_times_while_saving(tmp_path):
    kill_repeatedly(tmp_path, 28)


def test_the_final_save_survives_the_end_of_the_process(tmp_path):
    out = finish(start("with Checkpointer(directory) as c: c.save(7, {'x': jnp.ones((512, 1024))})", tmp_path))
    assert out == ''
    assert Checkpointer(tmp_path).all_steps() == [7]
    Checkpointer(tmp_path).verify(7)


TWO_PROCESSES = """
import glob, time, pathlib
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
me = int(sys.argv[3])
jax.distributed.initialize(f'localhost:{sys.argv[2]}', 2, me)
from jax.experimental import multihost_utils
mesh = Mesh(np.array(jax.devices()), ('fsdp',))
shardings = {'x': NamedSharding(mesh, P('fsdp')), 'y': NamedSharding(mesh, P())}
make = jax.jit(lambda n: {'x': jax.random.normal(jax.random.key(n), (64, 1024)), 'y': n}, out_shardings=shardings)
same = jax.jit(lambda a, b: (a['x'] == b['x']).all() & (a['y'] == b['y']), out_shardings=NamedSharding(mesh, P()))
config = CheckpointConfig(save_every_steps=None, save_every_minutes=0.3 / 60, keep_last=3)
saved = []
with Checkpointer(directory, config) as checkpointer:
    assert checkpointer.restore(make(0)) is None
    for step in range(1, 31):
        time.sleep(0.04 + 0.04 * me)  # the clocks of the processes disagree
        if checkpointer.should_save(step):
            checkpointer.save(step, make(step))
            saved.append(step)
    checkpointer.save(31, make(31))
saved.append(31)
print('saved', saved)
if me == 0:
    # the part of process 1 alone becomes unreadable
    data = max(pathlib.Path(directory, '31').glob('state/ocdbt.process_1/d/*'), key=lambda p: p.stat().st_size)
    data.write_bytes(data.read_bytes()[:1000])
multihost_utils.sync_global_devices('damaged')
with Checkpointer(directory, config) as checkpointer:
    state, step, _ = checkpointer.restore(make(0))
    print('restored', step, bool(same(state, make(step))))
    checkpointer.save(31, make(31))
print('steps', checkpointer.all_steps())
"""


def test_two_processes(tmp_path):
    port = tiny.free_port()
    processes = [start(TWO_PROCESSES, tmp_path, port, i) for i in range(2)]
    outs = [finish(p) for p in processes]
    assert outs[0] == outs[1]
    saved = eval(outs[0].splitlines()[0].partition(' ')[2])
    assert 3 <= len(saved) <= 10
    assert f'restored {saved[-2]} True' in outs[0]
    assert f'steps [{saved[-3]}, {saved[-2]}, 31]' in outs[0] or f'steps {saved[-2:]}' in outs[0]
    # One process with other devices reads it.
    abstract = {'x': jax.ShapeDtypeStruct((64, 1024), jnp.float32), 'y': jax.ShapeDtypeStruct((), jnp.int32)}
    state, step, _ = restore(tmp_path, abstract, fingerprints={})
    assert step == 31
    assert same(state['x'], jax.random.normal(jax.random.key(31), (64, 1024)))


ONE_FAILS = """
import logging, resource, signal, time
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
me, bad = int(sys.argv[3]), int(sys.argv[4])
jax.distributed.initialize(f'localhost:{sys.argv[2]}', 2, me)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logging.basicConfig(stream=sys.stdout, format='%(message)s')
sharding = NamedSharding(Mesh(np.array(jax.devices()), ('fsdp',)), P('fsdp'))
make = jax.jit(lambda n: {'x': jax.random.normal(jax.random.key(n), (64, 1024))}, out_shardings={'x': sharding})

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

looks, tell = [], multihost_utils.broadcast_one_to_all
multihost_utils.broadcast_one_to_all = lambda x: (looks.append((step, tick)), tell(x))[1]
config = CheckpointConfig(save_every_steps=None, save_every_minutes=1, on_failed_save='continue')
with Checkpointer(directory, config) as checkpointer:
    for step in (1, 2, 3, 4):
        if me == bad and step in (2, 3):
            limit(20_000)
        checkpointer.save(step, make(step))
        for tick in range(1, 21):  # the clock is looked at together, whoever finds out first
            time.sleep(0.02 + 0.04 * me)
            checkpointer.check_for_errors()
            checkpointer.should_save(step + tick)
        checkpointer.wait()
        limit(resource.RLIM_INFINITY)
print('looks', looks)
print('steps', checkpointer.all_steps())
"""


@pytest.mark.parametrize('bad', [0, 1])
def test_a_save_that_fails_in_one_process_fails_in_all_at_once(tmp_path, bad):
    port = tiny.free_port()
    outs = [finish(p) for p in [start(ONE_FAILS, tmp_path, port, i, bad) for i in range(2)]]
    assert outs[0].splitlines()[-2] == outs[1].splitlines()[-2] != 'looks []'
    for index, out in enumerate(outs):
        assert out.splitlines()[-1] == 'steps [1, 4]'
        for step in (2, 3):
            (line,) = [x for x in out.splitlines() if x.startswith(f'checkpoint step {step} could not be written')]
            assert (f'ElsewhereError: process {bad}: ' in line) == (index != bad)
            assert 'File too large' in line
            assert 'the newest complete one is 1' in line


def test_a_restore_prints_one_line_per_damaged_step(copied, caplog, capfd):
    """A damaged step prints one line, and no screen of tracebacks."""
    (copied / '20' / 'state' / 'manifest.ocdbt').write_bytes(b'')
    with caplog.at_level(logging.WARNING):
        restore(copied)
    assert len(caplog.records) == 1
    assert 'Traceback' not in capfd.readouterr().err
