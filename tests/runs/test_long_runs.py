"""A year of restarts and ten thousand steps: only the measurements grow."""

import json
import os
import pathlib
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import tiny
from etils import epath

from lm.runs import info as run_info
from lm.runs import metrics_file
from lm.runs.info import make_info, read_info, starts_left_out, to_text
from lm.runs.metrics_file import MetricsFile
from lm.trackers import Trackers, tensorboard
from lm.trackers.base import RunFacts
from lm.trackers.tensorboard import CluSummaries, TensorBoard

RESTARTS = 5000
"""One restart every two hours, for more than a year."""


def record(step: int, kind: str = 'train') -> dict:
    return {'kind': kind, 'step': step, 'loss': 1 / step, 'grad_norm': 1.0, 'tokens': 64 * step, 'seconds': 0.5 * step}


def restart(path: pathlib.Path, number: int, trackers: Trackers | None = None) -> None:
    """Resumes one step before the last logged step, and logs three steps."""
    with MetricsFile(path, resume_at=2 * number, trackers=trackers) as metrics:
        for step in range(2 * number + 1, 2 * number + 4):
            metrics.write(record(step))


def steps_of(path: pathlib.Path) -> list[int]:
    return [json.loads(line)['step'] for line in path.read_text().splitlines()]


def test_run_json_stays_small_and_keeps_what_still_matters(monkeypatch, tmp_path):
    machine = {'command': 'lm train', 'versions': {'jax': '1'}, 'git_commit': None, 'device_count': 8}
    monkeypatch.setattr(run_info, 'describe_machine', lambda: dict(machine))
    info = {}
    for number in range(RESTARTS):
        machine['versions'] = {'jax': str(1 + number // 1000)}
        machine['device_count'] = 8 if number < 300 else 16
        info = make_info(info, 10 * number, {'parameters': 7})
    assert len(info['starts']) == run_info.MOST_STARTS
    assert len(info['starts']) + starts_left_out(info) == RESTARTS
    assert len(to_text(info)) < 20_000
    first, second, *_, last = info['starts']
    assert (first['first_step'], first['versions'], first['device_count']) == (0, {'jax': '1'}, 8)
    assert (second['versions'], second['device_count']) == ({'jax': '5'}, 16)
    assert (last['first_step'], last.keys()) == (10 * (RESTARTS - 1), {'when', 'first_step'})
    (tmp_path / 'run.json').write_text(to_text(info))
    read = read_info(tmp_path / 'run.json')
    assert (read['versions'], read['device_count'], read['command']) == ({'jax': '5'}, 16, 'lm train')


@pytest.mark.parametrize(('by', 'tracker'), [('clu', CluSummaries()), ('tensorboardX', TensorBoard())])
def test_event_files_become_one_again(by, tracker, monkeypatch, tmp_path):
    folder = tmp_path / 'tensorboard'
    folder.mkdir()

    def writer(path, **_):
        file = pathlib.Path(path) / f'events.out.tfevents.{len(created):04d}'
        file.touch()
        created.append(file.name)

        def write_scalars(step, scalars):
            with file.open('a') as opened:
                opened.write(f'{step} {scalars["train/loss"]}\n')

        def add_scalar(name, value, step):
            if name == 'train/loss':
                write_scalars(step, {name: value})

        nothing = dict.fromkeys(('flush', 'close'), lambda: None)
        return types.SimpleNamespace(write_scalars=write_scalars, add_scalar=add_scalar, **nothing)

    created: list[str] = []
    if by == 'clu':
        module = types.SimpleNamespace(metric_writers=types.SimpleNamespace(SummaryWriter=writer))
    else:
        module = types.SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, by, module)
    monkeypatch.setattr(tensorboard.importlib.util, 'find_spec', lambda name: 'there')
    monkeypatch.setattr(tensorboard, 'MOST_EVENT_FILES', 10)
    for number in range(25):
        with Trackers([tracker], RunFacts('mine', epath.Path(tmp_path), {})) as trackers:
            restart(tmp_path / 'metrics.jsonl', number, trackers)
        assert len(list(folder.iterdir())) <= 10
    whole, *others = sorted(folder.iterdir())
    assert len(created) == 25
    assert len(others) == 25 - 1 - 20
    steps = [int(line.split()[0]) for line in whole.read_text().splitlines()]
    assert steps == list(range(1, 2 * 20 + 4))


def test_a_restart_reads_each_line_of_metrics_once(monkeypatch, tmp_path):
    plain, parsed = metrics_file._parse, []
    monkeypatch.setattr(metrics_file, '_parse', lambda line: parsed.append(line) or plain(line))
    for number in range(40):
        before = len(steps_of(tmp_path / 'metrics.jsonl')) if number else 0
        parsed.clear()
        restart(tmp_path / 'metrics.jsonl', number)
        assert len(parsed) == before
    assert steps_of(tmp_path / 'metrics.jsonl') == list(range(1, 82))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_metrics_survive_a_year_of_restarts(tmp_path):
    path, files = tmp_path / 'metrics.jsonl', len(os.listdir('/proc/self/fd'))
    for number in range(RESTARTS):
        restart(path, number)
    assert steps_of(path) == list(range(1, 2 * RESTARTS + 2))
    assert [p.name for p in tmp_path.iterdir()] == ['metrics.jsonl']
    assert len(os.listdir('/proc/self/fd')) == files
    begin = time.process_time()
    restart(path, RESTARTS)
    print(f'a restart with {2 * RESTARTS} lines: {time.process_time() - begin:.3f} s')
    assert time.process_time() - begin < 2


def seen(pid: int) -> tuple[float, int, int]:
    """Returns (MiB resident, open files, threads) of a process."""
    status = pathlib.Path(f'/proc/{pid}/status').read_text()
    fields = dict(line.split(':', 1) for line in status.splitlines() if ':' in line)
    return int(fields['VmRSS'].split()[0]) / 1024, len(os.listdir(f'/proc/{pid}/fd')), int(fields['Threads'])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_steps_without_growth(tokens, tmp_path):
    steps, run = 10_000, tmp_path / 'run'
    changes = {'train.steps': steps, 'train.tokens_per_step': 64, 'train.eval_every': 1000, 'data.path': str(tokens)}
    flags = tiny.params(tiny.MODEL | changes | {'checkpoint.save_every_steps': 250})
    command = [sys.executable, '-m', 'lm.cli', 'train', '--run_dir', str(run), *flags]
    with (tmp_path / 'output').open('w') as output:  # an unread pipe would block the process
        process = subprocess.Popen(command, env=tiny.environment(), stdout=output, stderr=output, cwd=tiny.ROOT)
    path, found = run / 'metrics.jsonl', []
    logged, position = 0, 0
    while process.poll() is None:
        time.sleep(0.2)
        if path.exists():
            with path.open('rb') as file:
                file.seek(position)
                new = file.read()
            position += len(new)
            logged += new.count(b'\n')
            try:
                found.append((logged, *seen(process.pid)))
            except (OSError, KeyError):
                break  # it has just ended
    assert process.wait() == 0, (tmp_path / 'output').read_text()[-2000:]
    assert steps_of(path).count(steps) == 2  # the step and its evaluation
    at, mib, files, threads = np.array([row for row in found if 2000 < row[0] < steps]).T
    assert len(at) > 20
    slope = np.polyfit(at, mib, 1)[0] * 1000
    print(f'{slope:.2f} MiB every 1,000 steps, {mib[0]:.0f} to {mib[-1]:.0f} MiB, files {files.min()} to {files.max()}')
    assert slope < 2, list(zip(at, mib, strict=True))[::10]
    half = len(at) // 2
    assert files[half:].max() <= files[:half].max() + 2
    assert threads[half:].max() <= threads[:half].max() + 2
