"""The comparison on real text: equal parameters, three seeds, and a table that names missing runs."""

import collections
import subprocess
import sys

import pytest
import tiny

from lm.model.functions import count_parameters
from lm.runs.records import to_json
from lm.sweep.points import make_points


def test_the_mechanisms_have_equal_parameters_tokens_and_seeds():
    points = make_points(['configs/papers/study/real_text/real_text.gin'], ['configs/papers/study/real_text/sweep.gin'])
    seeds = collections.Counter(point.experiment.train.seed for point in points)
    assert set(seeds) == {0, 1, 2}
    assert len(set(seeds.values())) == 1
    assert {(p.experiment.train.context_length, p.experiment.train.steps) for p in points} == {(1024, 600)}
    models = {p.name: p.experiment.model for p in points if p.experiment.train.seed == 0}
    assert len(models) == 12
    parameters = {name: sum(count_parameters(model).values()) for name, model in models.items()}
    assert max(parameters.values()) < 1.002 * min(parameters.values()), parameters
    for model in models.values():
        for mechanism in model.pattern:
            # Without exact weights in blocks, the engine may choose the block.
            assert getattr(mechanism, 'block', 128) == 128 or mechanism.gin_name not in ('polysketch', 'performer')


def test_the_table_averages_over_the_seeds_and_shows_gaps(tmp_path):
    def point(attention, seed, loss, status='done'):
        measured = {
            'perplexity': 10 * loss,
            'bits_per_byte': loss,
            'accuracy': None,
            'tokens_per_second': 1224.0 + 20 * seed,
        }
        settings = {'train.seed': str(seed), 'model.attention': attention}
        if status != 'done':
            measured, loss = dict.fromkeys(measured), None
        place = {'point': f'{attention}-{seed}', 'step': 0, 'steps': 1}
        return place | {'settings': settings, 'status': status, 'loss': loss, **measured}

    points = [point('@worse()', 0, 3.0), point('@better()', 0, 1.0), point('@better()', 1, 2.0)]
    points += [point('@worse()', 1, 0.0, 'waiting'), point('@none()', 0, 0.0, 'failed')]
    (tmp_path / 'sweep.json').write_text(to_json({'kind': 'sweep', 'points': points}))
    done = subprocess.run(
        [sys.executable, tiny.ROOT / 'configs/papers/results_table.py', tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [
        '| @better() | 2 of 2 | 15.00 ± 7.07 | 1.5000 ± 0.7071 | 1,234 ± 14 |',
        '| @worse() | 1 of 2 | 30.00 | 3.0000 | 1,224 |',
        '| @none() | 0 of 1 | not measured | not measured | not measured |',
    ]
    assert done.stdout.splitlines()[2:] == rows

    script = [sys.executable, tiny.ROOT / 'configs/papers/results_table.py', tmp_path, '--baseline']
    done = subprocess.run([*script, '@worse()'], capture_output=True, text=True)
    more = [' -2.000 |', '  |', ' not measured |']
    assert done.stdout.splitlines()[0].endswith('| nats above @worse() |')
    assert done.stdout.splitlines()[2:] == [row + cell for row, cell in zip(rows, more, strict=True)]
    done = subprocess.run([*script, '@wurse()'], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        '--baseline @wurse(): no such row; the rows are @worse(), @better(), @none()\n',
    )


@pytest.mark.parametrize('arguments', [[], ['nowhere']])
def test_the_script_names_the_missing_folder(arguments):
    script = [tiny.ROOT / 'configs/papers/study/real_text/real_text_table.sh', *arguments]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 2
    assert 'name a folder with train/*.txt' in done.stderr
