"""Cached predictions of a teacher: what the files hold, how they are completed, and when they are refused."""

import dataclasses
import shutil

import numpy as np
import pytest

from lm.data import store as files
from lm.data import teacher_logits
from lm.data.store import TokenStore
from lm.data.teacher_logits import CacheKey, TeacherLogits, write_logits
from lm.errors import AbsentError, MismatchError

K, LENGTH = 3, 32


@pytest.fixture
def store(tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / 'tokens')
    return TokenStore.open(str(tmp_path / 'tokens'))


def make_key(store, **changes):
    given = {'teacher': 'a', 'data': store.fingerprint, 'split': 'validation', 'length': LENGTH, 'k': K, 'inputs': 'x'}
    return CacheKey(**given | changes)


def predict(windows):
    """Returns numbers that tell window, position and rank."""
    places = (windows[:, None] * LENGTH + np.arange(LENGTH))[..., None] * K + np.arange(K)
    return places, -places.astype(np.float32)


def test_windows_come_with_their_predictions(store, monkeypatch):
    key, asked = make_key(store), []

    def stop_after(count):
        with monkeypatch.context() as smaller:
            for module, name, size in (
                (teacher_logits, 'SHARD', 2**10),
                (files, 'SHARD', 2**10),
                (files, 'CHUNK', 2**7),
            ):
                smaller.setattr(module, name, size)
            for done, _ in write_logits(store, key, lambda windows: asked.extend(windows) or predict(windows)):
                if done == count:
                    return

    stop_after(2)
    with pytest.raises(AbsentError, match=r'distill.top_k = 3: .*teacher_3_32 has no finished predictions'):
        TeacherLogits(store, key)
    first = len(asked)
    stop_after(10**9)
    windows = (store.tokens('validation') - 1) // LENGTH
    assert windows * LENGTH * K > 3 * 2**10, 'there are several files'
    assert min(asked[first:]) >= 2 * 2**10 // (LENGTH * K), 'what is there is not computed again'
    read = TeacherLogits(store, key).read_many('validation', [0, LENGTH, (windows - 1) * LENGTH], LENGTH + 1)
    expected = predict(np.array([0, 1, windows - 1]))
    np.testing.assert_array_equal(read['ids'], expected[0])
    np.testing.assert_array_equal(read['logs'], expected[1])
    np.testing.assert_array_equal(read['tokens'][1], store.read('validation', LENGTH, 2 * LENGTH + 1))


@pytest.mark.parametrize(('field', 'value'), [('teacher', 'b'), ('data', 'c'), ('inputs', 'y')])
def test_predictions_of_something_else_are_refused_and_replaced(store, field, value):
    [*write_logits(store, make_key(store), predict)]
    other = make_key(store, **{field: value})
    with pytest.raises(MismatchError, match=f'is of another {field}; run lm distill --cache 3'):
        TeacherLogits(store, other)
    [*write_logits(store, other, lambda windows: tuple(-x for x in predict(windows)))]
    assert TeacherLogits(store, other).read_many('validation', [0], LENGTH + 1)['logs'][0, 1, 0] == K
    with pytest.raises(MismatchError, match=field):
        TeacherLogits(store, dataclasses.replace(make_key(store)))


def test_damage_is_found(store, tmp_path):
    key = make_key(store)
    [*write_logits(store, key, predict)]
    file = tmp_path / 'tokens' / 'validation' / key.folder / 'logs' / 'c' / '0'
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    with pytest.raises(MismatchError, match='teacher_3_32'):
        TeacherLogits(store, key).read_many('validation', [0], LENGTH + 1)
