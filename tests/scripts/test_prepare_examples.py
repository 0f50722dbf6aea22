"""The examples of scripts/prepare: engines with a simulated `lm` give every share to one task."""

import json
import os
import pathlib
import re
import shlex
import subprocess

import pytest
import tiny
import yaml

from lm import cli
from lm.data.prepare.parts import read_share

FOLDER = tiny.ROOT / 'scripts' / 'prepare'
PAGE = (tiny.ROOT / 'docs' / 'how_to' / 'prepare.md').read_text()

LM = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done > "$CALLS/$$"
exit ${CODE:-0}
"""


@pytest.fixture
def bin_dir(tmp_path, monkeypatch):
    """A folder on the PATH with a simulated `lm`, which writes its arguments down."""
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'calls').mkdir()
    add_program(tmp_path / 'bin' / 'lm', LM)
    monkeypatch.setenv('PATH', f'{tmp_path / "bin"}:{os.environ["PATH"]}')
    monkeypatch.setenv('CALLS', str(tmp_path / 'calls'))
    return tmp_path / 'bin'


def add_program(path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def command(program: str) -> list[str]:
    """Returns the command of the page that begins so."""
    return shlex.split(re.search(rf'^{program} .*$', PAGE, re.MULTILINE)[0])


def check_calls(bin_dir: pathlib.Path, count: int) -> list[str]:
    """Checks that `lm` was called once for each of `count` shares; returns the words of one call."""
    calls = [path.read_text().splitlines() for path in (bin_dir.parent / 'calls').iterdir()]
    parsed = [cli.parse(call) for call in calls]
    assert {one.verb for one in parsed} == {'prepare'}
    assert sorted(read_share(one.shard) for one in parsed) == [(i, count) for i in range(count)]
    for one in parsed:
        assert all((tiny.ROOT / name).exists() for name in one.gin_file)
    return calls[0]


def run(words, **variables):
    return subprocess.run(words, cwd=tiny.ROOT, env=os.environ | variables, capture_output=True, text=True)


def test_xargs_runs_all_shares_here(bin_dir):
    assert run([*command('scripts/prepare/xargs.sh'), '--set', "text_files.path=a 'b'"]).returncode == 0
    assert check_calls(bin_dir, 4)[-3] == "text_files.path=a 'b'"
    assert run(['scripts/prepare/xargs.sh', '2', '--strict'], CODE='44').returncode == 123
    assert 'scripts/prepare/xargs.sh 4' in run(['scripts/prepare/xargs.sh']).stdout


def test_xargs_runs_a_share_on_each_machine(bin_dir):
    add_program(bin_dir / 'ssh', '#!/bin/sh\nprintf x >> "$CALLS.$1"\nsh -c "$2"\n')
    hosts, *words = command("HOSTS='one two three' scripts/prepare/xargs.sh")
    assert run([*words, '--set', "text_files.path=a\t'b'"], HOSTS=hosts.partition('=')[2]).returncode == 0
    assert "text_files.path=a\t'b'" in check_calls(bin_dir, 3)
    assert [(bin_dir.parent / f'calls.{name}').read_text() for name in ('one', 'two', 'three')] == ['x'] * 3


def test_slurm_gives_each_task_a_share_and_requeues_it(bin_dir):
    add_program(bin_dir / 'scontrol', '#!/bin/sh\necho "$@"\n')
    _, array, script, *flags = command('sbatch')
    last = int(re.fullmatch(r'--array=0-(\d+)', array)[1])
    variables = {'SLURM_ARRAY_JOB_ID': '7', 'SLURM_ARRAY_TASK_MAX': str(last), 'SLURM_CPUS_PER_TASK': '16'}
    for i in range(last + 1):
        assert run([script, *flags], SLURM_ARRAY_TASK_ID=str(i), **variables).returncode == 0
    assert '--processes' in check_calls(bin_dir, last + 1)
    stopped = run([script, *flags], SLURM_ARRAY_TASK_ID='3', CODE='42', **variables)
    assert (stopped.returncode, stopped.stdout) == (42, 'requeue 7_3\n')
    assert run([script, *flags], SLURM_ARRAY_TASK_ID='3', CODE='44', **variables).stdout == ''


def test_kubernetes_gives_each_index_a_share(bin_dir):
    _, template, copy, *_ = command('cp')
    assert command('kubectl')[-1] == copy
    job = yaml.safe_load((tiny.ROOT / template).read_text())['spec']
    (container,) = job['template']['spec']['containers']
    variables = {entry['name']: entry['value'] for entry in container['env']}
    assert (job['completionMode'], str(job['completions'])) == ('Indexed', variables['SHARES'])
    for i in range(job['completions']):
        words = [*container['command'], *container['args']]
        assert run(words, JOB_COMPLETION_INDEX=str(i), **variables).returncode == 0
    check_calls(bin_dir, job['completions'])
    rules = {rule['action']: rule.get('onExitCodes', {}).get('values') for rule in job['podFailurePolicy']['rules']}
    assert rules == {'Ignore': [42], 'FailJob': [2, 44]}
    assert job['template']['spec']['restartPolicy'] == 'Never', 'else the policy is refused'


def test_cloud_batch_gives_each_task_a_share(bin_dir):
    config = command('gcloud')[-1].partition('=')[2]
    (group,) = json.loads((tiny.ROOT / config).read_text())['taskGroups']
    (runnable,) = group['taskSpec']['runnables']
    words = [runnable['container']['entrypoint'], *runnable['container']['commands']]
    for i in range(group['taskCount']):
        variables = {'BATCH_TASK_INDEX': str(i), 'BATCH_TASK_COUNT': str(group['taskCount'])}
        assert run(words, **variables).returncode == 0
    check_calls(bin_dir, group['taskCount'])
