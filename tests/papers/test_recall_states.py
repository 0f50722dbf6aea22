"""Accuracy against the bytes of decoding states: the table and the picture of a sweep."""

import json
import subprocess
import sys

import made_up_runs
import pytest
import tiny

from lm.attention.softmax import Softmax
from lm.attention.taylor import Taylor
from lm.runs.records import to_json
from lm.tasks.multiquery_recall import MultiqueryRecall

MODEL = {'n_layers': 2, 'd_model': 64, 'n_heads': 4, 'head_dim': 16, 'vocab_size': 8192}
MECHANISMS = {
    '@softmax()': Softmax(),
    '@size4/taylor()': Taylor(feature_dim=4),
    '@size8/taylor()': Taylor(feature_dim=8),
}


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    """Writes two seeds of each mechanism; one run has not ended."""
    folder, points = tmp_path_factory.mktemp('sweep'), []
    for number, (name, attention) in enumerate(MECHANISMS.items()):
        for seed in (0, 1):
            path = folder / f'{number}-{seed}'
            made_up_runs.write_run(
                path, attention, seed=seed, steps=50, accuracy=True, data=MultiqueryRecall(), model=MODEL, context=64
            )
            lines = [json.loads(line) for line in (path / 'metrics.jsonl').read_text().splitlines()]
            lines[-1]['accuracy_by_slice'] = {'4 in 16': 0.5 + 0.25 * seed, '8 in 32': 0.25}
            (path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
            status = 'waiting' if (number, seed) == (2, 1) else 'done'
            settings = {'train.seed': str(seed), 'recall': name}
            point = {'index': len(points), 'point': path.name, 'status': status, 'step': 50, 'steps': 50}
            points.append(point | {'settings': settings, 'run_dir': str(path)})
    (folder / 'sweep.json').write_text(to_json({'kind': 'sweep', 'points': points}))
    return folder


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, tiny.ROOT / 'configs/papers/llops/tables_4_5_recall/recall_states.py', *arguments],
        capture_output=True,
        text=True,
        env=tiny.environment(),
    )


def test_each_mechanism_has_a_row_with_its_state_and_seeds(sweep, tmp_path):
    done = run(sweep, '--tokens', '100', '--segment', '4 in 16', '--out', str(tmp_path / 'picture'))
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ['softmax', 'size4/taylor', 'size8/taylor']
    assert [row[2:] for row in rows] == [['2', '62.5 ± 17.7', '25.0 ± 0.0']] * 2 + [['1', '50.0', '25.0']]
    softmax, small, large = (int(row[1].replace(',', '')) for row in rows)
    keys_and_values = 2 * 2 * 4 * 16 * 100 * 4  # layers, keys and values, heads, their size, tokens, bytes
    assert keys_and_values <= softmax < 1.3 * keys_and_values
    assert small < large < softmax
    assert (tmp_path / 'picture.png').stat().st_size > 10_000
    assert (tmp_path / 'picture.pdf').exists()


@pytest.mark.parametrize(
    ('arguments', 'said'), [(['--segment', 'all', '--out', 'x'], 'the runs have 4 in 16, 8 in 32'), ([], '4 in 16')]
)
def test_an_unknown_segment_lists_the_known_ones(sweep, arguments, said):
    done = run(sweep, *arguments)
    assert said in done.stdout + done.stderr
    assert done.returncode == (1 if arguments else 0)


def test_a_folder_without_a_sweep_is_reported(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1
    assert 'is not a table of lm sweep' in done.stderr
