"""ListOps, needles and state tracking: independent evaluators solve the examples."""

import itertools
import statistics

import numpy as np
import pytest
import shipped

from lm.errors import ConfigError
from lm.experiment import load
from lm.tasks.long_range_arena.listops import ASK, DIGIT, END, OPERATOR, ListOps
from lm.tasks.needle import Needle
from lm.tasks.state_tracking import StateTracking

NAMES = dict(enumerate(['MIN', 'MAX', 'MED', 'SM'], start=OPERATOR))


def value_of(text: str) -> int:
    """Computes the value of an expression as the Arena writes it, with a stack."""
    stack: list[list] = [[]]
    for word in text.split():
        if word.startswith('['):
            stack.append([word[1:]])
        elif word == ']':
            name, *values = stack.pop()
            assert 2 <= len(values) <= 10
            apply = {'MIN': min, 'MAX': max, 'MED': lambda v: int(statistics.median(v)), 'SM': lambda v: sum(v) % 10}
            stack[-1].append(apply[name](values))
        else:
            stack[-1].append(int(word))
    ((value,),) = stack
    return value


def text_of(tokens) -> str:
    word = lambda t: f'[{NAMES[t]}' if t in NAMES else ']' if t == END else str(t - DIGIT)  # noqa: E731
    return ' '.join(map(word, tokens))


def test_the_evaluator_solves_the_example_of_the_paper():
    assert value_of('[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]') == 5


def test_listops_are_expressions_with_their_values():
    task = ListOps()
    rows = task.examples('train', range(60), 2000)
    np.testing.assert_array_equal(task.examples('train', [31, 4], 2000), rows[[31, 4]])
    lengths, depths, operators, values = [], [], [], []
    for row, scored in zip(rows.tolist(), np.asarray(task.scored(rows)), strict=True):
        end = row.index(ASK)
        assert np.flatnonzero(scored).tolist() == [end]
        assert value_of(text_of(row[:end])) == row[end + 1] - DIGIT
        assert not any(row[end + 2 :])
        opened = np.cumsum([(t in NAMES) - (t == END) for t in row[:end]])
        lengths.append(end)
        depths.append(opened.max() + 1)
        operators += [t for t in row[:end] if t in NAMES]
        values.append(row[end + 1])
    assert 500 < min(lengths) < 800 < 1500 < max(lengths) < 2000
    assert max(depths) == 10  # digits at the tenth level
    np.testing.assert_allclose(np.bincount(operators)[OPERATOR:] / len(operators), 0.25, atol=0.03)
    assert len(set(values)) > 5
    assert (task.count('train'), task.count('validation'), task.count('test')) == (96_000, 2000, 2000)


def test_short_listops_have_short_expressions():
    task = ListOps(min_length=3, max_length=20, max_depth=3, max_arguments=4)
    for row in task.examples('test', range(300), 20).tolist():
        end = row.index(ASK)
        assert 3 < end < 20
        assert value_of(text_of(row[:end])) == row[end + 1] - DIGIT
    with pytest.raises(ConfigError, match=r'listops.max_length = 20: .* listops.min_length \+ 3 = 503'):
        ListOps(max_length=20)
    with pytest.raises(ConfigError, match=r'train.context_length = 19: @listops\(\) needs at least 20'):
        task.examples('train', [0], 19)


def test_listops_that_cannot_be_long_enough_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r'listops.min_length = 500: .*max_depth = 3 .* at most 122 tokens; lower'):
        ListOps(max_depth=3)
    longest = ListOps(min_length=121, max_length=124, max_depth=3)
    monkeypatch.setattr('lm.tasks.long_range_arena.listops.TRIES', 1000)
    with pytest.raises(ConfigError, match=r'max_depth = 3: none of 1,000 expressions .*min_length = 121 .*raise max_'):
        longest.examples('train', [0], 124)
    assert ListOps(min_length=2**31 - 9, max_length=2**31 - 1, max_depth=10**6).max_depth == 10**6


def test_needles_are_at_their_depths():
    task = Needle(vocab_size=64, depths=4, eval_examples=400, eval_lengths=(40, 100))
    places = {}
    for name, part in task.slices('validation', 40).items():
        rows = task.examples('validation', part.index_N, part.context_length)
        assert np.asarray(task.scored(rows)).sum(axis=1).tolist() == [1] * len(rows)
        places[name] = []
        for row in rows:
            first, second = np.flatnonzero(row == 0)
            assert second == part.context_length - 2
            assert row[first + 1 : first + 3].tolist() == row[-2:].tolist()
            assert row[-2] < 32 <= row[-1]
            places[name].append(first / (part.context_length - 4))
    assert list(places) == [f'{n} tokens, depth {d}' for n in (40, 100) for d in ('0.00', '0.25', '0.50', '0.75')]
    for name, found in places.items():
        depth = float(name[-4:])
        assert len(found) == 100
        assert depth - 0.03 <= min(found) < depth + 0.1
        assert depth + 0.15 < max(found) < depth + 0.25
    np.testing.assert_array_equal(task.examples('train', [9, 2], 50), task.examples('train', range(10), 50)[[9, 2]])


def test_states_are_products_of_permutations():
    for group, things in (('parity', 2), ('s3', 3), ('s5', 5)):
        task = StateTracking(group=group, eval_lengths=(7, 30), eval_examples=20)
        elements = list(itertools.permutations(range(things)))
        assert task.vocab_size == len(elements)
        inputs, states, scored = map(np.asarray, task.unpack(task.examples('test', range(20), 30)))
        assert scored.all()
        for row, answers in zip(inputs, states, strict=True):
            arrangement = list(range(things))
            for element, answer in zip(row, answers, strict=True):
                arrangement = [elements[element][x] for x in arrangement]
                assert tuple(arrangement) == elements[answer]
        if group == 'parity':
            np.testing.assert_array_equal(states, np.cumsum(inputs, axis=1) % 2)
        assert len(np.unique(inputs)) == len(elements) or group == 's5'
        assert list(task.slices('test', 30)) == ['7 tokens', '30 tokens']


@pytest.mark.parametrize('name', ['listops', 'needle', 'state_tracking'])
def test_the_shipped_configurations_fit_their_tasks(name):
    experiment = load([shipped.experiment(name), 'configs/attention/softmax.gin'])
    task, model = experiment.data.task, experiment.model
    assert task.gin_name == name
    assert task.vocab_size == model.vocab_size
    length = experiment.train.context_length
    inputs, answers, scored = map(np.asarray, task.unpack(task.examples('train', range(2), length)))
    assert inputs.shape == answers.shape == (2, length)
    assert scored.any(axis=1).all()
    assert max(inputs.max(), answers.max()) < model.vocab_size
