"""Steps that are written part by part are read like all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from lm.checkpoint import checksum, stream
from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.snapshot import Snapshot
from lm.checkpoint.stored_array import open_arrays
from lm.checkpoint.stream import StepWriter, choose_chunk, cut_part
from lm.errors import LmError, MismatchError


def make_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        'params.a': rng.normal(size=(5, 7, 6)).astype(np.float32),
        'params.b': rng.normal(size=(33,)).astype(np.float32),
        'params.c': rng.normal(size=(3, 40)).astype(jnp.bfloat16),
    }


def write(folder, arrays, parts: int = 1) -> None:
    writer = StepWriter(epath.Path(folder), 0)
    for name, x in arrays.items():
        writer.write(name, x.shape, x.dtype, np.array_split(x, parts))
    writer.commit({'tokenizer': 'x'}, {'config': 'y'})


@pytest.mark.parametrize(('chunk_bytes', 'parts'), [(2**26, 1), (64, 3), (4, 5)])
def test_a_streamed_step_is_restored(chunk_bytes, parts, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, 'CHUNK_BYTES', chunk_bytes)
    arrays = make_arrays()
    write(tmp_path, arrays, parts)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    with Checkpointer(epath.Path(tmp_path), fingerprints={'tokenizer': 'x'}) as saved:
        found, step, metadata = saved.restore(abstract)
    jax.tree.map(np.testing.assert_array_equal, found, arrays)
    assert (step, metadata['config']) == (0, 'y')


@pytest.mark.parametrize('chunk_bytes', [2**26, 340, 64])
def test_arrays_are_read_from_disk_in_pieces(chunk_bytes, tmp_path, monkeypatch):
    """The chunks are whole arrays, two rows, or parts of a row."""
    monkeypatch.setattr(stream, 'CHUNK_BYTES', chunk_bytes)
    arrays = make_arrays()
    write(tmp_path, arrays)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    found, step = open_arrays(epath.Path(tmp_path), abstract, None, {'tokenizer': 'x'})
    assert step == 0
    for name, x in arrays.items():
        found[name].verify()
        np.testing.assert_array_equal(found[name].read_all(), x)
        for row in (1, 0, len(x) - 1):
            np.testing.assert_array_equal(found[name].read_row(row), x[row])
    assert found['params.a'].piece_bytes == {2**26: 840, 340: 336, 64: 168}[chunk_bytes]
    assert open_arrays(epath.Path(tmp_path) / 'nothing', abstract, None, {}) is None
    with pytest.raises(MismatchError, match='tokenizer is x, of this run z'):
        open_arrays(epath.Path(tmp_path), abstract, None, {'tokenizer': 'z'})


def test_a_number_is_read_from_disk(tmp_path):
    state = {'params.scale': jnp.float32(0.5)}
    with Checkpointer(epath.Path(tmp_path), fingerprints={}) as saved:
        saved.save(0, state)
    found, _ = open_arrays(epath.Path(tmp_path), jax.eval_shape(lambda: state), None, {})
    found['params.scale'].verify()
    assert (found['params.scale'].read_all(), found['params.scale'].piece_bytes) == (0.5, 4)


@pytest.mark.parametrize(
    ('number', 'said'), [(2, 'is damaged: .*the checksum of params.a'), (np.nan, 'params.a are not all finite')]
)
def test_arrays_on_disk_tell_their_damage(number, said, tmp_path):
    x = np.ones((4, 3), np.float32)
    wrong, writer = x.copy(), StepWriter(epath.Path(tmp_path), 0)
    wrong[3, 1] = number
    for name, array in (('params.a', wrong), ('params.sound', x)):
        writer.write(name, x.shape, x.dtype, [array])
    if np.isfinite(number):
        writer.leaves['params.a'] = writer.leaves['params.sound']
    writer.commit({}, {})
    target = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (opened, _) = open_arrays(epath.Path(tmp_path), {'params.a': target, 'params.sound': target}, 0, {})
    opened['params.sound'].verify()
    with pytest.raises(MismatchError, match=f'checkpoint step 0.*{said}.*; choose another step'):
        opened['params.a'].verify()


def test_its_checksums_are_the_ones_of_whole_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(checksum, 'PART', 10)
    arrays = make_arrays()
    write(tmp_path, arrays, 2)
    sums = {name: leaf['checksum'] for name, leaf in Snapshot(epath.Path(tmp_path), 0).record()['leaves'].items()}
    assert sums == checksum.checksums({name: jnp.asarray(x) for name, x in arrays.items()})
    with pytest.raises(ValueError, match='float64: has more than 32 bits'):
        checksum.checksum_of_part(np.zeros(2), 0)


def test_a_step_is_there_only_when_it_is_complete(tmp_path):
    writer = StepWriter(epath.Path(tmp_path), 0)
    writer.write('params.b', (4,), np.float32, [np.ones(4, np.float32)])
    assert not Snapshot(epath.Path(tmp_path), 0).is_committed()
    with pytest.raises(ValueError, match=r'params.a: 2 rows of \(3,\)'):
        writer.write('params.a', (3,), np.float32, [np.ones(2, np.float32)])
    write(tmp_path, make_arrays())
    assert Snapshot(epath.Path(tmp_path), 0).is_committed()


def test_a_storage_that_fails_is_named(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(LmError, match='file'):
        write(tmp_path / 'file', make_arrays())


def test_chunks_cover_a_part_in_order(monkeypatch):
    monkeypatch.setattr(stream, 'CHUNK_BYTES', 40)
    assert choose_chunk((7, 2, 3), 4) == (1, 2, 3)
    assert choose_chunk((7, 5, 3), 4) == (1, 3, 3)
    assert choose_chunk((7,), 4) == (7,)
    x = np.arange(2 * 5 * 3).reshape(2, 5, 3)
    found = [(x[place].ravel().tolist(), first) for place, first in cut_part(x.shape, (1, 3, 3))]
    assert [part[0] for part, _ in found] == [first for _, first in found]
    assert [number for part, _ in found for number in part] == list(range(30))
