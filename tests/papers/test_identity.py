"""The bound of Performer's Figs. 1, 14 and 15: attention that returns the values."""

import json
import shlex
import subprocess
import sys

import tiny


def test_the_benchmark_knows_the_identity(tmp_path):
    script = tiny.ROOT / 'configs/papers/performer/figure_1/identity.py'
    flags = '--contexts 32,64 --tokens 64 --heads 2 --head_dim 8 --repeats 1 --passes forward'
    settings = '--mechanisms performer,identity --set performer.n_features=16'
    command = [sys.executable, str(script), 'attention', *shlex.split(f'{settings} {flags}')]
    command += ['--save', str(tmp_path / 'times.json')]
    subprocess.run(command, env=tiny.environment(), check=True, capture_output=True, text=True)
    rows = json.loads((tmp_path / 'times.json').read_text())['rows']
    assert [(row['mechanism'], row['context']) for row in rows] == [
        (name, context) for context in (32, 64) for name in ('performer', 'identity')
    ]
