"""A dry run of a search tells which share of its space makes no configuration, and which fields decide it."""

import random

import pytest

from lm.sweep.options import SearchOptions
from lm.sweep.search.refusals import DRAWS, describe_refusals, find_fields_at_fault
from lm.sweep.search.space import make_space
from lm.sweep.search.study import Study

ALWAYS = 'optimizer.peak_learning_rate = log_uniform(1e-4, 1e-2)\nmodel.n_layers = integers(1, 40)\n'


@pytest.fixture
def describe(tmp_path):
    def call(text: str) -> list[str]:
        path = tmp_path / 'space.gin'
        path.write_text(ALWAYS + text)
        space = make_space(['configs/experiments/quickstart.gin'], [str(path)])
        return describe_refusals(space, Study(space.distributions, SearchOptions(seed=1), lambda _: None, 10, None))

    return call


def test_a_space_without_refusals_is_one_line(describe):
    assert describe('') == ['0 of 1,000 points drawn at random make no configuration']


def test_a_pair_of_fields_that_do_not_fit_is_named(describe):
    share, why, fields = describe(
        'model.d_model = choice(96, 192)\nmodel.n_heads = choice(2, 3, 4)\nmodel.n_kv_heads = choice(1, 2, 4)\n'
    )
    # 4 of 9 pairs: 2 of 3 queries, and 4 of 2 and of 3.
    assert int(share.split()[0]) == pytest.approx(DRAWS * 3 / 9, rel=0.15)
    assert 'must divide model.n_heads' in why
    assert fields == 'the fields that decide it most: model.n_heads with model.n_kv_heads'


def test_one_field_that_is_wrong_alone_is_named_alone():
    draw = random.Random(0)
    draws = [{'a': draw.random(), 'b': draw.choice('xyz'), 'c': draw.choice((1, 2))} for _ in range(1000)]
    assert find_fields_at_fault(draws, {i for i, point in enumerate(draws) if point['a'] > 0.75}) == ('a',)
    both = {i for i, point in enumerate(draws) if point['a'] > 0.75 and point['c'] == 2}
    assert find_fields_at_fault(draws, both) == ('a', 'c')
