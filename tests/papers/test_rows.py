"""The rows of the papers' tables: what the paper prints of a row is what its configuration has."""

import dataclasses
import functools
import itertools
import json
import math
import re
import types

import pytest
import tiny
from shipped import experiment

from lm.config.configurable import REGISTRY
from lm.config.text import dump
from lm.experiment import load
from lm.report import paper
from lm.report.measures import Measures
from lm.report.published import PaperTable, Row, load_tables
from lm.runs.config_diff import parse_bindings
from lm.runs.records import Run
from lm.sweep.points import Point, make_points

KERNEL = 'configs/papers/polysketchformer/sweep_kernel.gin'
TABLES = 'configs/papers/llops'
PRINTED = 'configs/papers/polysketchformer/sweep_kernel_printed.gin'


@functools.cache
def points(name: str, *sweep_files: str) -> list[Point]:
    return make_points((experiment(name),), sweep_files, ())


def as_run(point: Point) -> Run:
    return Run(None, parse_bindings(point.config), {}, [], [], [])


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


def test_recall_has_the_published_task_and_widths():
    recall, made = (
        table('recall'),
        points('multiquery_recall', f'{TABLES}/tables_4_5_recall/sweep_multiquery_recall.gin'),
    )
    assert recall.task == 'multiquery_recall'
    assert recall.columns == [128, 192]
    assert {point.experiment.data.task.gin_name for point in made} == {recall.task}
    assert sorted({point.experiment.model.d_model for point in made}) == recall.columns
    sketches = {m for point in made for m in point.experiment.model.pattern if m.gin_name == 'llops'}
    assert {(m.degree, m.n_features) for m in sketches} == {
        (row.fields['degree'], row.fields['n_features']) for row in rows('recall', mechanism='llops')
    }


@pytest.mark.parametrize('column', range(5))
def test_the_arena_is_pre_trained_and_seen_from_both_sides(column):
    arena = table('arena')
    task = arena.columns[column]
    before, after = (points(task, f'{TABLES}/table_1_arena/sweep_{half}.gin') for half in ('pretrain', 'tune'))
    for half, objective in ((before, 'masked'), (after, 'next_token')):
        assert {point.experiment.data.task.gin_name for point in half} == {task}
        assert {point.experiment.model.causal for point in half} == {arena.rows[0].settings['model.causal']} == {False}
        assert {point.experiment.train.objective.gin_name for point in half} == {objective}
        mechanisms = [point.experiment.model.pattern[0].gin_name for point in half]
        assert mechanisms == [row.mechanism for row in arena.rows if row.mechanism]
    started = [point.experiment.train.init_from for point in after]
    assert started == [f'runs/arena/pretrain/{point.name}' for point in before]


def test_baselines_that_are_not_ours_have_no_mechanism():
    named = [row.label for row in table('arena').rows if row.mechanism is None]
    assert named == ['Nyström', 'Skyformer', 'PolaFormer', 'Flatten']


def test_protein_runs_match_no_other_paper():
    made = points('proteins', 'configs/papers/performer/table_2_proteins/sweep.gin')
    among = list(load_tables().values())
    found = {c.table.key for point in made for c in paper.find_cells(as_run(point), among)}
    assert found == {'proteins'}


@pytest.mark.parametrize('key', ['c4_tasks', 'c4_tasks_30k'])
def test_questions_are_asked_as_the_paper_asks_them(key, tmp_path):
    """A score counts with the paper's shots, and with as many questions or more."""
    asked = {(figure.task, figure.shots): figure for figure in table(key).columns}
    assert asked.keys() == set(itertools.product(('hellaswag', 'piqa', 'bigbench_physics_multiple_choice'), (0, 5)))
    assert {f.examples for f in asked.values() if f.task != 'bigbench_physics_multiple_choice'} == {500}
    run = Run(types.SimpleNamespace(evaluations=tmp_path), {}, {}, [], [], [])
    (tmp_path / 'harness').mkdir()
    for name, limit, shots, value in (('a', 500, 0, 0.302), ('b', 20, 5, 0.9), ('c', None, 5, 0.278)):
        record = {'step': 1, 'limit': limit, 'n-shot': {'piqa': shots}, 'results': {'piqa': {'acc,none': value}}}
        (tmp_path / 'harness' / f'{name}.json').write_text(json.dumps(record))
    measures = Measures()
    assert measures.figure(run, asked['piqa', 0]) == pytest.approx(30.2)
    assert measures.figure(run, asked['piqa', 5]) == pytest.approx(27.8)
    assert measures.figure(run, asked['hellaswag', 0]) is None


def test_physics_has_229_questions():
    """The reason to take BIG-bench's: all printed accuracies are shares of 229, rounded or cut."""
    printed = {value for key in ('c4_tasks', 'c4_tasks_30k') for row in table(key).rows for value in row.values[4:]}
    shares = [1000 * k / 229 for k in range(230)]
    assert {round(10 * value) for value in printed} <= {n for s in shares for n in (math.floor(s), round(s))}


PAPERS = tiny.ROOT.parent / 'shared' / 'papers'
PLACES = {
    'arena': ('llops', 5),
    'continued': ('llops', 9),
    'sketches': ('llops', 3),
    'proteins': ('performer_favor', 2),
    'c4_tasks': ('polysketchformer', 6),
    'c4_tasks_30k': ('polysketchformer', 6),
}
"""Table → the text of its paper, and how many numbers a line has that are ours."""


@pytest.mark.skipif(not PAPERS.is_dir(), reason='the text of the papers is not here')
@pytest.mark.parametrize('key', PLACES)
def test_the_rows_are_in_the_papers_text(key):
    name, count = PLACES[key]
    text = (PAPERS / f'{name}.txt').read_text().replace('<b>', '').replace('</b>', '').replace('*', '')
    text = text.replace('<u>', '').replace('</u>', '').replace('<i>', '').replace('</i>', '')
    lines = [tuple(map(float, re.findall(r'(?<![\d.])\d+\.\d+', line))) for line in text.splitlines()]
    printed = {line[i : i + count] for line in lines for i in range(len(line))}
    for row in table(key).rows:
        values = [tuple(row.values[i : i + count]) for i in range(0, len(row.values), count)]
        assert set(values) <= printed, row.label


def test_denominators_of_the_draft_have_no_constant():
    made = points('tables_1_2/pg19', 'configs/papers/polysketchformer_draft/tables_1_2/sweep.gin')
    found = [point.experiment.model.pattern[0] for point in made]
    assert [m.gin_name for m in found] == [row.mechanism for row in table('draft_pg19').rows]
    assert [m.denominator_bias for m in found if m.gin_name != 'softmax'] == [0.0, 0.0]


def test_the_speeds_have_every_baseline_of_the_paper():
    exact, baselines = (
        points('table_4_speed/exact', f'configs/papers/polysketchformer/{name}.gin')
        for name in ('sweep_exact', 'table_4_speed/sweep_baselines')
    )
    group = [row for row in table('speed').rows if row.group.startswith('Baselines')]
    assert len(group) == len(baselines)
    for row, point in zip(group, baselines, strict=True):
        (mechanism,) = point.experiment.model.pattern
        assert mechanism.gin_name == row.mechanism
        assert point.experiment.model.n_layers == row.settings['model.n_layers']
        assert all(str(getattr(mechanism, name)) == str(value) for name, value in row.fields.items())
        assert 'speed' in {c.table.key for c in paper.find_cells(as_run(point), [table('speed')]) if c.row is row}
    softmax = exact[0].experiment.model.attention
    assert (softmax.implementation, softmax.block) == (None, None)


def test_the_sketched_model_has_the_layers_of_the_paper():
    sketched = load([f'{TABLES}/table_3_sketches/recall_deep.gin'])
    layers = [int(column.label.removeprefix('layer ')) for column in table('sketches').columns]
    assert sketched.model.n_layers == layers[-1] + 1
    assert sketched.model.attention.degree == 2
    assert {row.group for row in table('sketches').rows} == {'p = 2', 'p = 3'}


def test_the_readme_names_fields_that_exist():
    """Each choice of ours that a field changes has its value there."""
    section = (tiny.ROOT / 'configs/papers/README.md').read_text().split('## Where the papers leave a choice')[1]
    lines = [line.split('|')[1:-1] for line in section.splitlines() if line.startswith('|')][2:]
    fields = {name for line in lines for name in re.findall(r'`(\w+\.\w+)', line[2]) if not name.endswith('.gin')}
    assert {'polynomial.offset', 'polynomial.score_norm', 'polysketch.far_factor', 'tokenizer.sample_bytes'} <= fields
    sections = dump(load()).splitlines()
    for name in fields:
        kind, _, field = name.partition('.')
        owner = REGISTRY.get(kind)
        known = owner is not None and field in {f.name for f in dataclasses.fields(owner)}
        assert known or any(line.startswith(f'{name} = ') for line in sections), name
