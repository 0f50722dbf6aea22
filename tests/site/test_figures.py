"""The pictures of the documentation: each has its file, and its figures stand on the page that they come from."""

import importlib
import json
import re
import sys

import pytest
import tiny

FIGURES = tiny.ROOT / 'docs' / 'figures'
sys.path.append(str(FIGURES))
NAMES = sorted(path.stem for path in FIGURES.glob('*.json'))
RESULTS = '\n'.join(page.read_text() for page in sorted((tiny.ROOT / 'docs' / 'lab').glob('*.md')))


def read_panels(name):
    return json.loads((FIGURES / f'{name}.json').read_text())['panels']


def read_table(section, first, number=0):
    """Returns the numbers of each row of a table: name → the numbers in its cells.

    `number` counts the section's tables whose head begins with `first`.
    """
    text = RESULTS.split(f'\n## {section}\n')[1].split('\n## ')[0]
    tables = re.findall(rf'^\| ?{re.escape(first)}.*\n\|[ |:-]+\n((?:\|.*\n)+)', text, re.MULTILINE)
    rows = {}
    for line in tables[number].splitlines():
        name, *cells = (cell.strip() for cell in line.strip('|').split('|'))
        rows.setdefault(name.replace('`', ''), []).append([re.findall(r'[\d.,]*\d', cell) for cell in cells])
    return rows


def as_numbers(cells):
    return [float(x.replace(',', '')) for x in cells]


@pytest.mark.parametrize('name', NAMES)
def test_each_picture_can_be_drawn_and_is_shown(name, tmp_path):
    module = importlib.import_module('draw')
    module.draw(json.loads((FIGURES / f'{name}.json').read_text()), tmp_path / 'picture.svg')
    drawn, kept = (
        (folder / file).read_text() for folder, file in ((tmp_path, 'picture.svg'), (FIGURES, f'{name}.svg'))
    )
    assert drawn.count('<path') == kept.count('<path'), 'run python docs/figures/draw.py'
    pages = [
        tiny.ROOT / 'README.md',
        *(tiny.ROOT / 'docs').glob('*.md'),
        *(tiny.ROOT / 'docs' / 'explanation').glob('*.md'),
        *(tiny.ROOT / 'docs' / 'lab').glob('*.md'),
    ]
    assert any(f'figures/{name}.svg' in page.read_text() for page in pages)


@pytest.mark.parametrize(
    'panel', [panel for name in NAMES for panel in read_panels(name)], ids=lambda p: p['title'][:30]
)
def test_each_panel_says_how_its_figures_were_made(panel):
    assert all(panel[key] for key in ('kind', 'device', 'command', 'source'))


def test_perplexities_are_those_of_the_study():
    rows = read_table('Past the plateau: 10M tokens of source code', 'mechanism | seed | perplexity, H200')
    panel = read_panels('loss_and_recall')[0]
    for name, values in panel['curves'].items():
        seeds = [as_numbers(cells[1] or cells[2])[0] for cells in rows[name][:3]]
        assert values == seeds, name


def test_predicted_steps_are_those_of_the_table():
    rows = read_table('Today: without a loop over the layers', '| before')
    names = {'three gated delta per softmax': 'hybrid_small', 'polysketch': 'polysketch, learned'}
    for name, (value,) in read_panels('step_and_state')[0]['curves'].items():
        assert value == as_numbers(rows[names.get(name, name.replace('_', ' '))][0][2])[0], name


def test_recall_is_that_of_the_second_table():
    rows = read_table('Associative recall as published, small', 'second layer | state, bytes', 1)
    found = {tuple(as_numbers(cells[0] + cells[4])) for same in rows.values() for cells in same}
    drawn = {tuple(point) for points in read_panels('loss_and_recall')[1]['curves'].values() for point in points}
    assert drawn == found


def test_perplexity_by_position_is_that_of_the_table():
    rows = read_table('Decay, and documents that do not see each other', 'perplexity at positions')
    for name, values in read_panels('beyond_trained_length')[0]['curves'].items():
        assert values == [as_numbers(cell)[0] for cell in rows[name][0][:7]], name


def test_nats_behind_are_those_of_the_table():
    rows = read_table('Students at a context of 1,024', 'nats behind at positions')
    for name, values in read_panels('conversion')[0]['curves'].items():
        assert values == [as_numbers(cell)[0] for cell in rows[name][0][1:]], name


def test_nats_behind_by_tokens_are_those_of_the_tables():
    section = 'Students at a context of 1,024'
    shares, stage_2 = (panel['curves'] for panel in read_panels('conversion_tokens'))
    rows = read_table(section, 'divergence after tokens of stage 2')
    for name, values in stage_2.items():
        assert values == [as_numbers(cell)[0] for cell in rows[name][0] if cell], name
    found = [
        as_numbers([cells[2][-1], cells[3][0]]) for cells in read_table(section, 'student | steps')['window of 128']
    ]
    assert all(list(pair) in found for pair in zip(shares['after stage 1'], shares['after both'], strict=True))


def test_nats_of_the_students_of_the_study_are_those_of_the_table():
    rows = read_table("Students of the study's model, with settings chosen before", 'student | full layers')
    found = [as_numbers(cells[2])[0] for same in rows.values() for cells in same]
    assert [value for (value,) in read_panels('conversion_lessons')[0]['curves'].values()] == sorted(found)


def test_states_are_those_of_the_models():
    panel = next(p for p in read_panels('step_and_state') if 'states.py' in p['command'])
    states = importlib.import_module('states')
    assert panel['x'] == list(states.LENGTHS)
    assert panel['curves'] == states.compute_curves()


def test_nats_of_the_real_model_are_those_of_the_table():
    rows = read_table('A real model under "Approximate attention" (Graef et al., §7)', 'evaluation, N = 200')
    panel = read_panels('real_hybrid')[0]
    for name, values in panel['curves'].items():
        assert values == [as_numbers(cell)[0] for cell in rows[name][0][2:]], name
    assert panel['curves'].keys() == rows.keys()


def test_offsets_of_the_shared_norm_are_those_of_the_table():
    rows = read_table('Where scores of polynomial attention start', 'one norm, offset 0')
    layers = [row[0] for name, row in rows.items() if 'layer' in name]
    for seed, values in enumerate(read_panels('shared_norm')[0]['curves'].values()):
        assert values == [as_numbers(cells[seed])[0] for cells in layers]
