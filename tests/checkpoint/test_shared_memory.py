"""States in the memory of a host: exact to the bit, whole after a kill, refused when damaged."""

import os
import re
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from planted_memory import plant

from lm.checkpoint import shared_memory
from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.config import CheckpointConfig
from lm.checkpoint.shared_memory import SharedMemory
from lm.errors import Diverged, LmError

FINGERPRINTS = {'data': 'd', 'tokenizer': 't'}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    place = tmp_path / 'shm'
    place.mkdir()
    monkeypatch.setattr(shared_memory, 'FOLDER', place)
    return place


def make_state(seed):
    """Returns arrays with copies, with parts, of two bytes and without axes."""
    mesh, draw = jax.make_mesh((2, 2), ('data', 'fsdp')), np.random.default_rng(seed)
    specs = {'a': PartitionSpec(), 'b': PartitionSpec('fsdp'), 'c': PartitionSpec(('data', 'fsdp'))}
    arrays = {name: draw.normal(size=(8, 3)) for name in specs}
    state = {name: jax.device_put(np.float32(x), NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    step = jax.device_put(jnp.int32(seed), NamedSharding(mesh, PartitionSpec()))
    return {'params': state | {'b': state['b'].astype(jnp.bfloat16)}, 'step': step}


def open_checkpoints(tmp_path, run='1', fingerprints=FINGERPRINTS, **config):
    settings = CheckpointConfig(**{'memory_every': 1} | config)
    return Checkpointer(tmp_path / 'run', settings, fingerprints, memory=SharedMemory(tmp_path / 'run', run))


def same(a, b):
    alike = jax.tree.map(lambda x, y: x.sharding == y.sharding and x.dtype == y.dtype, a, b)
    return jax.tree.all(alike) and [x.tobytes() for x in jax.tree.leaves(jax.device_get(a))] == [
        x.tobytes() for x in jax.tree.leaves(jax.device_get(b))
    ]


def list_files(folder):
    return sorted(path for path in folder.rglob('*') if path.is_file())


def test_the_newer_of_memory_and_directory_is_restored(tmp_path, folder, caplog):
    first = open_checkpoints(tmp_path, memory_every=2)
    assert [step for step in range(1, 7) if first.should_keep(step)] == [2, 4, 6]
    first.save(1, make_state(1), metadata={'at': 'disk'})
    first.keep(2, make_state(2), {'at': 'memory'})
    first.wait()
    with open_checkpoints(tmp_path) as second:
        found = second.restore(make_state(0))
        assert (*found[1:], second.stored) == (2, {'at': 'memory'}, 1)
        assert same(found.state, make_state(2))
        second.save(3, make_state(3))
        second.keep(2, make_state(9), {})
        second.wait()
        assert second.restore(make_state(0)).step == second.stored == 3
    assert not list(folder.iterdir()), 'the directory has all that memory had'
    first.close()


def test_each_state_is_written_over_the_older_one_and_half_a_state_does_not_count(tmp_path, folder):
    with open_checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.keep(step, make_state(step), {})
        assert checkpoints._memory.find_steps() == [3, 2]
        memory = checkpoints._memory
        (newest,) = (memory.folder / name for name, found in memory._list() if found['step'] == 3)
        with open(newest, 'r+b') as file:  # as a kill leaves it: the head is written last
            file.write(bytes(64))
        assert checkpoints._memory.find_steps() == [2]
        assert same(checkpoints.restore(make_state(0)).state, make_state(2))
        os.truncate(newest, 100)
        assert checkpoints._memory.find_steps() == [2]


@pytest.mark.parametrize('where', ['part', 'description'])
def test_a_damaged_byte_is_refused_with_one_line(where, tmp_path, caplog):
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1))
        checkpoints.wait()
        checkpoints._memory.delete()
        checkpoints.keep(2, make_state(2), {})
        (path,) = (checkpoints._memory.folder / name for name, _ in checkpoints._memory._list())
        data = bytearray(path.read_bytes())
        data[70 if where == 'part' else -5] ^= 4
        path.write_bytes(data)
        found = checkpoints.restore(make_state(0))
        assert (found.step, checkpoints.stored) == (1, 1)
        assert same(found.state, make_state(1))
    lines = [record.getMessage() for record in caplog.records if 'in memory' in record.getMessage()]
    assert len(lines) == (where == 'part')
    assert all('step 2 in memory is not used' in line and 'checksum' in line for line in lines)


def test_states_of_other_runs_layouts_and_inputs_are_not_used(tmp_path):
    first = open_checkpoints(tmp_path)
    first.keep(2, make_state(2), {})
    assert open_checkpoints(tmp_path, run='2').restore(make_state(0)) is None
    assert open_checkpoints(tmp_path, run='').restore(make_state(0)) is None
    assert open_checkpoints(tmp_path, fingerprints={'data': 'x', 'tokenizer': 't'}).restore(make_state(0)) is None
    elsewhere = jax.tree.map(lambda x: jax.device_put(np.asarray(x), jax.devices()[0]), make_state(0))
    assert open_checkpoints(tmp_path).restore(elsewhere) is None
    assert open_checkpoints(tmp_path).restore(make_state(0) | {'more': jnp.zeros(2)}) is None
    assert open_checkpoints(tmp_path).restore(make_state(0)).step == 2
    open_checkpoints(tmp_path).rewind(0)
    assert open_checkpoints(tmp_path).restore(make_state(0)) is None


@pytest.mark.parametrize(
    ('planted', 'said'),
    [
        ({'step': 10**9}, 'step 1000000000 in memory is not used: .*the run has 40 steps'),
        ({'metadata': {'at': 5}}, 'step 2 in memory is not used: .*without the metadata'),
        ({'metadata': None}, 'step 2 in memory is not used: '),
        ({'leaves': {}}, 'step 2 in memory is not used: '),
        ({'leaves': {'params.a': {}}}, 'step 2 in memory is not used: .*its record is damaged'),
        ({'step': 2**40}, None),  # no step is so large
        ({'step': -3}, None),
        ({'step': '2'}, None),
    ],
)
def test_a_planted_state_that_is_none_of_the_run_is_one_line(planted, said, tmp_path, folder, caplog):
    def find_fault(step, metadata):
        return 'the run has 40 steps' if step > 40 else None if 'seconds' in metadata else 'without the metadata'

    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1), metadata={'seconds': 1})
        checkpoints.wait()
        checkpoints._memory.delete()
        checkpoints.keep(2, make_state(2), {'seconds': 2})
        plant(folder, **planted)
        checkpoints._memory = SharedMemory(tmp_path / 'run', '1', find_fault)
        found = checkpoints.restore(make_state(0))
        assert (found.step, checkpoints.stored) == (1, 1)
        assert same(found.state, make_state(1))
    lines = [record.getMessage() for record in caplog.records if 'in memory' in record.getMessage()]
    assert len(lines) == (said is not None)
    assert not said or re.search(said, lines[0])


def test_too_little_memory_is_one_warning(tmp_path, folder, monkeypatch, caplog):
    monkeypatch.setattr(shared_memory, 'read_host_memory', lambda entry: 1000)
    with open_checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.keep(step, make_state(step), {})
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith('checkpoint.memory_every: no state is kept in memory (two states need ')
    assert not list_files(folder)


def test_a_folder_that_others_can_write_is_not_used(tmp_path, folder, caplog):
    memory = SharedMemory(tmp_path / 'run', '1')
    memory.folder.mkdir(mode=0o777)
    memory.folder.chmod(0o777)
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.keep(1, make_state(1), {})
    assert 'is not a folder that this user alone can write' in caplog.text
    assert not list_files(folder)


def plant_link(place, target):
    """Makes a link of the user nobody, where this user is root."""
    code = (
        f'import os; os.getuid() or (os.setgid(65534), os.setuid(65534)); os.symlink({str(target)!r}, {str(place)!r})'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


@pytest.mark.parametrize('act', ['delete', 'keep', 'find'])
def test_nothing_behind_a_link_in_the_place_of_the_folder_is_touched(act, tmp_path, folder, caplog):
    """Anyone may foretell the name of the folder and put a link there."""
    for place in (*reversed(folder.parents), folder):
        if place.stat().st_uid == os.getuid():
            place.chmod(place.stat().st_mode | 0o005)
    folder.chmod(0o1777)
    precious, memory = tmp_path / 'precious', SharedMemory(tmp_path / 'run', '1')
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.keep(1, make_state(1), {})
        memory.folder.rename(precious)
        (precious / 'thesis.tex').write_text('text')
        held = sorted(precious.iterdir())
        plant_link(memory.folder, precious)
        if act == 'delete':
            memory.delete()
        elif act == 'keep':
            checkpoints.keep(2, make_state(2), {})
            assert 'no state is kept in memory' in caplog.text
        else:
            assert memory.find_steps() == []
            assert checkpoints.restore(make_state(0)) is None
    assert sorted(precious.iterdir()) == held
    assert memory.folder.is_symlink()


def test_a_pipe_or_a_link_in_the_place_of_a_file_stops_nobody(tmp_path, folder, caplog):
    memory = SharedMemory(tmp_path / 'run', '1')
    memory.folder.mkdir(mode=0o700)
    os.mkfifo(memory.folder / '0.0')
    (memory.folder / '0.1').symlink_to(tmp_path / 'elsewhere')
    assert memory.find_steps() == []
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.keep(1, make_state(1), {})
    assert 'is not a plain file of this user' in caplog.text
    assert not (tmp_path / 'elsewhere').exists()


@pytest.mark.parametrize('error', [LmError('disk'), KeyboardInterrupt(), Diverged('')], ids=lambda e: type(e).__name__)
def test_memory_is_kept_after_failures_that_a_repetition_mends(error, tmp_path, folder):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.keep(1, make_state(1), {})
    checkpoints.__exit__(type(error), error, None)
    assert bool(list_files(folder)) != isinstance(error, Diverged)


def test_the_head_has_64_bytes():
    assert shared_memory.HEAD.size == 64 == struct.calcsize(shared_memory.HEAD.format)
