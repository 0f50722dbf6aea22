"""The rows of the papers' tables: what the paper prints of a row is what its configuration has."""

import functools

import pytest
from shipped import experiment

from lm.report.published import PaperTable, Row, load_tables
from lm.sweep.points import Point, make_points

KERNEL = 'configs/papers/polysketchformer/sweep_kernel.gin'
PRINTED = 'configs/papers/polysketchformer/sweep_kernel_printed.gin'


@functools.cache
def points(name: str, *sweep_files: str) -> list[Point]:
    return make_points((experiment(name),), sweep_files, ())


def table(key: str) -> PaperTable:
    return load_tables()[key]


def rows(key: str, **fields) -> list[Row]:
    """Returns the rows of a table with these fields."""
    return [row for row in table(key).rows if fields.items() <= {'mechanism': row.mechanism, **row.fields}.items()]


@pytest.mark.parametrize(('key', 'folder'), [('pg19', 'table_2_pg19'), ('wiki40b', 'table_3_wiki40b')])
def test_random_rows_have_the_published_factor(key, folder):
    """Algorithm 1 as printed, factor 1, is a variant with a name of its own."""
    gaussian = rows(key, mechanism='polysketch', sketch='gaussian')
    assert [row.fields['far_factor'] for row in gaussian] == ['published'] * 4

    def factors(sweep: str) -> list[tuple]:
        made = [point.experiment.model.pattern[0] for point in points(f'{folder}/kernel', sweep)]
        return [(m.local, m.sketch_size, m.far_factor) for m in made if getattr(m, 'sketch', '') == 'gaussian']

    assert factors(KERNEL) == [(row.fields['local'], row.fields['sketch_size'], 'published') for row in gaussian]
    assert factors(PRINTED) == [(local, size, 1.0) for local, size, _ in factors(KERNEL)]


def test_the_study_of_sizes_has_the_published_factor():
    for name, factor in (('sweep', 'published'), ('sweep_printed', 1.0)):
        made = make_points(('configs/papers/study/size/size.gin',), (f'configs/papers/study/size/{name}.gin',), ())
        random = [m for point in made for m in point.experiment.model.pattern if getattr(m, 'sketch', '') == 'gaussian']
        assert [m.far_factor for m in random] == [factor]
