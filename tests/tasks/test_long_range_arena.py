"""Pathfinder and the Arena's file tasks: a tracer solves the pictures; files come in their authors' formats."""

import dataclasses
import itertools

import numpy as np
import pytest
import shipped

from lm.errors import ConfigError
from lm.experiment import load
from lm.tasks import TaskStore
from lm.tasks.long_range_arena.images import ArenaImages
from lm.tasks.long_range_arena.pathfinder import DASH, DOT, Pathfinder
from lm.tasks.long_range_arena.retrieval import SEPARATOR, ArenaRetrieval
from lm.tasks.long_range_arena.texts import ArenaTexts


def parts(pixels: set, reach: int) -> list[set]:
    """Returns pixels by connected part; steps of at most `reach` in either direction connect pixels."""
    rest, found = set(pixels), []
    while rest:
        part, border = set(), [rest.pop()]
        while border:
            y, x = border.pop()
            part.add((y, x))
            near = {(y + a, x + b) for a, b in itertools.product(range(-reach, reach + 1), repeat=2)} & rest
            rest -= near
            border += near
        found.append(part)
    return found


def test_pathfinder_draws_separate_dashes_and_labels_connected_dots():
    task = Pathfinder(contour_length=6, distractors=3)
    rows = task.examples('train', range(40), 1025)
    np.testing.assert_array_equal(task.examples('train', [31, 4], 1025), rows[[31, 4]])
    assert (rows != task.examples('test', range(40), 1025)).any(axis=1).all()
    labels = rows[:, 1025] - task.ask - 1
    assert set(labels) == {0, 1}
    assert 12 <= labels.sum() <= 28
    one_path = {0: 0, 1: 0}
    for row, label, scored in zip(rows, labels, np.asarray(task.scored(rows)), strict=True):
        assert np.flatnonzero(scored).tolist() == [1024]
        picture = row[:1024].reshape(32, 32) - 1
        drawn = set(map(tuple, np.argwhere(picture)))
        dots = set(map(tuple, np.argwhere(picture == DOT)))
        assert len(dots) == 2
        assert set(np.unique(picture)) == {0, DASH, DOT}
        dashes = parts(drawn, 1)
        assert [len(dash) for dash in dashes] == [2] * (2 * 6 + 3 * 4)
        one_path[label] += any(dots <= part for part in parts(drawn, 2))
    # Most dashes of one path are two pixels apart, and dashes of other paths further. So tracing tells the classes
    # apart.
    assert one_path[1] / labels.sum() > 2 * one_path[0] / (40 - labels.sum())


def test_longer_paths_find_room():
    task = Pathfinder()
    (row,) = task.examples('validation', [7], 1025)
    assert (row[:1024] > 1).sum() == 2 * (2 * 14 + 6 * 4)


def test_pictures_without_room_are_refused(monkeypatch):
    monkeypatch.setattr('lm.tasks.long_range_arena.pathfinder.PICTURES', 20)
    with pytest.raises(ConfigError, match=r'pathfinder.size = 16: .*contour_length = 14 .* in 20 pictures; raise size'):
        Pathfinder(size=16).examples('train', [0], 257)


def cifar(folder, per_file: int = 20):
    """Writes files of CIFAR-10's binary version; returns their folder and contents."""
    numbers = np.random.default_rng(0)
    folder.mkdir()
    held = {}
    for name in [*(f'data_batch_{i}.bin' for i in range(1, 6)), 'test_batch.bin']:
        labels = numbers.integers(0, 10, (per_file, 1))
        held[name] = np.hstack([labels, numbers.integers(0, 256, (per_file, 3072))]).astype(np.uint8)
        (folder / name).write_bytes(held[name].tobytes())
    return held


def test_images_are_grey_pixels_row_by_row(tmp_path):
    held = cifar(tmp_path / 'cifar')
    task = ArenaImages(path=str(tmp_path / 'cifar'))
    assert {split: task.count(split) for split in ('train', 'validation', 'test')} == {
        'train': 90, 'validation': 10, 'test': 20,
    }  # fmt: skip
    (row,) = task.examples('validation', [3], 1025)
    record = held['data_batch_5.bin'][13].astype(float)
    red, green, blue = record[1:].reshape(3, 32, 32)
    grey = np.rint(0.2989 * red + 0.587 * green + 0.114 * blue)
    np.testing.assert_array_equal(row[:1024].reshape(32, 32) - 1, grey)
    assert row[1024:].tolist() == [task.ask, task.ask + 1 + record[0]]
    assert ArenaImages(path=str(tmp_path / 'cifar'), eval_examples=5).count('test') == 5


def test_moved_files_are_the_same_data_and_other_files_are_not(tmp_path):
    cifar(tmp_path / 'a')
    before = TaskStore(ArenaImages(path=str(tmp_path / 'a')), 1025).fingerprints
    (tmp_path / 'a').rename(tmp_path / 'b')
    assert TaskStore(ArenaImages(path=str(tmp_path / 'b')), 1025).fingerprints == before
    (tmp_path / 'b' / 'data_batch_5.bin').unlink()
    assert TaskStore(ArenaImages(path=str(tmp_path / 'b')), 1025).fingerprints != before


def test_texts_are_bytes_and_folders_are_classes(tmp_path):
    for split, name, i in itertools.product(('train', 'test'), ('neg', 'pos', 'unsup'), range(3)):
        (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / split / name / f'{i}.txt').write_text(f'{split} {name} {i} ' + 'ß' * i)
    task = ArenaTexts(path=str(tmp_path), max_length=14)
    assert [task.count(split) for split in ('train', 'validation', 'test')] == [6, 6, 6]
    assert task.vocab_size == 260
    rows = task.examples('train', range(6), 20)
    for row, name, i in zip(rows, 3 * ['neg'] + 3 * ['pos'], 2 * [0, 1, 2], strict=True):
        text = f'train {name} {i} {"ß" * i}'.encode()[:14]
        assert bytes((row[: len(text)] - 1).tolist()) == text
        assert row[len(text) :].tolist()[:3] == [task.ask, task.ask + 1 + (name == 'pos'), 0]
    assert task.examples('test', [5], 20).tolist() == task.examples('validation', [5], 20).tolist()


def test_fewer_examples_are_of_all_classes(tmp_path):
    for split, name, i in itertools.product(('train', 'test'), ('neg', 'pos'), range(5)):
        (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / split / name / f'{i}.txt').write_text(f'{i}')
    task = ArenaTexts(path=str(tmp_path), max_length=4, eval_examples=4)
    rows = task.examples('test', range(4), 10)
    assert [(chr(row[0] - 1), int(row[2] - task.ask - 1)) for row in rows] == [('0', 0), ('2', 0), ('0', 1), ('2', 1)]
    whole = dataclasses.replace(task, eval_examples=10)
    assert [int(row[2] - task.ask - 1) for row in whole.examples('test', range(10), 10)] == 5 * [0] + 5 * [1]
    assert task.identity().removesuffix(' spread') != task.identity()
    assert whole.identity().endswith(']')


def test_pairs_are_two_texts_with_a_label(tmp_path):
    for name, n in {'train': 3, 'eval': 2, 'test': 1}.items():
        lines = [f'{i % 2}.0\tA{i}\tB{i}\tfirst of {name} {i}\tsecond {"x" * 30}\n' for i in range(n)]
        (tmp_path / f'new_aan_pairs.{name}.tsv').write_text(''.join(lines))
    task = ArenaRetrieval(path=str(tmp_path), max_length=20)
    assert [task.count(split) for split in ('train', 'validation', 'test')] == [3, 2, 1]
    row = task.examples('train', [1], 42)[0] - 1
    first, second = b'first of train 1', b'second ' + 13 * b'x'
    assert row.tolist()[:39] == [*first, SEPARATOR, *second, task.ask - 1, task.ask + 1]
    (tmp_path / 'new_aan_pairs.train.tsv').write_text('1\tonly one text\n')
    with pytest.raises(ConfigError, match=r'new_aan_pairs.train.tsv: line 1 is not label, two names and two texts'):
        ArenaRetrieval(path=str(tmp_path)).examples('train', [0], 8002)


@pytest.mark.parametrize('task', [ArenaImages, ArenaTexts, ArenaRetrieval])
def test_missing_files_are_named(tmp_path, task):
    with pytest.raises(ConfigError, match=rf'{task.gin_name}\.path = .*: holds no (data_batch_1|train/CLASS|new_aan)'):
        TaskStore(task(path=str(tmp_path)), 8002)
    (tmp_path / 'data_batch_1.bin').write_bytes(b'x' * 100)
    with pytest.raises(ConfigError, match='100 bytes are no multiple of 3073'):
        TaskStore(ArenaImages(path=str(tmp_path)), 1025)


@pytest.mark.parametrize('name', ['pathfinder', 'arena_images', 'arena_texts', 'arena_retrieval'])
def test_the_configurations_fit_their_tasks(name):
    experiment = load([shipped.experiment(name)])
    assert experiment.data.task.shortest_context() <= experiment.train.context_length
    if name != 'arena_texts':  # the files of this task say how many classes there are
        assert experiment.model.vocab_size == experiment.data.task.vocab_size
