"""Each figure of README and of "Which attention?" equals the row that it is linked to."""

import json
import re
import statistics

import pytest
import tiny
from test_figures import read_panels, read_table

from lm.config.text import dump
from lm.experiment import load

README = (tiny.ROOT / 'README.md').read_text()
GUIDE = (tiny.ROOT / 'docs' / 'explanation' / 'which_attention.md').read_text()
STEPS = (tiny.ROOT / 'docs' / 'lab' / 'tpu_steps.md').read_text()
GPUS = (tiny.ROOT / 'docs' / 'lab' / 'gpu.md').read_text()


def find_row(page: str, place: str) -> str:
    """Returns the only row of a table of `page` that holds `place`."""
    (row,) = [line for line in page.splitlines() if line.startswith('|') and place in line]
    return row


def find_share(name: str) -> float:
    """Returns the predicted time of a step, relative to softmax."""
    curves = read_panels('step_and_state')[0]['curves']
    return curves[name][0] / curves['softmax'][0]


def find_gap(name: str) -> float:
    """Returns how much more perplexity a mechanism has than softmax, as the mean of the seeds of the study."""
    curves = read_panels('loss_and_recall')[0]['curves']
    return statistics.mean(curves[name]) / statistics.mean(curves['softmax']) - 1


def test_the_quickstart_has_the_perplexity_of_its_row():
    recipes = read_table('The quickstart at its processor time', 'recipe')
    (row,) = recipes['configs/experiments/quickstart.gin, 950 steps']
    seeds = [float(cell[0]) for cell in row[:3]]
    assert f'[{seeds[0]:.2f}](docs/lab/recipes.md#the-quickstart-at-its-processor-time)' in README
    low, high = map(int, re.search(r'per token of (\d+) to (\d+)\*\*', README).groups())
    assert low <= min(seeds) <= max(seeds) <= high
    assert read_panels('quickstart')[0]['end']['validation'] == [950, 3.1]


def test_the_quickstart_is_the_recipe_of_the_row():
    folder = tiny.ROOT / 'configs'
    row = [folder / 'papers' / 'study' / 'options' / 'options.gin', folder / 'recipes' / 'best.gin']
    recipe = load([str(path) for path in row], ['train.steps = 950'])
    assert dump(load([str(folder / 'experiments' / 'quickstart.gin')])) == dump(recipe)


def test_the_cost_of_polysketch_is_that_of_the_study():
    row = find_row(README, 'quality close to softmax')
    assert f'{find_gap("polysketch, learned"):.0%}'.replace('%', ' %') + ' more perplexity' in row
    assert 'docs/lab/text.md#past-the-plateau-10m-tokens-of-source-code' in row
    softmax, sketched = re.search(r'Softmax takes ([\d,]+) ms and learned polysketch ([\d,]+):', STEPS).groups()
    long = int(softmax.replace(',', '')) / int(sketched.replace(',', ''))
    assert f'{1 / find_share("polysketch"):.1f} times as fast at 32k, {long:.1f} times at 128k' in row
    assert f'Learned sketches are {find_gap("polysketch, learned"):.0%}'.replace('%', ' %') in GUIDE
    assert f'({find_gap("polynomial, degree 4"):.0%} behind'.replace('%', ' %') in GUIDE


def test_predicted_shares_are_those_of_the_picture():
    hybrid = f'{find_share("three gated delta per softmax"):.2f}'
    assert f'take {hybrid} of softmax' in find_row(README, 'facts to look up')
    assert f'rule per softmax layer take {hybrid}.' in GUIDE
    assert f'is predicted to take {find_share("polysketch"):.2f} of its time, and `gated_linear` ' in GUIDE
    assert f'`gated_linear` {find_share("gated_linear"):.2f}.' in GUIDE
    assert f'its state is {read_panels("step_and_state")[1]["curves"]["gated_linear"][0]} MiB per sequence' in GUIDE


def test_steps_per_second_are_those_of_the_table():
    rows = re.findall(r'^\| `?([\w/.]+)`? \| ([\d.]+) \| [\d.]+ \|$', GPUS, re.MULTILINE)
    gated, softmax = (dict(rows)[name] for name in ('configs/attention/gated_linear.gin', 'softmax'))
    assert f"{gated} steps per second at 8k beside softmax's {softmax} in [one" in README


def test_recall_is_that_of_the_table():
    (row,) = read_table('Associative recall as published, small', 'second layer')['softmax']
    shares = [round(float(cell[0])) for cell in row[1:6]]
    assert f'answers {min(shares)} to {max(shares)} % of [recall questions]' in README


def test_lengths_beyond_training_are_those_of_the_table():
    rows = read_table('Decay, and documents that do not see each other', 'perplexity at positions')
    row = find_row(README, 'contexts far beyond')
    near, far = ({name: round(float(cells[0][at][0])) for name, cells in rows.items()} for at in (2, 5))
    assert f'perplexity {far["retention"]} at positions 262k to 524k and {near["retention"]} at 4k to 8k' in row
    assert row.rstrip(' |').endswith(f') {far["polysketch"]} and {near["polysketch"]}')
    assert 'one seed' in row
    assert 'text that it was trained on' in row


def test_no_configuration_had_a_wrong_gradient():
    lines = (tiny.ROOT / 'scripts' / 'measurements.jsonl').read_text().splitlines()
    results = [r for r in map(json.loads, lines) if r['row'].startswith('precision_') and r.get('result')]
    newest = {row['mechanism']: row for result in results for row in result['result']['rows']}
    right, largest = sum(row['right'] for row in newest.values()), max(row['gradients'] for row in newest.values())
    words = f'[{right} of {len(newest)} configurations](docs/lab/gpu.md#gpu) are right, within {largest:.1%}'
    assert words.replace('%', ' %') in README
    worst = max(newest.values(), key=lambda row: row['worst_error'])
    errors = worst['worst_error'], worst['portable_error']
    words = 'of `{}`: {:.1%} with kernels, and {:.1%} in XLA'.format(worst['mechanism'], *errors)
    assert words.replace('%', ' %') in GPUS
    assert not newest['softmax']['repeats'], 'exit code 1 says that two runs differ in bits, as with cuDNN'


@pytest.mark.parametrize('text', [README, GUIDE], ids=['README', 'Which attention?'])
def test_rows_of_the_choice_link_to_their_evidence(text):
    rows = [line for line in text.splitlines() if line.startswith('|') and '`configs/' in line]
    assert len(rows) > 5
    for row in rows:
        if re.search(r'\d (?:%|times|of softmax)|0\.\d', row):
            assert re.search(r'\]\((?:\.\./|docs/)', row), row
