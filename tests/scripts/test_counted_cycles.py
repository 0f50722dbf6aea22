"""Static cycles and temporaries of the TPU kernels: the goals, and a gate against growth. Compiling needs libtpu."""

import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys

import jax
import pytest
import tiny

from lm.errors import ConfigError

sys.path.insert(0, str(tiny.ROOT))
from scripts.kernels import cycles
from scripts.kernels import measure as kernels

RECORD = tiny.ROOT / 'tests' / 'data' / 'kernels.json'
"""`python -m scripts.kernels.cycles --topology v5e,v6e --save tests/data/kernels.json` writes this record."""

GOALS = {
    ('polysketch r=32 block=256', 'v5e'): 10.5,
    ('polysketch r=32 block=1024', 'v5e'): 13.0,
    ('polysketch r=64 block=256', 'v5e'): 27.0,
    ('polysketch r=64 block=1024', 'v5e'): 27.0,
    ('polysketch r=32 block=256', 'v6e'): 5.7,
    ('polysketch r=32 block=1024', 'v6e'): 6.7,
    ('polysketch r=64 block=256', 'v6e'): 14.0,
    ('polysketch r=64 block=1024', 'v6e'): 14.0,
    ('softmax', 'v5e'): 200.0,
    ('softmax', 'v6e'): 110.0,
}
"""Goals in cycles per token and head, forward plus backward."""

NETWORKS_GOAL = 7.5
"""Goals for the sketch networks of queries and keys: cycles per token and head, forward, r = 32 on v5e; backward takes
at most 3×."""

GROWTH = 1.05
TEMPORARIES_MIB = 600
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')


def recorded() -> list[kernels.KernelRow]:
    return [kernels.KernelRow(**row) for row in json.loads(RECORD.read_text())['rows']]


def grown(rows, limits) -> list[str]:
    """Returns the figures that are more than `GROWTH` above the record."""
    key = lambda row: (row.case, row.generation, row.kernel)  # noqa: E731
    limits = {key(row): row for row in limits if row.case != 'splash'}
    found = {key(row): row for row in rows}
    complaints = [f'{k}: not measured' for k in limits if k not in found]
    for k, limit in limits.items():
        for name, slack in (('cycles', 0.0), ('temporaries_mib', 1.0)):
            was, now = getattr(limit, name), getattr(found.get(k, limit), name)
            if now > GROWTH * was + slack:
                complaints.append(f'{k}: {name} was {was} and is {now}')
    return complaints


def test_record_meets_the_goals():
    rows = recorded()
    sums = cycles.sum_cycles(rows)
    assert {key: sums[key] for key, goal in GOALS.items() if sums[key] > goal} == {}
    networks = {r.kernel: r.cycles for r in rows if (r.case, r.generation) == ('sketch networks r=32', 'v5e')}
    assert networks['forward'] <= NETWORKS_GOAL
    assert networks['backward'] <= 3 * NETWORKS_GOAL
    learned = [row for row in rows if 'sketch' in row.case and row.generation == 'v5e']
    assert learned
    assert all(row.temporaries_mib <= TEMPORARIES_MIB for row in learned)
    assert sums['splash', 'v5e'] > sums['softmax', 'v5e'] > 13 * sums['polysketch r=32 block=1024', 'v5e']


def test_gate_complains_of_growth():
    rows = recorded()
    assert grown(rows, rows) == []
    slower = [dataclasses.replace(row, cycles=1.06 * row.cycles) for row in rows]
    larger = [dataclasses.replace(row, temporaries_mib=1.06 * row.temporaries_mib + 1.1) for row in rows]
    ours = sum(row.case != 'splash' for row in rows)
    assert len(grown(slower, rows)) == len(grown(larger, rows)) == len(grown([], rows)) == ours


@pytest.mark.parametrize('topology', ['v9', 'cpu:2x2'])
def test_unknown_generation(topology):
    with pytest.raises(ConfigError, match='v5e'):
        kernels.measure_kernels(topology)


def test_parts_share_the_tokens_alone():
    arrays = {'x': (2, kernels.LENGTH, 64), 'projection': {'rows': (2048, 64), 'phases': (2048,)}}
    inputs = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, 'float32'), arrays, is_leaf=lambda s: isinstance(s, tuple))
    specs, longer = kernels.in_parts(inputs, 2)
    split, whole = jax.P(None, 'sequence'), jax.P()
    assert specs == {'x': split, 'projection': {'rows': whole, 'phases': whole}}
    assert jax.tree.map(lambda x: x.shape, longer) == arrays | {'x': (2, 2 * kernels.LENGTH, 64)}


def test_unknown_case():
    with pytest.raises(ConfigError, match='r=33'):
        kernels.measure_kernels('v5e', ['r=33'])


def test_more_parts_than_chips():
    with pytest.raises(ConfigError, match='--parts 8: at most 4, the chips of v5e:2x2'):
        kernels.measure_kernels('v5e', ['softmax'], 8)


def test_a_case_without_kernels_for_parts_is_not_a_missing_compiler(monkeypatch):
    done = subprocess.CompletedProcess([], 0, stdout='', stderr='')
    monkeypatch.setattr(kernels.subprocess, 'run', lambda *_, **__: done)
    with pytest.raises(ConfigError, match='--parts 2: no kernels of splash work on a part of a window'):
        kernels.measure_kernels('v5e', ['splash'], 2)


def row_of(case: str) -> kernels.KernelRow:
    return kernels.KernelRow(case, 'v5e', 'forward', 12.5, 0.5, 0.5, 0, 1.0, 2.0)


def test_all_topologies_are_printed_and_saved(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(cycles, 'measure_kernels', lambda *given: asked.append(given) or [row_of('splash')])
    flags = ['--topology', 'v5e,v6e', '--parts', '2', '--save', str(tmp_path / 'k.json')]
    assert cycles.main([*flags, 'splash']) == 0
    assert asked == [('v5e', ['splash'], 2), ('v6e', ['splash'], 2)]
    assert '12.5' in capsys.readouterr().out
    saved = json.loads((tmp_path / 'k.json').read_text())
    assert (saved['benchmark'], saved['rows'][0]['cycles']) == ('kernels', 12.5)


def test_kernels_that_compile_are_shown_beside_those_that_do_not(monkeypatch, tmp_path, capsys):
    lines = [json.dumps(dataclasses.asdict(row_of('splash'))), json.dumps({'error': 'softmax: out of VMEM'})]
    done = subprocess.CompletedProcess([], 0, stdout='\n'.join(lines), stderr='')
    monkeypatch.setattr(kernels.subprocess, 'run', lambda *_, **__: done)
    assert cycles.main(['--save', str(tmp_path / 'k.json'), 'splash', 'softmax']) == 2
    captured = capsys.readouterr()
    assert '12.5' in captured.out
    assert 'v5e: cannot compile softmax: out of VMEM' in captured.err
    assert [row['case'] for row in json.loads((tmp_path / 'k.json').read_text())['rows']] == ['splash']


def test_all_names_are_read_before_one_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(cycles, 'measure_kernels', lambda *_: pytest.fail('measured before all names were read'))
    assert cycles.main(['--topology', 'v5e,v7litepod']) == 2
    assert 'v7litepod' in capsys.readouterr().err
    names = ('v6litepod', 'V5E', 'tpu7x:2x2x1')
    assert [kernels.find_generation(name) for name in names] == ['v6e', 'v5e', 'v7x']


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize('generation', ['v5e', 'v6e'])
def test_nothing_has_grown(generation):
    limits = [row for row in recorded() if row.generation == generation and row.case != 'splash']
    rows = kernels.measure_kernels(generation, dict.fromkeys(row.case for row in limits))
    assert grown(rows, limits) == []


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize('generation', ['v4', 'v5p', 'v7x'])
def test_compiles_for_every_generation(generation):
    cases = [case for case in kernels.cases() if case not in ('splash', 'polynomial p=4')]
    found = {(row.case, row.kernel) for row in kernels.measure_kernels(generation, cases)}
    assert found >= set(itertools.product(cases, ('forward', 'backward')))
